// SPDX-License-Identifier: GPL-3.0-or-later
//! Compression of answers, flushed whenever something has to reach the client.

use std::io::Write;

use flate2::write::GzEncoder;
use zstd::stream::raw::CParameter;

/// A content coding (RFC 9110, 8.4.1; RFC 8878).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    Zstd,
    Gzip,
}

impl Coding {
    pub fn name(self) -> &'static str {
        match self {
            Coding::Zstd => "zstd",
            Coding::Gzip => "gzip",
        }
    }

    /// The coding to use for a value of `Accept-Encoding`: the one of higher quality, zstd of equals.
    pub fn choose(accept: &str) -> Option<Coding> {
        let quality = |name: &str| {
            let mut any = 0.0;
            for entry in accept.split(',') {
                let mut parts = entry.split(';').map(str::trim);
                let coding = parts.next().unwrap_or_default();
                let weight = parts
                    .find_map(|part| part.strip_prefix("q="))
                    .map_or(Some(1.0), |weight| weight.parse::<f32>().ok());
                let weight = weight.unwrap_or(0.0);
                if coding.eq_ignore_ascii_case(name) {
                    return weight;
                }
                if coding == "*" {
                    any = weight;
                }
            }
            any
        };
        let (zstd, gzip) = (quality("zstd"), quality("gzip"));
        if zstd > 0.0 && zstd >= gzip {
            Some(Coding::Zstd)
        } else if gzip > 0.0 {
            Some(Coding::Gzip)
        } else {
            None
        }
    }
}

/// Of zstd's window only this much is used (128 KiB): a stream's memory has to stay small, and answers are short.
const WINDOW_LOG: u32 = 17;

/// A running compression. The state is large and lies on the heap.
pub enum Encoder {
    Gzip(Box<GzEncoder<Vec<u8>>>),
    Zstd(Box<zstd::stream::write::Encoder<'static, Vec<u8>>>),
}

impl Encoder {
    pub fn new(coding: Coding) -> std::io::Result<Self> {
        Ok(match coding {
            Coding::Gzip => Encoder::Gzip(Box::new(GzEncoder::new(Vec::new(), flate2::Compression::new(4)))),
            Coding::Zstd => {
                let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1)?;
                encoder.set_parameter(CParameter::WindowLog(WINDOW_LOG))?;
                Encoder::Zstd(Box::new(encoder))
            }
        })
    }

    /// Compress a piece so that all of it can be read at the other end.
    pub fn flush(&mut self, piece: &[u8]) -> std::io::Result<Vec<u8>> {
        Ok(match self {
            Encoder::Gzip(encoder) => {
                encoder.write_all(piece)?;
                encoder.flush()?;
                std::mem::take(encoder.get_mut())
            }
            Encoder::Zstd(encoder) => {
                encoder.write_all(piece)?;
                encoder.flush()?;
                std::mem::take(encoder.get_mut())
            }
        })
    }

    /// Compress the last piece and what ends the coding.
    pub fn finish(self, piece: &[u8]) -> std::io::Result<Vec<u8>> {
        match self {
            Encoder::Gzip(mut encoder) => {
                encoder.write_all(piece)?;
                encoder.finish()
            }
            Encoder::Zstd(mut encoder) => {
                encoder.write_all(piece)?;
                encoder.finish()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    fn decoded(coding: Coding, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        // A stream that is not finished gives what it has, then an error.
        let _end = match coding {
            Coding::Gzip => flate2::read::GzDecoder::new(bytes).read_to_end(&mut out),
            Coding::Zstd => zstd::stream::read::Decoder::new(bytes).unwrap().read_to_end(&mut out),
        };
        out
    }

    #[test]
    fn the_client_chooses() {
        for (accept, expected) in [
            ("gzip, deflate, br, zstd", Some(Coding::Zstd)),
            ("gzip;q=1.0, zstd;q=0.5", Some(Coding::Gzip)),
            ("GZIP", Some(Coding::Gzip)),
            ("zstd;q=0, gzip;q=0", None),
            ("*", Some(Coding::Zstd)),
            ("*;q=0.5, zstd;q=0", Some(Coding::Gzip)),
            ("identity", None),
            ("gzip;q=x", None),
            ("", None),
        ] {
            assert_eq!(Coding::choose(accept), expected, "{accept}");
        }
    }

    #[test]
    fn each_piece_can_be_read_at_once() {
        for coding in [Coding::Gzip, Coding::Zstd] {
            let mut encoder = Encoder::new(coding).unwrap();
            let mut sent = Vec::new();
            let mut expected = Vec::new();
            for piece in [&b"data: one\n\n"[..], b"", b"data: two\n\n"] {
                sent.extend(encoder.flush(piece).unwrap());
                expected.extend_from_slice(piece);
                assert_eq!(decoded(coding, &sent), expected);
            }
            sent.extend(encoder.finish(b"end").unwrap());
            expected.extend_from_slice(b"end");
            assert_eq!(decoded(coding, &sent), expected);
        }
    }
}
