// SPDX-License-Identifier: GPL-3.0-or-later
//! Connections to the gateways' dispatch frontends.
//!
//! A request goes back to the gateway that it came from, to whose scheduler and limits it belongs; one that came from elsewhere
//! goes to the gateway that is next in turn. A gateway that could not be reached last time comes last, and if no connection can be
//! made, the others are tried. A kept connection that turns out to be closed is replaced by a new one: a gateway that reloads
//! closes those it has kept, and may do so while a request is on its way. So one that got no byte of an answer on a kept connection
//! is sent once more, and one on a new connection never.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{handshake, SendRequest};
use hyper::header::{HeaderValue, HOST};
use hyper::{HeaderMap, Method, Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::metrics::Metrics;

type Sender = SendRequest<Full<Bytes>>;

/// The gateway closes a connection that was idle for 60 s; this side has to be first.
const IDLE: Duration = Duration::from_secs(30);
/// How long a gateway that could not be reached is tried last.
const PENALTY: Duration = Duration::from_secs(2);

struct Gateway {
    address: SocketAddr,
    host: HeaderValue,
    idle: Mutex<Vec<(Sender, Instant)>>,
    down_until: Mutex<Option<Instant>>,
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gateway {
    fn is_down(&self, now: Instant) -> bool {
        locked(&self.down_until).is_some_and(|until| until > now)
    }

    fn take_idle(&self) -> Option<Sender> {
        let mut idle = locked(&self.idle);
        while let Some((sender, since)) = idle.pop() {
            if !sender.is_closed() && since.elapsed() < IDLE {
                return Some(sender);
            }
        }
        None
    }
}

/// Gives the connection back when the answer was read to its end. Dropped before, it closes the connection, by which the gateway
/// learns that nobody waits any more.
pub struct Lease {
    gateway: Arc<Gateway>,
    sender: Sender,
}

impl Lease {
    pub fn give_back(self) {
        let mut idle = locked(&self.gateway.idle);
        idle.retain(|(sender, since)| !sender.is_closed() && since.elapsed() < IDLE);
        idle.push((self.sender, Instant::now()));
    }
}

#[derive(Debug, PartialEq, Eq)]
pub enum Failure {
    Unreachable,
    Broken,
    Late,
}

pub struct Gateways {
    gateways: Vec<Arc<Gateway>>,
    turn: AtomicUsize,
    connect_time: Duration,
    answer_time: Duration,
    metrics: Arc<Metrics>,
}

impl Gateways {
    pub fn new(addresses: &[SocketAddr], connect_time: Duration, answer_time: Duration, metrics: Arc<Metrics>) -> Self {
        let gateway = |address: &SocketAddr| {
            Arc::new(Gateway {
                address: *address,
                host: HeaderValue::from_str(&address.to_string())
                    .unwrap_or_else(|_error| HeaderValue::from_static("dispatch")),
                idle: Mutex::default(),
                down_until: Mutex::default(),
            })
        };
        Gateways {
            gateways: addresses.iter().map(gateway).collect(),
            turn: AtomicUsize::new(0),
            connect_time,
            answer_time,
            metrics,
        }
    }

    /// Send a request and wait for the head of its answer.
    pub async fn send(
        &self,
        method: &Method,
        path: &'static str,
        headers: &HeaderMap,
        body: &Bytes,
        from: IpAddr,
    ) -> Result<(Response<Incoming>, Lease), Failure> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let now = Instant::now();
        let count = self.gateways.len();
        let mut order: Vec<&Arc<Gateway>> = (0..count).map(|step| &self.gateways[(turn + step) % count]).collect();
        order.sort_by_key(|gateway| (gateway.is_down(now), gateway.address.ip() != from));
        let mut is_resent = false;
        for gateway in order {
            loop {
                let kept = if is_resent { None } else { gateway.take_idle() };
                let (mut sender, is_fresh) = match kept {
                    Some(sender) => (sender, false),
                    None => match self.connect(gateway).await {
                        Some(sender) => (sender, true),
                        None => break,
                    },
                };
                if sender.ready().await.is_err() {
                    if is_fresh {
                        break;
                    }
                    continue;
                }
                let request = build(method, path, headers, &gateway.host, body);
                let answer = tokio::time::timeout(self.answer_time, sender.try_send_request(request)).await;
                match answer {
                    Ok(Ok(response)) => return Ok((response, Lease { gateway: Arc::clone(gateway), sender })),
                    // Given back unsent, or closed when it had been written.
                    Ok(Err(error)) if !is_fresh => is_resent = error.message().is_none(),
                    Ok(Err(_error)) => {
                        self.metrics.gateway_failures.add(1);
                        return Err(Failure::Broken);
                    }
                    Err(_elapsed) => return Err(Failure::Late),
                }
            }
        }
        Err(Failure::Unreachable)
    }

    async fn connect(&self, gateway: &Gateway) -> Option<Sender> {
        let connected = tokio::time::timeout(self.connect_time, TcpStream::connect(gateway.address)).await;
        let Ok(Ok(stream)) = connected else {
            self.metrics.gateway_failures.add(1);
            *locked(&gateway.down_until) = Some(Instant::now() + PENALTY);
            return None;
        };
        *locked(&gateway.down_until) = None;
        set_options(&stream);
        let (sender, connection) = handshake(TokioIo::new(stream)).await.ok()?;
        tokio::spawn(async move {
            // How it ended is seen by whoever uses the sender.
            let _end = connection.await;
        });
        Some(sender)
    }
}

/// No waiting for full packets; probes find a peer that lost its power.
pub fn set_options(stream: &TcpStream) {
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(Duration::from_secs(15))
        .with_interval(Duration::from_secs(5))
        .with_retries(3);
    // A socket that refuses an option still carries the request.
    let _ignored = stream.set_nodelay(true);
    let _ignored = socket2::SockRef::from(stream).set_tcp_keepalive(&keepalive);
}

fn build(
    method: &Method,
    path: &'static str,
    headers: &HeaderMap,
    host: &HeaderValue,
    body: &Bytes,
) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::new(body.clone()));
    *request.method_mut() = method.clone();
    *request.uri_mut() = hyper::Uri::from_static(path);
    *request.headers_mut() = headers.clone();
    request.headers_mut().insert(HOST, host.clone());
    request
}
