// SPDX-License-Identifier: GPL-3.0-or-later
//! All that is read from files, and how it is replaced while requests go on.
//!
//! A request keeps the state it began with. Files are looked at every second; when one has changed and was the same twice in
//! a row, a new state is built beside the old one. If that fails, the old one stays and the failure is logged.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use crate::config::{self, Config};
use crate::keys::Keys;
use crate::model::{Files, FILES};
use crate::words::{Action, List, Words};

pub struct Model {
    pub config: config::Model,
    pub files: Option<Arc<Files>>,
    /// `None` if no list holds for the model.
    pub words: Option<Arc<Words>>,
}

pub struct State {
    pub config: Config,
    pub keys: Keys,
    /// By name of model and adapter.
    models: HashMap<String, Arc<Model>>,
    stamp: Stamp,
    /// Of each model's directory.
    stamps: HashMap<PathBuf, Stamp>,
}

/// Inode, length and time of change of files; equal as long as nobody has changed one.
pub type Stamp = Vec<Option<(u64, u64, i64, i64)>>;

fn stamp_of<'path>(paths: impl Iterator<Item = &'path Path>) -> Stamp {
    let stamp = paths.map(|path| {
        let metadata = std::fs::metadata(path).ok()?;
        Some((metadata.ino(), metadata.len(), metadata.mtime(), metadata.mtime_nsec()))
    });
    stamp.collect()
}

fn files_of(directory: &Path) -> Vec<PathBuf> {
    FILES.iter().map(|name| directory.join(name)).collect()
}

fn all_files(path: &Path, config: &Config) -> Vec<PathBuf> {
    let mut files = vec![path.to_owned(), config.keys_file.clone()];
    files.extend(config.word_lists.iter().map(|list| list.file.clone()));
    files.extend(config.models.iter().filter_map(|model| model.directory.as_deref()).flat_map(files_of));
    files
}

fn read_text(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// One word a line; empty lines and lines that begin with `#` say nothing.
fn read_words(list: &config::WordList) -> Result<List, String> {
    let text = read_text(&list.file)?;
    let words = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    Ok(List {
        words: words.map(str::to_owned).collect(),
        folded: list.folded,
        action: list.replacement.clone().map_or(Action::Stop, Action::Replace),
    })
}

impl State {
    /// Read everything. Models whose files are as in `old` are taken over from there.
    pub fn load(path: &Path, old: Option<&State>) -> Result<Self, String> {
        let config = Config::read(path)?;
        // Before the files are read: what changes meanwhile is then seen as a change.
        let stamp = stamp_of(all_files(path, &config).iter().map(PathBuf::as_path));
        let keys_text = read_text(&config.keys_file)?;
        let keys = Keys::read(&keys_text).map_err(|error| format!("{}: {error}", config.keys_file.display()))?;
        let mut lists = HashMap::new();
        for list in &config.word_lists {
            lists.insert(list.name.as_str(), read_words(list)?);
        }
        let mut stamps = HashMap::new();
        for directory in config.models.iter().filter_map(|model| model.directory.clone()) {
            let stamp = stamp_of(files_of(&directory).iter().map(PathBuf::as_path));
            stamps.insert(directory, stamp);
        }
        let files = load_files(&config, &stamps, old)?;
        let mut models = HashMap::new();
        for (model, files) in config.models.iter().zip(files) {
            let lists = model.word_lists.iter().filter_map(|name| lists.get(name.as_str()));
            let words = Words::new(lists).map_err(|error| format!("word lists of {}: {error}", model.name))?;
            let loaded =
                Arc::new(Model { config: model.clone(), files, words: (!words.is_empty()).then(|| Arc::new(words)) });
            for name in model.adapters.iter().chain([&model.name]) {
                models.insert(name.clone(), Arc::clone(&loaded));
            }
        }
        Ok(State { config, keys, models, stamp, stamps })
    }

    pub fn model(&self, name: &str) -> Option<&Arc<Model>> {
        self.models.get(name)
    }

    /// The model of requests that name none: there has to be exactly one.
    pub fn only_model(&self) -> Option<&Arc<Model>> {
        match self.config.models.as_slice() {
            [model] => self.model(&model.name),
            _ => None,
        }
    }
}

/// Tokenizers are read at the same time, each in a thread of its own: readiness waits for the slowest only.
fn load_files(
    config: &Config,
    stamps: &HashMap<PathBuf, Stamp>,
    old: Option<&State>,
) -> Result<Vec<Option<Arc<Files>>>, String> {
    let unchanged = |model: &config::Model, directory: &Path| {
        let old = old.filter(|old| old.stamps.get(directory) == stamps.get(directory))?;
        let before = old.models.get(&model.name)?;
        let same = before.config.directory == model.directory && before.config.content_format == model.content_format;
        before.files.clone().filter(|_files| same)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = config
            .models
            .iter()
            .map(|model| {
                let directory = model.directory.as_deref()?;
                match unchanged(model, directory) {
                    Some(files) => Some(Err(files)),
                    None => Some(Ok(scope.spawn(move || Files::load(directory, model.content_format)))),
                }
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| match thread {
                None => Ok(None),
                Some(Err(files)) => Ok(Some(files)),
                Some(Ok(thread)) => match thread.join() {
                    Ok(loaded) => loaded.map(|files| Some(Arc::new(files))),
                    Err(_panic) => Err("a tokenizer cannot be read".to_owned()),
                },
            })
            .collect()
    })
}

/// The state in use.
pub struct Current {
    path: PathBuf,
    state: RwLock<Arc<State>>,
}

/// What a look at the files gave.
#[derive(Debug, PartialEq, Eq)]
pub enum Look {
    Same,
    Reloaded,
    Failed(String),
}

impl Current {
    pub fn new(path: &Path, state: State) -> Self {
        Current { path: path.to_owned(), state: RwLock::new(Arc::new(state)) }
    }

    pub fn get(&self) -> Arc<State> {
        Arc::clone(&self.state.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The files as they are now.
    pub fn stamp(&self) -> Stamp {
        stamp_of(all_files(&self.path, &self.get().config).iter().map(PathBuf::as_path))
    }

    /// Build a new state if files differ from the state's.
    pub fn reload(&self) -> Look {
        let old = self.get();
        if self.stamp() == old.stamp {
            return Look::Same;
        }
        match State::load(&self.path, Some(&old)) {
            Ok(state) => {
                *self.state.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(state);
                Look::Reloaded
            }
            Err(error) => Look::Failed(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENIZER: &str = r#"{"version":"1.0","added_tokens":[],"normalizer":null,"pre_tokenizer":null,"post_processor":null,
        "decoder":null,"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}}"#;

    fn site(name: &str) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("preprocessor-state-{name}-{}", std::process::id()));
        let _may_exist = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(directory.join("model")).unwrap();
        std::fs::write(directory.join("keys"), format!("{} a\n", "0".repeat(64))).unwrap();
        std::fs::write(directory.join("words"), "# list\n\n secret \n").unwrap();
        std::fs::write(directory.join("model/tokenizer.json"), TOKENIZER).unwrap();
        let path = directory.display();
        let config = format!(
            r#"{{"listen":"127.0.0.1:1","dispatch":["127.0.0.1:2"],"keys_file":"{path}/keys",
            "models":[{{"name":"m","adapters":["x"],"directory":"{path}/model","max_model_len":9,"word_lists":["w"]}}],
            "word_lists":[{{"name":"w","file":"{path}/words"}}]}}"#
        );
        std::fs::write(directory.join("config.json"), config).unwrap();
        directory
    }

    #[test]
    fn changed_files_are_taken_up_and_broken_ones_are_not() {
        let directory = site("reload");
        let config = directory.join("config.json");
        let current = Current::new(&config, State::load(&config, None).unwrap());
        let first = current.get();
        assert!(first.model("x").is_some_and(|model| model.words.is_some()) && first.only_model().is_some());
        assert_eq!(current.reload(), Look::Same);

        std::fs::write(directory.join("keys"), "").unwrap();
        assert_eq!(current.reload(), Look::Reloaded);
        let second = current.get();
        assert_eq!((first.keys.len(), second.keys.len()), (1, 0));
        let files = |state: &State| state.model("m").and_then(|model| model.files.clone()).unwrap();
        assert!(Arc::ptr_eq(&files(&first), &files(&second)), "the tokenizer did not change");

        std::fs::write(directory.join("model/tokenizer.json"), "{").unwrap();
        assert!(matches!(current.reload(), Look::Failed(error) if error.contains("tokenizer.json")));
        assert_eq!(files(&current.get()).tokenizer.encode("ab", true).unwrap(), [2]);

        std::fs::write(directory.join("model/tokenizer.json"), TOKENIZER.replace("2}", "7}")).unwrap();
        assert_eq!(current.reload(), Look::Reloaded);
        assert_eq!(files(&current.get()).tokenizer.encode("ab", true).unwrap(), [7]);
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn what_is_missing_is_named() {
        let directory = site("missing");
        for name in ["keys", "words", "model/tokenizer.json", "config.json"] {
            let path = directory.join(name);
            let kept = std::fs::read(&path).unwrap();
            std::fs::remove_file(&path).unwrap();
            let error = State::load(&directory.join("config.json"), None).err().unwrap();
            assert!(error.contains(name), "{error}");
            std::fs::write(&path, kept).unwrap();
        }
        std::fs::remove_dir_all(directory).unwrap();
    }
}
