# SPDX-License-Identifier: GPL-3.0-or-later
"""Each alert fires for what it is for, with a text that names it, and for nothing else; promtool is the judge."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.roles.observability.rendering import promtool, render_rules

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (package prometheus)"
)

ENGINE = {
    "job": "engine",
    "instance": "192.0.2.13:8100",
    "host": "gpu-a1",
    "engine": "gpu-a1.main",
    "model": "chat",
    "card": "l40s",
}
# vLLM's own labels: the number of the engine core, which Prometheus renames, and the served model.
VLLM = {**ENGINE, "exported_engine": "0", "model_name": "chat"}
GATEWAY = {"host": "gw1"}
HAPROXY = {**GATEWAY, "job": "haproxy", "instance": "192.0.2.11:8405"}
POOL = {**HAPROXY, "proxy": "pool_chat"}
SERVER = {**POOL, "server": "gpu-a1.main", "state": "DOWN"}
SCHEDULER = {**GATEWAY, "job": "scheduler", "instance": "192.0.2.11:8406"}
AGENT = {"job": "agent", "host": "gpu-a1", "instance": "192.0.2.13:8409"}
READER = {**AGENT, "reader": "rdma"}
WEIGHT = {**SCHEDULER, "engine": "gpu-a1.main"}
PREPROCESSOR = {"host": "pi1", "job": "preprocessor", "instance": "192.0.2.17:8411"}
PROMETHEUS = {"job": "prometheus", "host": "cpu-c1", "instance": "192.0.2.16:9090"}


def series(name: str, labels: dict[str, str], values: str) -> dict[str, str]:
    """Return a series as promtool takes it: a value every five seconds."""
    return {
        "series": name + "{" + ", ".join(f'{key}="{value}"' for key, value in labels.items()) + "}",
        "values": values,
    }


def time_to_first_token(within_one_second: int, of: int) -> list[dict[str, str]]:
    """Return a histogram that grows by so many requests every five seconds, the slow ones between one and five."""
    return [
        series("vllm:time_to_first_token_seconds_bucket", {**VLLM, "le": le}, f"0+{count}x200")
        for le, count in (("1.0", within_one_second), ("5.0", of), ("+Inf", of))
    ]


@dataclass(frozen=True)
class Case:
    """One alert: what makes it fire, when it must not and must have fired, and the labels it then carries."""

    alert: str
    series: list[dict[str, str]]
    quiet_at: str
    fires_at: str
    labels: dict[str, str]
    value: float = 0.0


CASES = [
    # Down from 0:30 on.
    Case("EngineDown", [series("up", ENGINE, "1x5 0x60")], "40s", "50s", ENGINE),
    Case(
        "EngineMakesNoProgress",
        [
            series("vllm:num_requests_running", VLLM, "3x60"),
            series("vllm:generation_tokens_total", VLLM, "0+50x12 600x48"),
            series("vllm:prompt_tokens_total", VLLM, "900x60"),
        ],
        "1m45s",
        "2m40s",
        VLLM,
    ),
    Case("EngineWaiting", [series("vllm:num_requests_waiting", VLLM, "0x23 1+1x80")], "3m", "6m", VLLM),
    Case("HighTimeToFirstToken", time_to_first_token(90, of=100), "1m30s", "6m", {"model": "chat"}, 4.6),
    Case("EdgeDown", [series("up", HAPROXY, "1x5 0x60")], "40s", "50s", HAPROXY),
    Case("NoEngineInPool", [series("haproxy_backend_active_servers", POOL, "2x5 0x60")], "35s", "45s", POOL),
    Case(
        "EdgeServerDown",
        [series("haproxy_server_status", SERVER, "0x5 1x60"), series("up", ENGINE, "1x65")],
        "55s",
        "1m5s",
        SERVER,
    ),
    Case(
        "EdgeServerErrors",
        [
            series("haproxy_backend_http_responses_total", {**POOL, "code": "2xx"}, "0+95x100"),
            series("haproxy_backend_http_responses_total", {**POOL, "code": "5xx"}, "0+5x100"),
        ],
        "45s",
        "3m",
        {"host": "gw1", "proxy": "pool_chat"},
        0.05,
    ),
    Case(
        "EdgeLosesLogLines",
        [series("haproxy_process_dropped_logs_total", HAPROXY, "0x5 3x60")],
        "25s",
        "60s",
        HAPROXY,
        3,
    ),
    Case("AgentDown", [series("up", AGENT, "1x5 0x60")], "40s", "50s", AGENT),
    Case("AgentReaderDown", [series("ringmaster_agent_reader_up", READER, "1x5 0x60")], "2m25s", "2m40s", READER),
    Case("PreprocessorDown", [series("up", PREPROCESSOR, "1x5 0x60")], "40s", "50s", PREPROCESSOR),
    Case(
        "NoPreprocessor",
        [series("haproxy_backend_active_servers", {**HAPROXY, "proxy": "preprocessors"}, "2x5 0x60")],
        "35s",
        "45s",
        {**HAPROXY, "proxy": "preprocessors"},
    ),
    Case(
        "PreprocessorRunsFormerFiles",
        [series("ringmaster_preprocessor_last_reload_failed", PREPROCESSOR, "0x5 1x60")],
        "40s",
        "50s",
        PREPROCESSOR,
    ),
    Case("SchedulerDown", [series("up", SCHEDULER, "1x5 0x60")], "40s", "50s", SCHEDULER),
    Case(
        "SchedulerMembersStale",
        [series("ringmaster_scheduler_members_current", SCHEDULER, "1x5 0x60")],
        "40s",
        "50s",
        SCHEDULER,
    ),
    Case(
        "EngineOut",
        [series("ringmaster_scheduler_engine_weight_ratio", WEIGHT, "1x5 0x60")],
        "40s",
        "50s",
        {"host": "gw1", "engine": "gpu-a1.main"},
    ),
    Case(
        "EngineWeightLow",
        [series("ringmaster_scheduler_engine_weight_ratio", WEIGHT, "1x5 0.1x100")],
        "5m25s",
        "5m40s",
        {"host": "gw1", "engine": "gpu-a1.main"},
        0.1,
    ),
    Case(
        "SchedulerNotAsked",
        [
            series("up", SCHEDULER, "1x100"),
            series("haproxy_backend_http_requests_total", POOL, "0+10x100"),
            series("ringmaster_scheduler_decisions_total", {**SCHEDULER, "outcome": "placed"}, "0+10x30 300x70"),
        ],
        "4m",
        "5m",
        SCHEDULER,
    ),
    Case(
        "PrometheusConfigurationNotLoaded",
        [series("prometheus_config_last_reload_successful", PROMETHEUS, "1x5 0x60")],
        "40s",
        "50s",
        PROMETHEUS,
    ),
]

WELL = [
    series("up", ENGINE, "1x200"),
    series("up", HAPROXY, "1x200"),
    series("up", SCHEDULER, "1x200"),
    series("up", PROMETHEUS, "1x200"),
    series("up", AGENT, "1x200"),
    series("ringmaster_agent_reader_up", READER, "1x200"),
    series("ringmaster_scheduler_engine_weight_ratio", WEIGHT, "1x200"),
    series("vllm:num_requests_running", VLLM, "0x50 200x100 0x50"),
    series("vllm:num_requests_waiting", VLLM, "0x50 40-1x40 0x110"),
    series("vllm:generation_tokens_total", VLLM, "0x50 0+4000x100 400000x50"),
    series("vllm:prompt_tokens_total", VLLM, "0x50 0+9000x100 900000x50"),
    *time_to_first_token(1000, of=1000),
    series("haproxy_process_dropped_logs_total", HAPROXY, "3x200"),
    series("haproxy_backend_active_servers", POOL, "1x200"),
    series("haproxy_backend_active_servers", {**HAPROXY, "proxy": "preprocessors"}, "1x200"),
    series("up", PREPROCESSOR, "1x200"),
    series("ringmaster_preprocessor_last_reload_failed", PREPROCESSOR, "0x200"),
    series("haproxy_server_status", SERVER, "0x200"),
    series("haproxy_server_status", {**SERVER, "state": "UP"}, "1x200"),
    series("haproxy_backend_http_responses_total", {**POOL, "code": "2xx"}, "0+1000x200"),
    series("haproxy_backend_http_responses_total", {**POOL, "code": "5xx"}, "0+1x200"),
    series("haproxy_backend_http_requests_total", POOL, "0x50 0+1000x100 100000x50"),
    series("ringmaster_scheduler_decisions_total", {**SCHEDULER, "outcome": "placed"}, "0x50 0+1000x100 100000x50"),
    series("ringmaster_scheduler_members_current", SCHEDULER, "1x200"),
    series("prometheus_config_last_reload_successful", PROMETHEUS, "1x200"),
]


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rendered rules."""
    file = tmp_path_factory.mktemp("rules") / "ringmaster.rules.yml"
    file.write_text(render_rules(), encoding="utf-8")
    return file


def alerts(rules: Path) -> dict[str, dict[str, Any]]:
    """Return the alerts by name."""
    groups = yaml.safe_load(rules.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def expand(text: str, labels: dict[str, str], value: float) -> str:
    """Return the text of an annotation as Prometheus gives it. A label that the alert does not carry is an error."""
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda match: labels[match[1]], text)
    text = re.sub(r'\{\{ \$value \| printf "(%\.\df)" \}\}', lambda match: match[1] % value, text)
    assert "{{" not in text, f"a template that this test does not know: {text}"
    return text


def check(rules: Path, *tests: dict[str, Any]) -> None:
    """Let promtool run tests against the rules."""
    file = rules.parent / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "5s", "tests": list(tests)}))
    finished = promtool("test", "rules", str(file))
    assert finished.returncode == 0, finished.stdout + finished.stderr


def firing(at: str, names: set[str]) -> dict[str, Any]:
    """Return the expectation that exactly these alerts fire."""
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(names)]
    return {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": at, "exp_samples": samples}


def test_promtool_takes_the_rules(rules: Path) -> None:
    finished = promtool("check", "rules", "--lint=all", "--lint-fatal", str(rules))
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_every_alert_has_a_case(rules: Path) -> None:
    assert [case.alert for case in CASES] == list(alerts(rules))


def test_every_alert_says_how_bad_what_and_what_to_do(rules: Path) -> None:
    for name, rule in alerts(rules).items():
        assert rule["labels"]["severity"] in ("warning", "critical"), name
        assert set(rule["annotations"]) == {"summary", "description", "action"}, name


@pytest.mark.parametrize("case", CASES, ids=[case.alert for case in CASES])
def test_the_alert_fires_for_its_fault_alone(rules: Path, case: Case) -> None:
    rule = alerts(rules)[case.alert]
    expected = {
        "exp_labels": {**case.labels, **rule["labels"]},
        "exp_annotations": {key: expand(text, case.labels, case.value) for key, text in rule["annotations"].items()},
    }
    check(
        rules,
        {
            "interval": "5s",
            "input_series": case.series,
            "alert_rule_test": [
                {"eval_time": case.quiet_at, "alertname": case.alert, "exp_alerts": []},
                {"eval_time": case.fires_at, "alertname": case.alert, "exp_alerts": [expected]},
            ],
            "promql_expr_test": [firing(case.quiet_at, set()), firing(case.fires_at, {case.alert})],
        },
    )


def test_nothing_fires_on_a_busy_site_that_is_well(rules: Path) -> None:
    moments = ["30s", "3m", "5m", "7m", "10m", "13m", "16m"]
    check(rules, {"interval": "5s", "input_series": WELL, "promql_expr_test": [firing(at, set()) for at in moments]})


def test_an_engine_that_is_gone_is_reported_once(rules: Path) -> None:
    gone = [series("up", ENGINE, "0x60"), series("haproxy_server_status", SERVER, "1x60")]
    check(rules, {"interval": "5s", "input_series": gone, "promql_expr_test": [firing("2m", {"EngineDown"})]})


def test_a_scheduler_that_is_gone_is_reported_once(rules: Path) -> None:
    gone = [series("up", SCHEDULER, "0x60"), series("haproxy_backend_http_requests_total", POOL, "0+10x60")]
    check(rules, {"interval": "5s", "input_series": gone, "promql_expr_test": [firing("4m", {"SchedulerDown"})]})


def test_a_queue_that_shrinks_is_no_alert(rules: Path) -> None:
    shrinking = [series("vllm:num_requests_waiting", VLLM, "100-1x90")]
    check(rules, {"interval": "5s", "input_series": shrinking, "promql_expr_test": [firing("6m", set())]})


def test_an_idle_engine_makes_no_progress_and_no_alert(rules: Path) -> None:
    idle = [
        series("vllm:num_requests_running", VLLM, "0x60"),
        series("vllm:generation_tokens_total", VLLM, "600x60"),
        series("vllm:prompt_tokens_total", VLLM, "900x60"),
    ]
    check(rules, {"interval": "5s", "input_series": idle, "promql_expr_test": [firing("4m", set())]})


def test_an_engine_that_reads_a_long_prompt_makes_progress(rules: Path) -> None:
    reading = [
        series("vllm:num_requests_running", VLLM, "1x60"),
        series("vllm:generation_tokens_total", VLLM, "600x60"),
        series("vllm:prompt_tokens_total", VLLM, "0+2000x60"),
    ]
    check(rules, {"interval": "5s", "input_series": reading, "promql_expr_test": [firing("4m", set())]})


def test_pools_add_up_their_engines(rules: Path) -> None:
    engines = [{**VLLM, "engine": name, "instance": name} for name in ("gpu-a1.main", "gpu-a2.main")]
    other = {**VLLM, "model": "code", "engine": "gpu-b1.main", "instance": "gpu-b1.main"}
    values = {
        "pool:generation_tokens:rate1m": (6.0, 1.0),
        "pool:prompt_tokens:rate1m": (60.0, 10.0),
        "pool:requests_running:sum": (14.0, 3.0),
        "pool:requests_waiting:sum": (4.0, 0.0),
    }
    check(
        rules,
        {
            "interval": "5s",
            "input_series": [
                *(series("vllm:generation_tokens_total", labels, "0+15x60") for labels in engines),
                *(series("vllm:prompt_tokens_total", labels, "0+150x60") for labels in engines),
                *(series("vllm:num_requests_running", labels, "7x60") for labels in engines),
                *(series("vllm:num_requests_waiting", labels, "2x60") for labels in engines),
                series("vllm:generation_tokens_total", other, "0+5x60"),
                series("vllm:prompt_tokens_total", other, "0+50x60"),
                series("vllm:num_requests_running", other, "3x60"),
                series("vllm:num_requests_waiting", other, "0x60"),
            ],
            "promql_expr_test": [
                {
                    "expr": name,
                    "eval_time": "4m",
                    "exp_samples": [
                        {"labels": f'{name}{{model="chat"}}', "value": chat},
                        {"labels": f'{name}{{model="code"}}', "value": code},
                    ],
                }
                for name, (chat, code) in values.items()
            ],
        },
    )


def test_latencies_are_those_of_all_engines_of_the_pool(rules: Path) -> None:
    # 90 of 100 within one second, evenly spread: the median at 50/90 s, the 99th of 100 at 1 + 9/10 × 4 s.
    expected = {"pool:time_to_first_token_seconds:p50_5m": 50 / 90, "pool:time_to_first_token_seconds:p99_5m": 4.6}
    check(
        rules,
        {
            "interval": "5s",
            "input_series": time_to_first_token(90, of=100),
            "promql_expr_test": [
                {
                    "expr": f"round({name}, 0.001)",
                    "eval_time": "6m",
                    "exp_samples": [{"labels": '{model="chat"}', "value": round(value, 3)}],
                }
                for name, value in expected.items()
            ],
        },
    )


def test_the_limit_of_the_time_to_first_token_is_the_operators(tmp_path: Path) -> None:
    file = tmp_path / "ringmaster.rules.yml"
    file.write_text(render_rules(observability_time_to_first_token_limit=4.7), encoding="utf-8")
    assert "the limit is 4.7 s." in alerts(file)["HighTimeToFirstToken"]["annotations"]["description"]
    slow = time_to_first_token(90, of=100)
    check(file, {"interval": "5s", "input_series": slow, "promql_expr_test": [firing("9m", set())]})
