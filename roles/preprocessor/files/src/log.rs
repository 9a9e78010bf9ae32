// SPDX-License-Identifier: GPL-3.0-or-later
//! One line of JSON a fact, on standard output. A journal that does not keep up costs lines, never requests.

use std::io::Write;
use std::sync::mpsc::{sync_channel, SyncSender};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::json::{self, Value};
use crate::metrics::Metrics;

/// How long a line waits for others after the last write. To wake the thread that writes for each line alone costs a busy core a
/// fifth of its time; on a quiet one each line is written at once.
const GATHERED: Duration = Duration::from_millis(5);
/// Bytes that are written at once, but for the last line.
const BLOCK: usize = 65_536;

#[derive(Clone)]
pub struct Log {
    lines: SyncSender<String>,
    metrics: Arc<Metrics>,
}

/// A value of a line.
pub fn text(value: &str) -> Value {
    Value::String(value.to_owned())
}

impl Log {
    pub fn new(metrics: Arc<Metrics>) -> Self {
        let (lines, received) = sync_channel::<String>(4096);
        std::thread::spawn(move || {
            let mut output = std::io::stdout().lock();
            let mut written: Option<Instant> = None;
            while let Ok(line) = received.recv() {
                std::thread::sleep(GATHERED.saturating_sub(written.map_or(GATHERED, |at| at.elapsed())));
                // What has come until then goes out with one write.
                let mut block = line;
                while block.len() < BLOCK {
                    match received.try_recv() {
                        Ok(line) => block.push_str(&line),
                        Err(_) => break,
                    }
                }
                // Nobody to tell if standard output is gone.
                let _lost = output.write_all(block.as_bytes()).and_then(|()| output.flush());
                // After a full block more is waiting.
                written = Some(Instant::now()).filter(|_now| block.len() < BLOCK);
            }
        });
        Log { lines, metrics }
    }

    /// Write a line with the time, the event and its details.
    pub fn event(&self, event: &str, details: impl IntoIterator<Item = (&'static str, Value)>) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let time = (now.as_secs_f64() * 1000.0).round() / 1000.0;
        let mut members = vec![("time".to_owned(), Value::Float(time)), ("event".to_owned(), text(event))];
        members.extend(details.into_iter().map(|(name, value)| (name.to_owned(), value)));
        let mut line = json::to_compact(&Value::Object(members));
        line.push('\n');
        if self.lines.try_send(line).is_err() {
            self.metrics.log_lines_lost.add(1);
        }
    }
}
