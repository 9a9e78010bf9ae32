// SPDX-License-Identifier: GPL-3.0-or-later
//! The word filter: finds words of lists in text that comes in pieces, and replaces them or stops the answer.
//!
//! Text is read once from left to right. At each place the longest word that begins there and stands alone counts, and reading
//! goes on behind it. Only the end of the text that could still become a word is held back: as long as a path in the tree of all
//! words goes on, or while a word is complete and the next character has to tell whether it stands alone. Filtering piece by
//! piece therefore gives what filtering the whole text gives (a property test).
//!
//! A word stands alone if no letter, digit or underscore touches an end of it that is one itself. Scripts that are written without
//! spaces (Chinese, Japanese, Thai and the like) have no such borders: there a word is found anywhere.

use std::collections::HashMap;

/// What is done about a word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Replace(String),
    Stop,
}

/// One list of words.
#[derive(Clone, Debug)]
pub struct List {
    pub words: Vec<String>,
    /// Upper and lower case are the same, by Unicode's lower-case mapping.
    pub folded: bool,
    pub action: Action,
}

/// Longest word, in characters after folding: what is held of a text is never more.
pub const LONGEST: usize = 256;

#[derive(Default)]
struct Node {
    next: HashMap<char, u32>,
    /// List whose word ends here.
    list: Option<u32>,
}

#[derive(Default)]
struct Tree {
    nodes: Vec<Node>,
}

impl Tree {
    fn insert(&mut self, word: impl Iterator<Item = char>, list: u32) {
        if self.nodes.is_empty() {
            self.nodes.push(Node::default());
        }
        let mut at = 0;
        for character in word {
            let fresh = self.nodes.len() as u32;
            at = *self.nodes[at].next.entry(character).or_insert(fresh) as usize;
            if at == fresh as usize {
                self.nodes.push(Node::default());
            }
        }
        // Of two lists with the same word the first counts.
        self.nodes[at].list.get_or_insert(list);
    }
}

/// All lists that hold for one answer.
pub struct Words {
    exact: Tree,
    folded: Tree,
    actions: Vec<Action>,
}

impl Words {
    /// Build. Empty words and words of more than `LONGEST` characters are refused.
    pub fn new<'list>(lists: impl IntoIterator<Item = &'list List>) -> Result<Self, String> {
        let mut words = Words { exact: Tree::default(), folded: Tree::default(), actions: Vec::new() };
        for (index, list) in lists.into_iter().enumerate() {
            for word in &list.words {
                let length = word.chars().map(|character| fold(character).count()).sum::<usize>();
                if length == 0 || length > LONGEST {
                    return Err(format!("a word has {length} characters; 1 to {LONGEST} are possible"));
                }
                if list.folded {
                    words.folded.insert(word.chars().flat_map(fold), index as u32);
                } else {
                    words.exact.insert(word.chars(), index as u32);
                }
            }
            words.actions.push(list.action.clone());
        }
        Ok(words)
    }

    pub fn is_empty(&self) -> bool {
        self.exact.nodes.is_empty() && self.folded.nodes.is_empty()
    }
}

fn fold(character: char) -> std::char::ToLowercase {
    character.to_lowercase()
}

/// Whether words of this character's script have borders.
fn is_word_character(character: char) -> bool {
    (character.is_alphanumeric() || character == '_') && !is_written_without_spaces(character)
}

fn is_written_without_spaces(character: char) -> bool {
    matches!(character as u32,
        0x0E00..=0x0EFF // Thai, Lao
        | 0x1000..=0x109F // Myanmar
        | 0x1780..=0x17FF // Khmer
        | 0x2E80..=0x2FDF // CJK radicals
        | 0x3005..=0x3007
        | 0x3040..=0x30FF // Hiragana, Katakana
        | 0x3100..=0x312F | 0x31A0..=0x31FF // Bopomofo, Katakana extensions
        | 0x3400..=0x4DBF | 0x4E00..=0x9FFF | 0xF900..=0xFAFF | 0x20000..=0x3FFFF // Han
        | 0xFF66..=0xFF9F)
}

/// What came of the text so far.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    Continue,
    /// A word of a list with action stop was found: nothing more of this text may be sent.
    Stop,
}

/// The state of one text.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// What is held back.
    held: Vec<char>,
    /// The character before what is held.
    before: Option<char>,
    stopped: bool,
    /// Words found so far.
    pub found: u64,
}

enum Found {
    Word {
        length: usize,
        list: u32,
    },
    Nothing,
    /// More text is needed.
    Open,
}

impl Filter {
    /// Add a piece of the text and append to `out` what can be sent.
    pub fn push(&mut self, words: &Words, text: &str, out: &mut String) -> Verdict {
        self.held.extend(text.chars());
        self.advance(words, false, out)
    }

    /// The text has ended: append the rest.
    pub fn finish(&mut self, words: &Words, out: &mut String) -> Verdict {
        self.advance(words, true, out)
    }

    fn advance(&mut self, words: &Words, ended: bool, out: &mut String) -> Verdict {
        if self.stopped {
            self.held.clear();
            return Verdict::Stop;
        }
        let mut at = 0;
        while at < self.held.len() {
            match find(words, self.before, &self.held[at..], ended) {
                Found::Nothing => {
                    out.push(self.held[at]);
                    self.before = Some(self.held[at]);
                    at += 1;
                }
                Found::Word { length, list } => {
                    self.found += 1;
                    match &words.actions[list as usize] {
                        Action::Replace(replacement) => out.push_str(replacement),
                        Action::Stop => {
                            self.stopped = true;
                            self.held.clear();
                            return Verdict::Stop;
                        }
                    }
                    self.before = Some(self.held[at + length - 1]);
                    at += length;
                }
                Found::Open => break,
            }
        }
        self.held.drain(..at);
        Verdict::Continue
    }
}

/// The longest word that begins at the text's first character.
fn find(words: &Words, before: Option<char>, text: &[char], ended: bool) -> Found {
    let begins_inside = is_word_character(text[0]) && before.is_some_and(is_word_character);
    if begins_inside {
        return Found::Nothing;
    }
    let exact = walk(&words.exact, text, ended, |character| [character].into_iter());
    let folded = walk(&words.folded, text, ended, fold);
    match (exact, folded) {
        (Found::Open, _) | (_, Found::Open) => Found::Open,
        (Found::Nothing, other) => other,
        (other, Found::Nothing) => other,
        (Found::Word { length: left, list: first }, Found::Word { length: right, list: second }) => {
            if left > right || (left == right && first < second) {
                Found::Word { length: left, list: first }
            } else {
                Found::Word { length: right, list: second }
            }
        }
    }
}

fn walk<I: Iterator<Item = char>>(tree: &Tree, text: &[char], ended: bool, fold: impl Fn(char) -> I) -> Found {
    if tree.nodes.is_empty() {
        return Found::Nothing;
    }
    let mut at = 0usize;
    let mut best = Found::Nothing;
    for (index, &character) in text.iter().enumerate() {
        for part in fold(character) {
            match tree.nodes[at].next.get(&part) {
                Some(&next) => at = next as usize,
                None => return best,
            }
        }
        if let Some(list) = tree.nodes[at].list {
            match text.get(index + 1) {
                Some(&after) if is_word_character(character) && is_word_character(after) => {}
                None if !ended && is_word_character(character) => return Found::Open,
                _ => best = Found::Word { length: index + 1, list },
            }
        }
    }
    if ended || tree.nodes[at].next.is_empty() {
        best
    } else {
        Found::Open
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn list(words: &[&str], folded: bool, action: Action) -> List {
        List { words: words.iter().map(|word| (*word).to_owned()).collect(), folded, action }
    }

    fn stars() -> Action {
        Action::Replace("***".into())
    }

    /// Filter pieces; the flag tells whether the text was stopped.
    fn filter(words: &Words, pieces: &[&str]) -> (String, bool) {
        let mut filter = Filter::default();
        let mut out = String::new();
        for piece in pieces {
            filter.push(words, piece, &mut out);
        }
        filter.finish(words, &mut out);
        (out, filter.stopped)
    }

    #[test]
    fn words_are_found_where_they_stand_alone() {
        let words = Words::new([&list(&["ass", "hot dog", "C++", "敏感", "naïve"], false, stars())]).unwrap();
        for (text, expected) in [
            ("ass", "***"),
            ("class assess ass.", "class assess ***."),
            ("ass_1 1ass ass-1", "ass_1 1ass ***-1"),
            ("a hot dog!", "a ***!"),
            ("a hot  dog", "a hot  dog"),
            ("hot dogs", "hot dogs"),
            ("C++ C++11 xC++", "*** ***11 xC++"),
            ("这是敏感词", "这是***词"),
            ("ASS", "ASS"),
            ("naïve naïvely", "*** naïvely"),
            ("敏ass感", "敏***感"),
            ("", ""),
        ] {
            assert_eq!(filter(&words, &[text]), (expected.to_owned(), false), "{text}");
        }
    }

    #[test]
    fn folding_goes_by_unicode() {
        let words = Words::new([&list(&["Straße", "ΟΔΟΣ", "İzmir"], true, stars())]).unwrap();
        assert_eq!(filter(&words, &["STRAßE οδοσ i̇zmir strasse"]).0, "*** *** *** strasse");
    }

    #[test]
    fn the_longest_word_counts_and_then_the_first_list() {
        let first = list(&["New York"], true, Action::Replace("city".into()));
        let second = list(&["new york times", "new york"], true, Action::Replace("paper".into()));
        let words = Words::new([&first, &second]).unwrap();
        assert_eq!(filter(&words, &["New York Times, New York, New York Time"]).0, "paper, city, city Time");
    }

    #[test]
    fn stop_ends_the_text_before_the_word() {
        let words = Words::new([&list(&["secret"], true, Action::Stop)]).unwrap();
        assert_eq!(filter(&words, &["a Sec", "ret b", " more"]), ("a ".to_owned(), true));
    }

    #[test]
    fn no_more_is_held_than_could_become_a_word() {
        let words = Words::new([&list(&["secret"], true, stars()), &list(&["敏感"], false, stars())]).unwrap();
        let mut state = Filter::default();
        let mut sent = |piece: &str| {
            let mut out = String::new();
            state.push(&words, piece, &mut out);
            out
        };
        assert_eq!(sent("hello se"), "hello ");
        assert_eq!(sent("nd"), "send");
        assert_eq!(sent(" secret"), " ", "the next character decides");
        assert_eq!(sent("ary"), "secretary");
        assert_eq!(sent(" sec"), " ");
        assert_eq!(sent("ret"), "");
        assert_eq!(sent("."), "***.");
        assert_eq!(sent("敏"), "");
        assert_eq!(sent("感"), "***", "no border has to be waited for");
    }

    #[test]
    fn words_that_cannot_be_are_refused() {
        assert!(Words::new([&list(&[""], true, Action::Stop)]).is_err());
        assert!(Words::new([&list(&[&"a".repeat(LONGEST + 1)], true, Action::Stop)]).is_err());
        assert!(Words::new([]).unwrap().is_empty());
    }

    /// A search that looks at the whole text, written in another way than the filter.
    fn reference(lists: &[List], text: &str) -> (String, bool) {
        let characters: Vec<char> = text.chars().collect();
        let mut out = String::new();
        let mut at = 0;
        'text: while at < characters.len() {
            let mut best: Option<(usize, usize)> = None;
            for (index, list) in lists.iter().enumerate() {
                for word in &list.words {
                    let word: Vec<char> = word.chars().collect();
                    let Some(found) = characters.get(at..at + word.len()) else {
                        continue;
                    };
                    let same = found.iter().zip(&word).all(|(left, right)| {
                        left == right || (list.folded && left.to_lowercase().eq(right.to_lowercase()))
                    });
                    let cut = |inside: char, outside: Option<&char>| {
                        !(is_word_character(inside) && outside.is_some_and(|outside| is_word_character(*outside)))
                    };
                    let alone = cut(word[0], at.checked_sub(1).map(|before| &characters[before]))
                        && cut(word[word.len() - 1], characters.get(at + word.len()));
                    if same && alone && best.is_none_or(|(length, _list)| word.len() > length) {
                        best = Some((word.len(), index));
                    }
                }
            }
            if let Some((length, index)) = best {
                match &lists[index].action {
                    Action::Replace(replacement) => out.push_str(replacement),
                    Action::Stop => return (out, true),
                }
                at += length;
                continue 'text;
            }
            out.push(characters[at]);
            at += 1;
        }
        (out, false)
    }

    fn small_text() -> impl Strategy<Value = String> {
        "[abAB_ 1.é敏感]{0,24}"
    }

    fn lists() -> impl Strategy<Value = Vec<List>> {
        let list = (proptest::collection::vec("[abAB é敏感]{1,4}", 0..5), any::<bool>(), any::<bool>()).prop_map(
            |(words, folded, stops)| List {
                words,
                folded,
                action: if stops { Action::Stop } else { Action::Replace("#".into()) },
            },
        );
        proptest::collection::vec(list, 0..3)
    }

    proptest! {
        #[test]
        fn any_pieces_give_what_the_whole_gives(text in small_text(), lists in lists(), cuts in proptest::collection::vec(0usize..24, 0..8)) {
            let words = Words::new(&lists).unwrap();
            let characters: Vec<char> = text.chars().collect();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(characters.len())).collect();
            cuts.push(characters.len());
            cuts.sort_unstable();
            let mut pieces = Vec::new();
            let mut start = 0;
            for cut in cuts {
                pieces.push(characters[start..cut].iter().collect::<String>());
                start = cut;
            }
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let in_pieces = filter(&words, &pieces);
            prop_assert_eq!(&in_pieces, &filter(&words, &[&text]));
            prop_assert_eq!(in_pieces, reference(&lists, &text));
        }
    }
}
