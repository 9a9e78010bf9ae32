// SPDX-License-Identifier: GPL-3.0-or-later
//! The configuration: one JSON file. A name that is not known is an error, so that a slip is found at once. Models, word lists,
//! classes and what belongs to prefixes are taken up when the file changes; addresses, threads and limits need a restart.
//!
//! ```json
//! {"listen": "0.0.0.0:8080", "metrics_listen": "10.0.0.17:8409", "dispatch": ["10.0.0.11:8081", "10.0.0.12:8081"],
//!  "keys_file": "/etc/ringmaster/preprocessor/keys",
//!  "models": [{"name": "qwen2-7b-instruct", "adapters": ["sql"], "directory": "/etc/ringmaster/preprocessor/models/qwen2-7b-instruct",
//!              "max_model_len": 32768, "block_size": 16, "completions_as_ids": true, "word_lists": ["names"]}],
//!  "word_lists": [{"name": "names", "file": "/etc/ringmaster/preprocessor/words/names", "folded": true, "action": "replace",
//!                  "replacement": "***"}],
//!  "classes": [{"name": "fast", "prompt_tokens_max": 2048}, {"name": "slow", "prompt_tokens_max": null}]}
//! ```

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::json::{self, Value};
use crate::template::ContentFormat;

#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    pub name: String,
    pub adapters: Vec<String>,
    /// Directory with `tokenizer.json`; without one the model's prompts are not counted.
    pub directory: Option<PathBuf>,
    /// Tokens of prompt and answer together.
    pub max_model_len: usize,
    /// Tokens of one block of the engine's prefix cache.
    pub block_size: usize,
    pub completions_as_ids: bool,
    /// `None`: found out from the template.
    pub content_format: Option<ContentFormat>,
    /// Variables of the chat template that hold for all requests (vLLM's --default-chat-template-kwargs).
    pub template_variables: Vec<(String, Value)>,
    pub word_lists: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WordList {
    pub name: String,
    pub file: PathBuf,
    pub folded: bool,
    /// `None`: the answer is stopped.
    pub replacement: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Class {
    pub name: String,
    /// `None`: any number.
    pub prompt_tokens_max: Option<usize>,
}

/// What a client may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub body_bytes: usize,
    /// Bodies that are being read or waited with, all together.
    pub held_bytes: usize,
    pub answer_bytes: usize,
    pub header_bytes: usize,
    pub header_count: usize,
    pub connections: usize,
    pub json_depth: usize,
    pub json_values: usize,
    /// From the first byte of a request, or the end of the one before it, to the end of its headers.
    pub header_time: Duration,
    pub body_time: Duration,
    /// How long a client may take nothing of what is sent to it.
    pub stall_time: Duration,
    pub connect_time: Duration,
    /// How long a gateway may send nothing.
    pub answer_time: Duration,
    /// After SIGTERM: how long new connections are still taken, with /healthz saying 503.
    pub drain_notice_time: Duration,
    /// After SIGTERM: how long open requests may go on.
    pub drain_time: Duration,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub listen: SocketAddr,
    pub metrics_listen: Option<SocketAddr>,
    pub dispatch: Vec<SocketAddr>,
    pub keys_file: PathBuf,
    pub models: Vec<Model>,
    pub word_lists: Vec<WordList>,
    pub classes: Vec<Class>,
    pub limits: Limits,
    /// Blocks whose hashes are told to dispatch, and that the hash for affinity is made of, at most.
    pub prefix_blocks: usize,
    pub affinity_tokens: usize,
    pub threads: usize,
    pub log_requests: bool,
}

/// The members of an object, each of which is asked for once.
struct Members<'value> {
    place: String,
    left: Vec<(&'value str, &'value Value)>,
}

impl<'value> Members<'value> {
    fn new(value: &'value Value, place: &str) -> Result<Self, String> {
        match value {
            Value::Object(members) => Ok(Members {
                place: place.to_owned(),
                left: members.iter().map(|(name, value)| (name.as_str(), value)).collect(),
            }),
            _ => Err(format!("{place} is not an object")),
        }
    }

    fn take(&mut self, name: &str) -> Option<&'value Value> {
        let index = self.left.iter().position(|(other, _value)| *other == name)?;
        Some(self.left.swap_remove(index).1)
    }

    fn wrong(&self, name: &str, expected: &str) -> String {
        format!("{}.{name} is not {expected}", self.place)
    }

    fn text(&mut self, name: &str) -> Result<Option<&'value str>, String> {
        match self.take(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong(name, "a string")),
        }
    }

    fn needed_text(&mut self, name: &str) -> Result<&'value str, String> {
        self.text(name)?.filter(|text| !text.is_empty()).ok_or_else(|| self.wrong(name, "a string that is not empty"))
    }

    fn truth(&mut self, name: &str, default: bool) -> Result<bool, String> {
        match self.take(name) {
            None => Ok(default),
            Some(Value::Bool(truth)) => Ok(*truth),
            Some(_) => Err(self.wrong(name, "true or false")),
        }
    }

    fn number(&mut self, name: &str, default: usize, least: usize) -> Result<usize, String> {
        match self.take(name) {
            None => Ok(default),
            Some(Value::Integer(number)) if usize::try_from(*number).is_ok_and(|number| number >= least) => {
                Ok(*number as usize)
            }
            Some(_) => Err(self.wrong(name, &format!("an integer from {least} on"))),
        }
    }

    fn seconds(&mut self, name: &str, default: f64) -> Result<Duration, String> {
        let seconds = match self.take(name) {
            None => default,
            Some(Value::Integer(number)) => *number as f64,
            Some(Value::Float(number)) => *number,
            Some(_) => -1.0,
        };
        if !(0.0..=86_400.0).contains(&seconds) {
            return Err(self.wrong(name, "a number of seconds from 0 to 86400"));
        }
        Ok(Duration::from_secs_f64(seconds))
    }

    fn list(&mut self, name: &str) -> Result<&'value [Value], String> {
        match self.take(name) {
            None => Ok(&[]),
            Some(Value::Array(items)) => Ok(items),
            Some(_) => Err(self.wrong(name, "an array")),
        }
    }

    fn texts(&mut self, name: &str) -> Result<Vec<String>, String> {
        let items = self.list(name)?;
        let texts = items.iter().map(|item| item.as_str().filter(|text| !text.is_empty()).map(str::to_owned));
        texts.collect::<Option<_>>().ok_or_else(|| self.wrong(name, "an array of strings that are not empty"))
    }

    fn address(&mut self, name: &str) -> Result<Option<SocketAddr>, String> {
        match self.text(name)? {
            None => Ok(None),
            Some(text) => text.parse().map(Some).map_err(|_error| self.wrong(name, "an IP address and a port")),
        }
    }

    fn end(self) -> Result<(), String> {
        match self.left.first() {
            Some((name, _value)) => Err(format!("{}.{name} is not known", self.place)),
            None => Ok(()),
        }
    }
}

impl Config {
    /// Read and check the file.
    pub fn read(path: &Path) -> Result<Self, String> {
        let bytes = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
        let document = json::read(&bytes, json::Limits::default());
        let root = document.map_err(|refusal| format!("{}: {refusal}", path.display()))?.root;
        Self::from_value(&root).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Whether something differs that is only read at the start: addresses, threads, limits of connections.
    pub fn needs_restart(&self, before: &Config) -> bool {
        let fixed = |config: &Config| (config.listen, config.metrics_listen, config.dispatch.clone(), config.threads);
        fixed(self) != fixed(before) || self.limits != before.limits
    }

    fn from_value(root: &Value) -> Result<Self, String> {
        let mut members = Members::new(root, "configuration")?;
        let mut dispatch = Vec::new();
        for address in members.texts("dispatch")? {
            dispatch.push(
                address.parse().map_err(|_error| format!("dispatch: {address} is not an IP address and a port"))?,
            );
        }
        if dispatch.is_empty() {
            return Err("configuration.dispatch names no gateway".into());
        }
        let models = members.list("models")?.iter().map(read_model).collect::<Result<Vec<Model>, String>>()?;
        let word_lists =
            members.list("word_lists")?.iter().map(read_list).collect::<Result<Vec<WordList>, String>>()?;
        let mut names: Vec<&str> = Vec::new();
        for name in models.iter().flat_map(|model| model.adapters.iter().chain([&model.name])) {
            if names.contains(&name.as_str()) {
                return Err(format!("the model or adapter {name} is there twice"));
            }
            names.push(name);
        }
        for name in models.iter().flat_map(|model| &model.word_lists) {
            if !word_lists.iter().any(|list| list.name == *name) {
                return Err(format!("the word list {name} does not exist"));
            }
        }
        let config = Config {
            listen: members.address("listen")?.ok_or("configuration.listen is missing")?,
            metrics_listen: members.address("metrics_listen")?,
            dispatch,
            keys_file: members.needed_text("keys_file")?.into(),
            classes: members.list("classes")?.iter().map(read_class).collect::<Result<_, _>>()?,
            limits: read_limits(members.take("limits"))?,
            prefix_blocks: members.number("prefix_blocks", 32, 0)?,
            affinity_tokens: members.number("affinity_tokens", 256, 1)?,
            threads: members.number("threads", 0, 0)?,
            log_requests: members.truth("log_requests", true)?,
            models,
            word_lists,
        };
        members.end()?;
        Ok(config)
    }
}

fn read_model(value: &Value) -> Result<Model, String> {
    let mut members = Members::new(value, "model")?;
    let name = members.needed_text("name")?.to_owned();
    members.place = format!("model {name}");
    let content_format = match members.text("content_format")? {
        None | Some("auto") => None,
        Some("string") => Some(ContentFormat::Text),
        Some("openai") => Some(ContentFormat::Parts),
        Some(_) => return Err(members.wrong("content_format", "auto, string or openai")),
    };
    let template_variables = match members.take("template_variables") {
        None => Vec::new(),
        Some(Value::Object(variables)) => variables.clone(),
        Some(_) => return Err(members.wrong("template_variables", "an object")),
    };
    let model = Model {
        adapters: members.texts("adapters")?,
        directory: members.text("directory")?.map(PathBuf::from),
        max_model_len: members.number("max_model_len", 0, 1)?,
        block_size: members.number("block_size", 16, 1)?,
        completions_as_ids: members.truth("completions_as_ids", false)?,
        content_format,
        template_variables,
        word_lists: members.texts("word_lists")?,
        name,
    };
    if model.max_model_len == 0 {
        return Err(members.wrong("max_model_len", "there"));
    }
    members.end()?;
    Ok(model)
}

fn read_list(value: &Value) -> Result<WordList, String> {
    let mut members = Members::new(value, "word list")?;
    let name = members.needed_text("name")?.to_owned();
    members.place = format!("word list {name}");
    let replacement = members.text("replacement")?;
    let list = WordList {
        file: members.needed_text("file")?.into(),
        folded: members.truth("folded", true)?,
        replacement: match members.text("action")? {
            None | Some("replace") => Some(replacement.unwrap_or("***").to_owned()),
            Some("stop") => None,
            Some(_) => return Err(members.wrong("action", "replace or stop")),
        },
        name,
    };
    // It may come to stand in the arguments of a tool call, which are JSON.
    let is_unsafe = |character: char| character.is_control() || "\"\\".contains(character);
    if list.replacement.as_ref().is_some_and(|text| text.chars().any(is_unsafe)) {
        return Err(members.wrong("replacement", "free of quotes, backslashes and control characters"));
    }
    members.end()?;
    Ok(list)
}

fn read_class(value: &Value) -> Result<Class, String> {
    let mut members = Members::new(value, "class")?;
    let name = members.needed_text("name")?.to_owned();
    let prompt_tokens_max = match members.take("prompt_tokens_max") {
        None | Some(Value::Null) => None,
        Some(Value::Integer(number)) if *number >= 0 => Some(*number as usize),
        Some(_) => return Err(members.wrong("prompt_tokens_max", "a number or null")),
    };
    members.end()?;
    Ok(Class { name, prompt_tokens_max })
}

fn read_limits(value: Option<&Value>) -> Result<Limits, String> {
    let nothing = Value::Object(Vec::new());
    let mut members = Members::new(value.unwrap_or(&nothing), "limits")?;
    let limits = Limits {
        body_bytes: members.number("body_bytes", 262_144, 1)?,
        held_bytes: members.number("held_bytes", 33_554_432, 1)?,
        answer_bytes: members.number("answer_bytes", 16_777_216, 1)?,
        // hyper needs 8 KiB at least.
        header_bytes: members.number("header_bytes", 16_384, 8192)?,
        header_count: members.number("header_count", 64, 8)?,
        connections: members.number("connections", 4096, 1)?,
        json_depth: members.number("json_depth", 64, 1)?,
        json_values: members.number("json_values", 200_000, 1)?,
        header_time: members.seconds("header_seconds", 10.0)?,
        body_time: members.seconds("body_seconds", 10.0)?,
        stall_time: members.seconds("stall_seconds", 30.0)?,
        connect_time: members.seconds("connect_seconds", 0.5)?,
        answer_time: members.seconds("answer_seconds", 900.0)?,
        drain_notice_time: members.seconds("drain_notice_seconds", 3.0)?,
        drain_time: members.seconds("drain_seconds", 900.0)?,
    };
    members.end()?;
    Ok(limits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Config, String> {
        Config::from_value(&json::read(text.as_bytes(), json::Limits::default()).unwrap().root)
    }

    fn with(more: &str) -> String {
        format!(r#"{{"listen":"127.0.0.1:1","dispatch":["[::1]:2"],"keys_file":"/k"{more}}}"#)
    }

    #[test]
    fn a_small_configuration_has_defaults() {
        let config = read(&with(r#","models":[{"name":"m","max_model_len":10}]"#)).unwrap();
        assert_eq!(config.models[0].block_size, 16);
        assert_eq!(config.limits.body_time, Duration::from_secs(10));
        assert_eq!(config.dispatch, ["[::1]:2".parse().unwrap()]);
    }

    #[test]
    fn slips_are_found_and_named() {
        for (more, named) in [
            (r#","modles":[]"#, "modles"),
            (r#","models":[{"name":"m"}]"#, "max_model_len"),
            (r#","models":[{"name":"m","max_model_len":-1}]"#, "max_model_len"),
            (r#","models":[{"name":"m","max_model_len":1,"content_format":"x"}]"#, "content_format"),
            (r#","models":[{"name":"m","max_model_len":1,"adapters":["m"]}]"#, "twice"),
            (r#","models":[{"name":"m","max_model_len":1,"word_lists":["w"]}]"#, "w"),
            (r#","word_lists":[{"name":"w","file":"f","action":"x"}]"#, "action"),
            (r#","word_lists":[{"name":"w","file":"f","replacement":"\""}]"#, "replacement"),
            (r#","limits":{"body_seconds":-1}"#, "body_seconds"),
            (r#","limits":{"body_second":1}"#, "body_second"),
            (r#","metrics_listen":"localhost:1""#, "metrics_listen"),
            (r#","classes":[{"name":"a","prompt_tokens_max":"b"}]"#, "prompt_tokens_max"),
        ] {
            let error = read(&with(more)).unwrap_err();
            assert!(error.contains(named), "{more}: {error}");
        }
        assert!(read(r#"{"listen":"127.0.0.1:1","dispatch":[],"keys_file":"/k"}"#).is_err());
        assert!(read("[]").is_err());
    }
}
