# SPDX-License-Identifier: GPL-3.0-or-later
"""``ringmasterctl``: shows what the scheduler of this gateway knows and does, and drains engines.

Needs nothing but Python, so that it works where the daemon does not. Tables for people, ``--json`` for programs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Sequence
from typing import Any, Final, TextIO

CONFIGURATION: Final = "/etc/ringmaster/scheduler.json"
TOKEN_FILE: Final = "/etc/ringmaster/scheduler-token"
_LARGEST_ANSWER: Final = 64 * 1024 * 1024


class ControlError(Exception):
    """The scheduler cannot be asked, or refuses; the message says what to do."""


class Scheduler:
    """The HTTP interface at `url`; `timeout` in seconds."""

    def __init__(self, url: str, timeout: float, token_file: str) -> None:
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._token_file = token_file
        # The scheduler is on this network: a proxy for the outside has no part in it.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str) -> Any:
        """Return a document. Raises ControlError."""
        return self._ask(path)

    def post(self, path: str) -> Any:
        """Change something, with the token. Raises ControlError."""
        try:
            with open(self._token_file, encoding="utf-8") as file:
                token = file.read().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ControlError(
                f"{self._token_file}: {getattr(error, 'strerror', None) or error}; run it as root"
            ) from error
        headers = {"Authorization": f"Bearer {token}"}
        return self._ask(path, data=b"", headers=headers, method="POST")

    def _ask(self, path: str, **more: Any) -> Any:
        try:
            request = urllib.request.Request(self._url + path, **more)
            with self._opener.open(request, timeout=self._timeout) as response:
                return json.loads(response.read(_LARGEST_ANSWER))
        except urllib.error.HTTPError as error:
            raise ControlError(_reason(error)) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise ControlError(f"{self._url}: {reason}; is ringmaster-scheduler.service running?") from error


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(65536))["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"the scheduler answers HTTP status {error.code}"


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return rows below their titles; numbers stand on the right, None is a dash."""
    cells = [[_cell(value) for value in row] for row in rows]
    right = [bool(cells) and all(_is_number(value) for value in column) for column in zip(*cells)] or [False] * len(
        columns
    )
    widths = [max(map(len, column)) for column in zip(columns, *cells)]
    lines = []
    for row in (columns, *cells):
        padded = [
            text.rjust(width) if to_right else text.ljust(width) for text, width, to_right in zip(row, widths, right)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".") if value < 100 else f"{value:.0f}"
    # A name that came from outside must not move the terminal's cursor.
    return "".join(character if character.isprintable() else "?" for character in str(value))


def _is_number(text: str) -> bool:
    return text == "-" or text.replace(".", "", 1).replace("%", "", 1).isdigit()


def show_status(document: dict[str, Any]) -> str:
    """Return the state of the scheduler and its engines."""
    problems = [*document["reasons"], *document["warnings"]]
    engines = table(
        (
            "ENGINE",
            "MODEL",
            "CARD",
            "HEALTH",
            "WEIGHT",
            "DRAINED",
            "HELD",
            "OTHERS",
            "LIMIT",
            "KV",
            "PREFILL/S",
            "SCORE",
            "PLACED",
        ),
        [
            (
                each["name"],
                each["model"],
                each["card"],
                each["health"],
                _weight(each["weight"]),
                "held back" if each["held_back"] else each["drained"],
                each["held"],
                each["foreign"],
                each["limit"],
                None if each["kv_use"] is None else f"{each['kv_use']:.0%}",
                each["prefill_tokens_per_s"],
                each["score"]["score"],
                each["placements"],
            )
            for each in document["engines"]
        ],
    )
    decisions = ", ".join(f"{name} {count}" for name, count in document["decisions"].items() if count) or "none yet"
    return "\n".join(
        [
            f"{document['status']}, up {document['uptime_s']:.0f} s; decisions: {decisions}",
            *(f"! {_cell(text)}" for text in problems),
            "",
            engines,
            "",
            table(
                ("QUEUE OF", "WAITING", "TOKENS", "DRAINS TOKENS/S"),
                [
                    (each["model"], each["waiting"] + each["unknown"], each["tokens"], each["drain_tokens_per_s"])
                    for each in document["queues"]
                ],
            ),
        ]
    )


def _weight(weight: float) -> str:
    return "out" if not weight else f"{weight:g}"


def show_nodes(document: dict[str, Any]) -> str:
    """Return why the engines of some hosts have the weight that they have."""
    return "\n\n".join(_node(each) for each in document["nodes"]) or "No host is known."


def _node(node: dict[str, Any]) -> str:
    agent = node["agent"]
    if agent is None:
        told = "no agent, so that nothing is known of its hardware"
    elif agent["up"]:
        told = f"its agent at {agent['address']} port {agent['port']} was heard {agent['heard_ago_s']} s ago"
    else:
        told = f"its agent at {agent['address']} port {agent['port']} is not followed: {agent['error']}"
    lines = [_cell(f"{node['host']}: {told}")]
    for engine in node["engines"]:
        state = f"{engine['health']}{', drained' if engine['drained'] else ''}"
        lines.append(_cell(f"  engine {engine['name']} ({state}): weight {_weight(engine['weight'])}"))
        for reason in engine["reasons"]:
            effect = "gets nothing" if not reason["factor"] else f"× {reason['factor']:g}"
            lines.append(
                _cell(
                    f"    {effect}: {reason['rule']} on {reason['subject']}, for {reason['for_s']} s: {reason['seen']}"
                )
            )
        if engine["stalled_s"] >= 1:
            lines.append(f"    no progress for {engine['stalled_s']} s")
    for watch in node["watches"]:
        course = "good windows to end it" if watch["holds"] else "bad windows to hold"
        held = f"; no change for {watch['held_for_s']} s" if watch["held_for_s"] else ""
        lines.append(
            _cell(
                f"  {watch['rule']} on {watch['subject']} {'holds' if watch['holds'] else 'is in doubt'}:"
                f" {watch['row']} of {watch['row_needed']} {course}; seen {watch['seen_ago_s']} s ago:"
                f" {watch['seen']}{held}"
            )
        )
    lines += [_cell(f"  not known, {name}: {reason}") for name, reason in sorted(node["unknown"].items())]
    return "\n".join(lines)


def show_queue(document: dict[str, Any]) -> str:
    """Return who waits, in the order in which they will be taken."""
    rows = [
        (
            queue["model"],
            each["id"],
            each["class"],
            each["key_id"],
            each["tokens"],
            each["waited_s"],
            each["deadline_in_s"],
        )
        for queue in document["queues"]
        for each in queue["waiting"]
    ]
    if not rows:
        return "Nobody waits."
    return table(("MODEL", "REQUEST", "CLASS", "KEY", "TOKENS", "WAITED S", "DUE IN S"), rows)


def show_decisions(document: dict[str, Any]) -> str:
    """Return decisions in words."""
    return "\n\n".join(_story(each) for each in document["decisions"]) or "No decision is kept."


def _story(decision: dict[str, Any]) -> str:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(decision["at"])) + f".{int(decision['at'] * 1000) % 1000:03}Z"
    lines = [f"{_cell(decision['id'])} at {at}: {decision['outcome']} ({decision['reason'] or 'no reason'})"]
    lines.append(f"  model {_cell(decision['model'])}, key {_cell(decision['key_id']) or '-'}")
    if "class" in decision:
        source = "estimated from the body's length" if decision["tokens_estimated"] else "counted"
        lines.append(
            f"  class {decision['class']}: {decision['prompt_tokens']} prompt tokens ({source}),"
            f" {decision['expected_output_tokens']} expected in the answer; to start in {decision['deadline_ms']} ms"
        )
    if decision.get("engine"):
        how = "taken from the queue" if decision.get("taken_from_queue") else "named to HAProxy"
        waited = f", after {decision['waited_ms']} ms" if decision.get("waited_ms") else ""
        lines.append(f"  engine {_cell(decision['engine'])}, {how}{waited}")
    if "terms_s" in decision:
        terms = decision["terms_s"]
        lines.append(
            f"  score of that engine {terms['score']} s: prefill {terms['prefill']}, decode {terms['decode']},"
            f" memory {terms['memory']}, service {terms['service']}"
        )
    if decision["status"]:
        lines.append(f"  refused with {decision['status']}, retry after {_cell(decision['retry_after_s'])} s")
    if "ended" in decision:
        ended = decision["ended"]
        lines.append(
            f"  ended with status {ended['status']}: {_cell(ended['queue_s'])} s in the queue, first byte after"
            f" {_cell(ended['first_byte_s'])} s, {_cell(ended['total_s'])} s in all"
        )
    elif "state" in decision:
        lines.append(f"  now {decision['state']}")
    return "\n".join(lines)


def show_rules(document: dict[str, Any]) -> str:
    """Return the numbers that decide, and what was learnt."""
    policy = dict(document["policy"])
    classes = policy.pop("classes")
    learnt = [
        (class_name, key_id, tokens)
        for class_name, keys in document["output_tokens_learnt"].items()
        for key_id, tokens in keys.items()
    ]
    parts = [
        table(
            ("CLASS", "PROMPT TOKENS UP TO", "STARTS WITHIN S"),
            [(each["name"], each["prompt_tokens_max"], each["deadline_s"]) for each in classes],
        ),
        table(("NUMBER", "VALUE"), policy.items()),
    ]
    if document["health_rules"]:
        parts.append(
            table(
                ("HEALTH RULE", "WINDOW S", "WINDOWS", "EFFECT", "BACK", "HOLD S", "CONDITION"),
                [
                    (
                        name,
                        rule["window_s"],
                        rule["windows"],
                        f"{rule['effect']} from {rule['floor']}" if "floor" in rule else str(rule["effect"]),
                        rule["back"],
                        rule["hold_s"],
                        _condition(rule),
                    )
                    for name, rule in document["health_rules"].items()
                ],
            )
        )
    if learnt:
        parts.append(table(("CLASS", "KEY", "ANSWER'S TOKENS"), learnt))
    return "\n\n".join(parts)


def _condition(rule: dict[str, Any]) -> str:
    common = ("kind", "window_s", "windows", "effect", "floor", "back", "hold_s", "condition")
    given = [
        f"{key} {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in rule.items()
        if key not in common
    ]
    return f"{rule['condition']}{f' ({chr(59).join(given)})' if given else ''}"


def change(scheduler: Scheduler, action: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Drain or undrain engines; a host's name stands for all its engines. Returns what was done.

    Raises ControlError; then nothing was changed if a name is not known.
    """
    engines = scheduler.get("/v1/state")["engines"]
    chosen: list[str] = []
    for name in names:
        found = [each["name"] for each in engines if name in (each["name"], each["host"])]
        if not found:
            raise ControlError(
                f"no engine or host is named {name}; known: {', '.join(each['name'] for each in engines)}"
            )
        chosen += [each for each in found if each not in chosen]
    return [scheduler.post(f"/v1/engines/{urllib.parse.quote(name, safe='')}/{action}") for name in chosen]


def default_url(path: str) -> str:
    """Return where the scheduler of this host listens. Raises ControlError."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        address, port = content["http_address"], content.get("http_port", 8406)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ControlError(f"{path}: {getattr(error, 'strerror', None) or error!r}; give --url") from error
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def run(options: argparse.Namespace, output: TextIO) -> None:
    """Do what was asked. Raises ControlError."""
    scheduler = Scheduler(options.url or default_url(CONFIGURATION), options.timeout, options.token_file)
    if options.command in ("drain", "undrain"):
        done = change(scheduler, options.command, options.names)
        text = table(
            ("ENGINE", "DRAINED", "CHANGED"), [(each["engine"], each["drained"], each["changed"]) for each in done]
        )
        document: Any = {"engines": done}
    elif options.command == "explain":
        path = "" if options.request is None else "/" + urllib.parse.quote(options.request, safe="")
        document = scheduler.get("/v1/explain" + path)
        text = show_decisions(document)
    elif options.command == "explain-node":
        path = "" if options.node is None else "/" + urllib.parse.quote(options.node, safe="")
        document = scheduler.get("/v1/nodes" + path)
        text = show_nodes(document)
    else:
        path, show = {
            "status": ("/v1/state", show_status),
            "queue": ("/v1/queue", show_queue),
            "rules": ("/v1/rules", show_rules),
        }[options.command]
        document = scheduler.get(path)
        text = show(document)
    print(json.dumps(document, indent=2) if options.json else text, file=output)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="ringmasterctl", description="The scheduler of this gateway.")
    parser.add_argument("--url", help=f"its HTTP interface; default: as {CONFIGURATION} says")
    parser.add_argument("--token-file", default=TOKEN_FILE, metavar="FILE", help="the token, for drain and undrain")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--json", action="store_true", help="the whole document, for programs")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("status", help="engines, queues and decisions")
    commands.add_parser("queue", help="who waits, in the order in which they will be taken")
    explain = commands.add_parser("explain", help="why a request went where it went")
    explain.add_argument("request", nargs="?", metavar="REQUEST-ID", help="default: the last decisions")
    explain_node = commands.add_parser("explain-node", help="why engines have the weight that they have")
    explain_node.add_argument("node", nargs="?", metavar="NODE", help="a host or an engine; default: all")
    commands.add_parser("rules", help="the numbers and rules that decide, and what was learnt")
    for action, text in (("drain", "send no more requests to engines"), ("undrain", "send requests to them again")):
        command = commands.add_parser(action, help=text)
        command.add_argument("names", nargs="+", metavar="NAME", help="an engine, or a host for all its engines")
    for command in commands.choices.values():  # it may stand behind the command as well
        command.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0 well, 1 failed, 2 wrong use."""
    options = make_parser().parse_args(arguments)
    try:
        run(options, sys.stdout)
    except ControlError as error:
        print(f"ringmasterctl: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
