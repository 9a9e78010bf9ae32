# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What vLLM's parser takes and a service must not have: options that do harm there, and options that contradict.

Contradictions are those that vLLM 0.32 itself refuses when it starts (``validate_parsed_serve_args``,
``create_engine_config`` and the validators of its configuration classes), long after the running engine was stopped,
and those where one option silently makes another one void. Values that were not given are not presumed, but where the
rule says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LOG_PROMPTS = "prompts must not get into a log"


@dataclass(frozen=True)
class Finding:
    """``flags`` are the options, or the variables of the environment, that it is about. ``refused``: an engine must
    not be started so; else it is advice."""

    verdict: str
    flags: tuple[str, ...]
    reason: str
    to_do: str
    refused: bool = True


class Wanted:
    """The values that the engine would have: by long name, in the form of `engine_flags_values.read`; a switch as
    bool."""

    def __init__(self, values: Mapping[str, Any], environment: Mapping[str, str], on_cpu: bool = False) -> None:
        self.values = values
        self.environment = environment
        self.on_cpu = on_cpu

    def given(self, flag: str) -> bool:
        """Whether the option is given, and with a value other than none."""
        return self.values.get(flag) is not None

    def on(self, flag: str) -> bool:
        """Whether the switch is given and not negated."""
        return self.values.get(flag) is True

    def off(self, flag: str) -> bool:
        """Whether the switch is given negated."""
        return self.values.get(flag) is False

    def text(self, flag: str) -> str:
        value = self.values.get(flag)
        return value if isinstance(value, str) else ""

    def number(self, flag: str, default: int | None = None) -> int | None:
        value = self.values.get(flag)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def field(self, flag: str, name: str) -> Any:
        """A field of an option that is a JSON object; None if there is none."""
        value = self.values.get(flag)
        return value.get(name) if isinstance(value, Mapping) else None


def findings(wanted: Wanted) -> list[Finding]:
    """All that is to be said, harm first."""
    return [*_harm(wanted), *_harm_of_environment(wanted), *_contradictions(wanted)]


# Harm
# ------------------------------------------------------------------------------------------------------------------

# Switches that do harm wherever they are on: (why, what to do).
_HARMFUL_SWITCHES = {
    "--enable-log-outputs": ("the answers get into the log", "leave it out"),
    "--disable-log-stats": (
        "the engine's metrics vanish, which the scheduler and the alerts live on",
        "leave it out; --disable-uvicorn-access-log quiets the log",
    ),
}
_ADVISED_SWITCHES = {
    "--enable-log-requests": (
        "it writes a line a request with ids and parameters, and the prompts at level DEBUG",
        "leave it out unless somebody reads it",
    ),
    "--trust-remote-code": (
        "the engine runs code out of the model's repository",
        "keep it for models whose code was read, at a pinned --revision",
    ),
    "--trust-request-chat-template": (
        "clients choose the template that is run",
        "leave it out where clients aren't trusted",
    ),
    "--trust-request-mm-kwargs": (
        "clients decide how much memory a picture takes",
        "leave it out where clients aren't trusted",
    ),
}
_SECRETS = {"--api-key": "VLLM_API_KEY", "--hf-token": "HF_TOKEN"}
_EAGER = "it turns CUDA graphs and compilation off, so decoding is slower; for debugging only"
_ALL_ADDRESSES = ("0.0.0.0", "::", "[::]", "0", "*")


def _harm(wanted: Wanted) -> Iterator[Finding]:
    if wanted.on("--enforce-eager"):
        # A build for CPUs has no CUDA graphs to lose.
        yield Finding("harmful", ("--enforce-eager",), _EAGER, "leave it out", refused=not wanted.on_cpu)
    if wanted.text("--optimization-level").strip() == "0":
        yield Finding("harmful", ("--optimization-level",), _EAGER, "leave it out", refused=not wanted.on_cpu)
    for switches, refused in ((_HARMFUL_SWITCHES, True), (_ADVISED_SWITCHES, False)):
        for flag, (reason, to_do) in switches.items():
            if wanted.on(flag):
                yield Finding("harmful", (flag,), reason, to_do, refused)
    for flag, variable in _SECRETS.items():
        if wanted.values.get(flag):
            reason = "every user of the host can read a command line"
            yield Finding("harmful", (flag,), reason, f"give it as {variable} in a file that only the unit can read")
    if wanted.text("--load-format") == "dummy":
        yield Finding("harmful", ("--load-format",), "the weights are random, the answers garbage", "leave it out")
    if "demo" in wanted.text("--tool-server").split(","):
        reason = "code that the model writes is run in a container with access to the network"
        yield Finding("harmful", ("--tool-server",), reason, "name a tool server of your own, or leave it out")
    if wanted.text("--host") in _ALL_ADDRESSES:
        reason = (
            "a key guards /v1, /v2 and /inference only; /metrics, /invocations and others are open to every network"
        )
        yield Finding("harmful", ("--host",), reason, "bind it to the private address, behind the edge", refused=False)
    verbose = [flag for flag in ("--log-level",) if wanted.text(flag).upper() in ("DEBUG", "NOTSET")]
    verbose += ["--logging-config"] if wanted.field("--logging-config", "log_level") in ("DEBUG", "NOTSET") else []
    verbose += ["VLLM_LOGGING_LEVEL"] if wanted.environment.get("VLLM_LOGGING_LEVEL", "").upper() == "DEBUG" else []
    for flag in verbose:
        prompts = wanted.on("--enable-log-requests")
        reason = f"{LOG_PROMPTS}, and with --enable-log-requests they do" if prompts else "it is for debugging"
        yield Finding("harmful", (flag,), reason, "use level INFO", refused=prompts)


def _harm_of_environment(wanted: Wanted) -> Iterator[Finding]:
    for name, (does_harm, reason, to_do) in _ENVIRONMENT.items():
        if name in wanted.environment and does_harm(wanted.environment[name].strip()):
            yield Finding("harmful", (name,), reason, to_do)


def _set(value: str) -> bool:
    return value not in ("", "0")


_ENVIRONMENT: dict[str, tuple[Callable[[str], bool], str, str]] = {
    "CUDA_LAUNCH_BLOCKING": (_set, "it makes the host wait for every kernel; for debugging only", "unset it"),
    "VLLM_TRACE_FUNCTION": (_set, "it writes a line for every call of a function; for debugging only", "unset it"),
    "VLLM_SERVER_DEV_MODE": (_set, "it opens routes for developers, without a key, that change the engine", "unset it"),
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": (
        lambda value: value.lower() == "true",
        "the answers get into the log",
        "unset it",
    ),
}


# Contradictions
# --------------------------------------------------------------------------------------------------------

# (one, other): the engine refuses both together.
_EXCLUSIVE = (
    ("--enable-per-request-metrics", "--disable-log-stats"),
    ("--grpc", "--grpc-port"),
    ("--data-parallel-multi-port-external-lb", "--grpc"),
    ("--data-parallel-multi-port-external-lb", "--grpc-port"),
    ("--data-parallel-multi-port-external-lb", "--uds"),
    ("--headless", "--data-parallel-hybrid-lb"),
    ("--headless", "--grpc-port"),
    ("--enable-elastic-ep", "--data-parallel-external-lb"),
    ("--enable-elastic-ep", "--data-parallel-hybrid-lb"),
)
# (one, other): the engine refuses the one without the other.
_REQUIRED = (
    ("--enable-log-outputs", "--enable-log-requests"),
    ("--enable-auto-tool-choice", "--tool-call-parser"),
    ("--enable-eplb", "--enable-expert-parallel"),
    ("--enable-elastic-ep", "--enable-eplb"),
    ("--numa-bind-nodes", "--numa-bind"),
    ("--numa-bind-cpus", "--numa-bind"),
    ("--ssl-keyfile", "--ssl-certfile"),
)
# (one, other): the one has no effect without the other.
_VOID_WITHOUT = tuple(
    (flag, "--enable-lora")
    for flag in ("--max-loras", "--max-lora-rank", "--max-cpu-loras", "--lora-dtype", "--fully-sharded-loras")
) + (("--fingerprint-value", "--fingerprint-mode"), ("--enable-ssl-refresh", "--ssl-certfile"))
# (one, other): with the one, the other has no effect.
_VOID_WITH = (
    ("--uds", "--host"),
    ("--uds", "--port"),
    ("--kv-cache-memory-bytes", "--gpu-memory-utilization"),
)
# (smaller, larger): the engine refuses it if the first is more than the second.
_ORDERED = (
    ("--max-num-seqs", "--max-num-batched-tokens"),
    ("--max-num-active-seqs", "--max-num-seqs"),
    ("--long-prefill-token-threshold", "--max-model-len"),
    ("--data-parallel-size-local", "--data-parallel-size"),
    ("--max-loras", "--max-cpu-loras"),
)
# An option, and the object and field that mean the same: the engine refuses both together.
_SAME = (
    ("--attention-backend", "--attention-config", "backend"),
    ("--cudagraph-capture-sizes", "--compilation-config", "cudagraph_capture_sizes"),
    ("--max-cudagraph-capture-size", "--compilation-config", "max_cudagraph_capture_size"),
    ("--enable-flashinfer-autotune", "--kernel-config", "enable_flashinfer_autotune"),
    ("--spec-method", "--speculative-config", "method"),
    ("--spec-model", "--speculative-config", "model"),
    ("--spec-tokens", "--speculative-config", "num_speculative_tokens"),
)


def _wanted(wanted: Wanted, flag: str) -> bool:
    return wanted.given(flag) and not wanted.off(flag)


def _contradictory(flags: tuple[str, ...], reason: str, to_do: str) -> Finding:
    return Finding("contradictory", flags, reason, to_do)


def _contradictions(wanted: Wanted) -> Iterator[Finding]:
    for one, other in _EXCLUSIVE:
        if _wanted(wanted, one) and _wanted(wanted, other):
            yield _contradictory((one, other), "they exclude each other", "leave one of them out")
    for one, other in _REQUIRED:
        if _wanted(wanted, one) and not _wanted(wanted, other):
            yield _contradictory((one,), f"it requires {other}", f"give {other} as well, or leave {one} out")
    for one, other in _VOID_WITHOUT:
        if _wanted(wanted, one) and not _wanted(wanted, other):
            yield Finding(
                "no_effect", (one,), f"it has no effect without {other}", f"give {other}, or leave it out", False
            )
    for one, other in _VOID_WITH:
        if _wanted(wanted, one) and _wanted(wanted, other):
            yield Finding("no_effect", (other,), f"with {one} it has no effect", "leave one of them out", False)
    for smaller, larger in _ORDERED:
        least, most = wanted.number(smaller), wanted.number(larger)
        if least is not None and most is not None and least > most and not (larger == "--max-model-len" and most < 0):
            reason = f"{smaller} {least} is more than {larger} {most}"
            yield _contradictory((smaller, larger), reason, f"raise {larger}, or lower {smaller}")
    for flag, configuration, name in _SAME:
        if _wanted(wanted, flag) and wanted.field(configuration, name) is not None:
            reason = f"{configuration} has {name} as well, and the engine takes one of the two only"
            yield _contradictory((flag, configuration), reason, f"leave {flag} or {name} out")
    yield from _single_contradictions(wanted)
    yield from _data_parallel(wanted)
    yield from _nodes(wanted)


def _single_contradictions(wanted: Wanted) -> Iterator[Finding]:
    api_servers = wanted.number("--api-server-count")
    if wanted.on("--headless") and api_servers is not None and api_servers > 0:
        flags = ("--headless", "--api-server-count")
        yield _contradictory(flags, "an engine without a head has no API server", "leave one of them out")
    batch, length = wanted.number("--max-num-batched-tokens"), wanted.number("--max-model-len")
    if batch is not None and length is not None and batch < length and wanted.off("--enable-chunked-prefill"):
        yield _contradictory(
            ("--max-num-batched-tokens", "--max-model-len", "--enable-chunked-prefill"),
            "without chunked prefill a prompt has to fit into one batch",
            "leave --no-enable-chunked-prefill out, or raise --max-num-batched-tokens to --max-model-len",
        )
    if wanted.on("--ray-workers-use-nsight") and wanted.text("--distributed-executor-backend") != "ray":
        reason = "it requires --distributed-executor-backend ray"
        yield _contradictory(("--ray-workers-use-nsight",), reason, "leave it out")
    tensor = wanted.number("--tensor-parallel-size", 1) or 1
    decode = wanted.number("--decode-context-parallel-size", 1) or 1
    prefill = wanted.number("--prefill-context-parallel-size", 1) or 1
    if prefill == 1 and tensor % decode:
        flags = ("--tensor-parallel-size", "--decode-context-parallel-size")
        yield _contradictory(flags, f"{decode} does not divide {tensor}", "choose a divisor of --tensor-parallel-size")
    if wanted.on("--enable-eplb") and tensor * prefill * (wanted.number("--data-parallel-size", 1) or 1) == 1:
        reason = "it requires more than one card in tensor, prefill-context or data parallelism"
        yield _contradictory(("--enable-eplb",), reason, "leave it out")
    if wanted.on("--enable-elastic-ep") and (wanted.number("--pipeline-parallel-size", 1) or 1) > 1:
        flags = ("--enable-elastic-ep", "--pipeline-parallel-size")
        yield _contradictory(flags, "they exclude each other", "leave one of them out")
    devices = [each.strip() for each in wanted.text("--device-ids").split(",")] if wanted.given("--device-ids") else []
    if len(set(devices)) != len(devices):
        yield _contradictory(("--device-ids",), "a card is named twice", "name each card once")


def _data_parallel(wanted: Wanted) -> Iterator[Finding]:
    modes = {
        "--data-parallel-multi-port-external-lb": wanted.on("--data-parallel-multi-port-external-lb"),
        "--data-parallel-external-lb": wanted.on("--data-parallel-external-lb"),
        "--data-parallel-rank": wanted.given("--data-parallel-rank"),
        "--data-parallel-hybrid-lb": wanted.on("--data-parallel-hybrid-lb"),
    }
    external = modes["--data-parallel-external-lb"] or modes["--data-parallel-rank"]
    chosen = (modes["--data-parallel-multi-port-external-lb"], external, modes["--data-parallel-hybrid-lb"])
    if sum(chosen) > 1:
        flags = tuple(flag for flag, on in modes.items() if on)
        yield _contradictory(flags, "only one mode of load balancing can be chosen", "leave all but one out")
    size, rank = wanted.number("--data-parallel-size", 1) or 1, wanted.number("--data-parallel-rank")
    if size > 1 and rank is not None and rank >= size:
        flags = ("--data-parallel-rank", "--data-parallel-size")
        yield _contradictory(flags, f"ranks go from 0 to {size - 1}", "correct the rank")
    if modes["--data-parallel-external-lb"] and size <= 1:
        reason = "it requires --data-parallel-size over 1"
        yield _contradictory(("--data-parallel-external-lb",), reason, "give the size, or leave it out")
    if wanted.on("--enable-fault-tolerance") and not external:
        reason = "it requires --data-parallel-external-lb or --data-parallel-rank"
        yield _contradictory(("--enable-fault-tolerance",), reason, "leave it out")


def _nodes(wanted: Wanted) -> Iterator[Finding]:
    nodes = wanted.number("--nnodes", 1) or 1
    if nodes <= 1:
        return
    sizes = (
        "--data-parallel-size",
        "--pipeline-parallel-size",
        "--tensor-parallel-size",
        "--prefill-context-parallel-size",
    )
    world = 1
    for flag in sizes:
        world *= wanted.number(flag, 1) or 1
    if world % nodes:
        reason = f"{world} cards (the product of the parallel sizes) can't be spread evenly over {nodes} nodes"
        yield _contradictory(("--nnodes",), reason, "let the number of nodes divide the product of the parallel sizes")
    rank = wanted.number("--node-rank", 0) or 0
    if rank >= nodes:
        yield _contradictory(("--node-rank", "--nnodes"), f"ranks go from 0 to {nodes - 1}", "correct the rank")
    for flag in ("--data-parallel-backend", "--distributed-executor-backend"):
        if wanted.text(flag) == "ray":
            yield _contradictory((flag, "--nnodes"), "several nodes without Ray need the backend mp", f"give {flag} mp")
