// SPDX-License-Identifier: GPL-3.0-or-later
//! A strict reader and two writers of JSON (RFC 8259).
//!
//! What two readers could understand differently is refused: duplicate names, lone surrogates, numbers that a double cannot
//! hold, anything that is not UTF-8. Depth, number of values and length of a number are limited, so that time and memory are in
//! proportion to the bytes that were read.

use std::collections::HashSet;
use std::fmt::Write;
use std::ops::Range;

/// A JSON value. Objects keep the order of their names, as Python's do; names are unique.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Null,
    Bool(bool),
    Integer(i64),
    /// An integer outside of 64 bits, as it was written.
    BigInteger(String),
    Float(f64),
    String(String),
    Array(Vec<Value>),
    Object(Vec<(String, Value)>),
}

impl Value {
    pub fn get(&self, name: &str) -> Option<&Value> {
        match self {
            Value::Object(members) => members.iter().find(|(key, _)| key == name).map(|(_, value)| value),
            _ => None,
        }
    }

    pub fn get_mut(&mut self, name: &str) -> Option<&mut Value> {
        match self {
            Value::Object(members) => members.iter_mut().find(|(key, _)| key == name).map(|(_, value)| value),
            _ => None,
        }
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::String(text) => Some(text),
            _ => None,
        }
    }

    pub fn as_array(&self) -> Option<&[Value]> {
        match self {
            Value::Array(items) => Some(items),
            _ => None,
        }
    }

    pub fn as_integer(&self) -> Option<i64> {
        match self {
            Value::Integer(number) => Some(*number),
            _ => None,
        }
    }

    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Value::Bool(truth) => Some(*truth),
            _ => None,
        }
    }

    pub fn is_null(&self) -> bool {
        matches!(self, Value::Null)
    }
}

/// What a document may have. The length in bytes is limited where it is received.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Arrays and objects within each other.
    pub depth: usize,
    /// Values in all, names not counted.
    pub values: usize,
    /// Characters of one number.
    pub number: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { depth: 64, values: 1_000_000, number: 64 }
    }
}

/// Why a document was refused, and at which byte. Holds nothing of the document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub code: &'static str,
    pub what: &'static str,
    pub at: usize,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} (byte {})", self.what, self.at)
    }
}

/// A document and where the values of its outermost object stand in it, in the same order.
#[derive(Debug)]
pub struct Document {
    pub root: Value,
    pub spans: Vec<Range<usize>>,
}

/// Read a whole document. It must be UTF-8 and nothing may follow it but white space.
pub fn read(bytes: &[u8], limits: Limits) -> Result<Document, Refusal> {
    let text = std::str::from_utf8(bytes).map_err(|error| Refusal {
        code: "invalid_utf8",
        what: "the text is not valid UTF-8",
        at: error.valid_up_to(),
    })?;
    let mut reader = Reader { text, bytes, at: 0, values: 0, limits, spans: Vec::new() };
    reader.skip_space();
    let root = reader.value(0)?;
    reader.skip_space();
    if reader.at != bytes.len() {
        return Err(reader.refusal("invalid_json", "there is more after the JSON value"));
    }
    Ok(Document { root, spans: reader.spans })
}

struct Reader<'text> {
    text: &'text str,
    bytes: &'text [u8],
    at: usize,
    values: usize,
    limits: Limits,
    spans: Vec<Range<usize>>,
}

impl Reader<'_> {
    fn refusal(&self, code: &'static str, what: &'static str) -> Refusal {
        Refusal { code, what, at: self.at }
    }

    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn word(&mut self, word: &str, value: Value) -> Result<Value, Refusal> {
        if self.bytes[self.at..].starts_with(word.as_bytes()) {
            self.at += word.len();
            Ok(value)
        } else {
            Err(self.refusal("invalid_json", "a value was expected"))
        }
    }

    fn value(&mut self, depth: usize) -> Result<Value, Refusal> {
        self.values += 1;
        if self.values > self.limits.values {
            return Err(self.refusal("json_too_large", "the JSON has too many values"));
        }
        match self.peek() {
            Some(b'{') => self.object(depth),
            Some(b'[') => self.array(depth),
            Some(b'"') => Ok(Value::String(self.string()?)),
            Some(b't') => self.word("true", Value::Bool(true)),
            Some(b'f') => self.word("false", Value::Bool(false)),
            Some(b'n') => self.word("null", Value::Null),
            Some(b'-' | b'0'..=b'9') => self.number(),
            None => Err(self.refusal("invalid_json", "the JSON ends too early")),
            Some(_) => Err(self.refusal("invalid_json", "a value was expected")),
        }
    }

    fn enter(&mut self, depth: usize) -> Result<(), Refusal> {
        if depth >= self.limits.depth {
            return Err(self.refusal("json_too_deep", "the JSON is nested too deeply"));
        }
        self.at += 1;
        self.skip_space();
        Ok(())
    }

    fn array(&mut self, depth: usize) -> Result<Value, Refusal> {
        self.enter(depth)?;
        let mut items = Vec::new();
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(Value::Array(items));
        }
        loop {
            items.push(self.value(depth + 1)?);
            self.skip_space();
            match self.peek() {
                Some(b',') => {
                    self.at += 1;
                    self.skip_space();
                }
                Some(b']') => {
                    self.at += 1;
                    return Ok(Value::Array(items));
                }
                _ => return Err(self.refusal("invalid_json", "a comma or the end of the array was expected")),
            }
        }
    }

    fn object(&mut self, depth: usize) -> Result<Value, Refusal> {
        self.enter(depth)?;
        let mut members: Vec<(String, Value)> = Vec::new();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(Value::Object(members));
        }
        // Few names are compared with each other; many would take the square of their number.
        let mut seen: HashSet<String> = HashSet::new();
        loop {
            if self.peek() != Some(b'"') {
                return Err(self.refusal("invalid_json", "a name in quotes was expected"));
            }
            let name = self.string()?;
            let duplicate = if members.len() < 16 {
                members.iter().any(|(other, _)| *other == name)
            } else {
                if seen.is_empty() {
                    seen.extend(members.iter().map(|(other, _)| other.clone()));
                }
                !seen.insert(name.clone())
            };
            if duplicate {
                return Err(self.refusal("duplicate_name", "an object has the same name twice"));
            }
            self.skip_space();
            if self.peek() != Some(b':') {
                return Err(self.refusal("invalid_json", "a colon was expected"));
            }
            self.at += 1;
            self.skip_space();
            let start = self.at;
            let value = self.value(depth + 1)?;
            if depth == 0 {
                self.spans.push(start..self.at);
            }
            members.push((name, value));
            self.skip_space();
            match self.peek() {
                Some(b',') => {
                    self.at += 1;
                    self.skip_space();
                }
                Some(b'}') => {
                    self.at += 1;
                    return Ok(Value::Object(members));
                }
                _ => return Err(self.refusal("invalid_json", "a comma or the end of the object was expected")),
            }
        }
    }

    fn string(&mut self) -> Result<String, Refusal> {
        self.at += 1;
        let mut text = String::new();
        loop {
            let start = self.at;
            while self.peek().is_some_and(|byte| byte != b'"' && byte != b'\\' && byte >= 0x20) {
                self.at += 1;
            }
            text.push_str(&self.text[start..self.at]);
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(text);
                }
                Some(b'\\') => text.push(self.escape()?),
                Some(_) => return Err(self.refusal("invalid_json", "a control character stands in a string")),
                None => return Err(self.refusal("invalid_json", "a string does not end")),
            }
        }
    }

    fn escape(&mut self) -> Result<char, Refusal> {
        self.at += 1;
        let plain = match self.peek() {
            Some(b'"') => '"',
            Some(b'\\') => '\\',
            Some(b'/') => '/',
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'u') => return self.unicode_escape(),
            _ => return Err(self.refusal("invalid_json", "this escape does not exist")),
        };
        self.at += 1;
        Ok(plain)
    }

    fn unicode_escape(&mut self) -> Result<char, Refusal> {
        let first = self.four_digits()?;
        let code = match first {
            0xD800..=0xDBFF if self.bytes[self.at..].starts_with(b"\\u") => {
                self.at += 1;
                let second = self.four_digits()?;
                if !(0xDC00..=0xDFFF).contains(&second) {
                    return Err(self.refusal("invalid_utf8", "a surrogate stands alone"));
                }
                0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00)
            }
            code => code,
        };
        char::from_u32(code).ok_or_else(|| self.refusal("invalid_utf8", "a surrogate stands alone"))
    }

    /// Read `uXXXX`.
    fn four_digits(&mut self) -> Result<u32, Refusal> {
        let digits = self.bytes.get(self.at + 1..self.at + 5).unwrap_or_default();
        if digits.len() < 4 || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(self.refusal("invalid_json", "four hexadecimal digits were expected"));
        }
        self.at += 5;
        Ok(digits.iter().fold(0, |code, digit| code * 16 + (*digit as char).to_digit(16).unwrap_or(0)))
    }

    fn digits(&mut self) -> Result<(), Refusal> {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        if self.at == start {
            return Err(self.refusal("invalid_json", "a digit was expected"));
        }
        Ok(())
    }

    fn number(&mut self) -> Result<Value, Refusal> {
        let start = self.at;
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        if self.peek() == Some(b'0') {
            self.at += 1;
        } else {
            self.digits()?;
        }
        let mut is_integer = true;
        if self.peek() == Some(b'.') {
            is_integer = false;
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            is_integer = false;
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        let written = &self.text[start..self.at];
        if written.len() > self.limits.number {
            return Err(self.refusal("number_too_long", "a number has too many digits"));
        }
        if is_integer {
            return Ok(match written.parse::<i64>() {
                Ok(number) => Value::Integer(number),
                Err(_) => Value::BigInteger(written.to_owned()),
            });
        }
        match written.parse::<f64>() {
            Ok(number) if number.is_finite() => Ok(Value::Float(number)),
            _ => Err(self.refusal("number_out_of_range", "a number is out of range")),
        }
    }
}

/// How Python's `json.dumps` is asked to write.
#[derive(Clone, Debug)]
pub struct Style {
    pub ensure_ascii: bool,
    pub indent: Option<String>,
    pub item_separator: String,
    pub name_separator: String,
}

impl Style {
    /// No white space at all.
    pub fn compact() -> Self {
        Style { ensure_ascii: false, indent: None, item_separator: ",".into(), name_separator: ":".into() }
    }

    /// What `json.dumps(value, ensure_ascii=False)` does.
    pub fn python() -> Self {
        Style { ensure_ascii: false, indent: None, item_separator: ", ".into(), name_separator: ": ".into() }
    }
}

/// Write a string with its quotes, with the escapes that Python's `json.dumps` uses.
pub fn write_string(text: &str, ensure_ascii: bool, out: &mut String) {
    out.push('"');
    let mut plain = 0;
    for (index, character) in text.char_indices() {
        let escape = match character {
            '"' => "\\\"",
            '\\' => "\\\\",
            '\n' => "\\n",
            '\r' => "\\r",
            '\t' => "\\t",
            '\u{8}' => "\\b",
            '\u{c}' => "\\f",
            control if (control as u32) < 0x20 => "",
            other if ensure_ascii && (other as u32) >= 0x7f => "",
            _ => continue,
        };
        out.push_str(&text[plain..index]);
        plain = index + character.len_utf8();
        if escape.is_empty() {
            for unit in character.encode_utf16(&mut [0; 2]) {
                let _infallible = write!(out, "\\u{unit:04x}");
            }
        } else {
            out.push_str(escape);
        }
    }
    out.push_str(&text[plain..]);
    out.push('"');
}

/// Write a double as Python's `repr` does: shortest form, exponent below 1e-4 and from 1e16.
pub fn write_float(number: f64, out: &mut String) {
    if number.is_nan() {
        out.push_str("NaN");
        return;
    }
    if number.is_infinite() {
        out.push_str(if number > 0.0 { "Infinity" } else { "-Infinity" });
        return;
    }
    let scientific = format!("{number:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if number != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        let _infallible = write!(out, "{mantissa}e{sign}{:02}", exponent.abs());
    } else {
        let _infallible = write!(out, "{number}");
        if number.fract() == 0.0 {
            out.push_str(".0");
        }
    }
}

/// Write a value.
pub fn write(value: &Value, style: &Style, out: &mut String) {
    write_at(value, style, 0, out);
}

fn new_line(style: &Style, depth: usize, out: &mut String) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        for _level in 0..depth {
            out.push_str(indent);
        }
    }
}

fn write_at(value: &Value, style: &Style, depth: usize, out: &mut String) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(true) => out.push_str("true"),
        Value::Bool(false) => out.push_str("false"),
        Value::Integer(number) => {
            let _infallible = write!(out, "{number}");
        }
        Value::BigInteger(written) => out.push_str(written),
        Value::Float(number) => write_float(*number, out),
        Value::String(text) => write_string(text, style.ensure_ascii, out),
        Value::Array(items) if items.is_empty() => out.push_str("[]"),
        Value::Object(members) if members.is_empty() => out.push_str("{}"),
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push_str(&style.item_separator);
                }
                new_line(style, depth + 1, out);
                write_at(item, style, depth + 1, out);
            }
            new_line(style, depth, out);
            out.push(']');
        }
        Value::Object(members) => {
            out.push('{');
            for (index, (name, item)) in members.iter().enumerate() {
                if index > 0 {
                    out.push_str(&style.item_separator);
                }
                new_line(style, depth + 1, out);
                write_string(name, style.ensure_ascii, out);
                out.push_str(&style.name_separator);
                write_at(item, style, depth + 1, out);
            }
            new_line(style, depth, out);
            out.push('}');
        }
    }
}

/// A value in its shortest form.
pub fn to_compact(value: &Value) -> String {
    let mut out = String::new();
    write(value, &Style::compact(), &mut out);
    out
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use proptest::prelude::*;

    fn refused(text: &str) -> &'static str {
        read(text.as_bytes(), Limits::default()).map(|_document| "accepted").unwrap_or_else(|refusal| refusal.code)
    }

    #[test]
    fn what_could_be_read_in_two_ways_is_refused() {
        for (text, code) in [
            (r#"{"a":1,"a":2}"#, "duplicate_name"),
            (r#"{"a":1,"\u0061":2}"#, "duplicate_name"),
            (r#""\ud800""#, "invalid_utf8"),
            (r#""\ud800\u0041""#, "invalid_utf8"),
            (r#""\udc00""#, "invalid_utf8"),
            ("1e999", "number_out_of_range"),
            ("01", "invalid_json"),
            ("+1", "invalid_json"),
            (".5", "invalid_json"),
            ("1.", "invalid_json"),
            ("NaN", "invalid_json"),
            ("-", "invalid_json"),
            ("\"a\nb\"", "invalid_json"),
            ("\"a", "invalid_json"),
            (r#""\x""#, "invalid_json"),
            (r#""\u00g0""#, "invalid_json"),
            (r#""\u00"#, "invalid_json"),
            ("{} {}", "invalid_json"),
            ("[1,]", "invalid_json"),
            (r#"{"a":1,}"#, "invalid_json"),
            ("{a:1}", "invalid_json"),
            ("", "invalid_json"),
            ("tru", "invalid_json"),
            ("\u{feff}{}", "invalid_json"),
        ] {
            assert_eq!(refused(text), code, "{text:?}");
        }
        assert_eq!(read(b"\"\xff\"", Limits::default()).unwrap_err().code, "invalid_utf8");
    }

    #[test]
    fn limits_hold() {
        let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
        assert_eq!(refused(&nested(64)), "accepted");
        assert_eq!(refused(&nested(65)), "json_too_deep");
        assert_eq!(refused(&"[".repeat(10_000_000)), "json_too_deep");
        assert_eq!(refused(&"1".repeat(65)), "number_too_long");
        let few = Limits { values: 3, ..Limits::default() };
        assert!(read(b"[1,2]", few).is_ok());
        assert_eq!(read(b"[1,2,3]", few).unwrap_err().code, "json_too_large");
    }

    #[test]
    fn a_late_duplicate_among_many_names_is_found() {
        let mut text: Vec<String> = (0..40).map(|index| format!("\"n{index}\":0")).collect();
        text.push("\"n3\":1".into());
        assert_eq!(refused(&format!("{{{}}}", text.join(","))), "duplicate_name");
    }

    #[test]
    fn spans_point_at_the_outermost_values() {
        let text = br#" { "model" : "m" , "prompt": [ "a", "b" ] } "#;
        let document = read(text, Limits::default()).unwrap();
        let found: Vec<&[u8]> = document.spans.iter().map(|span| &text[span.clone()]).collect();
        assert_eq!(found, [&b"\"m\""[..], &b"[ \"a\", \"b\" ]"[..]]);
    }

    #[test]
    fn floats_are_written_as_python_writes_them() {
        for (number, expected) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-0.0, "-0.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (123456.789, "123456.789"),
        ] {
            let mut out = String::new();
            write_float(number, &mut out);
            assert_eq!(out, expected);
        }
    }

    #[test]
    fn python_style_is_pythons() {
        let value = read(r#"{"a":[1,"é\u0001"],"b":{}}"#.as_bytes(), Limits::default()).unwrap().root;
        let mut out = String::new();
        write(&value, &Style::python(), &mut out);
        assert_eq!(out, r#"{"a": [1, "é\u0001"], "b": {}}"#);
        out.clear();
        let indented =
            Style { indent: Some("  ".into()), item_separator: ",".into(), ensure_ascii: true, ..Style::python() };
        write(&value, &indented, &mut out);
        assert_eq!(out, "{\n  \"a\": [\n    1,\n    \"\\u00e9\\u0001\"\n  ],\n  \"b\": {}\n}");
    }

    pub fn any_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::Bool),
            any::<i64>().prop_map(Value::Integer),
            any::<f64>().prop_filter("finite", |number| number.is_finite()).prop_map(Value::Float),
            any::<String>().prop_map(Value::String),
        ];
        leaf.prop_recursive(4, 64, 8, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..8).prop_map(Value::Array),
                proptest::collection::btree_map(any::<String>(), inner, 0..8)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(value in any_value(), ensure_ascii in any::<bool>()) {
            let mut out = String::new();
            write(&value, &Style { ensure_ascii, ..Style::python() }, &mut out);
            prop_assert_eq!(read(out.as_bytes(), Limits::default()).unwrap().root, value);
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _any_result = read(&bytes, Limits::default());
        }

        #[test]
        fn nothing_that_looks_like_json_makes_it_panic(text in r#"[\[\]{}:,"\\u0-9eE.+\-truefalsn ]{0,120}"#) {
            let _any_result = read(text.as_bytes(), Limits::default());
        }
    }
}
