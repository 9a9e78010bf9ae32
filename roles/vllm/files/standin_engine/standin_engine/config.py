# SPDX-License-Identifier: GPL-3.0-or-later
"""Everything that the command line and the environment decide, checked before anything starts."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import VLLM_VERSION, cards, flags

DEFAULT_CARD = "a100-80g"


class ConfigError(ValueError):
    """An option that vLLM would refuse at its start."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: the name that requests give, where it lies, and the base model's name if one was given."""

    name: str
    path: str
    base_model_name: str | None = None


@dataclass(frozen=True)
class Config:
    """The engine's settings.

    Attributes:
        served_names: names that requests may give; the first one is used in answers and metrics.
        max_model_len: tokens of prompt and answer together.
        blocks: key-value blocks of ``block_size`` tokens.
        api_keys: any of them opens ``/v1``; none means that it is open.
        time_scale: factor on the duration of every step.
        stream_interval: tokens a streamed chunk.
        shutdown_timeout: seconds that running requests get after SIGTERM.
        trace: whether the measuring route answers.
    """

    model: str
    served_names: tuple[str, ...]
    host: str
    port: int
    uds: str | None
    root_path: str
    api_keys: tuple[str, ...]
    card: str
    time_scale: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    gpu_memory_utilization: float
    block_size: int
    user_specified_block_size: bool
    blocks: int
    blocks_override: int | None
    prefix_caching: bool
    enable_lora: bool
    max_loras: int
    adapters: tuple[Adapter, ...]
    stream_interval: int
    max_logprobs: int
    request_id_headers: bool
    force_include_usage: bool
    prompt_tokens_details: bool
    auto_tool_choice: bool
    server_load_tracking: bool
    log_level: str
    access_log: bool
    log_stats: bool
    shutdown_timeout: int
    system_fingerprint: str | None
    faults_file: Path | None
    trace: bool

    def cache_config(self) -> dict[str, str]:
        """Labels of ``vllm:cache_config_info``: vLLM's cache configuration as strings, its defaults where they hold."""
        tokens = self.blocks * self.block_size
        return {
            "_block_size_resolved": "True",
            "block_size": str(self.block_size),
            "cache_dtype": "auto",
            "cache_hit_alignment_tokens": str(self.block_size),
            "effective_attention_block_size": str(self.block_size),
            "enable_mamba_shared_prefix_checkpoint": "False",
            "enable_prefix_caching": str(self.prefix_caching),
            "gpu_memory_utilization": str(self.gpu_memory_utilization),
            "hash_block_size": str(self.block_size),
            "is_attention_free": "False",
            "kv_cache_dtype_skip_layers": "[]",
            "kv_cache_layout": "None",
            "kv_cache_max_concurrency": str(tokens / self.max_model_len),
            "kv_cache_memory_bytes": "None",
            "kv_cache_size_tokens": str(tokens),
            "kv_offloading_backend": "native",
            "kv_offloading_size": "None",
            "kv_sharing_fast_prefill": "False",
            "mamba_block_size": "None",
            "mamba_cache_dtype": "auto",
            "mamba_cache_mode": "none",
            "mamba_page_size_padded": "None",
            "mamba_ssm_cache_dtype": "auto",
            "num_cpu_blocks": "None",
            "num_gpu_blocks": str(self.blocks),
            "num_gpu_blocks_override": str(self.blocks_override),
            "prefix_cache_retention_interval": "0",
            "prefix_caching_hash_algo": "sha256",
            "prefix_match_unit": "None",
            "replayssm_buffer_len": "16",
            "skip_page_size_padded": "None",
            "sliding_window": "None",
            "swa_bounded_replay": "True",
            "use_kda_recoverssm": "False",
            "use_replayssm": "False",
            "user_specified_block_size": str(self.user_specified_block_size),
        }


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _adapters(modules: list[str] | None) -> tuple[Adapter, ...]:
    adapters = []
    for module in modules or []:
        if module.lstrip().startswith("{"):
            try:
                entry = json.loads(module)
                adapter = Adapter(entry["name"], entry["path"], entry.get("base_model_name"))
            except (ValueError, KeyError) as error:
                raise ConfigError(f"Invalid JSON format for --lora-modules: {module}") from error
            texts = [adapter.name, adapter.path, _or(adapter.base_model_name, "")]
            if not all(isinstance(text, str) for text in texts):
                raise ConfigError(f"Invalid JSON format for --lora-modules: {module}")
            adapters.append(adapter)
        else:
            name, equals, path = module.partition("=")
            if not (name and equals and path):
                raise ConfigError(f"Invalid format for --lora-modules: {module}")
            adapters.append(Adapter(name, path))
    if len({adapter.name for adapter in adapters}) != len(adapters):
        raise ConfigError("--lora-modules names an adapter twice")
    return tuple(adapters)


def _api_keys(flag: list[str] | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Keys of the flag, else of ``VLLM_API_KEY``, else of the service manager's credential ``api-key``."""
    if flag:
        return tuple(key for key in flag if key)
    if environment.get("VLLM_API_KEY"):
        return (environment["VLLM_API_KEY"],)
    if environment.get("CREDENTIALS_DIRECTORY"):
        credential = Path(environment["CREDENTIALS_DIRECTORY"], "api-key")
        if credential.exists():
            try:
                key = credential.read_text(encoding="utf-8").strip()
            except (OSError, ValueError) as error:
                raise ConfigError(f"the credential {credential} cannot be read: {type(error).__name__}") from error
            if not key:
                raise ConfigError(f"the credential {credential} is empty")
            return (key,)
    return ()


def _fingerprint(options: argparse.Namespace, model: str) -> str | None:
    mode = _or(options.fingerprint_mode, "full")
    if mode == "none":
        return None
    if mode == "custom":
        return None if options.fingerprint_value is None else str(options.fingerprint_value)
    return f"vllm-{VLLM_VERSION}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


def _positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}")


def build(options: argparse.Namespace, environment: Mapping[str, str]) -> Config:
    """Check the options together.

    Environment: ``STANDIN_CARD`` (``a100-80g``, ``l40s``), ``STANDIN_TIME_SCALE`` (a number over 0, default 1),
    ``STANDIN_FAULTS`` (path of the faults file), ``STANDIN_TRACE`` (``1`` opens the measuring route), ``VLLM_API_KEY``.

    Raises:
        ConfigError: a value that vLLM would refuse at its start, or that the stand-in cannot serve.
    """
    model = _or(options.model_tag, options.model)
    if model is None:
        raise ConfigError("the model is missing: standin-engine serve MODEL")
    card_name = environment.get("STANDIN_CARD") or DEFAULT_CARD
    if card_name not in cards.CARDS:
        raise ConfigError(f"STANDIN_CARD is {card_name!r}, known cards: {', '.join(sorted(cards.CARDS))}")
    try:
        time_scale = float(environment.get("STANDIN_TIME_SCALE") or 1)
    except ValueError:
        time_scale = 0.0
    if not 0 < time_scale < float("inf"):
        raise ConfigError(f"STANDIN_TIME_SCALE is {environment['STANDIN_TIME_SCALE']!r}, expected a number over 0")

    for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks_override", "stream_interval",
                 "max_loras", "max_num_queued_reqs", "max_num_queued_tokens"):  # fmt: skip
        _positive(name, getattr(options, name))
    utilization = _or(options.gpu_memory_utilization, cards.GPU_MEMORY_UTILIZATION)
    if not 0 < utilization <= 1:
        raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {utilization}")
    batched_tokens = _or(options.max_num_batched_tokens, cards.MAX_NUM_BATCHED_TOKENS)
    max_num_seqs = _or(options.max_num_seqs, cards.MAX_NUM_SEQS)
    if batched_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({batched_tokens}) must be greater than or equal to max_num_seqs ({max_num_seqs})."
        )
    block_size = _or(options.block_size, cards.BLOCK_SIZE)
    blocks = _or(
        options.num_gpu_blocks_override,
        cards.blocks_that_fit(cards.CARDS[card_name], cards.MODEL, utilization, batched_tokens, block_size),
    )
    if blocks < 1:
        raise ConfigError(
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing "
            "the engine."
        )
    capacity = blocks * block_size
    positions = cards.MODEL.max_positions
    if options.max_model_len == -1:
        max_model_len = min(positions, capacity)
    else:
        max_model_len = _or(options.max_model_len, positions)
        _positive("max_model_len", max_model_len)
        if max_model_len > positions:
            raise ConfigError(
                f"User-specified max_model_len ({max_model_len}) is greater than the derived max_model_len "
                f"(max_position_embeddings={positions})."
            )
        if max_model_len > capacity:
            raise ConfigError(
                f"To serve at least one request with the model's max seq len ({max_model_len}), more KV cache is "
                f"needed than is available; the estimated maximum model length is {capacity}. Try increasing "
                "`gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
            )
    for problem in flags.out_of_range(options):
        raise ConfigError(problem)
    adapters = _adapters(options.lora_modules)
    if adapters and not options.enable_lora:
        raise ConfigError("--lora-modules needs --enable-lora")
    served_names = tuple(options.served_model_name or [model])
    port = _or(options.port, 8000)
    if not 0 <= port <= 65535:
        raise ConfigError(f"port must be in [0, 65535], got {port}")  # The event loop would take it modulo 65536.
    if {adapter.name for adapter in adapters} & set(served_names):
        raise ConfigError("an adapter has the name of the served model")

    return Config(
        model=model,
        served_names=served_names,
        host=_or(options.host, "0.0.0.0"),
        port=port,
        uds=options.uds,
        root_path=_or(options.root_path, "").rstrip("/"),
        api_keys=_api_keys(options.api_key, environment),
        card=card_name,
        time_scale=time_scale,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched_tokens,
        max_num_queued_reqs=options.max_num_queued_reqs,
        max_num_queued_tokens=options.max_num_queued_tokens,
        gpu_memory_utilization=utilization,
        block_size=block_size,
        user_specified_block_size=options.block_size is not None,
        blocks=blocks,
        blocks_override=options.num_gpu_blocks_override,
        prefix_caching=_or(options.enable_prefix_caching, True),
        enable_lora=bool(options.enable_lora),
        max_loras=_or(options.max_loras, 1),
        adapters=adapters,
        stream_interval=_or(options.stream_interval, 1),
        max_logprobs=_or(options.max_logprobs, 20),
        request_id_headers=bool(options.enable_request_id_headers),
        force_include_usage=bool(options.enable_force_include_usage),
        prompt_tokens_details=bool(options.enable_prompt_tokens_details),
        auto_tool_choice=bool(options.enable_auto_tool_choice and options.tool_call_parser),
        server_load_tracking=bool(options.enable_server_load_tracking),
        log_level=_or(options.uvicorn_log_level, "info"),
        access_log=not options.disable_uvicorn_access_log,
        log_stats=not options.disable_log_stats,
        shutdown_timeout=_or(options.shutdown_timeout, 0),
        system_fingerprint=_fingerprint(options, model),
        faults_file=Path(environment["STANDIN_FAULTS"]) if environment.get("STANDIN_FAULTS") else None,
        trace=environment.get("STANDIN_TRACE") == "1",
    )
