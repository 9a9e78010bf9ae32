// SPDX-License-Identifier: GPL-3.0-or-later
//! API keys, known by their hashes only.
//!
//! The file has one key a line: `HASH ID` or `SALT:HASH ID`, hexadecimal. HASH without a salt is the SHA-256 of the key, the form of
//! the edge's own map. With a salt it is the SHA-256 of the salt's bytes and the 64 hexadecimal characters of the key's SHA-256, so
//! that it can be made for a client of whom only the SHA-256 is known. Empty lines and lines that begin with `#` say nothing.

use sha2::{Digest, Sha256};

/// One salt and the keys that have it.
struct Group {
    salt: Option<Vec<u8>>,
    keys: Vec<([u8; 32], String)>,
}

/// All keys.
#[derive(Default)]
pub struct Keys {
    groups: Vec<Group>,
}

impl Keys {
    /// Read the file's text. The error names the line, not what is in it.
    pub fn read(text: &str) -> Result<Self, String> {
        let mut keys = Keys::default();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (salt, hash, id) =
                read_line(line).ok_or_else(|| format!("line {} is not a hash and an identity", index + 1))?;
            match keys.groups.iter_mut().find(|group| group.salt == salt) {
                Some(group) => group.keys.push((hash, id)),
                None => keys.groups.push(Group { salt, keys: vec![(hash, id)] }),
            }
        }
        Ok(keys)
    }

    pub fn len(&self) -> usize {
        self.groups.iter().map(|group| group.keys.len()).sum()
    }

    /// The identity of a key. Takes the same time for every key that is not known, and for every one that is: all hashes are
    /// compared in full.
    pub fn identity(&self, key: &[u8]) -> Option<&str> {
        let plain: [u8; 32] = Sha256::digest(key).into();
        let mut identity = None;
        for group in &self.groups {
            let hash: [u8; 32] = match &group.salt {
                None => plain,
                Some(salt) => {
                    let mut digest = Sha256::new();
                    digest.update(salt);
                    digest.update(hexadecimal(&plain));
                    digest.finalize().into()
                }
            };
            for (known, id) in &group.keys {
                if equal(known, &hash) {
                    identity = Some(id.as_str());
                }
            }
        }
        identity
    }
}

fn read_line(line: &str) -> Option<(Option<Vec<u8>>, [u8; 32], String)> {
    let (hashes, id) = line.split_once([' ', '\t'])?;
    let id = id.trim();
    let is_id = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if id.is_empty() || id.len() > 64 || !id.bytes().all(is_id) {
        return None;
    }
    let (salt, hash) = match hashes.split_once(':') {
        Some((salt, hash)) => (Some(bytes_of(salt).filter(|salt| !salt.is_empty())?), hash),
        None => (None, hashes),
    };
    Some((salt, bytes_of(hash)?.try_into().ok()?, id.to_owned()))
}

fn bytes_of(digits: &str) -> Option<Vec<u8>> {
    let digits: Vec<u8> =
        digits.chars().map(|digit| digit.to_digit(16).map(|value| value as u8)).collect::<Option<_>>()?;
    (digits.len() % 2 == 0).then(|| digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

/// Small hexadecimal digits.
pub fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        for digit in [byte >> 4, byte & 15] {
            text.push(char::from_digit(u32::from(digit), 16).unwrap_or('0'));
        }
        text
    })
}

/// Compare without a hint of where the first difference is.
fn equal(left: &[u8; 32], right: &[u8; 32]) -> bool {
    let difference = left.iter().zip(right).fold(0, |difference, (left, right)| difference | (left ^ right));
    std::hint::black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn salted(salt: &[u8], key: &str) -> String {
        let plain = hexadecimal(&Sha256::digest(key));
        format!("{}:{}", hexadecimal(salt), hexadecimal(&Sha256::digest([salt, plain.as_bytes()].concat())))
    }

    #[test]
    fn keys_are_known_by_their_hashes() {
        let text = format!(
            "# comment\n\n{} team-a\n{}\tteam-b\r\n{} team-c",
            hexadecimal(&Sha256::digest("key-a")),
            salted(b"salt", "key-b"),
            salted(&[0xff; 16], "key-c").to_uppercase(),
        );
        let keys = Keys::read(&text).unwrap();
        assert_eq!(keys.len(), 3);
        for (key, id) in
            [("key-a", Some("team-a")), ("key-b", Some("team-b")), ("key-c", Some("team-c")), ("key", None), ("", None)]
        {
            assert_eq!(keys.identity(key.as_bytes()), id);
        }
    }

    #[test]
    fn lines_that_are_none_are_named_without_their_content() {
        let hash = "0".repeat(64);
        for line in [
            "secret".to_owned(),
            hash.clone(),
            format!("{hash}0 a"),
            format!("{} a", &hash[1..]),
            format!("{hash} a b"),
            format!("{hash} a/b"),
            format!("{hash} {}", "a".repeat(65)),
            format!(":{hash} a"),
            format!("0:{hash} a"),
            format!("zz:{hash} a"),
            format!("é{} a", &hash[1..]),
        ] {
            let error = Keys::read(&format!("# first\n{line}\n")).err().unwrap();
            assert!(error.contains("line 2") && !error.contains(&line), "{line}");
        }
        assert_eq!(Keys::read("").unwrap().len(), 0);
    }
}
