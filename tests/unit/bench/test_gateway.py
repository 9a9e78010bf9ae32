# SPDX-License-Identifier: GPL-3.0-or-later
"""The bench of the gateway still starts what it measures: a short round of it answers and decides."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.bench.gateway import __main__ as bench

RUN = Path(__file__).resolve().parents[2] / "run" / "bench"


def benches() -> list[str]:
    """The benches that `make bench` runs."""
    found = re.search(r"^for bench in (.+); do$", RUN.read_text(), re.MULTILINE)
    assert found is not None
    return found[1].split()


@pytest.mark.parametrize("name", benches())
def test_what_make_bench_runs_can_be_loaded(name: str) -> None:
    package = import_module(f"tests.bench.{name}")
    module = import_module(f"tests.bench.{name}.__main__") if hasattr(package, "__path__") else package
    assert callable(module.main)


def test_a_short_round_of_the_gateway_is_answered_and_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WORKLOADS", {"requests": bench.Workload(connections=4)})
    traffic = bench.program()
    first_engine = bench.free_ports(bench.ENGINES)
    figures = bench.Figures()
    with bench.started([traffic, "engines", str(first_engine), str(bench.ENGINES)], tmp_path / "log", bench.LOAD_CORE):
        bench.wait_until(lambda: bench.answers(first_engine), "the engines answer", bench.PATIENCE)
        bench.measure(bench.Ringmaster("trixie"), traffic, first_engine, 1.0, figures)
    (result,) = figures.results["requests"]
    assert result["failed"] == 0
    assert result["placed"] > 0
