# SPDX-License-Identifier: GPL-3.0-or-later
"""The console page: one self-contained HTML document without scripts, which a text browser shows as well."""

from __future__ import annotations

from html import escape
from typing import Final

from ringmaster_scheduler import __version__
from ringmaster_scheduler.core import EngineView, LineView
from ringmaster_scheduler.domain import Outcome
from ringmaster_scheduler.status import Snapshot, describe

REFRESH_SECONDS: Final = 2

_STYLE: Final = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { margin: 2rem auto; max-width: 78rem; padding: 0 1rem }
h1 { font-size: 1.3rem; margin: 0 } h2 { font-size: 1rem; margin: 2rem 0 .5rem }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid #8884; padding: .3rem .6rem; text-align: left; vertical-align: top }
th { font-weight: 600 } td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
.healthy { color: #18794e } .unhealthy { color: #cd2b31 } .unknown { color: #ad5700 }
@media (prefers-color-scheme: dark) {
  .healthy { color: #3dd68c } .unhealthy { color: #ff9592 } .unknown { color: #ffb224 }
}
small { opacity: .7 } meter { width: 5rem }
"""

_COLUMNS: Final = (
    ("Engine", ""),
    ("Model", ""),
    ("Card", ""),
    ("Health", ""),
    ("Weight", "number"),
    ("Running", "number"),
    ("Waiting", "number"),
    ("KV use", "number"),
    ("Held here", "number"),
    ("Of others", "number"),
    ("Limit", "number"),
    ("Tokens/s prefill", "number"),
    ("Score in s", "number"),
    ("Placed in all", "number"),
)

_OUTCOMES: Final = {
    Outcome.PLACED: "placed on an engine",
    Outcome.QUEUED: "waited for the first free slot",
    Outcome.NOT_IN_TIME: "refused with 429: could not start in time",
    Outcome.PROMPT_TOO_LONG: "refused with 400 or 413: the prompt fits no engine",
    Outcome.LEFT_TO_HAPROXY: "left to HAProxy: nothing known yet",
    Outcome.UNKNOWN_MODEL: "refused with 404: no engine serves the model",
    Outcome.NO_HEALTHY_ENGINE: "refused with 503: no healthy engine in the pool, or all drained",
}


def render(snapshot: Snapshot) -> str:
    """Return the page. Everything that comes from a file or an engine is escaped."""
    notes = [("unhealthy", text) for text in snapshot.reasons()]
    if snapshot.members_loaded and snapshot.members_error:
        notes.append(("unknown", f"{snapshot.members_file} is not used, former members kept: {snapshot.members_error}"))
    head = "".join(f'<th class="{style}">{title}</th>' for title, style in _COLUMNS)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="refresh" content="{REFRESH_SECONDS}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Ringmaster scheduler</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Ringmaster scheduler</h1>
<small>version {__version__}, up {_duration(snapshot.uptime)}, {snapshot.spoe_connections} connections from HAProxy,
members from {escape(snapshot.members_file)}</small>
{"".join(f'<p class="{style}">{escape(text)}</p>' for style, text in notes)}
<h2>Engines</h2>
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{"".join(_engine_row(view) for view in snapshot.engines)}</tbody>
</table>
<h2>Queues</h2>
<table>
<thead><tr><th>Model</th><th class="number">Waiting</th><th class="number">Tokens</th>
<th class="number">Drains tokens/s</th></tr></thead>
<tbody>
{"".join(_line_row(line) for line in snapshot.lines)}</tbody>
</table>
<h2>Decisions since the start</h2>
<table>
<tbody>
{"".join(_outcome_row(outcome, count) for outcome, count in snapshot.outcomes.items())}</tbody>
</table>
</body>
</html>
"""


def _engine_row(view: EngineView) -> str:
    engine, reading = view.engine, view.reading
    health = f'<span class="{view.health.value}">{view.health.value}</span>'
    if view.drained:
        health += ' <span class="unknown">drained</span>'
    elif view.held_back:
        health += ' <span class="unknown">held back</span>'
    for each in view.reasons:
        health += f' <small class="unknown">{escape(describe(each))}</small>'
    if view.reason:
        health += f" <small>{escape(view.reason)}</small>"
    model = escape(engine.model)
    if engine.adapters:
        model += f" <small>+ {escape(', '.join(engine.adapters))}</small>"
    cells = (
        escape(engine.name),
        model,
        escape(engine.card),
        health,
        f"{view.weight:g}" if view.weight else '<span class="unhealthy">out</span>',
        "–" if reading is None else str(reading.running),
        "–" if reading is None else str(reading.waiting),
        "–" if reading is None or reading.kv_use is None else f"{reading.kv_use:.0%}",
        str(view.held),
        str(view.foreign),
        f"{view.limit}{' over watermark' if view.over_watermark else ''}",
        f"{view.prefill_rate:,.0f}",
        f"{view.terms.score:.2f}",
        str(view.placements),
    )
    return (
        "<tr>"
        + "".join(f'<td class="{style}">{cell}</td>' for cell, (_unused, style) in zip(cells, _COLUMNS))
        + "</tr>\n"
    )


def _line_row(line: LineView) -> str:
    return (
        f'<tr><td>{escape(line.model)}</td><td class="number">{len(line.waiting) + line.unknown}</td>'
        f'<td class="number">{line.tokens:,}</td><td class="number">{line.drain_rate:,.0f}</td></tr>\n'
    )


def _outcome_row(outcome: Outcome, count: int) -> str:
    return f'<tr><td>{_OUTCOMES[outcome]}</td><td class="number">{count}</td></tr>\n'


def _duration(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days} d {hour:02}:{minute:02}:{second:02}"
