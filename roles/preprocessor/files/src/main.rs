// SPDX-License-Identifier: GPL-3.0-or-later
//! The preprocessor: a streaming reverse proxy between the edge's public and dispatch frontends. It checks keys and requests,
//! counts their tokens and hashes their beginnings, and filters and compresses the answers.

#![forbid(unsafe_code)]

mod answer;
mod bpe;
mod byte_level;
mod compress;
mod config;
mod errors;
mod json;
mod keys;
mod log;
mod metrics;
mod model;
mod request;
mod selftest;
mod server;
mod sse;
mod state;
mod template;
mod tokenizer;
mod upstream;
mod words;

use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::signal::unix::{signal, SignalKind};
use tokio::sync::watch;

use crate::json::Value;
use crate::log::{text, Log};
use crate::metrics::Metrics;
use crate::server::{listen, Server, Side};
use crate::state::{Current, Look, State};
use crate::upstream::Gateways;

const USAGE: &str = "usage: ringmaster-preprocessor --config FILE            serve
       ringmaster-preprocessor --check FILE             read the configuration and all it names, and end
       ringmaster-preprocessor --selftest DIR [COUNT]   print the fingerprint of a model's tokenizer and chat template
       ringmaster-preprocessor --tokenize DIR           JSON strings in, one a line; arrays of token ids out
       ringmaster-preprocessor --version";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments.as_slice() {
        ["--config", path] => serve(Path::new(path)),
        ["--check", path] => State::load(Path::new(path), None).map(drop),
        ["--selftest", directory] => {
            selftest::run(Path::new(directory), selftest::TEXTS).map(|line| println!("{line}"))
        }
        ["--selftest", directory, count] => count
            .parse()
            .map_err(|_error| USAGE.to_owned())
            .and_then(|count| selftest::run(Path::new(directory), count))
            .map(|line| println!("{line}")),
        ["--tokenize", directory] => tokenize_lines(Path::new(directory)),
        ["--version"] => {
            println!("ringmaster-preprocessor {}", env!("CARGO_PKG_VERSION"));
            Ok(())
        }
        _ => Err(USAGE.to_owned()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Tokenise the lines of standard input, without special tokens.
fn tokenize_lines(directory: &Path) -> Result<(), String> {
    let files = model::Files::load(directory, None)?;
    let mut output = std::io::BufWriter::new(std::io::stdout().lock());
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|error| error.to_string())?;
        let document = json::read(line.as_bytes(), json::Limits::default()).map_err(|refusal| refusal.to_string())?;
        let ids = files.tokenizer.encode(document.root.as_str().ok_or("a line is no JSON string")?, false)?;
        let ids = Value::Array(ids.into_iter().map(|id| Value::Integer(i64::from(id))).collect());
        writeln!(output, "{}", json::to_compact(&ids)).map_err(|error| error.to_string())?;
    }
    output.flush().map_err(|error| error.to_string())
}

fn serve(path: &Path) -> Result<(), String> {
    let started = Instant::now();
    let state = State::load(path, None)?;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    if state.config.threads > 0 {
        runtime.worker_threads(state.config.threads);
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    runtime.max_blocking_threads(cores).enable_io().enable_time();
    let runtime = runtime.build().map_err(|error| format!("runtime: {error}"))?;
    let ended = runtime.block_on(run(path.to_owned(), state, started));
    // Requests that are cut now have their lines, too. The log's thread writes what it has; nothing else is left to do.
    drop(runtime);
    std::thread::sleep(Duration::from_millis(50));
    ended
}

async fn run(path: PathBuf, state: State, started: Instant) -> Result<(), String> {
    let metrics = Arc::new(Metrics::default());
    let log = Log::new(Arc::clone(&metrics));
    let limits = state.config.limits;
    let addresses = (state.config.listen, state.config.metrics_listen);
    let gateways = Gateways::new(&state.config.dispatch, limits.connect_time, limits.answer_time, Arc::clone(&metrics));
    metrics.keys.set(state.keys.len() as i64);
    let mut terminate = signal(SignalKind::terminate()).map_err(|error| error.to_string())?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(|error| error.to_string())?;
    let clients = listen(addresses.0).map_err(|error| format!("{}: {error}", addresses.0))?;
    let operators = match addresses.1 {
        Some(address) => Some(listen(address).map_err(|error| format!("{address}: {error}"))?),
        None => None,
    };
    let current = Current::new(&path, state);
    let server = Arc::new(Server::new(current, gateways, Arc::clone(&metrics), log.clone()));
    let (drain, drained) = watch::channel(false);
    let accepting = tokio::spawn(Arc::clone(&server).accept(clients, Side::Clients, drained.clone()));
    if let Some(operators) = operators {
        tokio::spawn(Arc::clone(&server).accept(operators, Side::Operators, drained));
    }
    tokio::spawn(watch_files(Arc::clone(&server)));
    log.event("ready", [("ms", Value::Float(started.elapsed().as_secs_f64() * 1000.0))]);
    notify("READY=1");
    std::future::poll_fn(|context| match (terminate.poll_recv(context), interrupt.poll_recv(context)) {
        (std::task::Poll::Pending, std::task::Poll::Pending) => std::task::Poll::Pending,
        _ => std::task::Poll::Ready(()),
    })
    .await;
    notify("STOPPING=1");
    log.event("draining", [("requests", Value::Integer(metrics.requests_open.get()))]);
    server.draining.store(true, Ordering::Relaxed);
    metrics.draining.set(1);
    // The edge has to see /healthz fail before connections are refused.
    tokio::time::sleep(limits.drain_notice_time).await;
    // Nobody listens only if all connections have ended.
    let _nobody = drain.send(true);
    let _ended = accepting.await;
    let until = Instant::now() + limits.drain_time;
    while metrics.connections.get() > 0 && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    log.event("stopped", [("connections", Value::Integer(metrics.connections.get()))]);
    Ok(())
}

/// Take up changed files: once they were the same at two looks in a row, so that none is read half written.
async fn watch_files(server: Arc<Server>) {
    let mut seen = server.current.stamp();
    let mut failed = None;
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        notify("WATCHDOG=1");
        let stamp = server.current.stamp();
        let is_settled = stamp == seen;
        seen = stamp;
        if !is_settled || failed.as_ref() == Some(&seen) {
            continue;
        }
        let server = Arc::clone(&server);
        let before = server.current.get();
        let looked = {
            let server = Arc::clone(&server);
            tokio::task::spawn_blocking(move || server.current.reload()).await
        };
        failed = None;
        match looked.unwrap_or_else(|panic| Look::Failed(panic.to_string())) {
            Look::Same => {}
            Look::Reloaded => {
                server.metrics.reloads.add(1);
                server.metrics.keys.set(server.current.get().keys.len() as i64);
                let needs_restart = server.current.get().config.needs_restart(&before.config);
                server.log.event("reloaded", [("needs_restart", Value::Bool(needs_restart))]);
            }
            Look::Failed(error) => {
                server.metrics.reload_failures.add(1);
                server.log.event("reload_failed", [("error", text(&error))]);
                failed = Some(seen.clone());
            }
        }
        server.metrics.last_reload_failed.set(i64::from(failed.is_some()));
    }
}

/// Tell the service manager (sd_notify(3)), if there is one.
fn notify(message: &str) {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    let name = name.into_encoded_bytes();
    let address = match name.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(Path::new(&*String::from_utf8_lossy(&name))),
    };
    // Who started the process decides whether it is heard.
    let _unheard = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(message.as_bytes(), &address));
}
