// SPDX-License-Identifier: GPL-3.0-or-later
//! The proxy: connections, requests, answers.

use std::convert::Infallible;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, SocketAddr};
use std::pin::{pin, Pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{
    HeaderMap, HeaderName, HeaderValue, ACCEPT_ENCODING, ALLOW, AUTHORIZATION, CACHE_CONTROL, CONNECTION,
    CONTENT_ENCODING, CONTENT_TYPE, RETRY_AFTER, VARY, WWW_AUTHENTICATE,
};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{watch, Semaphore};
use tokio::time::Sleep;

use crate::answer::{filter_whole, Findings, StreamFilter};
use crate::compress::{Coding, Encoder};
use crate::errors::ApiError;
use crate::json::Value;
use crate::log::{text, Log};
use crate::metrics::Metrics;
use crate::request::{identity_headers, prepare, Forward, Prepared, Route};
use crate::state::{Current, State};
use crate::upstream::{set_options, Failure, Gateways, Lease};
use crate::words::Words;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Headers of a request that dispatch gets; all others end here.
const PASSED_ON: [HeaderName; 3] =
    [REQUEST_ID, HeaderName::from_static("traceparent"), HeaderName::from_static("tracestate")];
/// Headers of an answer that the client gets.
const PASSED_BACK: [HeaderName; 5] = [CONTENT_TYPE, RETRY_AFTER, REQUEST_ID, CACHE_CONTROL, ALLOW];
/// Bodies from this size on are read and tokenised away from the threads that serve connections.
const LARGE: usize = 32_768;
/// Smaller answers gain nothing from compression.
const WORTH_COMPRESSING: usize = 256;

pub struct Server {
    pub current: Current,
    pub gateways: Gateways,
    pub metrics: Arc<Metrics>,
    pub log: Log,
    pub draining: AtomicBool,
    request_count: AtomicU64,
    /// Keys of the hash that makes request ids.
    id_hasher: RandomState,
}

/// Which paths a listener has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Clients,
    Operators,
}

impl Server {
    pub fn new(current: Current, gateways: Gateways, metrics: Arc<Metrics>, log: Log) -> Self {
        Server {
            current,
            gateways,
            metrics,
            log,
            draining: AtomicBool::new(false),
            request_count: AtomicU64::new(0),
            id_hasher: RandomState::new(),
        }
    }

    /// Take connections until the drain signal, and serve those that are open to their end.
    pub async fn accept(self: Arc<Self>, listener: TcpListener, side: Side, mut drain: watch::Receiver<bool>) {
        let limits = self.current.get().config.limits;
        let places = Arc::new(Semaphore::new(limits.connections));
        loop {
            let accepted = {
                let mut accept = pin!(listener.accept());
                let mut stop = pin!(drain.wait_for(|drained| *drained));
                std::future::poll_fn(|context| {
                    if stop.as_mut().poll(context).is_ready() {
                        return Poll::Ready(None);
                    }
                    accept.as_mut().poll(context).map(Some)
                })
                .await
            };
            match accepted {
                None => return,
                Some(Ok((stream, peer))) => match Arc::clone(&places).try_acquire_owned() {
                    Ok(place) => {
                        let server = Arc::clone(&self);
                        let drain = drain.clone();
                        tokio::spawn(async move {
                            server.metrics.connections.add(1);
                            server.serve_connection(stream, peer.ip().to_canonical(), side, drain).await;
                            server.metrics.connections.add(-1);
                            drop(place);
                        });
                    }
                    Err(_full) => self.metrics.connections_refused.add(1),
                },
                // Out of descriptors, mostly: others have to end first.
                Some(Err(_error)) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }

    async fn serve_connection(
        self: &Arc<Self>,
        stream: TcpStream,
        peer: IpAddr,
        side: Side,
        mut drain: watch::Receiver<bool>,
    ) {
        set_options(&stream);
        let limits = self.current.get().config.limits;
        let service = service_fn(|request| {
            let server = Arc::clone(self);
            async move { Ok::<_, Infallible>(server.handle(request, side, peer).await) }
        });
        let connection = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.header_time)
            .max_headers(limits.header_count)
            .max_buf_size(limits.header_bytes)
            .serve_connection(TokioIo::new(Guarded::new(stream, limits.stall_time)), service);
        let mut connection = pin!(connection);
        let mut drained = pin!(drain.wait_for(|drained| *drained));
        let mut is_told = false;
        // How a connection ends is the client's business.
        let _end = std::future::poll_fn(|context| {
            if !is_told && drained.as_mut().poll(context).is_ready() {
                is_told = true;
                connection.as_mut().graceful_shutdown();
            }
            connection.as_mut().poll(context)
        })
        .await;
    }

    async fn handle(self: Arc<Self>, request: Request<Incoming>, side: Side, peer: IpAddr) -> Response<Answer> {
        let started = Instant::now();
        let route = Route::of(request.uri().path()).filter(|route| match side {
            Side::Clients => *route != Route::Metrics,
            Side::Operators => matches!(route, Route::Health | Route::Metrics),
        });
        let Some(route) = route else {
            self.metrics.request_ended("other", 404);
            return self.refusal(&ApiError::unknown_path());
        };
        match route {
            Route::Health if request.method() == Method::GET => return self.health(),
            Route::Metrics if request.method() == Method::GET => return plain(StatusCode::OK, self.metrics.to_text()),
            _ => {}
        }
        let mut record = Record::new(Arc::clone(&self), route, peer, started);
        let outcome = self.serve(request, route, &mut record).await;
        let mut response = match outcome {
            Ok(response) => response,
            Err(error) => self.refusal(&error),
        };
        record.status = response.status().as_u16();
        if let Ok(id) = HeaderValue::from_str(&record.request_id) {
            response.headers_mut().insert(REQUEST_ID, id);
        }
        if self.draining.load(Ordering::Relaxed) {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        match response.body_mut() {
            Answer::Whole(body) => record.bytes_out = body.as_ref().map_or(0, |body| body.len() as u64),
            Answer::Stream(stream) => {
                // Until its end was passed on: the client may leave, or the time of a drain be over.
                record.is_cut = true;
                stream.record = Some(record);
            }
        }
        response
    }

    fn health(&self) -> Response<Answer> {
        if self.draining.load(Ordering::Relaxed) {
            plain(StatusCode::SERVICE_UNAVAILABLE, "draining\n".into())
        } else {
            plain(StatusCode::OK, "ok\n".into())
        }
    }

    fn refusal(&self, error: &ApiError) -> Response<Answer> {
        let mut response = whole(error.status, "application/json", error.to_json().into());
        let headers = response.headers_mut();
        if let Some(seconds) = error.retry_after {
            headers.insert(RETRY_AFTER, seconds.into());
        }
        if let Some(allow) = error.allow {
            headers.insert(ALLOW, HeaderValue::from_static(allow));
        }
        if error.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if error.closes {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }

    fn new_request_id(&self) -> String {
        let count = self.request_count.fetch_add(1, Ordering::Relaxed);
        format!("{:016x}{:016x}", self.id_hasher.hash_one(count), self.id_hasher.hash_one((count, "id")))
    }

    async fn serve(
        &self,
        request: Request<Incoming>,
        route: Route,
        record: &mut Record,
    ) -> Result<Response<Answer>, ApiError> {
        let state = self.current.get();
        record.request_id = match single(request.headers(), &REQUEST_ID)? {
            Some(id) if is_request_id(id) => id.to_owned(),
            _ => self.new_request_id(),
        };
        if request.method().as_str() != route.method() {
            return Err(ApiError::method(route.method()));
        }
        let key_id = key_id(&state, request.headers())?;
        record.key_id = key_id.to_owned();
        let coding = request.headers().get(ACCEPT_ENCODING).and_then(|accept| Coding::choose(accept.to_str().ok()?));
        let mut passed_on = HeaderMap::new();
        for name in &PASSED_ON {
            if let Some(value) = single(request.headers(), name)? {
                passed_on.insert(name, HeaderValue::from_str(value).map_err(|_error| invalid_header(name))?);
            }
        }
        if let Ok(id) = HeaderValue::from_str(&record.request_id) {
            passed_on.insert(REQUEST_ID, id);
        }
        if route == Route::Models {
            passed_on.extend(identity_headers(key_id));
            return self.forward(&state, Method::GET, route, passed_on, &Bytes::new(), None, 0, coding, record).await;
        }
        check_media_type(request.headers())?;
        let (body, held) = self.read_body(request.into_body(), &state).await?;
        record.arrived = Instant::now();
        record.bytes_in = body.len();
        let prepared = if body.len() < LARGE {
            prepare(&state, route, key_id, body)?
        } else {
            let (state, key_id) = (Arc::clone(&state), key_id.to_owned());
            let prepared = tokio::task::spawn_blocking(move || prepare(&state, route, &key_id, body)).await;
            prepared.map_err(|_panic| ApiError::internal())??
        };
        self.metrics.preparing.observe(record.arrived.elapsed());
        match prepared {
            Prepared::Answer(answer) => Ok(self.answer(StatusCode::OK, "application/json", answer.into(), coding)),
            Prepared::Forward(forward) => {
                let Forward { body, headers, model, choices, prompt_tokens, uncounted } = forward;
                record.model = model.config.name.clone();
                record.prompt_tokens = prompt_tokens;
                record.uncounted = uncounted;
                self.metrics.prompt_tokens.add(prompt_tokens.unwrap_or(0) as u64);
                self.metrics.uncounted.add(u64::from(uncounted.is_some()));
                passed_on.extend(headers);
                passed_on.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
                let words = model.words.clone();
                let answer =
                    self.forward(&state, Method::POST, route, passed_on, &body, words, choices, coding, record).await;
                drop(held);
                answer
            }
        }
    }

    #[allow(clippy::too_many_arguments, reason = "what a request and its answer need, and nowhere else together")]
    async fn forward(
        &self,
        state: &State,
        method: Method,
        route: Route,
        headers: HeaderMap,
        body: &Bytes,
        words: Option<Arc<Words>>,
        choices: usize,
        coding: Option<Coding>,
        record: &mut Record,
    ) -> Result<Response<Answer>, ApiError> {
        let sent = self.gateways.send(&method, route.path(), &headers, body, record.peer).await;
        let (response, lease) = sent.map_err(|failure| match failure {
            Failure::Unreachable => ApiError::no_gateway(),
            Failure::Broken => ApiError::gateway_failed(),
            Failure::Late => ApiError::gateway_late(),
        })?;
        record.first_byte = Some(Instant::now());
        self.metrics.first_byte.observe(record.arrived.elapsed());
        let (head, incoming) = response.into_parts();
        let kind = head.headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        let is_json = kind.starts_with("application/json");
        let is_stream = kind.starts_with("text/event-stream");
        let mut answer = if is_json {
            let limits = &state.config.limits;
            let (body, at_end) = read_answer(incoming, limits.answer_bytes, limits.answer_time).await?;
            if at_end {
                lease.give_back();
            }
            let body = self.whole_answer(body, words.as_deref())?;
            self.answer(head.status, "application/json", body, coding)
        } else if is_stream || words.is_none() {
            let filter = words.map(|words| StreamFilter::new(words, choices));
            let coding = coding.filter(|_coding| is_stream);
            let encoder = coding.map(Encoder::new).transpose().map_err(|_error| ApiError::internal())?;
            let stream = Stream::new(
                incoming,
                lease,
                filter,
                encoder,
                Arc::clone(&self.metrics),
                state.config.limits.answer_time,
            );
            let mut answer = Response::new(Answer::Stream(Box::new(stream)));
            *answer.status_mut() = head.status;
            if let Some(coding) = coding {
                answer.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static(coding.name()));
            }
            if is_stream {
                answer.headers_mut().insert(VARY, HeaderValue::from_static("Accept-Encoding"));
            }
            answer
        } else {
            return Err(ApiError::answer_unreadable());
        };
        for name in &PASSED_BACK {
            if let Some(value) = head.headers.get(name) {
                answer.headers_mut().insert(name, value.clone());
            }
        }
        Ok(answer)
    }

    fn whole_answer(&self, body: Bytes, words: Option<&Words>) -> Result<Bytes, ApiError> {
        match filter_whole(&body, words) {
            Ok((answer, findings)) => {
                self.found(findings);
                Ok(answer.into())
            }
            // Nothing is promised about an answer without lists; it goes as it is.
            Err(_unreadable) if words.is_none() => Ok(body),
            Err(_unreadable) => Err(ApiError::answer_unreadable()),
        }
    }

    fn found(&self, findings: Findings) {
        self.metrics.words_found.add(findings.words);
        self.metrics.answers_stopped.add(findings.stopped);
    }

    /// An answer that is there as a whole, compressed if that is wanted and worth it.
    fn answer(&self, status: StatusCode, kind: &'static str, body: Bytes, coding: Option<Coding>) -> Response<Answer> {
        let coding = coding.filter(|_coding| body.len() >= WORTH_COMPRESSING);
        let compressed = coding.and_then(|coding| {
            let encoder = Encoder::new(coding).ok()?;
            Some((coding, encoder.finish(&body).ok()?))
        });
        let mut response = match compressed {
            Some((coding, bytes)) => {
                let mut response = whole(status, kind, bytes.into());
                response.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static(coding.name()));
                response
            }
            None => whole(status, kind, body),
        };
        response.headers_mut().insert(VARY, HeaderValue::from_static("Accept-Encoding"));
        response
    }

    async fn read_body(&self, mut incoming: Incoming, state: &State) -> Result<(Bytes, Held), ApiError> {
        let limits = &state.config.limits;
        let most = limits.body_bytes;
        if incoming.size_hint().lower() > most as u64 {
            return Err(ApiError::body_too_large(most));
        }
        let mut held = Held { metrics: Arc::clone(&self.metrics), bytes: 0 };
        let mut body: Vec<u8> = Vec::new();
        let read = async {
            while let Some(frame) = incoming.frame().await {
                let frame = frame.map_err(|_error| ApiError {
                    closes: true,
                    ..ApiError::invalid("invalid_body", None, "The body is not complete or not valid HTTP.")
                })?;
                let Some(data) = frame.data_ref() else {
                    continue;
                };
                if body.len() + data.len() > most {
                    return Err(ApiError::body_too_large(most));
                }
                held.add(data.len(), limits.held_bytes)?;
                body.extend_from_slice(data);
            }
            Ok(())
        };
        tokio::time::timeout(limits.body_time, read).await.map_err(|_elapsed| ApiError::too_slow())??;
        Ok((body.into(), held))
    }
}

/// Bytes of a body that count against the common limit as long as it is held.
struct Held {
    metrics: Arc<Metrics>,
    bytes: usize,
}

impl Held {
    fn add(&mut self, bytes: usize, most: usize) -> Result<(), ApiError> {
        self.metrics.held_bytes.add(bytes as i64);
        self.bytes += bytes;
        if self.metrics.held_bytes.get() > most as i64 {
            return Err(ApiError::overloaded());
        }
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.metrics.held_bytes.add(-(self.bytes as i64));
    }
}

/// Read an answer. The flag says whether its end was seen, so that the connection can be used again.
async fn read_answer(mut incoming: Incoming, most: usize, time: Duration) -> Result<(Bytes, bool), ApiError> {
    let mut body: Vec<u8> = Vec::new();
    let read = async {
        while let Some(frame) = incoming.frame().await {
            let frame = frame.map_err(|_error| ApiError::gateway_failed())?;
            if let Some(data) = frame.data_ref() {
                if body.len() + data.len() > most {
                    return Err(ApiError::answer_unreadable());
                }
                body.extend_from_slice(data);
            }
        }
        Ok(())
    };
    tokio::time::timeout(time, read).await.map_err(|_elapsed| ApiError::gateway_late())??;
    Ok((body.into(), true))
}

fn invalid_header(name: &HeaderName) -> ApiError {
    ApiError::invalid(
        "invalid_header",
        None,
        format!("The header {name} is there twice or has characters that it may not have."),
    )
}

/// A header that may be there once, in visible ASCII.
fn single<'headers>(headers: &'headers HeaderMap, name: &HeaderName) -> Result<Option<&'headers str>, ApiError> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => value.to_str().map(Some).map_err(|_error| invalid_header(name)),
        (Some(_), Some(_)) => Err(invalid_header(name)),
    }
}

fn is_request_id(id: &str) -> bool {
    (1..=64).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

fn key_id<'state>(state: &'state State, headers: &HeaderMap) -> Result<&'state str, ApiError> {
    // Of two keys nobody can say which one counts.
    let header =
        single(headers, &AUTHORIZATION).map_err(|_twice| ApiError::key_wrong())?.ok_or_else(ApiError::key_missing)?;
    let (scheme, key) = header.split_once(' ').ok_or_else(ApiError::key_missing)?;
    if !scheme.eq_ignore_ascii_case("bearer") {
        return Err(ApiError::key_missing());
    }
    state.keys.identity(key.trim().as_bytes()).ok_or_else(ApiError::key_wrong)
}

fn check_media_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let kind = single(headers, &CONTENT_TYPE)?.unwrap_or_default();
    let mut parts = kind.split(';').map(str::trim);
    let is_json = parts.next().is_some_and(|kind| kind.eq_ignore_ascii_case("application/json"));
    let is_utf8 = parts.all(|parameter| match parameter.split_once('=') {
        Some((name, value)) if name.eq_ignore_ascii_case("charset") => {
            value.trim_matches('"').eq_ignore_ascii_case("utf-8")
        }
        _ => true,
    });
    let is_plain = single(headers, &CONTENT_ENCODING)?.is_none_or(|coding| coding.eq_ignore_ascii_case("identity"));
    if is_json && is_utf8 && is_plain {
        Ok(())
    } else {
        Err(ApiError::media_type())
    }
}

fn whole(status: StatusCode, kind: &'static str, body: Bytes) -> Response<Answer> {
    let mut response = Response::new(Answer::Whole(Some(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

fn plain(status: StatusCode, body: String) -> Response<Answer> {
    whole(status, "text/plain; version=0.0.4; charset=utf-8", body.into())
}

/// What is known of a request, counted and logged when its answer has ended, however it ended.
struct Record {
    server: Arc<Server>,
    route: Route,
    /// Who asked: a gateway, as a rule.
    peer: IpAddr,
    started: Instant,
    /// When the whole request was there.
    arrived: Instant,
    first_byte: Option<Instant>,
    request_id: String,
    key_id: String,
    model: String,
    status: u16,
    prompt_tokens: Option<usize>,
    uncounted: Option<&'static str>,
    bytes_in: usize,
    bytes_out: u64,
    is_cut: bool,
}

impl Record {
    fn new(server: Arc<Server>, route: Route, peer: IpAddr, started: Instant) -> Self {
        server.metrics.requests_open.add(1);
        Record {
            server,
            route,
            peer,
            started,
            arrived: started,
            first_byte: None,
            request_id: String::new(),
            key_id: String::new(),
            model: String::new(),
            // Until there is one: the client left.
            status: 499,
            prompt_tokens: None,
            uncounted: None,
            bytes_in: 0,
            bytes_out: 0,
            is_cut: false,
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let server = &self.server;
        server.metrics.requests_open.add(-1);
        server.metrics.request_ended(self.route.path(), self.status);
        if !server.current.get().config.log_requests {
            return;
        }
        let milliseconds = |time: Duration| Value::Float((time.as_secs_f64() * 1e5).round() / 100.0);
        let number = |number: u64| Value::Integer(number as i64);
        server.log.event(
            "request",
            [
                ("request_id", text(&self.request_id)),
                ("key_id", text(&self.key_id)),
                ("path", text(self.route.path())),
                ("model", text(&self.model)),
                ("status", number(u64::from(self.status))),
                ("prompt_tokens", self.prompt_tokens.map_or(Value::Null, |tokens| number(tokens as u64))),
                ("uncounted", self.uncounted.map_or(Value::Null, text)),
                ("bytes_in", number(self.bytes_in as u64)),
                ("bytes_out", number(self.bytes_out)),
                ("complete", Value::Bool(!self.is_cut)),
                ("ms_first_byte", self.first_byte.map_or(Value::Null, |at| milliseconds(at - self.started))),
                ("ms_total", milliseconds(self.started.elapsed())),
            ],
        );
    }
}

/// The body of an answer.
pub enum Answer {
    Whole(Option<Bytes>),
    Stream(Box<Stream>),
}

/// An answer that comes in pieces.
pub struct Stream {
    incoming: Option<Incoming>,
    lease: Option<Lease>,
    filter: Option<StreamFilter>,
    encoder: Option<Encoder>,
    record: Option<Record>,
    metrics: Arc<Metrics>,
    /// Ends an answer of which nothing more comes. It is set anew when it has run down, not with each piece.
    silence: Pin<Box<Sleep>>,
    heard: Instant,
    answer_time: Duration,
}

type StreamError = std::io::Error;

impl Stream {
    fn new(
        incoming: Incoming,
        lease: Lease,
        filter: Option<StreamFilter>,
        encoder: Option<Encoder>,
        metrics: Arc<Metrics>,
        answer_time: Duration,
    ) -> Self {
        Stream {
            incoming: Some(incoming),
            lease: Some(lease),
            filter,
            encoder,
            record: None,
            metrics,
            silence: Box::pin(tokio::time::sleep(answer_time)),
            heard: Instant::now(),
            answer_time,
        }
    }

    /// The next bytes for the client; `None` at the end.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, StreamError>>> {
        loop {
            let Some(incoming) = &mut self.incoming else {
                return Poll::Ready(None);
            };
            let frame = match Pin::new(incoming).poll_frame(context) {
                Poll::Ready(frame) => frame,
                Poll::Pending => {
                    while self.silence.as_mut().poll(context).is_ready() {
                        let end = self.heard + self.answer_time;
                        if end <= Instant::now() {
                            return Poll::Ready(Some(Err(self.cut("the gateway is silent"))));
                        }
                        self.silence.as_mut().reset(end.into());
                    }
                    return Poll::Pending;
                }
            };
            self.heard = Instant::now();
            let (piece, ended) = match frame {
                None => (Bytes::new(), true),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => (data, false),
                    Err(_trailers) => continue,
                },
                Some(Err(_error)) => return Poll::Ready(Some(Err(self.cut("the gateway broke off")))),
            };
            match self.process(piece, ended) {
                Ok(bytes) if bytes.is_empty() && !ended => {}
                Ok(bytes) if bytes.is_empty() => return Poll::Ready(None),
                Ok(bytes) => return Poll::Ready(Some(Ok(bytes))),
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
    }

    fn cut(&mut self, why: &'static str) -> StreamError {
        self.incoming = None;
        self.lease = None;
        StreamError::other(why)
    }

    /// Filter and compress a piece, or what comes at the end.
    fn process(&mut self, piece: Bytes, ended: bool) -> Result<Bytes, StreamError> {
        let mut last = ended;
        let bytes = match &mut self.filter {
            None => piece,
            Some(filter) => {
                let before = filter.findings;
                let mut out = Vec::with_capacity(piece.len() + 64);
                let filtered = if ended { filter.finish(&mut out) } else { filter.push(&piece, &mut out) };
                self.metrics.words_found.add(filter.findings.words - before.words);
                self.metrics.answers_stopped.add(filter.findings.stopped - before.stopped);
                if filtered.is_err() {
                    out.extend_from_slice(
                        format!("data: {}\n\ndata: [DONE]\n\n", ApiError::answer_unreadable().to_json()).as_bytes(),
                    );
                    last = true;
                } else if filter.is_cut() {
                    last = true;
                }
                out.into()
            }
        };
        if last {
            self.incoming = None;
            let lease = self.lease.take();
            // An answer whose end was not seen leaves its connection in the middle of it.
            if let Some(lease) = lease.filter(|_lease| ended) {
                lease.give_back();
            }
        }
        let bytes = match (self.encoder.take(), last) {
            (None, _) => bytes,
            (Some(encoder), true) => encoder.finish(&bytes)?.into(),
            (Some(mut encoder), false) => {
                // Nothing to tell is not worth an empty block.
                let compressed = if bytes.is_empty() { Vec::new() } else { encoder.flush(&bytes)? };
                self.encoder = Some(encoder);
                compressed.into()
            }
        };
        if let Some(record) = &mut self.record {
            record.bytes_out += bytes.len() as u64;
            record.is_cut = !last;
        }
        Ok(bytes)
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = StreamError;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, StreamError>>> {
        match self.get_mut() {
            Answer::Whole(body) => {
                Poll::Ready(body.take().filter(|body| !body.is_empty()).map(|body| Ok(Frame::data(body))))
            }
            Answer::Stream(stream) => stream.poll(context).map(|piece| piece.map(|piece| piece.map(Frame::data))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Answer::Whole(body) => body.as_ref().is_none_or(Bytes::is_empty),
            Answer::Stream(stream) => stream.incoming.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Answer::Whole(body) => SizeHint::with_exact(body.as_ref().map_or(0, |body| body.len() as u64)),
            Answer::Stream(_) => SizeHint::default(),
        }
    }
}

/// A connection whose client has to take what is sent: a write that waits longer than allowed ends it.
struct Guarded {
    stream: TcpStream,
    stall_time: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl Guarded {
    fn new(stream: TcpStream, stall_time: Duration) -> Self {
        Guarded { stream, stall_time, waiting: None }
    }

    fn watch<T>(&mut self, context: &mut Context<'_>, written: Poll<std::io::Result<T>>) -> Poll<std::io::Result<T>> {
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let stall_time = self.stall_time;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep(stall_time)));
        waiting.as_mut().poll(context).map(|()| Err(std::io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Guarded {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Guarded {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        let guarded = self.get_mut();
        let written = Pin::new(&mut guarded.stream).poll_write(context, bytes);
        guarded.watch(context, written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        let guarded = self.get_mut();
        let written = Pin::new(&mut guarded.stream).poll_write_vectored(context, slices);
        guarded.watch(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

/// Open a listening socket.
pub fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { tokio::net::TcpSocket::new_v4() } else { tokio::net::TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    // The kernel cuts it to somaxconn.
    socket.listen(4096)
}
