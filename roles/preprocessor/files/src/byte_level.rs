// SPDX-License-Identifier: GPL-3.0-or-later
//! The short way for byte-level BPE, which is what most served models have.
//!
//! The `tokenizers` crate keeps, for each character, where it came from, and matches its patterns by backtracking, which takes the
//! square of the length of a run of white space and gives up silently when it becomes too much. Where a tokenizer is of a form that
//! is known here, text goes straight from a hand-written matcher of its pattern to bytes to merges: the same ids, some times
//! faster, in linear time. Everything else takes the crate's way.

use std::sync::Mutex;

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value;
use unicode_normalization_alignments::UnicodeNormalization;

use crate::bpe::{spread, Bpe};

/// The patterns that are known, as they stand in `tokenizer.json`.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const ONE_DIGIT: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const THREE_DIGITS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// How text is cut into words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// GPT-2 and what came of it.
    Gpt2,
    /// cl100k and what came of it (Llama 3, Qwen 2 …): so many digits make one word at most.
    Cl100k { digits: usize },
}

/// What the pattern tells characters apart by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Letter,
    Number,
    Space,
    Other,
}

/// Characters below this are looked up in a table, which has most alphabets in it.
const TABLE: usize = 0x800;

/// The general categories L and N, from the tables that the crate's own regular expressions use.
pub struct Kinds {
    table: Vec<Kind>,
    letters: Vec<(char, char)>,
    numbers: Vec<(char, char)>,
}

impl Kinds {
    fn new() -> Option<Self> {
        let mut kinds = Kinds { table: Vec::new(), letters: ranges(r"\p{L}")?, numbers: ranges(r"\p{N}")? };
        kinds.table =
            (0..TABLE as u32).map(|code| char::from_u32(code).map_or(Kind::Other, |c| kinds.search(c))).collect();
        Some(kinds)
    }

    fn search(&self, character: char) -> Kind {
        let is_in = |ranges: &[(char, char)]| {
            let after = ranges.partition_point(|range| range.0 <= character);
            after > 0 && character <= ranges[after - 1].1
        };
        if is_in(&self.letters) {
            Kind::Letter
        } else if is_in(&self.numbers) {
            Kind::Number
        } else if character.is_whitespace() {
            Kind::Space
        } else {
            Kind::Other
        }
    }

    fn of(&self, character: char) -> Kind {
        match self.table.get(character as usize) {
            Some(kind) => *kind,
            None => self.search(character),
        }
    }
}

fn ranges(class: &str) -> Option<Vec<(char, char)>> {
    match regex_syntax::parse(class).ok()?.into_kind() {
        regex_syntax::hir::HirKind::Class(regex_syntax::hir::Class::Unicode(class)) => {
            Some(class.iter().map(|range| (range.start(), range.end())).collect())
        }
        _ => None,
    }
}

impl Pattern {
    fn of_text(text: &str) -> Option<Pattern> {
        match text {
            GPT2 => Some(Pattern::Gpt2),
            ONE_DIGIT => Some(Pattern::Cl100k { digits: 1 }),
            THREE_DIGITS => Some(Pattern::Cl100k { digits: 3 }),
            _ => None,
        }
    }

    /// The length of the word at the beginning of a text that is not empty.
    fn word(self, kinds: &Kinds, text: &str) -> usize {
        match self {
            Pattern::Gpt2 => gpt2_word(kinds, text),
            Pattern::Cl100k { digits } => cl100k_word(kinds, text, digits),
        }
    }
}

/// Length of the longest run of characters that pass, up to `most` of them.
fn run(text: &str, most: usize, passes: impl Fn(char) -> bool) -> usize {
    text.char_indices()
        .take(most)
        .find(|(_at, character)| !passes(*character))
        .map_or_else(|| text.char_indices().nth(most).map_or(text.len(), |(at, _character)| at), |(at, _character)| at)
}

/// `'s` and the like: its length, or 0.
fn contraction(text: &str, folded: bool) -> usize {
    let Some(rest) = text.strip_prefix('\'') else { return 0 };
    let mut characters = rest.chars().map(|character| match character {
        // Without case, the long s is an s.
        'ſ' if folded => 's',
        other if folded => other.to_ascii_lowercase(),
        other => other,
    });
    let length = match (characters.next(), characters.next()) {
        (Some('s' | 't' | 'm' | 'd'), _) => 1,
        (Some('r' | 'v'), Some('e')) | (Some('l'), Some('l')) => 2,
        _ => return 0,
    };
    1 + rest.char_indices().nth(length).map_or(rest.len(), |(at, _character)| at)
}

/// White space: all of it at the end of the text, else all but its last character, which goes with the next word; but one alone
/// is a word. (`\s+(?!\S)|\s+`)
fn space_word(text: &str) -> usize {
    let length = run(text, usize::MAX, char::is_whitespace);
    if length == text.len() {
        return length;
    }
    let last = text[..length].chars().next_back().map_or(0, char::len_utf8);
    if length > last {
        length - last
    } else {
        length
    }
}

fn gpt2_word(kinds: &Kinds, text: &str) -> usize {
    let found = contraction(text, false);
    if found > 0 {
        return found;
    }
    let after_space = text.strip_prefix(' ').unwrap_or(text);
    let skipped = text.len() - after_space.len();
    match after_space.chars().next().map(|character| kinds.of(character)) {
        Some(kind) if kind != Kind::Space => {
            skipped + run(after_space, usize::MAX, |character| kinds.of(character) == kind)
        }
        _ => space_word(text),
    }
}

fn cl100k_word(kinds: &Kinds, text: &str, digits: usize) -> usize {
    let found = contraction(text, true);
    if found > 0 {
        return found;
    }
    let mut characters = text.chars();
    let Some(first) = characters.next() else { return 0 };
    let is_letter = |character: char| kinds.of(character) == Kind::Letter;
    // [^\r\n\p{L}\p{N}]?\p{L}+
    match kinds.of(first) {
        Kind::Letter => return run(text, usize::MAX, is_letter),
        Kind::Number => return run(text, digits, |character| kinds.of(character) == Kind::Number),
        _ if !matches!(first, '\r' | '\n') => {
            let letters = run(characters.as_str(), usize::MAX, is_letter);
            if letters > 0 {
                return first.len_utf8() + letters;
            }
        }
        _ => {}
    }
    let is_line_end = |character: char| matches!(character, '\r' | '\n');
    //  ?[^\s\p{L}\p{N}]+[\r\n]*
    let after_space = text.strip_prefix(' ').unwrap_or(text);
    let signs = run(after_space, usize::MAX, |character| kinds.of(character) == Kind::Other);
    if signs > 0 {
        let length = text.len() - after_space.len() + signs;
        return length + run(&text[length..], usize::MAX, is_line_end);
    }
    // \s*[\r\n]+ ends with the last line end of the white space.
    let spaces = run(text, usize::MAX, char::is_whitespace);
    match text[..spaces].rfind(is_line_end) {
        Some(at) => at + 1,
        None => space_word(text),
    }
}

/// Longest word, in bytes, and most ids of one that are remembered: what most words of most languages have.
const REMEMBERED_BYTES: usize = 16;
const REMEMBERED_IDS: usize = 3;
/// Words that are remembered at most; a power of two.
const REMEMBERED: usize = 8192;

/// Ids of words that were merged of late: a few words make most of any text. A word has one place, from which it drives the one
/// before it.
struct Words(Vec<Remembered>);

#[derive(Clone, Copy, Default)]
struct Remembered {
    word: Word,
    ids: [u32; REMEMBERED_IDS],
    count: usize,
}

/// The bytes of a word that is not too long: its first and its last eight, which may have some in common, and its length, which is
/// 0 for no word. (Nothing is copied byte by byte: a call for each word would cost more than all the rest.)
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Word {
    first: u64,
    last: u64,
    length: usize,
}

impl Word {
    fn new(text: &str) -> Option<Self> {
        let bytes = text.as_bytes();
        let length = bytes.len();
        let (first, last) = match length {
            1..=3 => (u64::from(bytes[0]) << 16 | u64::from(bytes[length / 2]) << 8 | u64::from(bytes[length - 1]), 0),
            4..=7 => {
                (u32::from_le_bytes(*bytes.first_chunk()?).into(), u32::from_le_bytes(*bytes.last_chunk()?).into())
            }
            8..=REMEMBERED_BYTES => {
                (u64::from_le_bytes(*bytes.first_chunk()?), u64::from_le_bytes(*bytes.last_chunk()?))
            }
            _ => return None,
        };
        Some(Word { first, last, length })
    }

    fn place(self) -> usize {
        spread(self.first ^ spread(self.last ^ self.length as u64) as u64) % REMEMBERED
    }
}

/// Text to ids for one tokenizer.
pub struct ByteLevel {
    pattern: Pattern,
    kinds: Kinds,
    /// Id of each byte.
    bytes: Vec<u32>,
    /// Character that stands for each byte in the vocabulary.
    characters: Vec<char>,
    normalizes: bool,
    /// Added tokens and their ids. `None` if there are none.
    added: Option<(AhoCorasick, Vec<u32>)>,
    /// One for each text that is encoded at the same time, so that nobody waits for anybody.
    words: Mutex<Vec<Words>>,
}

/// An added token: its text, its id, whether it has to be found in normalised text.
pub struct Added {
    pub content: String,
    pub id: u32,
    pub normalized: bool,
}

impl ByteLevel {
    /// The short way, if the tokenizer is of a form that it is known for. `plain` says of the added tokens that none of them takes
    /// white space along or has to stand alone.
    pub fn new(normalizer: &Value, pre_tokenizer: &Value, bpe: &Bpe, added: &[Added], plain: bool) -> Option<Self> {
        let normalizes = match normalizer {
            Value::Null => false,
            Value::Object(_) if normalizer["type"] == "NFC" => true,
            _ => return None,
        };
        // Tokens that are found before and ones that are found after normalising would need two passes.
        let same = added.iter().all(|token| !token.normalized || !normalizes);
        let one_pass = added.windows(2).all(|pair| pair[0].normalized == pair[1].normalized);
        if !plain || !same || !one_pass || !bpe.is_plain() {
            return None;
        }
        let pattern = pattern_of(pre_tokenizer)?;
        let characters = byte_characters();
        let bytes =
            characters.iter().map(|character| bpe.id(character.encode_utf8(&mut [0; 4]))).collect::<Option<_>>()?;
        let added = if added.is_empty() {
            None
        } else {
            let contents = added.iter().map(|token| token.content.as_bytes());
            let finder = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(contents).ok()?;
            Some((finder, added.iter().map(|token| token.id).collect()))
        };
        Some(ByteLevel { pattern, kinds: Kinds::new()?, bytes, characters, normalizes, added, words: Mutex::default() })
    }

    /// The ids of a text, without tokens around it.
    pub fn encode(&self, bpe: &Bpe, text: &str, ids: &mut Vec<u32>) {
        let mut words = self
            .words
            .lock()
            .ok()
            .and_then(|mut words| words.pop())
            .unwrap_or_else(|| Words(vec![Remembered::default(); REMEMBERED]));
        let mut start = 0;
        if let Some((finder, added)) = &self.added {
            for found in finder.find_iter(text) {
                self.encode_part(bpe, &text[start..found.start()], &mut words, ids);
                ids.push(added[found.pattern().as_usize()]);
                start = found.end();
            }
        }
        self.encode_part(bpe, &text[start..], &mut words, ids);
        if let Ok(mut all) = self.words.lock() {
            all.push(words);
        }
    }

    fn encode_part(&self, bpe: &Bpe, text: &str, words: &mut Words, ids: &mut Vec<u32>) {
        let normalized;
        let mut rest = if self.normalizes && !text.is_ascii() {
            normalized = text.nfc().map(|(character, _change)| character).collect::<String>();
            normalized.as_str()
        } else {
            text
        };
        while !rest.is_empty() {
            let (word, after) = rest.split_at(self.pattern.word(&self.kinds, rest));
            self.encode_word(bpe, word, words, ids);
            rest = after;
        }
    }

    fn encode_word(&self, bpe: &Bpe, text: &str, words: &mut Words, ids: &mut Vec<u32>) {
        let Some(word) = Word::new(text) else { return self.merge(bpe, text, ids) };
        let known = &mut words.0[word.place()];
        if known.word == word {
            for id in &known.ids[..known.count] {
                ids.push(*id);
            }
            return;
        }
        let before = ids.len();
        self.merge(bpe, text, ids);
        let merged = &ids[before..];
        if let Some(kept) = known.ids.get_mut(..merged.len()) {
            kept.copy_from_slice(merged);
            (known.word, known.count) = (word, merged.len());
        }
    }

    fn merge(&self, bpe: &Bpe, word: &str, ids: &mut Vec<u32>) {
        if bpe.ignores_merges() {
            let spelt: String = word.bytes().map(|byte| self.characters[byte as usize]).collect();
            if let Some(id) = bpe.id(&spelt) {
                ids.push(id);
                return;
            }
        }
        bpe.merge_ids(word.bytes().map(|byte| self.bytes[byte as usize]), ids);
    }
}

fn pattern_of(pre_tokenizer: &Value) -> Option<Pattern> {
    let is_level = |value: &Value, use_regex: bool| {
        value["type"] == "ByteLevel"
            && value["add_prefix_space"] == false
            && value.get("use_regex").map_or(use_regex, |given| *given == use_regex)
    };
    if is_level(pre_tokenizer, true) {
        return Some(Pattern::Gpt2);
    }
    let steps = pre_tokenizer.get("pretokenizers")?.as_array()?;
    let [split, level] = steps.as_slice() else { return None };
    if !is_level(level, false)
        || split["type"] != "Split"
        || split["behavior"] != "Isolated"
        || split["invert"] != false
    {
        return None;
    }
    Pattern::of_text(split["pattern"].get("Regex")?.as_str()?)
}

/// The characters that stand for the bytes 0 to 255: printable ones for themselves, the others from U+0100 on.
fn byte_characters() -> Vec<char> {
    let mut next = 0x100;
    let character = |byte: u8| match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
        _ => {
            next += 1;
            char::from_u32(next - 1).unwrap_or('\u{fffd}')
        }
    };
    (0..=255).map(character).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::OnceLock;

    fn words(pattern: Pattern, text: &str) -> Vec<String> {
        let kinds = Kinds::new().unwrap();
        let mut rest = text;
        let mut words = Vec::new();
        while !rest.is_empty() {
            let (word, after) = rest.split_at(pattern.word(&kinds, rest));
            assert!(!word.is_empty(), "no progress at {rest:?}");
            words.push(word.to_owned());
            rest = after;
        }
        words
    }

    fn by_expression(expression: &fancy_regex::Regex, text: &str) -> Vec<String> {
        expression.find_iter(text).map(|found| found.unwrap().as_str().to_owned()).collect()
    }

    /// Each pattern with the expression that it stands for.
    fn patterns() -> &'static [(fancy_regex::Regex, Pattern)] {
        static PATTERNS: OnceLock<Vec<(fancy_regex::Regex, Pattern)>> = OnceLock::new();
        PATTERNS.get_or_init(|| {
            [GPT2, ONE_DIGIT, THREE_DIGITS]
                .map(|text| (fancy_regex::Regex::new(text).unwrap(), Pattern::of_text(text).unwrap()))
                .into()
        })
    }

    #[test]
    fn bytes_have_the_characters_of_gpt2() {
        let characters = byte_characters();
        assert_eq!(
            (characters[0], characters[b' ' as usize], characters[b'a' as usize], characters[0x7f], characters[0xad]),
            ('Ā', 'Ġ', 'a', 'ġ', 'Ń')
        );
        let mut sorted = characters.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), 256);
    }

    #[test]
    fn long_runs_take_linear_time() {
        for pattern in [Pattern::Gpt2, Pattern::Cl100k { digits: 1 }, Pattern::Cl100k { digits: 3 }] {
            for text in [" ".repeat(1_000_000) + "a", "\n ".repeat(500_000), "1".repeat(1_000_000)] {
                assert_eq!(words(pattern, &text).concat(), text);
            }
        }
    }

    /// A tokenizer of all bytes and a few merges, which has remembered whatever other tests gave it.
    fn used() -> &'static (ByteLevel, Bpe) {
        static USED: OnceLock<(ByteLevel, Bpe)> = OnceLock::new();
        USED.get_or_init(|| {
            let merges = [("a", "b"), ("Ġ", "a"), ("ab", "ab"), ("1", "1"), ("Ġ", "Ġ"), ("s", "t"), ("Ġa", "b")];
            let mut tokens: Vec<String> = byte_characters().into_iter().map(String::from).collect();
            tokens.extend(merges.iter().map(|(left, right)| format!("{left}{right}")));
            let ids: serde_json::Map<String, Value> =
                tokens.into_iter().enumerate().map(|(id, token)| (token, id.into())).collect();
            let lines: Vec<String> = merges.iter().map(|(left, right)| format!("{left} {right}")).collect();
            let model = serde_json::json!({"vocab": ids, "merges": lines}).to_string();
            let bpe: Bpe = serde_json::from_str(&model).unwrap();
            let pre_tokenizer = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false});
            (ByteLevel::new(&Value::Null, &pre_tokenizer, &bpe, &[], true).unwrap(), bpe)
        })
    }

    fn assert_merged_alike(text: &str) {
        let (level, bpe) = used();
        let mut expected = Vec::new();
        for word in words(Pattern::Gpt2, text) {
            level.merge(bpe, &word, &mut expected);
        }
        for _again in 0..2 {
            let mut ids = Vec::new();
            level.encode(bpe, text, &mut ids);
            assert_eq!(ids, expected, "{text:?}");
        }
    }

    #[test]
    fn words_that_drive_each_other_out_are_merged_alike() {
        // Twice as many words as there are places.
        let text: String = (0..2 * REMEMBERED).map(|number| format!(" ab{number}")).collect();
        assert_merged_alike(&text);
        assert_merged_alike(&text);
    }

    #[test]
    fn words_of_every_length_are_merged_alike() {
        for length in 0..2 * REMEMBERED_BYTES {
            for word in ["a".repeat(length), "ab".repeat(length), "\0".repeat(length), "1".repeat(length)] {
                assert_merged_alike(&word);
                assert_merged_alike(&(word + " x"));
            }
        }
    }

    fn text() -> impl Strategy<Value = String> {
        proptest::collection::vec(
            prop_oneof![
                "['sStTrRevVmMlLdDſK ]{0,6}",
                "[ \n\r\t\u{a0}\u{3000}\u{85}]{0,6}",
                "[a-zA-Z0-9éß你½Ⅷ٣ªʰ\u{301}_!?.,' ]{0,8}",
                any::<String>(),
            ],
            0..6,
        )
        .prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn words_are_those_of_the_expressions(text in text()) {
            for (expression, pattern) in patterns() {
                prop_assert_eq!(words(*pattern, &text), by_expression(expression, &text));
            }
        }

        #[test]
        fn remembered_words_are_merged_alike(text in text()) {
            assert_merged_alike(&text);
        }
    }
}
