# SPDX-License-Identifier: GPL-3.0-or-later
"""The preprocessor: how soon it is ready, its memory, what a request, an event and a token cost it.

Usage: python -m tests.bench.preprocessor [--rounds N] [--seconds S]

It has the machine's last core to itself and one thread, with a tokenizer of 150,000 entries that is trained here, once.
Load and engines, which answer at once or an event every 20 ms, share the first core. Figures are medians of the rounds.
Those "of a core" come from the time that the processor spent on it: what else the machine does changes little there.

Everything is on loopback. Needs two cores, gcc, and a minute for the tokenizer the first time.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers, trainers

from rehearsal import preprocessor
from tests.bench.gateway.__main__ import (
    CACHE,
    CORES,
    GATEWAY_CORE,
    LOAD_CORE,
    PATIENCE,
    free_ports,
    processor_us,
    program,
    started,
)
from tests.support.waiting import wait_until
from tests.unit.preprocessor.made_tokenizers import QWEN2, bpe
from tests.unit.preprocessor.proxy_world import KEY, Proxy

ENTRIES = 150_000
MODEL = "bench"
CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STREAMS, EVENT_MS = 200, 20
LONG_TEXT = 100_000  # characters, of which the cost is the tokens' alone
SYLLABLES = [first + vowel for first in "bcdfghjklmnprstvwz" for vowel in ("a", "e", "i", "o", "u", "ai", "ou")]


def words(count: int) -> list[str]:
    """Words of one to five syllables, each once."""
    source = random.Random(5)
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(source.choices(SYLLABLES, k=source.randint(1, 5)))] = None
    return list(found)


def text(characters: int, seed: int = 11) -> str:
    """Running text: few words make most of it, as in any language."""
    known = words(4000)
    source = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(len(known))]
    parts = source.choices(known, weights, k=characters // 3)
    return " ".join(parts)[:characters]


def model_directory() -> Path:
    """A model's directory with a byte-level BPE of 150,000 entries and a chat template, trained where it is not yet."""
    directory = CACHE / f"tokenizer-{ENTRIES}"
    if not (directory / "chat_template.jinja").exists():
        print(f"training a tokenizer of {ENTRIES} entries, once", flush=True)
        tokenizer = bpe(QWEN2)
        tokenizer.normalizer = normalizers.NFC()
        trainer = trainers.BpeTrainer(
            vocab_size=ENTRIES,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        known = words(ENTRIES + 60_000)
        # Frequent words first, as merges are learnt: what comes later is put together of what came before.
        lines = (" ".join(known[: 1000 * step]) for step in range(1, 11))
        tokenizer.train_from_iterator([*lines, " ".join(known), " ".join(known)], trainer)
        assert tokenizer.get_vocab_size() == ENTRIES, tokenizer.get_vocab_size()
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(directory / "tokenizer.json"))
        configuration = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (directory / "tokenizer_config.json").write_text(json.dumps(configuration), encoding="utf-8")
        (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return directory


class Bench:
    """One run: what is measured by name, a figure a round."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder = folder
        self._seconds = seconds
        self._traffic = program()
        self._model = model_directory()
        self._prompt = text(1000)
        self.figures: dict[str, list[float]] = {}
        (folder / "words").write_text("".join(f"{word}\n" for word in words(2000)[1000:]), encoding="utf-8")
        self._binary = folder / "pinned"
        binary = preprocessor.ensured(platform.machine())
        self._binary.write_text(f'#!/bin/sh\nexec taskset --cpu-list {GATEWAY_CORE} {binary} "$@"\n')
        self._binary.chmod(0o755)

    def note(self, name: str, value: float) -> None:
        """Keep a figure."""
        self.figures.setdefault(name, []).append(value)

    @contextlib.contextmanager
    def _proxy(self, gateway: int, filtered: bool = False) -> Iterator[Proxy]:
        model: dict[str, Any] = {"name": MODEL, "max_model_len": 1 << 20, "directory": str(self._model)}
        lists = []
        if filtered:
            model["word_lists"] = ["names"]
            lists = [{"name": "names", "file": str(self._folder / "words")}]
        directory = Path(tempfile.mkdtemp(dir=self._folder))
        proxy = Proxy(self._binary, directory, [model], [gateway], word_lists=lists, threads=1)
        try:
            yield proxy
        finally:
            proxy.close()

    def _load(self, port: int, path: str, connections: int, tokens: int = 0, rate: int = 0) -> dict[str, float]:
        load = [self._traffic, "load", port, path, KEY, connections, self._seconds, tokens, rate, self._prompt]
        command = ["taskset", "--cpu-list", str(LOAD_CORE), *map(str, load)]
        finished = subprocess.run(command, capture_output=True, text=True, check=True)
        result: dict[str, float] = json.loads(finished.stdout)
        if not result["answered"] and not result["events"]:
            raise SystemExit(f"nothing was answered: {result}")
        if result["failed"]:
            raise SystemExit(f"requests failed: {result}")
        return result

    def _measured(
        self, process: subprocess.Popen[bytes], work: Callable[[], dict[str, float]]
    ) -> tuple[dict[str, float], float, float]:
        """What something gave, and the seconds of the processor and of the clock that a process took for it."""
        before, begun_at = processor_us(process), time.monotonic()
        result = work()
        return result, (processor_us(process) - before) / 1e6, time.monotonic() - begun_at

    def ready(self) -> None:
        """From the start to the first answer, and the memory then."""
        for tokenizer, name in ((False, "no model"), (True, "150,000 entries")):
            begun_at = time.monotonic()
            with self._proxy_at_once(tokenizer) as (proxy_process, port):
                while not _answers(port):
                    if proxy_process.poll() is not None:
                        raise SystemExit("the preprocessor did not start")
                self.note(f"ready, {name}: ms", (time.monotonic() - begun_at) * 1000)
                self.note(f"ready, {name}: ms of a core", processor_us(proxy_process) / 1000)
                pages = Path(f"/proc/{proxy_process.pid}/statm").read_text(encoding="ascii").split()[1]
                self.note(f"resident, {name}: MB", int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6)

    @contextlib.contextmanager
    def _proxy_at_once(self, tokenizer: bool) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
        port = free_ports(2)
        model: dict[str, Any] = {"name": MODEL, "max_model_len": 32768}
        if tokenizer:
            model["directory"] = str(self._model)
        (self._folder / "keys").write_text("", encoding="utf-8")
        configuration = self._folder / "ready.json"
        document = {"listen": f"127.0.0.1:{port}", "dispatch": [f"127.0.0.1:{port + 1}"], "models": [model]}
        configuration.write_text(json.dumps({**document, "keys_file": str(self._folder / "keys")}))
        with started(
            [str(preprocessor.ensured(platform.machine())), "--config", str(configuration)],
            self._folder / "ready.log",
            GATEWAY_CORE,
        ) as process:
            yield process, port

    def requests(self, engines: int) -> None:
        """Chats of 1 kB, flat out, and the time that they are later than without."""
        with self._proxy(engines) as proxy:
            result, used, _seconds = self._measured(proxy.process, lambda: self._load(proxy.port, CHAT, 64))
            self.note("chats of 1 kB: requests/s", result["answered"] / result["seconds"])
            self.note("chats of 1 kB: requests/s of a core", result["answered"] / 0.9 / used)
            rate = 1000
            direct = self._load(engines, CHAT, 64, rate=rate)
            through = self._load(proxy.port, CHAT, 64, rate=rate)
            for share in ("p50", "p99"):
                self.note(
                    f"added to the first byte, {share}: ms", (through[f"{share}_us"] - direct[f"{share}_us"]) / 1000
                )

    def streams(self, engines: int) -> None:
        """200 streams of 50 events a second through a list of 1,000 words."""
        with self._proxy(engines, filtered=True) as proxy:
            # What began in the first tenth of the time is not counted, so that each stream begins anew several times.
            tokens = max(10, int(self._seconds * 1000 / EVENT_MS / 6))
            result, used, seconds = self._measured(
                proxy.process, lambda: self._load(proxy.port, CHAT, STREAMS, tokens=tokens)
            )
            self.note("200 filtered streams: events/s", result["events"] / result["seconds"])
            self.note("200 filtered streams: share of a core", used / seconds)

    def tokens(self, engines: int) -> None:
        """Tokenising alone, against transformers in a web handler and against the crate that both are made of."""
        port = free_ports(1)
        command = [sys.executable, "-m", "tests.bench.tokenizing_handler", str(port), str(self._model)]
        environment = {"PYTHONPATH": ".", "TOKENIZERS_PARALLELISM": "false"}
        with started(command, self._folder / "handler.log", GATEWAY_CORE, **environment):
            wait_until(lambda: _listens(port), "the handler answers", PATIENCE)
            theirs = self._load(port, "/tokenize", 16)
            self.note("transformers in a handler: chats tokenised/s", theirs["answered"] / theirs["seconds"])
        long_text = text(LONG_TEXT)
        body = json.dumps({"model": MODEL, "prompt": long_text}).encode()
        with self._proxy(engines) as proxy:
            ours = self._load(proxy.port, "/tokenize", 16)
            self.note("chats tokenised/s", ours["answered"] / ours["seconds"])
            connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=20)
            headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
            before, count, answer = processor_us(proxy.process), 40, {}
            for _unused in range(count):
                connection.request("POST", "/tokenize", body, headers)
                answer = json.loads(connection.getresponse().read())
            used = (processor_us(proxy.process) - before) / 1e6
            self.note("long texts: MB/s of a core", count * len(long_text) / 1e6 / used)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        crate = Tokenizer.from_file(str(self._model / "tokenizer.json"))
        assert crate.encode(long_text, add_special_tokens=False).ids == answer["tokens"]
        begun = time.process_time()
        for _unused in range(count):
            crate.encode_batch_fast([long_text], add_special_tokens=False)
        self.note("long texts, crate: MB/s of a core", count * len(long_text) / 1e6 / (time.process_time() - begun))


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as asked:
        asked.sendall(b"GET /healthz HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
        return asked.recv(64).startswith(b"HTTP/1.1 200")
    time.sleep(0.0005)
    return False


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


ASKED = {
    "ready, 150,000 entries: ms": "at most 150",
    "resident, no model: MB": "at most 40",
    "chats of 1 kB: requests/s of a core": "at least 2,500",
    "added to the first byte, p50: ms": "under 1",
    "added to the first byte, p99: ms": "under 3",
    "200 filtered streams: events/s": "10,000",
    "200 filtered streams: share of a core": "at most 0.5",
}


def report(figures: dict[str, list[float]]) -> None:
    """Print the medians, beside what is asked."""
    median = {name: statistics.median(values) for name, values in figures.items()}
    for name, value in median.items():
        spread = f"{min(figures[name]):,.2f} to {max(figures[name]):,.2f}"
        print(f"{name:48}{value:>12,.2f}   {spread:24} {ASKED.get(name, '')}")
    ours, theirs = median["chats tokenised/s"], median["transformers in a handler: chats tokenised/s"]
    print(f"tokenising against transformers in a handler: {ours / theirs:.1f} times (5 asked)")
    long_ours, crate = median["long texts: MB/s of a core"], median["long texts, crate: MB/s of a core"]
    print(f"tokenising long texts against the crate, by time of a core: {long_ours / crate:.2f} times (1 asked)")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="The preprocessor on one core.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement")
    options = parser.parse_args()
    if len(CORES) < 2:
        raise SystemExit("expected two cores, one for the preprocessor and one for the load, found one")
    with tempfile.TemporaryDirectory(prefix="ringmaster-bench-") as name:
        folder = Path(name)
        bench = Bench(folder, options.seconds)
        port, paced = free_ports(2), free_ports(2) + 1
        engines = [program(), "engines", str(port), "1"]
        slow = [program(), "engines", str(paced), "1", str(EVENT_MS)]
        with (
            started(engines, folder / "engines.log", LOAD_CORE),
            started(slow, folder / "slow.log", LOAD_CORE),
        ):
            wait_until(lambda: _listens(port) and _listens(paced), "the engines listen", PATIENCE)
            for number in range(options.rounds):
                print(f"round {number + 1} of {options.rounds}", flush=True)
                bench.ready()
                bench.requests(port)
                bench.streams(paced)
                bench.tokens(port)
    report(bench.figures)


if __name__ == "__main__":
    main()
