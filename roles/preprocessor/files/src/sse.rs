// SPDX-License-Identifier: GPL-3.0-or-later
//! Reader of event streams (WHATWG HTML, section 9.2), for any cutting of the bytes.

/// One event: its data lines joined by line feeds, and its other lines as they came.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Event {
    pub data: Option<Vec<u8>>,
    /// Comments and fields other than `data`, each with a line feed.
    pub others: Vec<u8>,
}

impl Event {
    /// Append the event with the given data in place of its own.
    pub fn write_with(&self, data: &str, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.others);
        for line in data.split('\n') {
            out.extend_from_slice(b"data: ");
            out.extend_from_slice(line.as_bytes());
            out.push(b'\n');
        }
        out.push(b'\n');
    }
}

/// An event or a line became longer than allowed.
#[derive(Debug, PartialEq, Eq)]
pub struct TooLong;

/// The state between two pieces.
pub struct Reader {
    line: Vec<u8>,
    event: Event,
    /// The last byte was a carriage return; a line feed after it belongs to it.
    after_return: bool,
    first_line: bool,
    longest: usize,
}

impl Reader {
    /// Events may have up to `longest` bytes.
    pub fn new(longest: usize) -> Self {
        Reader { line: Vec::new(), event: Event::default(), after_return: false, first_line: true, longest }
    }

    /// Read a piece and append the events that it completes.
    pub fn push(&mut self, piece: &[u8], events: &mut Vec<Event>) -> Result<(), TooLong> {
        if piece.is_empty() {
            return Ok(());
        }
        let mut rest = piece;
        if std::mem::take(&mut self.after_return) {
            rest = rest.strip_prefix(b"\n").unwrap_or(rest);
        }
        while let Some(end) = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
            self.line.extend_from_slice(&rest[..end]);
            let is_return = rest[end] == b'\r';
            rest = &rest[end + 1..];
            if is_return {
                if rest.is_empty() {
                    self.after_return = true;
                }
                rest = rest.strip_prefix(b"\n").unwrap_or(rest);
            }
            self.end_line(events)?;
        }
        self.line.extend_from_slice(rest);
        self.check()
    }

    fn check(&self) -> Result<(), TooLong> {
        let length = self.line.len() + self.event.others.len() + self.event.data.as_ref().map_or(0, Vec::len);
        if length > self.longest {
            return Err(TooLong);
        }
        Ok(())
    }

    fn end_line(&mut self, events: &mut Vec<Event>) -> Result<(), TooLong> {
        self.check()?;
        let mut line = std::mem::take(&mut self.line);
        if std::mem::take(&mut self.first_line) && line.starts_with(b"\xef\xbb\xbf") {
            line.drain(..3);
        }
        if line.is_empty() {
            let event = std::mem::take(&mut self.event);
            if event != Event::default() {
                events.push(event);
            }
            return Ok(());
        }
        let value = match line.strip_prefix(b"data") {
            Some(b"") => Some(&b""[..]),
            Some(rest) => rest.strip_prefix(b":").map(|value| value.strip_prefix(b" ").unwrap_or(value)),
            None => None,
        };
        match (value, &mut self.event.data) {
            (Some(value), Some(data)) => {
                data.push(b'\n');
                data.extend_from_slice(value);
            }
            (Some(value), data) => *data = Some(value.to_vec()),
            (None, _) => {
                self.event.others.extend_from_slice(&line);
                self.event.others.push(b'\n');
            }
        }
        Ok(())
    }

    /// Whether the stream may end here without losing anything.
    pub fn is_between_events(&self) -> bool {
        self.line.is_empty() && self.event == Event::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(pieces: &[&[u8]]) -> Vec<Event> {
        let mut reader = Reader::new(1000);
        let mut events = Vec::new();
        for piece in pieces {
            reader.push(piece, &mut events).unwrap();
        }
        events
    }

    fn event(data: Option<&str>, others: &str) -> Event {
        Event { data: data.map(|data| data.as_bytes().to_vec()), others: others.as_bytes().to_vec() }
    }

    #[test]
    fn events_are_read_as_the_standard_says() {
        let stream = b"\xef\xbb\xbfdata: a\n\ndata:b\ndata\ndata:  c\r\n\r\n: ping\n\nid: 1\revent: x\rdata: d\r\rdatum: e\n\n\n\ndata: cut";
        assert_eq!(
            read(&[stream]),
            [
                event(Some("a"), ""),
                event(Some("b\n\n c"), ""),
                event(None, ": ping\n"),
                event(Some("d"), "id: 1\nevent: x\n"),
                event(None, "datum: e\n")
            ]
        );
    }

    #[test]
    fn a_line_end_may_be_cut_in_two_with_nothing_between() {
        assert_eq!(read(&[b"data: a\r", b"", b"\ndata: b\r", b"\n\r", b"\n"]), [event(Some("a\nb"), "")]);
    }

    #[test]
    fn what_does_not_end_is_refused() {
        let mut reader = Reader::new(10);
        assert_eq!(reader.push(b"data: 0123456789", &mut Vec::new()), Err(TooLong));
        let mut reader = Reader::new(20);
        let result: Result<(), TooLong> = (0..10).try_for_each(|_time| reader.push(b"data: 0\n", &mut Vec::new()));
        assert_eq!(result, Err(TooLong));
    }

    proptest! {
        #[test]
        fn pieces_give_what_the_whole_gives(stream in "[dat:e x\r\n]{0,80}", cuts in proptest::collection::vec(0usize..80, 0..6)) {
            let bytes = stream.as_bytes();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
            cuts.push(bytes.len());
            cuts.sort_unstable();
            let mut start = 0;
            let pieces: Vec<&[u8]> = cuts.into_iter().map(|cut| { let piece = &bytes[start..cut]; start = cut; piece }).collect();
            prop_assert_eq!(read(&pieces), read(&[bytes]));
        }

        #[test]
        fn what_is_written_is_read_again(data in "[a-z\n]{0,20}", other in "[b-z]{0,5}") {
            let others = if other.is_empty() { String::new() } else { format!("{other}\n") };
            let mut out = Vec::new();
            event(None, &others).write_with(&data, &mut out);
            prop_assert_eq!(read(&[&out]), vec![event(Some(&data), &others)]);
        }
    }
}
