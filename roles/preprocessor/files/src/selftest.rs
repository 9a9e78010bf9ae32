// SPDX-License-Identifier: GPL-3.0-or-later
//! A fingerprint of what a model's files do to texts and conversations.
//!
//! `fingerprint.py` makes the same texts and conversations and has `transformers` tokenise and render them. Equal fingerprints mean
//! equal token ids for all of them.

use std::path::Path;

use sha2::{Digest, Sha256};

use crate::json::{self, Value};
use crate::keys::hexadecimal;
use crate::model::{chat_prompt, Files, Prompt};

/// Texts that are made unless another number is asked for.
pub const TEXTS: usize = 2000;

/// Pieces that texts are put together from.
const PIECES: [&str; 64] = [
    "Hello",
    "world",
    " the",
    " quick",
    " brown fox",
    "ing",
    "'s",
    "'LL",
    "n't",
    "I'm",
    " 3.14159",
    "1234567890",
    "007",
    " -1",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    " ",
    "  ",
    "   ",
    "\u{a0}",
    "\u{3000}",
    "\u{200b}",
    "\u{feff}",
    ".",
    "...",
    "!?",
    ", ",
    " (",
    ")",
    "{\"a\": [1, 2]}",
    "def f(x):\n    return x",
    "https://example.org/a?b=c&d",
    "user@example.org",
    "_",
    "__init__",
    "camelCase",
    "SHOUT",
    "ÀÉÎõü",
    "e\u{301}",
    "ﬁ",
    "Straße",
    "ΑΒΓ αβγ",
    "Привет",
    " мир",
    "שלום",
    "مرحبا",
    "नमस्ते",
    "ไทย",
    "你好",
    "世界",
    "。",
    "，",
    "東京",
    "カタカナ",
    "ひらがな",
    "한국어",
    "😀",
    "👩‍👩‍👧‍👦",
    "🇩🇪",
    "\u{1f3fd}",
    "\u{0}",
    "\u{fffd}",
];

/// Conversations that every chat template should take.
const CONVERSATIONS: [&str; 5] = [
    r#"[{"role":"user","content":"Hello"}]"#,
    r#"[{"role":"system","content":"Be brief."},{"role":"user","content":" What is 2+2?\n"}]"#,
    r#"[{"role":"user","content":"你好"},{"role":"assistant","content":"Hi! 😀"},{"role":"user","content":"<b>&amp;</b> 'quoted' \"double\""}]"#,
    r#"[{"role":"user","content":[{"type":"text","text":"one"},{"type":"text","text":"two"}]}]"#,
    r#"[{"role":"user","content":""},{"role":"assistant","content":"  spaces  "},{"role":"user","content":"line\r\nline"}]"#,
];

/// xorshift64*, so that both sides draw the same pieces.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % bound
    }
}

/// The texts of a self-test, always the same. `tokens` are named tokens of the model, which texts may contain, too.
pub fn texts(count: usize, tokens: &[String]) -> impl Iterator<Item = String> + '_ {
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    (0..count).map(move |_index| {
        let mut text = String::new();
        for _piece in 0..random.below(24) {
            match random.below(16) {
                // A character of the first 64 Ki; surrogates stand for one that is not.
                0 => text.push(char::from_u32(random.below(0x10000) as u32).unwrap_or('\u{fffd}')),
                1 => text.push(char::from_u32(0x20 + random.below(0x5f) as u32).unwrap_or(' ')),
                2 if !tokens.is_empty() => text.push_str(&tokens[random.below(tokens.len() as u64) as usize]),
                _ => text.push_str(PIECES[random.below(PIECES.len() as u64) as usize]),
            }
        }
        text
    })
}

/// The fingerprints of a directory as one JSON object.
pub fn run(directory: &Path, count: usize) -> Result<String, String> {
    let files = Files::load(directory, None)?;
    let named: Vec<String> = files.tokenizer.named_tokens.iter().map(|(_name, token)| token.clone()).collect();
    let mut digest = Sha256::new();
    let mut total = 0;
    for text in texts(count, &named) {
        for add_special_tokens in [true, false] {
            let ids = files.tokenizer.encode(&text, add_special_tokens)?;
            total += ids.len();
            update(&mut digest, &ids);
        }
    }
    let tokenizer = hexadecimal(&digest.finalize());
    let template = if files.template.is_some() { Value::String(conversations(&files)) } else { Value::Null };
    Ok(json::to_compact(&Value::Object(vec![
        ("texts".into(), Value::Integer(count as i64)),
        ("tokens".into(), Value::Integer(total as i64)),
        ("tokenizer".into(), Value::String(tokenizer)),
        ("chat_template".into(), template),
    ])))
}

/// Ids with their number in front, little-endian.
fn update(digest: &mut Sha256, ids: &[u32]) {
    digest.update((ids.len() as u32).to_le_bytes());
    ids.iter().for_each(|id| digest.update(id.to_le_bytes()));
}

fn conversations(files: &Files) -> String {
    let model = crate::config::Model {
        name: String::new(),
        adapters: Vec::new(),
        directory: None,
        max_model_len: usize::MAX,
        block_size: 1,
        completions_as_ids: false,
        content_format: None,
        template_variables: Vec::new(),
        word_lists: Vec::new(),
    };
    let mut digest = Sha256::new();
    for messages in CONVERSATIONS {
        let request = format!(r#"{{"messages":{messages}}}"#);
        let ids = json::read(request.as_bytes(), json::Limits::default())
            .ok()
            .and_then(|document| chat_prompt(files, &model, &document.root).ok());
        match ids {
            Some(Prompt::Tokens { prompts, .. }) => prompts.iter().for_each(|ids| update(&mut digest, ids)),
            // A template may refuse a conversation; both sides have to agree on that, too.
            _ => digest.update(u32::MAX.to_le_bytes()),
        }
    }
    hexadecimal(&digest.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_always_the_same() {
        let tokens = vec!["<s>".to_owned()];
        let digest =
            texts(500, &tokens).fold(Sha256::new(), |digest, text| digest.chain_update(text).chain_update("\n"));
        assert_eq!(hexadecimal(&digest.finalize())[..16], *"f62db11afec7afd9");
    }
}
