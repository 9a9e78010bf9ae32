// SPDX-License-Identifier: GPL-3.0-or-later
//! A model's tokenizer, read from its directory as `transformers` reads it: `tokenizer.json`, with what `tokenizer_config.json`
//! changes about it.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use tokenizers::decoders::DecoderWrapper;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::models::unigram::Unigram;
use tokenizers::models::wordlevel::WordLevel;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::processors::PostProcessorWrapper;
use tokenizers::{AddedToken, Model, Token, TokenizerImpl};

use crate::bpe::{Bpe, ModelVisitor};
use crate::byte_level::{Added, ByteLevel};
use crate::json::{self, Value};

/// The models that a `tokenizer.json` can have.
pub enum AnyModel {
    Bpe(Box<Bpe>),
    Unigram(Box<Unigram>),
    WordLevel(WordLevel),
    WordPiece(WordPiece),
}

macro_rules! of_each {
    ($model:expr, $inner:ident => $answer:expr) => {
        match $model {
            AnyModel::Bpe($inner) => $answer,
            AnyModel::Unigram($inner) => $answer,
            AnyModel::WordLevel($inner) => $answer,
            AnyModel::WordPiece($inner) => $answer,
        }
    };
}

impl Model for AnyModel {
    type Trainer = BpeTrainer;

    fn tokenize(&self, sequence: &str) -> tokenizers::Result<Vec<Token>> {
        of_each!(self, model => model.tokenize(sequence))
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        of_each!(self, model => model.token_to_id(token))
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        of_each!(self, model => model.id_to_token(id))
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        of_each!(self, model => model.get_vocab())
    }

    fn get_vocab_size(&self) -> usize {
        of_each!(self, model => model.get_vocab_size())
    }

    fn save(&self, _folder: &Path, _prefix: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("this model is only read".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}

impl<'de> Deserialize<'de> for AnyModel {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(AnyModelVisitor)
    }
}

struct AnyModelVisitor;

impl<'de> Visitor<'de> for AnyModelVisitor {
    type Value = AnyModel;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a model")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<AnyModel, A::Error> {
        // Files name the type first, and then a BPE can be read without a copy in between.
        let mut members = serde_json::Map::new();
        while let Some(name) = map.next_key::<String>()? {
            let value: serde_json::Value = map.next_value()?;
            if members.is_empty() && name == "type" && value == "BPE" {
                return Ok(AnyModel::Bpe(Box::new(ModelVisitor.visit_map(map)?)));
            }
            members.insert(name, value);
        }
        let kind = match members.get("type").and_then(serde_json::Value::as_str) {
            Some(kind) => kind.to_owned(),
            // Files from before the type was written: told by what they have, as the reference does.
            None if members.contains_key("merges") => "BPE".to_owned(),
            None if members.contains_key("max_input_chars_per_word") => "WordPiece".to_owned(),
            None if members.get("vocab").is_some_and(serde_json::Value::is_array) => "Unigram".to_owned(),
            None => "WordLevel".to_owned(),
        };
        members.remove("type");
        let rest = serde_json::Value::Object(members);
        Ok(match kind.as_str() {
            "BPE" => AnyModel::Bpe(Box::new(Bpe::deserialize(rest).map_err(A::Error::custom)?)),
            "Unigram" => AnyModel::Unigram(Box::new(Unigram::deserialize(rest).map_err(A::Error::custom)?)),
            "WordLevel" => AnyModel::WordLevel(WordLevel::deserialize(rest).map_err(A::Error::custom)?),
            "WordPiece" => AnyModel::WordPiece(WordPiece::deserialize(rest).map_err(A::Error::custom)?),
            other => return Err(A::Error::custom(format!("models of type {other} are not known"))),
        })
    }
}

type Inner = TokenizerImpl<AnyModel, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// The names of `tokenizer_config.json` that a template may use, in the order of `transformers`.
const NAMED_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// See `byte_level`.
struct ShortWay {
    level: ByteLevel,
    before: Vec<u32>,
    after: Vec<u32>,
}

/// Turns text into ids and back.
pub struct Tokenizer {
    inner: Inner,
    cleans_up: bool,
    short_way: Option<ShortWay>,
    /// `bos_token` and the like, for the chat template.
    pub named_tokens: Vec<(String, String)>,
}

impl Tokenizer {
    /// Read the directory of a model. The configuration is `tokenizer_config.json`, or `Value::Null` where there is none.
    pub fn load(directory: &Path, configuration: &Value) -> Result<Self, String> {
        let path = directory.join("tokenizer.json");
        // As text: else each of its strings would be looked through by itself for what is no UTF-8.
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        Self::from_json(&text, configuration).map_err(|error| format!("{}: {error}", path.display()))
    }

    fn from_json(text: &str, configuration: &Value) -> Result<Self, String> {
        let mut inner: Inner = serde_json::from_str(text).map_err(|error| error.to_string())?;
        // Neither is used unless a call asks for it.
        inner.with_truncation(None).map_err(|error| error.to_string())?;
        inner.with_padding(None);
        let named_tokens = named_tokens(configuration);
        add_missing_tokens(&mut inner, configuration, &named_tokens)?;
        if configuration.get("add_bos_token").is_some() || configuration.get("add_eos_token").is_some() {
            set_sentence_tokens(&mut inner, configuration, &named_tokens)?;
        }
        let cleans_up = configuration.get("clean_up_tokenization_spaces").and_then(Value::as_bool).unwrap_or(false)
            && !matches!(inner.get_model(), AnyModel::Bpe(_));
        let mut tokenizer = Tokenizer { inner, cleans_up, short_way: None, named_tokens };
        tokenizer.short_way = tokenizer.find_short_way();
        Ok(tokenizer)
    }

    fn find_short_way(&self) -> Option<ShortWay> {
        let AnyModel::Bpe(bpe) = self.inner.get_model() else { return None };
        let as_value = |part: serde_json::Result<serde_json::Value>| part.ok();
        let normalizer = as_value(serde_json::to_value(self.inner.get_normalizer()))?;
        let pre_tokenizer = as_value(serde_json::to_value(self.inner.get_pre_tokenizer()))?;
        let mut plain = true;
        let mut added = Vec::new();
        for (id, token) in self.inner.get_added_tokens_decoder() {
            plain &= !(token.lstrip || token.rstrip || token.single_word);
            added.push(Added { content: token.content, id, normalized: token.normalized });
        }
        let level = ByteLevel::new(&normalizer, &pre_tokenizer, bpe, &added, plain)?;
        // What goes around a text is seen from one: the tokens before and after its own.
        let around = self.encode_in_full("a", true).ok()?;
        let own = self.encode_in_full("a", false).ok()?;
        let start = around.windows(own.len().max(1)).position(|window| window == own)?;
        let (before, rest) = around.split_at(start);
        Some(ShortWay { level, before: before.to_vec(), after: rest[own.len()..].to_vec() })
    }

    fn encode_in_full(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, String> {
        let encoding = self.inner.encode_fast(text, add_special_tokens).map_err(|error| error.to_string())?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The ids of a text, with the special tokens around it if asked for.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, String> {
        let (Some(short), AnyModel::Bpe(bpe)) = (&self.short_way, self.inner.get_model()) else {
            return self.encode_in_full(text, add_special_tokens);
        };
        let mut ids = Vec::with_capacity(text.len() / 3 + 8);
        ids.extend(short.before.iter().filter(|_id| add_special_tokens));
        short.level.encode(bpe, text, &mut ids);
        ids.extend(short.after.iter().filter(|_id| add_special_tokens));
        Ok(ids)
    }

    /// The text of ids, special tokens with it. Ids that do not exist have no text.
    pub fn decode(&self, ids: &[u32]) -> Result<String, String> {
        let text = self.inner.decode(ids, false).map_err(|error| error.to_string())?;
        Ok(if self.cleans_up { clean_up(&text) } else { text })
    }

    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }
}

/// A token of the configuration is a string or an object with its `content`.
fn token_content(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content").and_then(Value::as_str))
}

fn named_tokens(configuration: &Value) -> Vec<(String, String)> {
    let named = NAMED_TOKENS.iter().filter_map(|name| {
        let token = configuration.get(name).and_then(token_content)?;
        Some(((*name).to_owned(), token.to_owned()))
    });
    named.collect()
}

/// Add what the configuration names and `tokenizer.json` lacks, in the order of `transformers`.
fn add_missing_tokens(inner: &mut Inner, configuration: &Value, named: &[(String, String)]) -> Result<(), String> {
    let mut missing: Vec<AddedToken> = Vec::new();
    let known = |inner: &Inner, missing: &[AddedToken], content: &str| {
        inner.get_added_vocabulary().get_vocab().contains_key(content)
            || missing.iter().any(|token| token.content == content)
    };
    if let Some(Value::Object(decoder)) = configuration.get("added_tokens_decoder") {
        let mut decoder: Vec<(u64, &Value)> =
            decoder.iter().filter_map(|(id, token)| Some((id.parse().ok()?, token))).collect();
        decoder.sort_by_key(|(id, _token)| *id);
        for (_id, token) in decoder {
            let Some(content) = token_content(token) else {
                continue;
            };
            if !known(inner, &missing, content) {
                let flag = |name: &str| token.get(name).and_then(Value::as_bool);
                let special = flag("special").unwrap_or(false);
                missing.push(
                    AddedToken::from(content, special)
                        .single_word(flag("single_word").unwrap_or(false))
                        .lstrip(flag("lstrip").unwrap_or(false))
                        .rstrip(flag("rstrip").unwrap_or(false))
                        .normalized(flag("normalized").unwrap_or(!special)),
                );
            }
        }
    }
    let extra = ["extra_special_tokens", "additional_special_tokens"].iter().filter_map(|name| configuration.get(name));
    let extra = extra.flat_map(|tokens| match tokens {
        Value::Array(tokens) => tokens.iter().filter_map(token_content).collect::<Vec<_>>(),
        Value::Object(tokens) => tokens.iter().filter_map(|(_name, token)| token_content(token)).collect(),
        _ => Vec::new(),
    });
    for content in named.iter().map(|(_name, content)| content.as_str()).chain(extra) {
        if !known(inner, &missing, content) {
            missing.push(AddedToken::from(content, true));
        }
    }
    inner.add_tokens(missing).map_err(|error| error.to_string())?;
    Ok(())
}

/// `add_bos_token` and `add_eos_token` replace the file's post-processor.
fn set_sentence_tokens(inner: &mut Inner, configuration: &Value, named: &[(String, String)]) -> Result<(), String> {
    let wanted = |switch: &str, name: &str| -> Option<(String, u32)> {
        configuration.get(switch).and_then(Value::as_bool).filter(|wanted| *wanted)?;
        let (_name, token) = named.iter().find(|(named, _token)| named == name)?;
        Some((token.clone(), inner.token_to_id(token)?))
    };
    let begin = wanted("add_bos_token", "bos_token");
    let end = wanted("add_eos_token", "eos_token");
    let mut single: Vec<String> = Vec::new();
    single.extend(begin.iter().map(|(token, _id)| token.clone()));
    single.push("$A".into());
    single.extend(end.iter().map(|(token, _id)| token.clone()));
    let mut builder = TemplateProcessing::builder();
    builder.try_single(single)?;
    builder.special_tokens(begin.into_iter().chain(end).collect::<Vec<(String, u32)>>());
    let processor = builder.build().map_err(|error| error.to_string())?;
    inner.with_post_processor(Some(processor));
    Ok(())
}

/// What `transformers` does to decoded text of tokenizers of old.
fn clean_up(text: &str) -> String {
    text.replace(" .", ".")
        .replace(" ?", "?")
        .replace(" !", "!")
        .replace(" ,", ",")
        .replace(" ' ", "'")
        .replace(" n't", "n't")
        .replace(" 'm", "'m")
        .replace(" 's", "'s")
        .replace(" 've", "'ve")
        .replace(" 're", "'re")
}

/// Read a JSON file of the model's directory; `Value::Null` if it is not there.
pub fn read_optional(path: &Path) -> Result<Value, String> {
    let limits = json::Limits { number: 400, ..json::Limits::default() };
    match std::fs::read(path) {
        Ok(bytes) => json::read(&bytes, limits)
            .map(|document| document.root)
            .map_err(|refusal| format!("{}: {refusal}", path.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Value::Null),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}
