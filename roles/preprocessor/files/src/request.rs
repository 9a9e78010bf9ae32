// SPDX-License-Identifier: GPL-3.0-or-later
//! From the body of a request to what is sent on: checked, counted, hashed, maybe rewritten.

use std::sync::Arc;

use bytes::Bytes;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use sha2::{Digest, Sha256};

use crate::config::Class;
use crate::errors::ApiError;
use crate::json::{self, Document, Value};
use crate::keys::hexadecimal;
use crate::model::{chat_prompt, text_prompt, Prompt};
use crate::state::{Model, State};

/// What is served, by path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    Chat,
    Completions,
    Embeddings,
    Tokenize,
    Detokenize,
    Models,
    Health,
    Metrics,
}

impl Route {
    pub fn of(path: &str) -> Option<Route> {
        Some(match path {
            "/v1/chat/completions" => Route::Chat,
            "/v1/completions" => Route::Completions,
            "/v1/embeddings" => Route::Embeddings,
            "/tokenize" => Route::Tokenize,
            "/detokenize" => Route::Detokenize,
            "/v1/models" => Route::Models,
            "/healthz" => Route::Health,
            "/metrics" => Route::Metrics,
            _ => return None,
        })
    }

    pub fn path(self) -> &'static str {
        match self {
            Route::Chat => "/v1/chat/completions",
            Route::Completions => "/v1/completions",
            Route::Embeddings => "/v1/embeddings",
            Route::Tokenize => "/tokenize",
            Route::Detokenize => "/detokenize",
            Route::Models => "/v1/models",
            Route::Health => "/healthz",
            Route::Metrics => "/metrics",
        }
    }

    pub fn method(self) -> &'static str {
        match self {
            Route::Models | Route::Health | Route::Metrics => "GET",
            _ => "POST",
        }
    }
}

/// What becomes of a request.
pub enum Prepared {
    /// It is answered here.
    Answer(String),
    Forward(Forward),
}

pub struct Forward {
    pub body: Bytes,
    /// What dispatch is told.
    pub headers: HeaderMap,
    pub model: Arc<Model>,
    /// Choices that the answer will have; 0 if that is not known.
    pub choices: usize,
    pub prompt_tokens: Option<usize>,
    /// Why the prompt was not counted.
    pub uncounted: Option<&'static str>,
}

const MODEL: HeaderName = HeaderName::from_static("x-ringmaster-model");
const ADAPTER: HeaderName = HeaderName::from_static("x-ringmaster-adapter");
const KEY_ID: HeaderName = HeaderName::from_static("x-ringmaster-key-id");
const CLASS: HeaderName = HeaderName::from_static("x-ringmaster-class");
const PROMPT_TOKENS: HeaderName = HeaderName::from_static("x-ringmaster-prompt-tokens");
const MAX_TOKENS: HeaderName = HeaderName::from_static("x-ringmaster-max-tokens");
const PREFIX: HeaderName = HeaderName::from_static("x-ringmaster-prefix");
const PREFIX_BLOCKS: HeaderName = HeaderName::from_static("x-ringmaster-prefix-blocks");

/// Headers for dispatch that do not depend on a prompt.
pub fn identity_headers(key_id: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    set(&mut headers, KEY_ID, key_id);
    headers
}

fn set(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    // A name that cannot stand in a header is served without it: dispatch then reads the body.
    if let Ok(value) = HeaderValue::from_bytes(value.as_bytes()) {
        headers.insert(name, value);
    }
}

/// Read, check, count.
pub fn prepare(state: &State, route: Route, key_id: &str, body: Bytes) -> Result<Prepared, ApiError> {
    let limits = json::Limits {
        depth: state.config.limits.json_depth,
        values: state.config.limits.json_values,
        ..json::Limits::default()
    };
    let document = json::read(&body, limits)?;
    let request = &document.root;
    if !matches!(request, Value::Object(_)) {
        return Err(ApiError::invalid("invalid_type", None, "The body has to be a JSON object."));
    }
    let (name, model) = model_of(state, request)?;
    check_types(request)?;
    let files = model.files.as_deref();
    if let (Route::Detokenize, Some(files)) = (route, files) {
        return detokenize(files, request).map(Prepared::Answer);
    }
    let prompt = match (route, files) {
        (_, None) => Prompt::Unknown("no_tokenizer"),
        (Route::Chat, Some(files)) => chat_prompt(files, &model.config, request)?,
        (Route::Tokenize, Some(files)) if request.get("messages").is_some() => {
            chat_prompt(files, &model.config, request)?
        }
        (Route::Embeddings, Some(files)) => text_prompt(files, request, "input")?,
        (_, Some(files)) => text_prompt(files, request, "prompt")?,
    };
    if let (Route::Tokenize, Some(files), Prompt::Tokens { prompts, .. }) = (route, files, &prompt) {
        let ids = prompts.first().map(Vec::as_slice).unwrap_or_default();
        return Ok(Prepared::Answer(tokenize_answer(files, &model, request, ids)));
    }
    let generates = matches!(route, Route::Chat | Route::Completions);
    let mut headers = identity_headers(key_id);
    set(&mut headers, MODEL, &name);
    if name != model.config.name {
        set(&mut headers, ADAPTER, &name);
    }
    let max_tokens =
        ["max_completion_tokens", "max_tokens"].iter().find_map(|name| request.get(name).and_then(Value::as_integer));
    if let Some(max_tokens) = max_tokens.filter(|_max| generates) {
        headers.insert(MAX_TOKENS, max_tokens.into());
    }
    let mut forward = Forward { body, headers, choices: 0, prompt_tokens: None, uncounted: None, model };
    let mut prompt_count = 1;
    match &prompt {
        Prompt::Unknown(why) => forward.uncounted = Some(why),
        Prompt::Tokens { prompts, converted } => {
            let limit = forward.model.config.max_model_len;
            let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
            if longest + usize::from(generates) > limit {
                let param = if route == Route::Chat {
                    "messages"
                } else if route == Route::Embeddings {
                    "input"
                } else {
                    "prompt"
                };
                return Err(ApiError { param: Some(param), ..ApiError::prompt_too_long(longest, limit) });
            }
            prompt_count = prompts.len();
            let tokens = prompts.iter().map(Vec::len).sum();
            forward.prompt_tokens = Some(tokens);
            forward.headers.insert(PROMPT_TOKENS, tokens.into());
            if let Some(class) = class_of(&state.config.classes, tokens) {
                set(&mut forward.headers, CLASS, class);
            }
            if let Some(first) = prompts.first() {
                let salt = request.get("cache_salt").and_then(Value::as_str).unwrap_or_default();
                add_prefix(&mut forward.headers, state, &forward.model, [&name, salt], first);
            }
            // What an engine echoes it takes from ids it got; it has to get the text.
            let echoes = request.get("echo").and_then(Value::as_bool).unwrap_or(false);
            if route == Route::Completions && *converted && forward.model.config.completions_as_ids && !echoes {
                forward.body = with_ids(&forward.body, &document, prompts);
            }
        }
    }
    let n = request.get("n").and_then(Value::as_integer).and_then(|n| usize::try_from(n).ok()).unwrap_or(1);
    if generates && (forward.prompt_tokens.is_some() || route == Route::Chat) {
        forward.choices = n.saturating_mul(prompt_count);
    }
    Ok(Prepared::Forward(forward))
}

/// The model that serves a request, and the name it is asked for by. Without a name it is the only one, as with the engine itself.
fn model_of(state: &State, request: &Value) -> Result<(String, Arc<Model>), ApiError> {
    match request.get("model") {
        Some(Value::String(name)) => match state.model(name) {
            Some(model) => Ok((name.clone(), Arc::clone(model))),
            None => Err(ApiError::unknown_model(name)),
        },
        None | Some(Value::Null) => match state.only_model() {
            Some(model) => Ok((model.config.name.clone(), Arc::clone(model))),
            None => Err(ApiError::invalid("model_missing", Some("model"), "The body has to name a model in model.")),
        },
        Some(_) => Err(ApiError::invalid("invalid_type", Some("model"), "model has to be a string.")),
    }
}

/// Types of members that are read here. What else a body has is the engine's to judge.
fn check_types(request: &Value) -> Result<(), ApiError> {
    let wrong = |name: &'static str, expected: &str| {
        Err(ApiError::invalid("invalid_type", Some(name), format!("{name} has to be {expected}.")))
    };
    for name in ["stream", "echo", "add_generation_prompt", "continue_final_message", "add_special_tokens"] {
        if request.get(name).is_some_and(|value| !value.is_null() && value.as_bool().is_none()) {
            return wrong(name, "true or false");
        }
    }
    for name in ["max_tokens", "max_completion_tokens"] {
        if request.get(name).is_some_and(|value| !value.is_null() && value.as_integer().is_none_or(|number| number < 0))
        {
            return wrong(name, "an integer that is not negative");
        }
    }
    if request
        .get("n")
        .is_some_and(|value| !value.is_null() && value.as_integer().is_none_or(|number| !(1..=1024).contains(&number)))
    {
        return wrong("n", "an integer from 1 to 1024");
    }
    let truth = |name: &str| request.get(name).and_then(Value::as_bool);
    if truth("continue_final_message") == Some(true) && truth("add_generation_prompt") == Some(true) {
        let message = "continue_final_message and add_generation_prompt cannot both be true.";
        return Err(ApiError::invalid("invalid_value", Some("continue_final_message"), message));
    }
    Ok(())
}

fn class_of(classes: &[Class], tokens: usize) -> Option<&str> {
    let class = classes.iter().find(|class| class.prompt_tokens_max.is_none_or(|most| tokens <= most))?;
    Some(&class.name)
}

/// Hashes of the prompt's blocks, each over all tokens up to the end of its block, and over what else must be the same for an
/// engine to use the block again: model or adapter, and salt. The first 64 bits of SHA-256.
pub fn block_hashes(seed: [&str; 2], ids: &[u32], block_size: usize, most: usize) -> Vec<String> {
    let mut hash: [u8; 32] = Sha256::digest(seed.join("\0")).into();
    let blocks = ids.chunks_exact(block_size).take(most).map(|block| {
        let mut digest = Sha256::new();
        digest.update(hash);
        block.iter().for_each(|id| digest.update(id.to_le_bytes()));
        hash = digest.finalize().into();
        hexadecimal(&hash[..8])
    });
    blocks.collect()
}

fn add_prefix(headers: &mut HeaderMap, state: &State, model: &Model, seed: [&str; 2], ids: &[u32]) {
    let size = model.config.block_size;
    // The beginning that decides where a prompt goes: long enough to be worth keeping, short enough to be shared.
    let affinity = (state.config.affinity_tokens / size).max(1);
    let hashes = block_hashes(seed, ids, size, state.config.prefix_blocks.max(affinity));
    if let Some(hash) = hashes.iter().take(affinity).next_back() {
        set(headers, PREFIX, hash);
    }
    let told = hashes.len().min(state.config.prefix_blocks);
    if told > 0 {
        set(headers, PREFIX_BLOCKS, &hashes[..told].join(","));
    }
}

/// The body with ids in place of the prompt's text; all else stays byte for byte.
fn with_ids(body: &[u8], document: &Document, prompts: &[Vec<u32>]) -> Bytes {
    let Value::Object(members) = &document.root else {
        return Bytes::copy_from_slice(body);
    };
    let Some(index) = members.iter().position(|(name, _value)| name == "prompt") else {
        return Bytes::copy_from_slice(body);
    };
    let is_list = matches!(members[index].1, Value::Array(_));
    let span = &document.spans[index];
    let mut out = Vec::with_capacity(body.len() * 2);
    out.extend_from_slice(&body[..span.start]);
    let lists: Vec<String> = prompts.iter().map(|ids| numbers(ids)).collect();
    if is_list {
        out.push(b'[');
        out.extend_from_slice(lists.join(",").as_bytes());
        out.push(b']');
    } else {
        out.extend_from_slice(lists.concat().as_bytes());
    }
    out.extend_from_slice(&body[span.end..]);
    out.into()
}

fn numbers(ids: &[u32]) -> String {
    let numbers: Vec<String> = ids.iter().map(u32::to_string).collect();
    format!("[{}]", numbers.join(","))
}

fn tokenize_answer(files: &crate::model::Files, model: &Model, request: &Value, ids: &[u32]) -> String {
    let tokens = Value::Array(ids.iter().map(|id| Value::Integer(i64::from(*id))).collect());
    let texts = request.get("return_token_strs").and_then(Value::as_bool).unwrap_or(false).then(|| {
        let text = |id: &u32| files.tokenizer.token(*id).map_or(Value::Null, Value::String);
        Value::Array(ids.iter().map(text).collect())
    });
    json::to_compact(&Value::Object(vec![
        ("count".into(), Value::Integer(ids.len() as i64)),
        ("max_model_len".into(), Value::Integer(model.config.max_model_len as i64)),
        ("tokens".into(), tokens),
        ("token_strs".into(), texts.unwrap_or(Value::Null)),
    ]))
}

fn detokenize(files: &crate::model::Files, request: &Value) -> Result<String, ApiError> {
    let ids = request.get("tokens").and_then(Value::as_array).and_then(|tokens| {
        tokens.iter().map(|id| id.as_integer().and_then(|id| u32::try_from(id).ok())).collect::<Option<Vec<u32>>>()
    });
    let Some(ids) = ids else {
        return Err(ApiError::invalid("invalid_type", Some("tokens"), "tokens has to be an array of token ids."));
    };
    let prompt = files.tokenizer.decode(&ids).map_err(|_error| ApiError::internal())?;
    Ok(json::to_compact(&Value::Object(vec![("prompt".into(), Value::String(prompt))])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_of_blocks_are_chained() {
        let ids: Vec<u32> = (0..10).collect();
        let all = block_hashes(["m", ""], &ids, 4, 9);
        assert_eq!(all.len(), 2, "only whole blocks");
        assert_eq!(block_hashes(["m", ""], &ids[..4], 4, 9), all[..1]);
        assert_eq!(block_hashes(["m", ""], &ids, 4, 1), all[..1]);
        let mut other = ids.clone();
        other[0] = 99;
        assert!(block_hashes(["m", ""], &other, 4, 9).iter().zip(&all).all(|(left, right)| left != right));
        assert_ne!(block_hashes(["adapter", ""], &ids, 4, 9), all);
        assert_ne!(block_hashes(["m", "salt"], &ids, 4, 9), all);
        assert!(all.iter().all(|hash| hash.len() == 16));
    }

    #[test]
    fn the_prompt_alone_is_replaced() {
        for (body, prompts, expected) in [
            (r#"{"prompt" : "a", "x": 1.0}"#, vec![vec![1, 2]], r#"{"prompt" : [1,2], "x": 1.0}"#),
            (
                r#"{"n":{"prompt":"b"},"prompt":["a","b"]}"#,
                vec![vec![1], vec![]],
                r#"{"n":{"prompt":"b"},"prompt":[[1],[]]}"#,
            ),
        ] {
            let document = json::read(body.as_bytes(), json::Limits::default()).unwrap();
            assert_eq!(with_ids(body.as_bytes(), &document, &prompts), expected);
        }
    }

    #[test]
    fn classes_go_by_tokens() {
        let class = |name: &str, most| Class { name: name.into(), prompt_tokens_max: most };
        let classes = [class("fast", Some(10)), class("slow", None)];
        assert_eq!(class_of(&classes, 10), Some("fast"));
        assert_eq!(class_of(&classes, 11), Some("slow"));
        assert_eq!(class_of(&classes[..1], 11), None);
    }
}
