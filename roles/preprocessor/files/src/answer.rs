// SPDX-License-Identifier: GPL-3.0-or-later
//! Words in answers: in whole ones, and in streams of events.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use crate::json::{self, Limits, Value};
use crate::sse::{Event, Reader};
use crate::words::{Filter, Verdict, Words};

/// The answer is not what an engine sends.
#[derive(Debug, PartialEq, Eq)]
pub struct Unreadable;

/// Longest event that is read, in bytes.
const EVENT_BYTES: usize = 4_194_304;

fn limits() -> Limits {
    Limits { depth: 128, values: 4_000_000, number: 400 }
}

/// How many words were found and how many choices were stopped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    pub words: u64,
    pub stopped: u64,
}

/// A text of a choice that words are looked for in.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Field {
    /// A member of the message, the delta, or (completions) of the choice itself.
    Member(&'static str),
    /// The arguments of the tool call with this index.
    Arguments(i64),
}

const MEMBERS: [&str; 4] = ["content", "reasoning_content", "reasoning", "refusal"];

/// Go through the texts of a choice; `visit` may change them. `container` is `message` or `delta`.
fn each_text(choice: &mut Value, container: &str, visit: &mut dyn FnMut(Field, &mut String)) {
    if let Some(Value::String(text)) = choice.get_mut("text") {
        visit(Field::Member("text"), text);
    }
    let Some(message) = choice.get_mut(container) else {
        return;
    };
    for name in MEMBERS {
        if let Some(Value::String(text)) = message.get_mut(name) {
            visit(Field::Member(name), text);
        }
    }
    if let Some(Value::Array(calls)) = message.get_mut("tool_calls") {
        for (position, call) in calls.iter_mut().enumerate() {
            let index = call.get("index").and_then(Value::as_integer).unwrap_or(position as i64);
            if let Some(Value::String(text)) =
                call.get_mut("function").and_then(|function| function.get_mut("arguments"))
            {
                visit(Field::Arguments(index), text);
            }
        }
    }
}

/// Tokens spell the answer a second time; what the filter takes out must not stand there.
fn remove_tokens(choice: &mut Value) {
    for name in ["logprobs", "token_ids"] {
        if let Some(value) = choice.get_mut(name) {
            *value = Value::Null;
        }
    }
}

fn set(value: &mut Value, name: &str, member: Value) {
    match value.get_mut(name) {
        Some(old) => *old = member,
        None => {
            if let Value::Object(members) = value {
                members.push((name.to_owned(), member));
            }
        }
    }
}

/// Filter a whole answer. The text of the answer is normalised: no white space, no escapes that are not needed.
pub fn filter_whole(body: &[u8], words: Option<&Words>) -> Result<(String, Findings), Unreadable> {
    let mut root = json::read(body, limits()).map_err(|_refusal| Unreadable)?.root;
    let mut findings = Findings::default();
    if let (Some(words), Some(Value::Array(choices))) = (words, root.get_mut("choices")) {
        for choice in choices {
            let mut stopped = false;
            each_text(choice, "message", &mut |_field, text| {
                let mut filter = Filter::default();
                let mut out = String::with_capacity(text.len());
                let first = filter.push(words, text, &mut out);
                let last = filter.finish(words, &mut out);
                stopped |= first == Verdict::Stop || last == Verdict::Stop;
                findings.words += filter.found;
                *text = out;
            });
            if stopped {
                findings.stopped += 1;
                set(choice, "finish_reason", Value::String("content_filter".into()));
                set(choice, "stop_reason", Value::Null);
            }
            remove_tokens(choice);
        }
    }
    Ok((json::to_compact(&root), findings))
}

/// In order, so that what is left of several texts goes out in the same order each time.
#[derive(Default)]
struct Choice {
    texts: BTreeMap<Field, Filter>,
    pattern: Option<Pattern>,
}

/// What repeats from event to event: everything around the only text of the only choice. An event that begins and ends with the
/// same bytes differs in that text alone, and need not be taken apart.
struct Pattern {
    before: String,
    after: String,
    name: &'static str,
    is_chat: bool,
}

/// Events of a stream that are looked at in vain for what repeats: where each tells the usage so far, nothing does.
const LOOKS: u32 = 8;

impl Pattern {
    /// The pattern of an event in compact form that was read as `root`, if it is of one, and the index of its choice.
    fn of(root: &Value, data: &[u8]) -> Option<(i64, Self)> {
        let [choice] = root.get("choices").and_then(Value::as_array)? else {
            return None;
        };
        let is_null = |name: &str| choice.get(name).is_none_or(Value::is_null);
        if !is_null("finish_reason") || !is_null("logprobs") || !is_null("token_ids") {
            return None;
        }
        let mut texts = Vec::new();
        each_text(&mut choice.clone(), "delta", &mut |field, text| texts.push((field, std::mem::take(text))));
        let [(Field::Member(name), text)] = texts.as_slice() else {
            return None;
        };
        let mut written = String::new();
        json::write_string(text, false, &mut written);
        let compact = json::to_compact(root);
        let key = format!("\"{name}\":");
        let mut places = compact.match_indices(&key);
        let start = places.next()?.0 + key.len();
        // As a member of something else it may stand for something else.
        if places.next().is_some() || compact.as_bytes() != data || !compact[start..].starts_with(&written) {
            return None;
        }
        let pattern = Pattern {
            before: compact[..start].to_owned(),
            after: compact[start + written.len()..].to_owned(),
            name,
            is_chat: choice.get("text").is_none(),
        };
        Some((choice.get("index").and_then(Value::as_integer).unwrap_or(0), pattern))
    }

    /// The text of an event of this pattern; only one that is written as it is.
    fn text<'data>(&self, data: &'data [u8]) -> Option<&'data str> {
        let written = data.strip_prefix(self.before.as_bytes())?.strip_suffix(self.after.as_bytes())?;
        let text = written.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
        if text.iter().any(|byte| matches!(byte, b'"' | b'\\' | ..=0x1f)) {
            return None;
        }
        std::str::from_utf8(text).ok()
    }
}

/// Filters a stream of events.
pub struct StreamFilter {
    words: Arc<Words>,
    reader: Reader,
    choices: HashMap<i64, Choice>,
    stopped: HashSet<i64>,
    /// Choices that the client asked for.
    expected: usize,
    /// An event without choices, for text that is left when the stream ends.
    frame: Option<Value>,
    looks: u32,
    is_chat: bool,
    done: bool,
    pub findings: Findings,
}

impl StreamFilter {
    pub fn new(words: Arc<Words>, expected: usize) -> Self {
        StreamFilter {
            words,
            reader: Reader::new(EVENT_BYTES),
            choices: HashMap::new(),
            stopped: HashSet::new(),
            expected,
            frame: None,
            looks: LOOKS,
            is_chat: true,
            done: false,
            findings: Findings::default(),
        }
    }

    /// Whether all choices were stopped, so that nothing that the engine still says will be sent.
    pub fn is_cut(&self) -> bool {
        self.expected > 0 && self.stopped.len() >= self.expected
    }

    /// Read a piece and append what can be sent.
    pub fn push(&mut self, piece: &[u8], out: &mut Vec<u8>) -> Result<(), Unreadable> {
        let mut events = Vec::new();
        let read = self.reader.push(piece, &mut events);
        for event in events {
            if self.done {
                break;
            }
            self.event(&event, out)?;
        }
        read.map_err(|_too_long| Unreadable)
    }

    /// The stream has ended without saying so.
    pub fn finish(&mut self, out: &mut Vec<u8>) -> Result<(), Unreadable> {
        if !self.done {
            self.rest(out);
            if !self.reader.is_between_events() {
                return Err(Unreadable);
            }
        }
        Ok(())
    }

    fn event(&mut self, event: &Event, out: &mut Vec<u8>) -> Result<(), Unreadable> {
        let Some(data) = &event.data else {
            out.extend_from_slice(&event.others);
            out.push(b'\n');
            return Ok(());
        };
        if data == b"[DONE]" {
            self.rest(out);
            event.write_with("[DONE]", out);
            self.done = true;
            return Ok(());
        }
        if self.repeated(event, data, out) {
            return Ok(());
        }
        let mut root = json::read(data, limits()).map_err(|_refusal| Unreadable)?.root;
        if self.looks > 0 {
            self.looks -= 1;
            if let Some((index, pattern)) = Pattern::of(&root, data).filter(|(index, _)| !self.stopped.contains(index))
            {
                self.choices.entry(index).or_default().pattern = Some(pattern);
            }
        }
        let had_choices = match root.get_mut("choices") {
            Some(Value::Array(choices)) => {
                let had_choices = !choices.is_empty();
                choices.retain_mut(|choice| self.choice(choice));
                had_choices.then_some(choices.is_empty())
            }
            _ => None,
        };
        if self.frame.is_none() && had_choices.is_some() {
            if let Value::Object(members) = &root {
                let kept = ["id", "object", "created", "model"];
                let frame = members.iter().filter(|(name, _value)| kept.contains(&name.as_str())).cloned();
                self.frame = Some(Value::Object(frame.collect()));
            }
        }
        // An event of which nothing is left still goes out if it tells the usage.
        if had_choices != Some(true) || root.get("usage").is_some_and(|usage| !usage.is_null()) {
            event.write_with(&json::to_compact(&root), out);
        }
        if self.is_cut() {
            Event::default().write_with("[DONE]", out);
            self.done = true;
        }
        Ok(())
    }

    /// Filter an event that differs from one before in its text alone. False, and nothing is changed, if it has to be read.
    fn repeated(&mut self, event: &Event, data: &[u8], out: &mut Vec<u8>) -> bool {
        let found = self.choices.values_mut().find_map(|choice| {
            let pattern = choice.pattern.as_ref()?;
            Some((pattern, pattern.text(data)?, &mut choice.texts))
        });
        let Some((pattern, text, texts)) = found else {
            return false;
        };
        // Where another text is open, or this one was closed, the event does more than to add to it.
        let (1, Some(filter)) = (texts.len(), texts.get_mut(&Field::Member(pattern.name))) else {
            return false;
        };
        let mut next = filter.clone();
        let mut passed = String::with_capacity(text.len() + 16);
        if next.push(&self.words, text, &mut passed) == Verdict::Stop {
            return false;
        }
        self.findings.words += next.found - filter.found;
        *filter = next;
        self.looks = LOOKS;
        self.is_chat = pattern.is_chat;
        let mut document = pattern.before.clone();
        json::write_string(&passed, false, &mut document);
        document.push_str(&pattern.after);
        event.write_with(&document, out);
        true
    }

    /// Filter the texts of a choice. False if nothing of it may be sent any more.
    fn choice(&mut self, choice: &mut Value) -> bool {
        let index = choice.get("index").and_then(Value::as_integer).unwrap_or(0);
        if self.stopped.contains(&index) {
            return false;
        }
        self.is_chat = choice.get("text").is_none();
        let has_ended = choice.get("finish_reason").is_some_and(|reason| !reason.is_null());
        let words = &self.words;
        let texts = &mut self.choices.entry(index).or_default().texts;
        let mut touched: Vec<Field> = Vec::new();
        let mut stopped = false;
        let mut found = 0;
        each_text(choice, "delta", &mut |field, text| {
            let filter = texts.entry(field.clone()).or_default();
            let before = filter.found;
            let mut out = String::with_capacity(text.len());
            if !stopped && filter.push(words, text, &mut out) == Verdict::Stop {
                stopped = true;
            }
            found += filter.found - before;
            if !text.is_empty() {
                touched.push(field);
            }
            *text = out;
        });
        // A text is over when another one begins, or the choice ends: what was held of it goes first.
        if !stopped && (has_ended || !touched.is_empty()) {
            let over: Vec<Field> =
                texts.keys().filter(|field| has_ended || !touched.contains(field)).cloned().collect();
            for field in over {
                let mut filter = texts.remove(&field).unwrap_or_default();
                let mut rest = String::new();
                let before = filter.found;
                let verdict = filter.finish(words, &mut rest);
                found += filter.found - before;
                append(choice, &field, &rest);
                stopped |= verdict == Verdict::Stop;
            }
        }
        self.findings.words += found;
        if stopped {
            self.findings.stopped += 1;
            self.stopped.insert(index);
            self.choices.remove(&index);
            set(choice, "finish_reason", Value::String("content_filter".into()));
            set(choice, "stop_reason", Value::Null);
        }
        remove_tokens(choice);
        true
    }

    /// Send what is held of choices that never said that they have ended.
    fn rest(&mut self, out: &mut Vec<u8>) {
        let mut choices = Vec::new();
        let mut held: Vec<(i64, Choice)> = self.choices.drain().collect();
        held.sort_by_key(|(index, _choice)| *index);
        for (index, held) in held {
            let mut choice = Value::Object(vec![("index".into(), Value::Integer(index))]);
            if self.is_chat {
                set(&mut choice, "delta", Value::Object(Vec::new()));
            }
            let (mut is_empty, mut stopped) = (true, false);
            for (field, mut filter) in held.texts {
                let mut rest = String::new();
                let before = filter.found;
                stopped |= filter.finish(&self.words, &mut rest) == Verdict::Stop;
                self.findings.words += filter.found - before;
                is_empty &= rest.is_empty();
                append(&mut choice, &field, &rest);
            }
            if stopped {
                self.findings.stopped += 1;
            }
            set(
                &mut choice,
                "finish_reason",
                if stopped { Value::String("content_filter".into()) } else { Value::Null },
            );
            if !is_empty || stopped {
                choices.push(choice);
            }
        }
        if let (Some(frame), false) = (&self.frame, choices.is_empty()) {
            let mut root = frame.clone();
            set(&mut root, "choices", Value::Array(choices));
            Event::default().write_with(&json::to_compact(&root), out);
        }
    }
}

/// Append to a text of a choice's delta; the text is made where it is not there.
fn append(choice: &mut Value, field: &Field, more: &str) {
    if more.is_empty() {
        return;
    }
    let mut appended = false;
    each_text(choice, "delta", &mut |other, text| {
        if other == *field {
            text.push_str(more);
            appended = true;
        }
    });
    if appended {
        return;
    }
    let text = Value::String(more.to_owned());
    if *field == Field::Member("text") {
        set(choice, "text", text);
        return;
    }
    if choice.get("delta").is_none() {
        set(choice, "delta", Value::Object(Vec::new()));
    }
    let Some(delta) = choice.get_mut("delta") else {
        return;
    };
    match field {
        Field::Member(name) => set(delta, name, text),
        Field::Arguments(index) => {
            let function = Value::Object(vec![("arguments".into(), text)]);
            let call = Value::Object(vec![("index".into(), Value::Integer(*index)), ("function".into(), function)]);
            match delta.get_mut("tool_calls") {
                Some(Value::Array(calls)) => calls.push(call),
                _ => set(delta, "tool_calls", Value::Array(vec![call])),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::{Action, List};
    use proptest::prelude::*;

    fn words(action: Action) -> Words {
        let list = List { words: vec!["secret".into(), "敏感".into()], folded: true, action };
        Words::new([&list]).unwrap()
    }

    fn stars() -> Words {
        words(Action::Replace("***".into()))
    }

    fn chunk(index: i64, content: &str, finish: &str) -> String {
        let mut text = String::new();
        json::write_string(content, false, &mut text);
        format!(
            "data: {{\"id\":\"x\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[{{\"index\":{index},\"delta\":{{\"content\":{text}}},\"logprobs\":null,\"finish_reason\":{finish}}}]}}\n\n"
        )
    }

    fn run(words: Words, expected: usize, stream: &str) -> (String, Findings, bool) {
        let mut filter = StreamFilter::new(Arc::new(words), expected);
        let mut out = Vec::new();
        filter.push(stream.as_bytes(), &mut out).unwrap();
        filter.finish(&mut out).unwrap();
        (String::from_utf8(out).unwrap(), filter.findings, filter.is_cut())
    }

    /// The text of a choice that a client puts together.
    fn content(stream: &str, index: i64) -> (String, Option<String>) {
        let mut events = Vec::new();
        Reader::new(1_000_000).push(stream.as_bytes(), &mut events).unwrap();
        let mut text = String::new();
        let mut reason = None;
        for event in events {
            let Ok(document) = json::read(&event.data.unwrap_or_default(), limits()) else {
                continue;
            };
            for choice in document.root.get("choices").and_then(Value::as_array).unwrap_or_default() {
                if choice.get("index").and_then(Value::as_integer) == Some(index) {
                    let delta =
                        choice.get("delta").and_then(|delta| delta.get("content")).or_else(|| choice.get("text"));
                    text.push_str(delta.and_then(Value::as_str).unwrap_or_default());
                    reason = choice.get("finish_reason").and_then(Value::as_str).map(str::to_owned).or(reason);
                }
            }
        }
        (text, reason)
    }

    #[test]
    fn words_across_events_are_found_in_each_choice() {
        let stream = [
            chunk(0, "my se", "null"),
            chunk(1, "cret ", "null"),
            chunk(0, "cret", "null"),
            chunk(1, "sec", "null"),
            chunk(0, " is 敏", "null"),
            chunk(0, "感", "\"stop\""),
            chunk(1, "ret", "\"length\""),
            "data: [DONE]\n\n".into(),
        ]
        .concat();
        let (out, findings, is_cut) = run(stars(), 2, &stream);
        assert_eq!(content(&out, 0), ("my *** is ***".into(), Some("stop".into())));
        assert_eq!(content(&out, 1), ("cret ***".into(), Some("length".into())));
        assert_eq!(findings, Findings { words: 3, stopped: 0 });
        assert!(!is_cut && out.ends_with("data: [DONE]\n\n"));
    }

    #[test]
    fn a_stream_without_words_keeps_its_events() {
        let stream = [
            ": ping\n\n".into(),
            chunk(0, "a", "null"),
            chunk(0, " b", "\"stop\""),
            "data: {\"choices\":[],\"usage\":{\"n\":1}}\n\ndata: [DONE]\n\n".into(),
        ]
        .concat();
        assert_eq!(run(stars(), 1, &stream).0, stream);
    }

    #[test]
    fn events_that_differ_in_their_text_alone_are_of_one_pattern() {
        let mut filter = StreamFilter::new(Arc::new(stars()), 1);
        let mut out = Vec::new();
        for text in ["a", " \"b\"", " c", " 敏", "x\n", "d"] {
            filter.push(chunk(0, text, "null").as_bytes(), &mut out).unwrap();
        }
        let pattern = filter.choices[&0].pattern.as_ref().unwrap();
        let one = chunk(0, "one", "null");
        assert_eq!(pattern.text(one["data: ".len()..].trim_end().as_bytes()), Some("one"));
        for other in [chunk(1, "one", "null"), chunk(0, "on\"e", "null"), chunk(0, "one", "\"stop\"")] {
            assert_eq!(pattern.text(other["data: ".len()..].trim_end().as_bytes()), None);
        }
        filter.finish(&mut out).unwrap();
        assert_eq!(content(&String::from_utf8(out).unwrap(), 0).0, "a \"b\" c 敏x\nd");
    }

    #[test]
    fn events_are_looked_at_for_what_repeats_only_while_something_does() {
        let looks = |events: &[String]| {
            let mut filter = StreamFilter::new(Arc::new(stars()), 2);
            for event in events {
                filter.push(event.as_bytes(), &mut Vec::new()).unwrap();
            }
            filter.looks
        };
        let repeated: Vec<String> = (0..40).map(|number| chunk(0, &format!(" {number}"), "null")).collect();
        assert_eq!(looks(&repeated[..1]), LOOKS - 1);
        assert_eq!(looks(&repeated), LOOKS);
        let turns: Vec<String> = (0..40).map(|number| chunk(number % 2, "x", "null")).collect();
        assert_eq!(looks(&turns), LOOKS);
        let told: Vec<String> =
            (0..40).map(|number| chunk(0, "x", "null").replace("\"m\"", &format!("\"m\",\"n\":{number}"))).collect();
        assert_eq!(looks(&told), 0);
    }

    #[test]
    fn stop_ends_the_choice_and_then_the_stream() {
        let stream = [
            chunk(0, "a secret. b", "null"),
            chunk(1, "fine", "null"),
            chunk(0, "more", "null"),
            chunk(1, " secret ", "null"),
            chunk(1, "more", "null"),
        ]
        .concat();
        let (out, findings, is_cut) = run(words(Action::Stop), 2, &stream);
        assert_eq!(content(&out, 0), ("a ".into(), Some("content_filter".into())));
        assert_eq!(content(&out, 1), ("fine ".into(), Some("content_filter".into())));
        assert!(is_cut && out.ends_with("data: [DONE]\n\n") && !out.contains("more"));
        assert_eq!(findings.stopped, 2);
    }

    #[test]
    fn what_is_held_goes_out_when_the_stream_breaks_off() {
        assert_eq!(content(&run(stars(), 1, &chunk(0, "a secr", "null")).0, 0).0, "a secr");
        assert_eq!(content(&run(stars(), 1, &chunk(0, "a secret", "null")).0, 0).0, "a ***");
        let completions = "data: {\"id\":\"x\",\"choices\":[{\"index\":0,\"text\":\"sec\",\"finish_reason\":null}]}\n\ndata: [DONE]\n\n";
        let (out, ..) = run(stars(), 1, completions);
        assert_eq!(content(&out, 0).0, "sec");
        assert!(out.contains("\"text\":\"sec\"") && !out.contains("delta"), "{out}");
    }

    #[test]
    fn tools_and_reasoning_are_filtered_and_flushed_in_order() {
        let event = |delta: &str| {
            format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{delta},\"finish_reason\":null}}]}}\n\n")
        };
        let stream = [
            event(r#"{"reasoning":"se"}"#),
            event(r#"{"content":"x"}"#),
            event(r#"{"tool_calls":[{"index":0,"function":{"name":"f","arguments":"{\"a\":\"sec"}}]}"#),
            event(r#"{"tool_calls":[{"index":0,"function":{"arguments":"ret\"}"}}]}"#),
        ]
        .concat();
        let (out, findings, _is_cut) = run(stars(), 1, &stream);
        let events: Vec<&str> = out.split("\n\n").collect();
        assert!(events[1].contains(r#"{"content":"x","reasoning":"se"}"#), "{out}");
        assert!(
            events[2].contains(r#""arguments":"{\"a\":\""#) && events[3].contains(r#""arguments":"***\"}""#),
            "{out}"
        );
        assert_eq!(findings.words, 1);
    }

    #[test]
    fn whole_answers_are_filtered_and_normalised() {
        let body = r#" { "choices" : [ {"index":0, "message":{"role":"assistant","content":"a Secret \u00e9","tool_calls":[]},"logprobs":{"content":[]},"finish_reason":"stop"} ], "x":1.50 } "#;
        let (out, findings) = filter_whole(body.as_bytes(), Some(&stars())).unwrap();
        assert_eq!(
            out,
            r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"a *** é","tool_calls":[]},"logprobs":null,"finish_reason":"stop"}],"x":1.5}"#
        );
        assert_eq!(findings.words, 1);
        let (out, findings) = filter_whole(body.as_bytes(), Some(&words(Action::Stop))).unwrap();
        assert!(out.contains(r#""content":"a ""#) && out.contains(r#""finish_reason":"content_filter""#), "{out}");
        assert_eq!(findings.stopped, 1);
        assert!(filter_whole(body.as_bytes(), None).unwrap().0.contains(r#""logprobs":{"content":[]}"#));
        assert_eq!(filter_whole(b"no", None), Err(Unreadable));
    }

    #[test]
    fn what_is_no_event_of_an_engine_ends_the_stream() {
        let mut filter = StreamFilter::new(Arc::new(stars()), 1);
        assert_eq!(filter.push(b"data: secret\n\n", &mut Vec::new()), Err(Unreadable));
        let mut filter = StreamFilter::new(Arc::new(stars()), 1);
        assert_eq!(filter.push(&vec![b'a'; EVENT_BYTES + 1], &mut Vec::new()), Err(Unreadable));
        let mut filter = StreamFilter::new(Arc::new(stars()), 1);
        filter.push(b"data: {\"a\"", &mut Vec::new()).unwrap();
        assert_eq!(filter.finish(&mut Vec::new()), Err(Unreadable));
    }

    proptest! {
        #[test]
        fn a_client_sees_the_filtered_whole(pieces in proptest::collection::vec("[secrt 敏感.]{0,6}", 1..8), ends in any::<bool>(), cut in 1usize..50) {
            let last = pieces.len() - 1;
            let mut stream: String = pieces.iter().enumerate()
                .map(|(index, piece)| chunk(0, piece, if ends && index == last { "\"stop\"" } else { "null" })).collect();
            stream.push_str("data: [DONE]\n\n");
            let mut filter = StreamFilter::new(Arc::new(stars()), 1);
            let mut out = Vec::new();
            for bytes in stream.as_bytes().chunks(cut) {
                filter.push(bytes, &mut out).unwrap();
            }
            filter.finish(&mut out).unwrap();
            let mut whole = String::new();
            let mut reference = Filter::default();
            reference.push(&stars(), &pieces.concat(), &mut whole);
            reference.finish(&stars(), &mut whole);
            prop_assert_eq!(content(&String::from_utf8(out).unwrap(), 0).0, whole);
        }

        #[test]
        fn a_repeated_event_is_filtered_as_one_that_is_read(
            pieces in proptest::collection::vec(("[secrt 敏感\"\\\\\n.]{0,6}", 0i64..2, any::<bool>(), 0u8..12), 1..20),
            stops in any::<bool>(),
        ) {
            let event = |text: &str, index: i64, is_chat: bool, kind: u8| {
                let mut written = String::new();
                json::write_string(text, kind == 1, &mut written);
                let member = match (is_chat, kind) {
                    (_, 2) => format!("\"delta\":{{\"reasoning\":{written}}}"),
                    (_, 3) => format!("\"delta\":{{\"content\":{written},\"reasoning\":\"sec\"}}"),
                    (_, 4) => format!("\"delta\":{{\"role\":\"assistant\",\"content\": {written}}}"),
                    (true, _) => format!("\"delta\":{{\"content\":{written}}}"),
                    (false, _) => format!("\"text\":{written}"),
                };
                let reason = if kind == 5 { "\"length\"" } else { "null" };
                let logprobs = if kind == 6 { "{\"content\":[]}" } else { "null" };
                let usage = if kind == 7 { ",\"usage\":{\"n\":1},\"content\":\"se\"" } else { "" };
                format!("data: {{\"id\":\"x\",\"choices\":[{{\"index\":{index},{member},\"logprobs\":{logprobs},\"finish_reason\":{reason}}}]{usage}}}\n\n")
            };
            let mut stream: String = pieces.iter().map(|(text, index, is_chat, kind)| event(text, *index, *is_chat, *kind)).collect();
            stream.push_str("data: [DONE]\n\n");
            let list = || if stops { words(Action::Stop) } else { stars() };
            let run = |looks: u32| {
                let mut filter = StreamFilter::new(Arc::new(list()), 2);
                filter.looks = looks;
                let mut out = Vec::new();
                filter.push(stream.as_bytes(), &mut out).unwrap();
                filter.finish(&mut out).unwrap();
                (String::from_utf8(out).unwrap(), filter.findings)
            };
            prop_assert_eq!(run(LOOKS), run(0));
        }

        #[test]
        fn no_stream_makes_it_panic(stream in "(data: |\\{|\\}|\\[|\\]|\"|choices|delta|index|content|:|,|0|-1|null|\n|a){0,60}") {
            let mut filter = StreamFilter::new(Arc::new(stars()), 1);
            let _any_result = filter.push(stream.as_bytes(), &mut Vec::new());
        }
    }
}
