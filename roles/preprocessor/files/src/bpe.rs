// SPDX-License-Identifier: GPL-3.0-or-later
//! Byte-pair encoding (BPE) over tables that are quick to build and small.
//!
//! The `tokenizers` crate keeps each token as two strings in two hash maps and reads them through an untyped copy of the file; that
//! takes a second and a hundred megabytes for 150,000 tokens. Here the file is read once, straight into one string and two open hash
//! tables. Everything around the model (added tokens, normalizer, pre-tokenizer, post-processor, decoder) is the crate's own, so
//! that only the merging has to be equal, which the equality tests check.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::{Model, Token};

const NONE: u32 = u32::MAX;
/// Longest run of symbols that is merged by looking at all of them for each merge; longer ones use a heap.
const SHORT: usize = 48;
/// Characters whose symbol is found by index: ASCII, Latin, and the 256 characters that stand for bytes.
const DIRECT: usize = 512;
/// Threads that look up merges, and merges that are worth one.
const MOST_CORES: usize = 4;
const LEAST_PART: usize = 8192;

/// Tokens by id and ids by token.
pub struct Vocabulary {
    text: String,
    /// Place of each id's text. An id that the file does not have is empty and has `NONE` as its start.
    places: Vec<(u32, u32)>,
    /// Open hash table of ids, each with more bits of its token's hash, so that few texts are looked at in vain. Its length is a
    /// power of two.
    slots: Vec<(u32, u32)>,
    len: usize,
}

impl Vocabulary {
    /// Build from entries in the file's order; of a token that occurs twice the last id counts, as in a hash map.
    fn new(text: String, entries: &[(u32, u32, u32)]) -> Result<Self, String> {
        let highest = entries.iter().map(|entry| entry.2).max().unwrap_or(0) as usize;
        if highest > entries.len().saturating_mul(4) + 1_000_000 {
            return Err(format!("token id {highest} is far beyond the number of tokens"));
        }
        let mut vocabulary = Vocabulary {
            text,
            places: vec![(NONE, 0); highest + 1],
            slots: vec![(NONE, 0); table_size(entries.len())],
            len: 0,
        };
        for &(start, length, id) in entries {
            let token = &vocabulary.text[start as usize..(start + length) as usize];
            let hash = hash_of(token.as_bytes());
            let slot = vocabulary.slot(token, hash);
            if vocabulary.slots[slot].0 == NONE {
                vocabulary.len += 1;
            }
            vocabulary.places[id as usize] = (start, length);
            vocabulary.slots[slot] = (id, tag_of(hash));
        }
        Ok(vocabulary)
    }

    /// The slot that holds the token, or the empty one where it would be.
    fn slot(&self, token: &str, hash: usize) -> usize {
        let mask = self.slots.len() - 1;
        let tag = tag_of(hash);
        let mut slot = hash & mask;
        loop {
            let (id, other) = self.slots[slot];
            if id == NONE || (other == tag && self.token(id) == Some(token)) {
                return slot;
            }
            slot = (slot + 1) & mask;
        }
    }

    pub fn id(&self, token: &str) -> Option<u32> {
        let (id, _tag) = self.slots[self.slot(token, hash_of(token.as_bytes()))];
        Some(id).filter(|id| *id != NONE)
    }

    pub fn token(&self, id: u32) -> Option<&str> {
        let &(start, length) = self.places.get(id as usize)?;
        self.text.get(start as usize..start as usize + length as usize)
    }
}

/// What two neighbouring symbols become, and how early.
struct Merges {
    pairs: Vec<u64>,
    results: Vec<(u32, u32)>,
}

const NO_PAIR: u64 = u64::MAX;

impl Merges {
    fn new(count: usize) -> Self {
        let size = table_size(count);
        Merges { pairs: vec![NO_PAIR; size], results: vec![(0, 0); size] }
    }

    fn slot(&self, pair: u64) -> usize {
        let mask = self.pairs.len() - 1;
        let mut slot = spread(pair) & mask;
        while self.pairs[slot] != NO_PAIR && self.pairs[slot] != pair {
            slot = (slot + 1) & mask;
        }
        slot
    }

    fn insert(&mut self, left: u32, right: u32, rank: u32, result: u32) {
        let pair = u64::from(left) << 32 | u64::from(right);
        let slot = self.slot(pair);
        self.pairs[slot] = pair;
        self.results[slot] = (rank, result);
    }

    /// Rank and resulting id.
    fn get(&self, left: u32, right: u32) -> Option<(u32, u32)> {
        let pair = u64::from(left) << 32 | u64::from(right);
        let slot = self.slot(pair);
        (self.pairs[slot] == pair && pair != NO_PAIR).then(|| self.results[slot])
    }
}

/// Spread the bits of a number over a table's index. The tables here are filled once, from the model's own file, so that nobody can
/// fill them with what collides.
pub fn spread(number: u64) -> usize {
    let product = u128::from(number ^ 0x9E37_79B9_7F4A_7C15) * 0xD6E8_FEB8_6659_FD93;
    (product as u64 ^ (product >> 64) as u64) as usize
}

fn hash_of(bytes: &[u8]) -> usize {
    let mut state = bytes.len() as u64;
    for part in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..part.len()].copy_from_slice(part);
        state = spread(state ^ u64::from_le_bytes(word)) as u64;
    }
    state as usize
}

/// Bits of a hash that do not choose the slot.
fn tag_of(hash: usize) -> u32 {
    (hash as u64 >> 32) as u32
}

/// A power of two with a third of the slots free at least, never full.
fn table_size(count: usize) -> usize {
    (count + count / 2 + 8).next_power_of_two()
}

/// A symbol of a word that is being merged: its id, its length in bytes.
#[derive(Clone, Copy)]
struct Symbol {
    id: u32,
    length: u32,
}

/// The model of type `BPE` of a `tokenizer.json`.
pub struct Bpe {
    vocabulary: Vocabulary,
    merges: Merges,
    unknown: Option<u32>,
    prefix: Option<String>,
    suffix: Option<String>,
    fuse_unknown: bool,
    bytes: Option<Vec<Option<u32>>>,
    ignore_merges: bool,
    direct: Vec<u32>,
}

/// Ids of the left and the right side and of the result of each merge. Looking them up is most of what a model's start takes after
/// its file was read, and each can be looked up by itself: all cores do it.
fn ids_of_merges(vocabulary: &Vocabulary, prefix_length: usize, merges: &[[u32; 4]]) -> Result<Vec<[u32; 3]>, String> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_CORES);
    let part = merges.len().div_ceil(cores).max(LEAST_PART);
    std::thread::scope(|scope| {
        let parts: Vec<_> = merges
            .chunks(part)
            .enumerate()
            .map(|(number, merges)| scope.spawn(move || look_up(vocabulary, prefix_length, merges, number * part)))
            .collect();
        let mut ids = Vec::with_capacity(merges.len());
        for part in parts {
            ids.extend(part.join().map_err(|_panic| "a merge could not be looked up")??);
        }
        Ok(ids)
    })
}

fn look_up(
    vocabulary: &Vocabulary,
    prefix_length: usize,
    merges: &[[u32; 4]],
    first_rank: usize,
) -> Result<Vec<[u32; 3]>, String> {
    let mut joined = String::new();
    let mut expected = NONE;
    let ids = merges.iter().enumerate().map(|(number, &[left_start, left_end, right_start, right_end])| {
        let left = &vocabulary.text[left_start as usize..left_end as usize];
        let right = &vocabulary.text[right_start as usize..right_end as usize];
        joined.clear();
        joined.push_str(left);
        joined.push_str(right.get(prefix_length..).ok_or("a merge lacks the prefix of subwords")?);
        // Tokens mostly have their ids in the order in which merges made them.
        let result = if vocabulary.token(expected) == Some(&joined) { Some(expected) } else { vocabulary.id(&joined) };
        match (vocabulary.id(left), vocabulary.id(right), result) {
            (Some(left), Some(right), Some(result)) => {
                expected = result.wrapping_add(1);
                Ok([left, right, result])
            }
            _ => Err(format!("merge {} has a token that is not in the vocabulary", first_rank + number)),
        }
    });
    ids.collect()
}

impl Bpe {
    fn new(file: ModelFile) -> Result<Self, String> {
        if file.dropout.is_some_and(|dropout| dropout != 0.0) {
            return Err("a BPE with dropout gives another result each time".into());
        }
        let vocabulary = Vocabulary::new(file.strings.text, &file.vocabulary)?;
        let prefix = file.prefix;
        let prefix_length = prefix.as_ref().map_or(0, String::len);
        let mut merges = Merges::new(file.merges.len());
        let ids = ids_of_merges(&vocabulary, prefix_length, &file.merges)?;
        for (rank, [left, right, result]) in ids.into_iter().enumerate() {
            merges.insert(left, right, rank as u32, result);
        }
        let unknown = match &file.unknown {
            Some(token) => Some(vocabulary.id(token).ok_or("the unknown token is not in the vocabulary")?),
            None => None,
        };
        let bytes =
            file.byte_fallback.then(|| (0..=255u8).map(|byte| vocabulary.id(&format!("<0x{byte:02X}>"))).collect());
        let direct = (0..DIRECT as u32)
            .map(|code| {
                let mut buffer = [0; 4];
                char::from_u32(code)
                    .and_then(|character| vocabulary.id(character.encode_utf8(&mut buffer)))
                    .unwrap_or(NONE)
            })
            .collect();
        // The text of the merges has done its work.
        let mut vocabulary = vocabulary;
        vocabulary.text.truncate(file.vocabulary_end);
        vocabulary.text.shrink_to_fit();
        Ok(Bpe {
            vocabulary,
            merges,
            unknown,
            prefix,
            suffix: file.suffix,
            fuse_unknown: file.fuse_unknown,
            bytes,
            ignore_merges: file.ignore_merges,
            direct,
        })
    }

    /// Whether every character is a symbol of its own, with nothing around words and nothing in place of unknowns.
    pub fn is_plain(&self) -> bool {
        self.prefix.is_none() && self.suffix.is_none()
    }

    pub fn ignores_merges(&self) -> bool {
        self.ignore_merges
    }

    pub fn id(&self, token: &str) -> Option<u32> {
        self.vocabulary.id(token)
    }

    /// Merge a word that is given as the ids of its symbols.
    pub fn merge_ids(&self, word: impl Iterator<Item = u32>, ids: &mut Vec<u32>) {
        let mut symbols: Vec<Symbol> = word.map(|id| Symbol { id, length: 1 }).collect();
        self.merge(&mut symbols);
        ids.extend(symbols.iter().map(|symbol| symbol.id));
    }

    /// The symbol that a character starts as. `first` and `last` say where in the word it stands.
    fn symbol(&self, character: &str, first: bool, last: bool) -> Option<u32> {
        let prefix = self.prefix.as_deref().filter(|_prefix| !first);
        let suffix = self.suffix.as_deref().filter(|_suffix| last);
        if prefix.is_none() && suffix.is_none() {
            let code = character.chars().next().map_or(u32::MAX, u32::from) as usize;
            return match self.direct.get(code) {
                Some(&id) => Some(id).filter(|id| *id != NONE),
                None => self.vocabulary.id(character),
            };
        }
        self.vocabulary.id(&[prefix.unwrap_or(""), character, suffix.unwrap_or("")].concat())
    }

    /// The word's characters as symbols, bytes or unknowns.
    fn symbols(&self, word: &str) -> Vec<Symbol> {
        let mut symbols: Vec<Symbol> = Vec::with_capacity(word.len());
        // An unknown that further unknowns may join.
        let mut open = false;
        for (start, character) in word.char_indices() {
            let length = character.len_utf8();
            let end = start + length;
            let text = &word[start..end];
            let (first, last) = (start == 0, end == word.len());
            if let Some(id) = self.symbol(text, first, last) {
                symbols.push(Symbol { id, length: length as u32 });
                open = false;
                continue;
            }
            if let Some(bytes) = &self.bytes {
                // What the prefix and the suffix add is spelt in bytes, too.
                let prefix = self.prefix.as_deref().filter(|_prefix| !first).unwrap_or("");
                let suffix = self.suffix.as_deref().filter(|_suffix| last).unwrap_or("");
                let spelt: Option<Vec<u32>> = [prefix, text, suffix]
                    .iter()
                    .flat_map(|part| part.bytes())
                    .map(|byte| bytes[byte as usize])
                    .collect();
                if let Some(spelt) = spelt {
                    // The reference adds bytes before an unknown that is still open; it stays open.
                    let at = if open { symbols.len() - 1 } else { symbols.len() };
                    symbols.splice(at..at, spelt.into_iter().map(|id| Symbol { id, length: 1 }));
                    continue;
                }
            }
            if let Some(id) = self.unknown {
                match symbols.last_mut() {
                    Some(previous) if open && self.fuse_unknown => previous.length += length as u32,
                    _ => symbols.push(Symbol { id, length: length as u32 }),
                }
                open = true;
            }
        }
        symbols
    }

    /// Merge the pair of lowest rank, the leftmost of equals, until none is left.
    fn merge(&self, symbols: &mut Vec<Symbol>) {
        if symbols.len() > SHORT {
            self.merge_long(symbols);
        } else if symbols.len() > 1 {
            self.merge_short(symbols);
        }
    }

    fn merge_short(&self, symbols: &mut Vec<Symbol>) {
        const NOTHING: (u32, u32) = (NONE, NONE);
        let mut pairs = [NOTHING; SHORT];
        for index in 0..symbols.len() - 1 {
            pairs[index] = self.merges.get(symbols[index].id, symbols[index + 1].id).unwrap_or(NOTHING);
        }
        loop {
            let count = symbols.len() - 1;
            let mut best = 0;
            for index in 1..count {
                if pairs[index].0 < pairs[best].0 {
                    best = index;
                }
            }
            if count == 0 || pairs[best].0 == NONE {
                return;
            }
            symbols[best] = Symbol { id: pairs[best].1, length: symbols[best].length + symbols[best + 1].length };
            symbols.remove(best + 1);
            pairs.copy_within(best + 1..count, best);
            let count = count - 1;
            if best < count {
                pairs[best] = self.merges.get(symbols[best].id, symbols[best + 1].id).unwrap_or(NOTHING);
            }
            if best > 0 {
                pairs[best - 1] = self.merges.get(symbols[best - 1].id, symbols[best].id).unwrap_or(NOTHING);
            }
        }
    }

    fn merge_long(&self, symbols: &mut Vec<Symbol>) {
        let count = symbols.len();
        let mut next: Vec<usize> = (1..=count).collect();
        let mut previous: Vec<usize> = (0..count).map(|index| index.wrapping_sub(1)).collect();
        let mut gone = vec![false; count];
        let mut queue: BinaryHeap<Reverse<(u32, usize, u32)>> = BinaryHeap::with_capacity(count);
        let candidate = |symbols: &[Symbol], left: usize, right: usize| {
            self.merges.get(symbols[left].id, symbols[right].id).map(|(rank, result)| Reverse((rank, left, result)))
        };
        queue.extend((1..count).filter_map(|right| candidate(symbols, right - 1, right)));
        while let Some(Reverse((rank, left, result))) = queue.pop() {
            let right = next[left];
            if gone[left] || right == count {
                continue;
            }
            // The pair may have changed since it was put into the queue.
            if self.merges.get(symbols[left].id, symbols[right].id) != Some((rank, result)) {
                continue;
            }
            symbols[left] = Symbol { id: result, length: symbols[left].length + symbols[right].length };
            gone[right] = true;
            next[left] = next[right];
            if next[left] < count {
                previous[next[left]] = left;
                queue.extend(candidate(symbols, left, next[left]));
            }
            if previous[left] < count {
                queue.extend(candidate(symbols, previous[left], left));
            }
        }
        let mut gone = gone.iter();
        symbols.retain(|_symbol| !gone.next().copied().unwrap_or(false));
    }
}

impl Model for Bpe {
    type Trainer = BpeTrainer;

    fn tokenize(&self, word: &str) -> tokenizers::Result<Vec<Token>> {
        if word.is_empty() {
            return Ok(Vec::new());
        }
        if self.ignore_merges {
            if let Some(id) = self.vocabulary.id(word) {
                return Ok(vec![Token::new(id, word.to_owned(), (0, word.len()))]);
            }
        }
        let mut symbols = self.symbols(word);
        self.merge(&mut symbols);
        let mut start = 0;
        let tokens = symbols.iter().map(|symbol| {
            let end = start + symbol.length as usize;
            let offsets = (start, end);
            start = end;
            Token::new(symbol.id, self.vocabulary.token(symbol.id).unwrap_or_default().to_owned(), offsets)
        });
        Ok(tokens.collect())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.vocabulary.id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.vocabulary.token(id).map(str::to_owned)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        let ids = 0..self.vocabulary.places.len() as u32;
        ids.filter_map(|id| Some((self.vocabulary.token(id)?.to_owned(), id))).collect()
    }

    fn get_vocab_size(&self) -> usize {
        self.vocabulary.len
    }

    fn save(&self, _folder: &Path, _prefix: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("this model is only read".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}

/// Strings of the file, one after the other.
#[derive(Default)]
struct Strings {
    text: String,
}

impl Strings {
    fn add(&mut self, text: &str) -> (u32, u32) {
        let start = self.text.len() as u32;
        self.text.push_str(text);
        (start, self.text.len() as u32)
    }
}

/// What the file says, before tables are made of it. Members can come in any order.
#[derive(Default)]
struct ModelFile {
    strings: Strings,
    /// Start, length, id.
    vocabulary: Vec<(u32, u32, u32)>,
    vocabulary_end: usize,
    /// Start and end of the left and of the right side.
    merges: Vec<[u32; 4]>,
    dropout: Option<f32>,
    unknown: Option<String>,
    prefix: Option<String>,
    suffix: Option<String>,
    fuse_unknown: bool,
    byte_fallback: bool,
    ignore_merges: bool,
}

impl<'de> Deserialize<'de> for Bpe {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ModelVisitor)
    }
}

/// Reads the members of the model; the one named `type` may have been read already.
pub struct ModelVisitor;

impl<'de> Visitor<'de> for ModelVisitor {
    type Value = Bpe;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a model of type BPE")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Bpe, A::Error> {
        let mut file = ModelFile::default();
        while let Some(name) = map.next_key::<String>()? {
            match name.as_str() {
                "dropout" => file.dropout = map.next_value()?,
                "unk_token" => file.unknown = map.next_value()?,
                "continuing_subword_prefix" => file.prefix = map.next_value()?,
                "end_of_word_suffix" => file.suffix = map.next_value()?,
                "fuse_unk" => file.fuse_unknown = map.next_value::<Option<bool>>()?.unwrap_or(false),
                "byte_fallback" => file.byte_fallback = map.next_value::<Option<bool>>()?.unwrap_or(false),
                "ignore_merges" => file.ignore_merges = map.next_value::<Option<bool>>()?.unwrap_or(false),
                "vocab" => map.next_value_seed(VocabularySeed(&mut file))?,
                "merges" => map.next_value_seed(MergesSeed(&mut file))?,
                _ => {
                    map.next_value::<serde::de::IgnoredAny>()?;
                }
            }
        }
        if file.strings.text.len() >= NONE as usize {
            return Err(A::Error::custom("the vocabulary is too large"));
        }
        Bpe::new(file).map_err(A::Error::custom)
    }
}

/// Appends one string and gives its place.
struct TextSeed<'file>(&'file mut Strings);

impl<'de> DeserializeSeed<'de> for TextSeed<'_> {
    type Value = (u32, u32);

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(u32, u32), D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for TextSeed<'_> {
    type Value = (u32, u32);

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a string")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<(u32, u32), E> {
        Ok(self.0.add(text))
    }
}

struct VocabularySeed<'file>(&'file mut ModelFile);

impl<'de> DeserializeSeed<'de> for VocabularySeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for VocabularySeed<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("an object of tokens and their ids")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let file = self.0;
        file.vocabulary.clear();
        while let Some((start, end)) = map.next_key_seed(TextSeed(&mut file.strings))? {
            let id: u32 = map.next_value()?;
            file.vocabulary.push((start, end - start, id));
        }
        file.vocabulary_end = file.strings.text.len();
        Ok(())
    }
}

struct MergesSeed<'file>(&'file mut ModelFile);

impl<'de> DeserializeSeed<'de> for MergesSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for MergesSeed<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("an array of merges")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let ModelFile { strings, merges, .. } = self.0;
        merges.clear();
        while let Some(merge) = seq.next_element_seed(MergeSeed(strings))? {
            // Files of old begin with a line that tells their version.
            merges.extend(merge);
        }
        Ok(())
    }
}

/// One merge: `"left right"`, or `["left", "right"]` where a token may have spaces.
struct MergeSeed<'file>(&'file mut Strings);

impl<'de> DeserializeSeed<'de> for MergeSeed<'_> {
    type Value = Option<[u32; 4]>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MergeSeed<'_> {
    type Value = Option<[u32; 4]>;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("two tokens")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
        if text.starts_with("#version") {
            return Ok(None);
        }
        match text.split_once(' ') {
            Some((left, right)) if !right.contains(' ') => {
                let (start, middle) = self.0.add(left);
                let (after, end) = self.0.add(right);
                Ok(Some([start, middle, after, end]))
            }
            _ => Err(E::custom("a merge is not two tokens with a space between them")),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let few = || A::Error::custom("a merge is not two tokens");
        let (start, middle) = seq.next_element_seed(TextSeed(self.0))?.ok_or_else(few)?;
        let (after, end) = seq.next_element_seed(TextSeed(self.0))?.ok_or_else(few)?;
        if seq.next_element::<serde::de::IgnoredAny>()?.is_some() {
            return Err(few());
        }
        Ok(Some([start, middle, after, end]))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A model of the letters a to d and of what the merges make of them, each merge of two tokens that are there.
    fn made(choices: &[(usize, usize)]) -> Bpe {
        let mut tokens: Vec<String> = ["a", "b", "c", "d"].map(str::to_owned).to_vec();
        let mut merges = Vec::new();
        for &(left, right) in choices {
            let (left, right) = (tokens[left % tokens.len()].clone(), tokens[right % tokens.len()].clone());
            let joined = format!("{left}{right}");
            if joined.len() <= 32 && !tokens.contains(&joined) {
                merges.push(format!("\"{left} {right}\""));
                tokens.push(joined);
            }
        }
        let vocabulary: Vec<String> =
            tokens.iter().enumerate().map(|(id, token)| format!("\"{token}\":{id}")).collect();
        let file = format!("{{\"vocab\":{{{}}},\"merges\":[{}]}}", vocabulary.join(","), merges.join(","));
        serde_json::from_str(&file).unwrap()
    }

    /// What merging is, as slow as it is plain: the pair of lowest rank, the leftmost of equals, until none is left.
    fn plainly_merged(model: &Bpe, word: &[u32]) -> Vec<u32> {
        let mut ids = word.to_vec();
        loop {
            let best = (1..ids.len())
                .filter_map(|right| model.merges.get(ids[right - 1], ids[right]).map(|(rank, id)| (rank, right, id)))
                .min();
            match best {
                Some((_rank, right, id)) => {
                    ids[right - 1] = id;
                    ids.remove(right);
                }
                None => return ids,
            }
        }
    }

    proptest! {
        #[test]
        fn short_and_long_words_are_merged_as_they_have_to_be(
            choices in proptest::collection::vec((0usize..40, 0usize..40), 0..30),
            word in proptest::collection::vec(0u32..4, 0..200),
        ) {
            let model = made(&choices);
            let symbols = || -> Vec<Symbol> { word.iter().map(|id| Symbol { id: *id, length: 1 }).collect() };
            let expected = plainly_merged(&model, &word);
            let mut long = symbols();
            model.merge_long(&mut long);
            prop_assert_eq!(long.iter().map(|symbol| symbol.id).collect::<Vec<_>>(), expected.clone());
            prop_assert_eq!(long.iter().map(|symbol| symbol.length as usize).sum::<usize>(), word.len());
            let mut merged = Vec::new();
            model.merge_ids(word.iter().copied(), &mut merged);
            prop_assert_eq!(merged, expected);
        }

        #[test]
        fn any_file_is_a_model_or_is_refused(
            entries in proptest::collection::vec(("[a-d ]{0,3}", any::<u32>()), 0..8),
            merges in proptest::collection::vec("[a-d ]{0,5}", 0..8),
            word in "[a-e]{0,70}",
        ) {
            let vocabulary: Vec<String> =
                entries.iter().map(|(token, id)| format!("\"{token}\":{}", if id % 3 == 0 { *id } else { id % 16 })).collect();
            let merges: Vec<String> = merges.iter().map(|merge| format!("\"{merge}\"")).collect();
            let file = format!("{{\"vocab\":{{{}}},\"merges\":[{}]}}", vocabulary.join(","), merges.join(","));
            if let Ok(model) = serde_json::from_str::<Bpe>(&file) {
                let _any_result = model.tokenize(&word);
            }
        }
    }
}
