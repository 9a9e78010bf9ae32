# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Takes a node's engines out of service at every scheduler, brings them back, and waits until nothing runs there.

Every gateway has a scheduler of its own, and each must know: an engine that only one of them drains still gets the
requests of the others. So all are asked before anything is changed, and one that does not answer is a failure.

An engine is *empty* when no scheduler has a request there and its own metrics, read after that, show none running or
waiting. One that nobody can read any more is empty when no scheduler has a request there: it serves nobody.

Interface of the scheduler: ``GET /v1/state``, ``POST /v1/engines/NAME/drain`` and ``/undrain`` with a token. Nothing
here imports Ansible.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

LARGEST_ANSWER = 64 * 1024 * 1024
"""Bytes; the state of a site of 10,000 engines has about 8 MB."""


class NodeStateError(Exception):
    """Something is not as it has to be; the text says what was expected, what was found and what to do."""

    def __init__(self, expected: str, found: str, remedy: str) -> None:
        super().__init__(f"Expected {expected}. Found {found}. To do: {remedy}.")


class SchedulerRefusalError(Exception):
    """A scheduler answered, but not with what was asked for; the text says why. ``status`` is HTTP's, 0 if
    that was well."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class Scheduler:
    """The HTTP interface of one scheduler. ``timeout`` is in seconds for one question."""

    def __init__(self, url: str, token: str, timeout: float) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._timeout = timeout
        # Schedulers are on the management network; a proxy for the outside has no part in it.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def engines(self) -> list[dict[str, Any]]:
        """The engines as this scheduler sees them, each with what keeps it from HAProxy's counts (``haproxy_error``).

        Raises:
            NodeStateError: it does not answer, or not as a scheduler does.
        """
        try:
            document = self._ask("GET", "/v1/state")
            found = document["engines"]
            if not isinstance(found, list) or not all(
                isinstance(each, dict) and isinstance(each.get("name"), str) for each in found
            ):
                raise SchedulerRefusalError("no list of engines")
            haproxy = document.get("haproxy")
            # Where no HAProxy runs nothing is under way.
            known = not isinstance(haproxy, dict) or bool(haproxy.get("absent"))
            complaint = None if known else haproxy.get("error")
        except (OSError, ValueError, KeyError, TypeError, SchedulerRefusalError) as error:
            raise self._failed(error) from error
        return [{**each, "haproxy_error": complaint} for each in found]

    def drain(self, name: str, drained: bool) -> None:
        """Drain an engine, or end that.

        Raises:
            NodeStateError: it does not answer, or refuses.
        """
        action = "drain" if drained else "undrain"
        try:
            self._ask("POST", f"/v1/engines/{urllib.parse.quote(name, safe='')}/{action}")
        except (OSError, ValueError, SchedulerRefusalError) as error:
            raise self._failed(error) from error

    def forget(self, name: str) -> bool:
        """End the drain of an engine that this scheduler does not list (any more); whether it had been drained.

        Raises:
            NodeStateError: it does not answer, or refuses.
        """
        try:
            self._ask("POST", f"/v1/engines/{urllib.parse.quote(name, safe='')}/undrain")
        except SchedulerRefusalError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return False
            raise self._failed(error) from error
        except (OSError, ValueError) as error:
            raise self._failed(error) from error
        return True

    def _ask(self, method: str, path: str) -> Any:
        request = urllib.request.Request(self.url + path, method=method)
        if method == "POST":
            request.data = b""
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                return json.loads(response.read(LARGEST_ANSWER))
        except urllib.error.HTTPError as error:
            raise SchedulerRefusalError(_reason(error), error.code) from error

    def _failed(self, error: Exception) -> NodeStateError:
        reason = getattr(error, "reason", None) or error
        return NodeStateError(
            f"the scheduler at {self.url} to answer",
            str(reason),
            "look at ringmaster-scheduler.service on that gateway, at the address, and at the token",
        )


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return f"HTTP status {error.code}: {json.loads(error.read(65536))['error']}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"HTTP status {error.code}"


@dataclass
class EngineState:
    """One engine over all schedulers: whether all have drained it, the requests that still run or wait there, and
    why more may run there than is known; empty if all was looked at."""

    name: str
    drained: bool
    requests: int
    unknown: str = ""

    @property
    def empty(self) -> bool:
        """Whether nothing runs or waits there."""
        return self.requests == 0 and not self.unknown


@dataclass
class Outcome:
    """What was found at the end, and whether anything was, or in check mode would be, changed. Seconds waited."""

    changed: bool
    engines: list[EngineState]
    waited: float = 0.0
    diff: dict[str, str] = field(default_factory=dict)


class NodeState:
    """The engines of a node, at all schedulers.

    Args:
        schedulers: those of all gateways.
        name: a host's name, for all its engines, or an engine's.
        must_exist: whether it is an error that a scheduler does not know the name; else that one has no engine of it.
        clock, sleep: for tests.

    Raises:
        NodeStateError: from every method, if a scheduler does not answer or does not know the node.
    """

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        name: str,
        must_exist: bool = True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._schedulers = schedulers
        self._name = name
        self._must_exist = must_exist
        self._clock = clock
        self._sleep = sleep

    def read(self) -> list[EngineState]:
        """The node's engines in order of name."""
        return merge([self._engines_of_node(scheduler) for scheduler in self._schedulers])

    def set(self, drained: bool, write: bool = True) -> Outcome:
        """Drain the node or bring it back; without ``write`` only say whether that would change anything."""
        seen = [(scheduler, self._engines_of_node(scheduler)) for scheduler in self._schedulers]
        before = merge([engines for _unused, engines in seen])
        changed = False
        for scheduler, engines in seen:
            for engine in engines:
                if bool(engine.get("drained")) != drained:
                    changed = True
                    if write:
                        scheduler.drain(engine["name"], drained)
            # A scheduler keeps that an engine is drained after it left the members, and for when it comes back.
            if not engines and not drained and write:
                changed |= scheduler.forget(self._name)
        after = self.read() if changed and write else before
        if not write:
            after = [replace(each, drained=drained) for each in before]
        return Outcome(changed, after, diff={"before": describe(before), "after": describe(after)})

    def wait_until_empty(self, timeout: float, interval: float) -> Outcome:
        """Wait until nothing runs on the node, ``timeout`` seconds at most, asking every ``interval`` seconds.

        Raises:
            NodeStateError: it does not become empty in time.
        """
        begun_at = self._clock()
        while True:
            engines = self.read()
            waited = self._clock() - begun_at
            left = [each for each in engines if not each.empty]
            if not left:
                return Outcome(False, engines, waited)
            if waited >= timeout:
                raise NodeStateError(
                    f"no request on {self._name} after {timeout:g} s",
                    ", ".join(f"{each.unknown or each.requests} on {each.name}" for each in left),
                    "wait longer, or end them by stopping the engine",
                )
            self._sleep(min(interval, timeout - waited))

    def _engines_of_node(self, scheduler: Scheduler) -> list[dict[str, Any]]:
        engines = scheduler.engines()
        found = [each for each in engines if self._name in (each["name"], each.get("host"))]
        if not found and self._must_exist:
            raise NodeStateError(
                f"the scheduler at {scheduler.url} to know a host or engine named {self._name}",
                ", ".join(sorted(each["name"] for each in engines)) or "no engine",
                "give a name of the members document, or run the registry role",
            )
        return found


def merge(views: Iterable[Sequence[dict[str, Any]]]) -> list[EngineState]:
    """One state for each engine, from what every scheduler says of it.

    Requests that schedulers hold are different ones and add up; what the engine itself shows includes them all. An
    engine that does not answer shows nothing, and has nothing but what HAProxy still holds for it; one that a scheduler
    has not looked at, or of which HAProxy does not tell, may have anything.
    """
    unknown: dict[str, str] = {}
    held: dict[str, int] = {}
    shown: dict[str, int] = {}
    drained: dict[str, bool] = {}
    for engines in views:
        for each in engines:
            name = each["name"]
            held[name] = held.get(name, 0) + _count(each.get("held"))
            drained[name] = drained.get(name, True) and bool(each.get("drained"))
            if each.get("health") == "unknown" or (each.get("health") == "healthy" and each.get("running") is None):
                unknown[name] = "a scheduler has not read it yet"
            if each.get("haproxy_error"):
                unknown[name] = f"HAProxy does not tell: {each['haproxy_error']}"
            if each.get("health") == "healthy":
                shown[name] = max(shown.get(name, 0), _count(each.get("running")) + _count(each.get("waiting")))
    return [
        EngineState(name, drained[name], max(held[name], shown.get(name, 0)), unknown.get(name, ""))
        for name in sorted(held)
    ]


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def describe(engines: Iterable[EngineState]) -> str:
    """The states as lines, for a diff."""
    return "".join(f"{each.name}: {'drained' if each.drained else 'active'}\n" for each in engines)
