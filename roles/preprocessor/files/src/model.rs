// SPDX-License-Identifier: GPL-3.0-or-later
//! A served model: its tokenizer and template, and how the prompt of a request becomes tokens. What vLLM does to a request before
//! it tokenises (`vllm.entrypoints.chat_utils`, `vllm.renderers`) is done here in the same way.

use std::path::Path;

use crate::config;
use crate::errors::ApiError;
use crate::json::{self, Value};
use crate::template::{ChatTemplate, ContentFormat, Conversation, RenderError};
use crate::tokenizer::{read_optional, Tokenizer};

/// What is read from a model's directory.
pub struct Files {
    pub tokenizer: Tokenizer,
    pub template: Option<ChatTemplate>,
}

/// Files that a model's directory may have. A change of any of them is noticed.
pub const FILES: [&str; 5] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
];

impl Files {
    pub fn load(directory: &Path, format: Option<ContentFormat>) -> Result<Self, String> {
        let configuration = read_optional(&directory.join("tokenizer_config.json"))?;
        let tokenizer = Tokenizer::load(directory, &configuration)?;
        let (plain, with_tools) = templates(directory, &configuration)?;
        let template = match plain {
            Some(plain) => Some(
                ChatTemplate::new(&plain, with_tools.as_deref(), format)
                    .map_err(|error| format!("{}: chat template: {error}", directory.display()))?,
            ),
            None => None,
        };
        Ok(Files { tokenizer, template })
    }
}

/// The template for all requests and the one for requests with tools, from wherever `transformers` takes them.
fn templates(directory: &Path, configuration: &Value) -> Result<(Option<String>, Option<String>), String> {
    let file = |name: &str| {
        let path = directory.join(name);
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(format!("{}: {error}", path.display())),
        }
    };
    let tool_file = file("additional_chat_templates/tool_use.jinja")?;
    if let Some(plain) = file("chat_template.jinja")? {
        return Ok((Some(plain), tool_file));
    }
    let processors = read_optional(&directory.join("chat_template.json"))?;
    let written = processors.get("chat_template").or_else(|| configuration.get("chat_template"));
    Ok(match written {
        Some(Value::String(plain)) => (Some(plain.clone()), tool_file),
        Some(Value::Array(named)) => {
            let with_name = |name: &str| {
                let entry = named.iter().find(|entry| entry.get("name").and_then(Value::as_str) == Some(name))?;
                entry.get("template").and_then(Value::as_str).map(str::to_owned)
            };
            (with_name("default"), with_name("tool_use"))
        }
        _ => (None, tool_file),
    })
}

/// Tokens of a request's prompts, or why they are not known.
pub enum Prompt {
    /// One list of ids a prompt. `converted` says that prompts were strings and may be replaced by these ids.
    Tokens { prompts: Vec<Vec<u32>>, converted: bool },
    /// The engine adds what cannot be seen here (images, own templates, truncation …).
    Unknown(&'static str),
}

/// Read the prompt of a chat request (`/v1/chat/completions`, or `/tokenize` with messages).
pub fn chat_prompt(files: &Files, model: &config::Model, request: &Value) -> Result<Prompt, ApiError> {
    let Some(messages) = request.get("messages") else {
        return Err(ApiError::invalid("missing_required_parameter", Some("messages"), "messages is missing."));
    };
    let messages = messages
        .as_array()
        .filter(|messages| {
            messages.iter().all(|message| message.get("role").is_some_and(|role| role.as_str().is_some()))
        })
        .ok_or_else(|| {
            let message = "messages has to be an array of objects with a role each.";
            ApiError::invalid("invalid_type", Some("messages"), message)
        })?;
    let has = |name: &str| request.get(name).is_some_and(|value| !value.is_null());
    if has("chat_template") || has("truncate_prompt_tokens") || has("mm_processor_kwargs") {
        return Ok(Prompt::Unknown("option"));
    }
    let Some(template) = &files.template else {
        return Ok(Prompt::Unknown("no_template"));
    };
    let flag = |name: &str, default: bool| request.get(name).and_then(Value::as_bool).unwrap_or(default);
    let tools = tools(request);
    let format = template.format(tools.is_some());
    let mut conversation = Vec::with_capacity(messages.len());
    for message in messages {
        match conversation_message(message, format)? {
            Some(message) => conversation.push(message),
            None => return Ok(Prompt::Unknown("content")),
        }
    }
    let add_generation_prompt = flag("add_generation_prompt", true);
    let continue_final_message = flag("continue_final_message", false);
    let rendered = template.render(Conversation {
        messages: conversation,
        tools,
        add_generation_prompt,
        continue_final_message,
        variables: variables(model, request),
        named_tokens: &files.tokenizer.named_tokens,
    });
    let text = match rendered {
        Ok(text) => text,
        Err(RenderError::Raised(message)) => {
            return Err(ApiError::invalid("chat_template_error", Some("messages"), message))
        }
        Err(RenderError::Failed) => return Ok(Prompt::Unknown("template")),
    };
    match files.tokenizer.encode(&text, flag("add_special_tokens", false)) {
        Ok(ids) => Ok(Prompt::Tokens { prompts: vec![ids], converted: false }),
        Err(_error) => Ok(Prompt::Unknown("tokenizer")),
    }
}

/// Read the prompts of `/v1/completions`, `/v1/embeddings` (`input`) and `/tokenize` with a prompt.
pub fn text_prompt(files: &Files, request: &Value, name: &'static str) -> Result<Prompt, ApiError> {
    let wrong = || {
        let message = format!(
            "{name} has to be a string, an array of strings, an array of token ids or an array of such arrays."
        );
        ApiError::invalid("invalid_type", Some(name), message)
    };
    let prompt = match request.get(name) {
        Some(prompt) => prompt,
        None if ["prompt_embeds", "messages"].iter().any(|other| request.get(other).is_some()) => {
            return Ok(Prompt::Unknown("option"));
        }
        None => {
            return Err(ApiError::invalid("missing_required_parameter", Some(name), format!("{name} is missing.")));
        }
    };
    let has = |name: &str| request.get(name).is_some_and(|value| !value.is_null());
    if has("truncate_prompt_tokens") || has("prompt_embeds") {
        return Ok(Prompt::Unknown("option"));
    }
    let add_special_tokens = request.get("add_special_tokens").and_then(Value::as_bool).unwrap_or(true);
    let ids_of = |items: &[Value]| -> Option<Vec<u32>> {
        items.iter().map(|id| id.as_integer().and_then(|id| u32::try_from(id).ok())).collect()
    };
    let texts: Vec<&str> = match prompt {
        Value::String(text) => vec![text],
        Value::Array(items) => match items.first() {
            None => return Err(wrong()),
            Some(Value::String(_)) => items.iter().map(Value::as_str).collect::<Option<_>>().ok_or_else(wrong)?,
            Some(Value::Integer(_)) => {
                let ids = ids_of(items).ok_or_else(wrong)?;
                return Ok(Prompt::Tokens { prompts: vec![ids], converted: false });
            }
            Some(Value::Array(_)) => {
                let prompts = items.iter().map(|item| ids_of(item.as_array()?)).collect::<Option<Vec<_>>>();
                return Ok(Prompt::Tokens { prompts: prompts.ok_or_else(wrong)?, converted: false });
            }
            Some(_) => return Err(wrong()),
        },
        _ => return Err(wrong()),
    };
    let prompts: Result<Vec<Vec<u32>>, String> =
        texts.iter().map(|text| files.tokenizer.encode(text, add_special_tokens)).collect();
    Ok(match prompts {
        Ok(prompts) => Prompt::Tokens { prompts, converted: true },
        Err(_error) => Prompt::Unknown("tokenizer"),
    })
}

/// Variables of the template: the model's defaults, then the request's own.
fn variables(model: &config::Model, request: &Value) -> Vec<(String, Value)> {
    let mut variables = model.template_variables.clone();
    let mut set = |name: &str, value: &Value| match variables.iter_mut().find(|(other, _value)| other == name) {
        Some((_name, old)) => *old = value.clone(),
        None => variables.push((name.to_owned(), value.clone())),
    };
    if let Some(Value::Object(given)) = request.get("chat_template_kwargs") {
        given.iter().for_each(|(name, value)| set(name, value));
    }
    for name in ["documents", "reasoning_effort"] {
        if let Some(value) = request.get(name).filter(|value| !value.is_null()) {
            set(name, value);
        }
    }
    variables
}

/// Tools in the form in which vLLM hands them to the template: `type` and `function`, the latter with `description` and
/// `parameters` even where they are missing.
fn tools(request: &Value) -> Option<Value> {
    let tools = request.get("tools").and_then(Value::as_array).filter(|tools| !tools.is_empty())?;
    let tools = tools.iter().map(|tool| {
        let mut function = Vec::new();
        let given = tool.get("function");
        for name in ["name", "description", "parameters"] {
            let value = given.and_then(|given| given.get(name)).cloned().unwrap_or(Value::Null);
            function.push((name.to_owned(), value));
        }
        if let Some(Value::Object(members)) = given {
            let known = |name: &str| ["name", "description", "parameters"].contains(&name);
            function.extend(members.iter().filter(|(name, _value)| !known(name)).cloned());
        }
        let kind = tool.get("type").cloned().unwrap_or_else(|| Value::String("function".into()));
        Value::Object(vec![("type".into(), kind), ("function".into(), Value::Object(function))])
    });
    Some(Value::Array(tools.collect()))
}

/// A message as the template sees it. `None` if it has parts that are no text.
fn conversation_message(message: &Value, format: ContentFormat) -> Result<Option<Value>, ApiError> {
    let role = message.get("role").and_then(Value::as_str).unwrap_or_default();
    let nothing = Value::Array(Vec::new());
    let single;
    let parts: &[Value] = match message.get("content") {
        None | Some(Value::Null) => nothing.as_array().unwrap_or_default(),
        Some(Value::String(_)) => {
            single = [message.get("content").cloned().unwrap_or(Value::Null)];
            &single
        }
        Some(Value::Array(parts)) => parts,
        Some(_) => {
            let message = "The content of a message has to be a string or an array of parts.";
            return Err(ApiError::invalid("invalid_type", Some("messages"), message));
        }
    };
    let mut texts: Vec<&str> = Vec::with_capacity(parts.len());
    for part in parts {
        let kind = part.get("type").and_then(Value::as_str);
        let member = match kind {
            _ if part.as_str().is_some() => None,
            Some("text" | "input_text" | "output_text") => Some("text"),
            Some("refusal") => Some("refusal"),
            Some("thinking") => Some("thinking"),
            _ => return Ok(None),
        };
        match member.map_or(Some(part), |member| part.get(member)) {
            Some(Value::String(text)) => texts.push(text),
            None | Some(Value::Null) if matches!(kind, Some("text" | "refusal")) => {}
            _ => return Ok(None),
        }
    }
    // Most templates take only text from tools.
    let content = if format == ContentFormat::Text || role == "tool" {
        Value::String(texts.join("\n"))
    } else {
        let part = |text: &&str| {
            Value::Object(vec![
                ("type".into(), Value::String("text".into())),
                ("text".into(), Value::String((*text).to_owned())),
            ])
        };
        Value::Array(texts.iter().map(part).collect())
    };
    let mut members = vec![("role".to_owned(), Value::String(role.to_owned())), ("content".to_owned(), content)];
    if role == "assistant" {
        if let Some(calls) = message.get("tool_calls").and_then(Value::as_array).filter(|calls| !calls.is_empty()) {
            members.push(("tool_calls".into(), Value::Array(calls.iter().map(tool_call).collect())));
        }
        let reasoning = ["reasoning", "reasoning_content"].iter().find_map(|name| message.get(name));
        if let Some(reasoning) = reasoning.filter(|reasoning| !reasoning.is_null()) {
            members.push(("reasoning".into(), reasoning.clone()));
            members.push(("reasoning_content".into(), reasoning.clone()));
        }
    }
    if role == "tool" {
        if let Some(id) = message.get("tool_call_id").filter(|id| !id.is_null()) {
            members.push(("tool_call_id".into(), id.clone()));
        }
    }
    for name in ["name", "task"] {
        if let Some(text @ Value::String(_)) = message.get(name) {
            members.push((name.into(), text.clone()));
        }
    }
    if role == "developer" {
        if let Some(tools) = message.get("tools").filter(|tools| !tools.is_null()) {
            members.push(("tools".into(), tools.clone()));
        }
    }
    Ok(Some(Value::Object(members)))
}

/// A tool call with its arguments as an object: templates expect that, clients send them as text.
fn tool_call(call: &Value) -> Value {
    let mut call = call.clone();
    if let Some(Value::Object(function)) = call.get_mut("function") {
        let arguments = function.iter_mut().find(|(name, _value)| name == "arguments");
        let empty = Value::Object(Vec::new());
        match arguments {
            Some((_name, value)) => match value {
                Value::String(text) => {
                    let read = json::read(text.as_bytes(), json::Limits::default());
                    *value = read.map_or(empty, |document| document.root);
                }
                Value::Array(_) | Value::Object(_) => {}
                _ => *value = empty,
            },
            None => function.push(("arguments".into(), empty)),
        }
    }
    call
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::json::tests::any_value;

    fn value(text: &str) -> Value {
        json::read(text.as_bytes(), json::Limits::default()).unwrap().root
    }

    fn seen(message: &str, format: ContentFormat) -> Option<String> {
        conversation_message(&value(message), format).unwrap().map(|message| json::to_compact(&message))
    }

    #[test]
    fn messages_reach_the_template_as_in_vllm() {
        use ContentFormat::{Parts, Text};
        for (message, format, expected) in [
            (r#"{"role":"user","content":"a","x":1}"#, Text, r#"{"role":"user","content":"a"}"#),
            (r#"{"role":"user","content":"a"}"#, Parts, r#"{"role":"user","content":[{"type":"text","text":"a"}]}"#),
            (
                r#"{"role":"user","content":[{"type":"text","text":"a"},"b",{"type":"text","text":null}]}"#,
                Text,
                r#"{"role":"user","content":"a\nb"}"#,
            ),
            (
                r#"{"role":"assistant","content":null,"tool_calls":[],"reasoning_content":"r"}"#,
                Text,
                r#"{"role":"assistant","content":"","reasoning":"r","reasoning_content":"r"}"#,
            ),
            (
                r#"{"role":"tool","content":[{"type":"text","text":"a"}],"tool_call_id":"i","name":"n"}"#,
                Parts,
                r#"{"role":"tool","content":"a","tool_call_id":"i","name":"n"}"#,
            ),
            (
                r#"{"role":"assistant","tool_calls":[{"id":"i","function":{"name":"f","arguments":"{\"a\":1}"}},{"function":{"arguments":"no"}}]}"#,
                Text,
                r#"{"role":"assistant","content":"","tool_calls":[{"id":"i","function":{"name":"f","arguments":{"a":1}}},{"function":{"arguments":{}}}]}"#,
            ),
        ] {
            assert_eq!(seen(message, format).as_deref(), Some(expected), "{message}");
        }
        assert_eq!(seen(r#"{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}"#, Text), None);
        assert!(conversation_message(&value(r#"{"role":"user","content":1}"#), Text).is_err());
    }

    #[test]
    fn tools_are_completed() {
        let request = value(r#"{"tools":[{"type":"function","function":{"strict":true,"name":"f"},"other":1}]}"#);
        assert_eq!(
            json::to_compact(&tools(&request).unwrap()),
            r#"[{"type":"function","function":{"name":"f","description":null,"parameters":null,"strict":true}}]"#
        );
        assert_eq!(tools(&value(r#"{"tools":[]}"#)), None);
    }

    /// An object as the reader gives it, which refuses one with two members of the same name: the last of them is taken.
    fn object(members: Vec<(&'static str, Value)>) -> Value {
        let members: std::collections::BTreeMap<_, _> = members.into_iter().collect();
        Value::Object(members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    }

    /// A message, or something like it: members that are read, with any value or one of the right kind.
    fn any_message() -> impl Strategy<Value = Value> {
        let text = |texts: &'static [&'static str]| {
            proptest::sample::select(texts).prop_map(|text| Value::String(text.into()))
        };
        let part = proptest::collection::vec(
            (
                proptest::sample::select(&["type", "text", "refusal", "thinking", "image_url"][..]),
                prop_oneof![any_value(), text(&["text", "refusal", "thinking", "input_text", "image_url"])],
            ),
            0..4,
        )
        .prop_map(object);
        let call = (any_value(), any_value(), any::<String>()).prop_map(|(id, other, arguments)| {
            let function = Value::Object(vec![("arguments".into(), Value::String(arguments)), ("name".into(), other)]);
            Value::Object(vec![("id".into(), id), ("function".into(), function)])
        });
        let member = (
            proptest::sample::select(
                &["role", "content", "tool_calls", "tool_call_id", "name", "reasoning", "reasoning_content", "tools"][..],
            ),
            prop_oneof![
                any_value(),
                text(&["user", "assistant", "tool", "developer", "system"]),
                proptest::collection::vec(prop_oneof![part, call], 0..4).prop_map(Value::Array),
            ],
        );
        proptest::collection::vec(member, 0..6).prop_map(object)
    }

    proptest! {
        #[test]
        fn any_message_is_seen_or_refused(message in prop_oneof![any_message(), any_value()], as_text in any::<bool>()) {
            let format = if as_text { ContentFormat::Text } else { ContentFormat::Parts };
            if let Ok(Some(seen)) = conversation_message(&message, format) {
                prop_assert!(seen.get("role").is_some_and(|role| role.as_str().is_some()));
                let content = seen.get("content");
                prop_assert!(content.is_some_and(|content| content.as_str().is_some() || content.as_array().is_some()));
                // What a template gets can be written, and is the same when it is read again.
                let again = json::read(json::to_compact(&seen).as_bytes(), json::Limits::default());
                prop_assert!(again.is_ok());
            }
        }

        #[test]
        fn any_tools_are_completed_or_left_out(tools_given in any_value(), inner in any_value()) {
            for given in [tools_given.clone(), Value::Array(vec![tools_given, Value::Object(vec![("function".into(), inner)])])] {
                let request = Value::Object(vec![("tools".into(), given)]);
                for tool in tools(&request).iter().flat_map(|tools| tools.as_array().unwrap_or_default()) {
                    let function = tool.get("function");
                    prop_assert!(function.is_some_and(|function| function.get("parameters").is_some()));
                }
            }
        }
    }
}
