// SPDX-License-Identifier: GPL-3.0-or-later
//! Counters and times in Prometheus' text format.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// A monotonic number.
#[derive(Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that goes up and down.
#[derive(Default)]
pub struct Gauge(AtomicI64);

impl Gauge {
    pub fn add(&self, amount: i64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    pub fn set(&self, value: i64) {
        self.0.store(value, Ordering::Relaxed);
    }

    pub fn get(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

const BOUNDS: [f64; 10] = [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0];

/// Times in seconds.
#[derive(Default)]
pub struct Histogram {
    buckets: [AtomicU64; BOUNDS.len() + 1],
    microseconds: AtomicU64,
}

impl Histogram {
    pub fn observe(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS.len());
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.microseconds.fetch_add(time.as_micros() as u64, Ordering::Relaxed);
    }

    fn write(&self, name: &str, help: &str, out: &mut String) {
        header(name, "histogram", help, out);
        let mut total = 0;
        for (index, bucket) in self.buckets.iter().enumerate() {
            total += bucket.load(Ordering::Relaxed);
            let bound = BOUNDS.get(index).map_or_else(|| "+Inf".to_owned(), f64::to_string);
            let _infallible = writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {total}");
        }
        let seconds = self.microseconds.load(Ordering::Relaxed) as f64 / 1e6;
        let _infallible = writeln!(out, "{name}_sum {seconds}\n{name}_count {total}");
    }
}

#[derive(Default)]
pub struct Metrics {
    /// By path and status.
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
    pub connections: Gauge,
    pub requests_open: Gauge,
    pub held_bytes: Gauge,
    pub connections_refused: Counter,
    pub prompt_tokens: Counter,
    pub uncounted: Counter,
    pub words_found: Counter,
    pub answers_stopped: Counter,
    pub gateway_failures: Counter,
    pub reload_failures: Counter,
    pub reloads: Counter,
    pub log_lines_lost: Counter,
    pub last_reload_failed: Gauge,
    pub draining: Gauge,
    pub keys: Gauge,
    pub preparing: Histogram,
    pub first_byte: Histogram,
}

fn header(name: &str, kind: &str, help: &str, out: &mut String) {
    let _infallible = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

impl Metrics {
    pub fn request_ended(&self, path: &'static str, status: u16) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        *requests.entry((path, status)).or_insert(0) += 1;
    }

    /// All of it as text.
    pub fn to_text(&self) -> String {
        let mut out = String::with_capacity(4096);
        let name = "ringmaster_preprocessor_requests_total";
        header(name, "counter", "Requests that ended, by path and status.", &mut out);
        for ((path, status), count) in self.requests.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _infallible = writeln!(out, "{name}{{path=\"{path}\",status=\"{status}\"}} {count}");
        }
        for (name, counter, help) in [
            (
                "connections_refused_total",
                &self.connections_refused,
                "Connections closed at once because too many were open.",
            ),
            ("prompt_tokens_total", &self.prompt_tokens, "Tokens of prompts that were counted."),
            ("uncounted_total", &self.uncounted, "Prompts that could not be counted and went on without a count."),
            ("words_found_total", &self.words_found, "Words of the lists found in answers."),
            ("answers_stopped_total", &self.answers_stopped, "Choices ended because of a word."),
            ("gateway_failures_total", &self.gateway_failures, "Connections and requests that a gateway failed."),
            ("reloads_total", &self.reloads, "Changed files taken up."),
            ("reload_failures_total", &self.reload_failures, "Changed files that could not be taken up."),
            ("log_lines_lost_total", &self.log_lines_lost, "Log lines lost because the journal was too slow."),
        ] {
            let name = format!("ringmaster_preprocessor_{name}");
            header(&name, "counter", help, &mut out);
            let _infallible = writeln!(out, "{name} {}", counter.get());
        }
        for (name, gauge, help) in [
            ("connections", &self.connections, "Open connections of clients."),
            ("requests_open", &self.requests_open, "Requests that are being served."),
            ("held_bytes", &self.held_bytes, "Bytes of bodies that are held."),
            (
                "last_reload_failed",
                &self.last_reload_failed,
                "1 if files have changed and the old ones are still in use.",
            ),
            ("draining", &self.draining, "1 after SIGTERM."),
            ("keys", &self.keys, "API keys that are known."),
        ] {
            let name = format!("ringmaster_preprocessor_{name}");
            header(&name, "gauge", help, &mut out);
            let _infallible = writeln!(out, "{name} {}", gauge.get());
        }
        self.preparing.write(
            "ringmaster_preprocessor_preparing_seconds",
            "From a whole request to its being sent on: reading, rendering, tokenising.",
            &mut out,
        );
        self.first_byte.write(
            "ringmaster_preprocessor_first_byte_seconds",
            "From a whole request to the first byte of its answer.",
            &mut out,
        );
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_prometheus() {
        let metrics = Metrics::default();
        metrics.request_ended("/v1/models", 200);
        metrics.preparing.observe(Duration::from_micros(300));
        metrics.connections.add(3);
        let text = metrics.to_text();
        for line in [
            "ringmaster_preprocessor_requests_total{path=\"/v1/models\",status=\"200\"} 1",
            "ringmaster_preprocessor_preparing_seconds_bucket{le=\"0.00025\"} 0",
            "ringmaster_preprocessor_preparing_seconds_bucket{le=\"0.0005\"} 1",
            "ringmaster_preprocessor_preparing_seconds_bucket{le=\"+Inf\"} 1",
            "ringmaster_preprocessor_preparing_seconds_sum 0.0003",
            "ringmaster_preprocessor_connections 3",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
