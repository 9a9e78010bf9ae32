# SPDX-License-Identifier: GPL-3.0-or-later
"""Versions of a model on a host: fetched, cut, resumed, switched, damaged and mended; what is in service stays so."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.ringmaster.inference.plugins.module_utils import model_store
from ansible_collections.ringmaster.inference.plugins.module_utils.model_manifest import (
    Manifest,
    ModelError,
    ModelFile,
    of_directory,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.model_sources import (
    DirectorySource,
    HttpSource,
    SourceInterruptedError,
    Stream,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.model_store import Part, Store, format_bytes
from tests.support.model_mirror import Mirror

UID, GID = os.getuid(), os.getgid()
WEIGHTS = "model-00001-of-00002.safetensors"


class Killed(BaseException):
    """Stands for a signal: nothing in the store may catch it."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Slow(DirectorySource):
    """Hands out small chunks, each of which takes time; can be cut, or end the run, after some of them."""

    def __init__(self, path: Path, clock: Clock | None = None, seconds: float = 0.0, chunk: int = 1000) -> None:
        super().__init__(str(path))
        self.clock, self.seconds, self.size_of_chunk = clock, seconds, chunk
        self.bytes = 0
        self.opened: list[tuple[str, int]] = []
        self.before_chunk: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def open(self, file: ModelFile, offset: int) -> Iterator[Stream]:
        self.opened.append((file.path, offset))
        with super().open(file, offset) as stream:
            content = b"".join(stream.chunks)
            yield Stream(stream.offset, stream.size, self._slowly(content))

    def _slowly(self, content: bytes) -> Iterator[bytes]:
        for begin in range(0, len(content), self.size_of_chunk):
            self.before_chunk()
            if self.clock:
                self.clock.now += self.seconds
            chunk = content[begin : begin + self.size_of_chunk]
            self.bytes += len(chunk)
            yield chunk


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    (directory / "tokenizer").mkdir(parents=True)
    (directory / "config.json").write_text('{"model_type": "qwen2"}')
    (directory / "empty").write_text("")
    (directory / "tokenizer" / "vocab.json").write_bytes(os.urandom(3000))
    (directory / WEIGHTS).write_bytes(os.urandom(20_000))
    return directory


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "models"), "qwen2", UID, GID, sleep=lambda _seconds: None)


def place(store: Store, manifest: Manifest, source: Any, keep: int = 1) -> str:
    with store.locked():
        situation = store.situation(manifest)
        version = situation.version
        if version is None:
            store.distrust(situation, manifest)
            assert store.fetch(manifest, source)
            version = store.place(manifest)
        store.activate(version)
        store.prune(keep)
    return version


def another(model: Path, name: str = "config.json", content: str = '{"model_type": "other"}') -> Manifest:
    (model / name).write_text(content)
    return of_directory(str(model))


def served(store: Store) -> dict[str, bytes]:
    """What an engine would load."""
    directory = Path(store.document()["path"])
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_model_is_placed_and_nobody_else_can_read_it(store: Store, model: Path) -> None:
    manifest = of_directory(str(model))
    version = place(store, manifest, DirectorySource(str(model)))
    assert version == manifest.identity == store.current()
    assert served(store) == content(model)
    for path in [Path(store.root), *Path(store.root).rglob("*")]:
        if not path.is_symlink():
            assert not path.stat().st_mode & 0o007, path
    assert stat.S_IMODE(Path(store.document()["path"], WEIGHTS).stat().st_mode) == 0o640
    assert stat.S_IMODE(Path(store.document()["path"], "tokenizer").stat().st_mode) == 0o750
    assert store.document() == {
        "name": "qwen2",
        "path": f"{store.base}/current",
        "version": version,
        "previous": None,
        "versions": [version],
        "incoming": {},
        "files": 4,
        "bytes": manifest.size,
    }


def test_a_second_run_reads_nothing(store: Store, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = of_directory(str(model))
    place(store, manifest, DirectorySource(str(model)))
    monkeypatch.setattr(model_store, "digest_of", lambda _file: pytest.fail("a file was read"))
    situation = store.situation(manifest)
    assert (situation.version, situation.differences) == (manifest.identity, [])
    with pytest.raises(BaseException, match="a file was read"):
        store.situation(manifest, full=True)


def test_the_former_version_stays_and_older_ones_go(store: Store, model: Path) -> None:
    source = DirectorySource(str(model))
    versions = [place(store, another(model, content=str(number)), source, keep=2) for number in range(4)]
    assert store.current() == versions[3]
    assert store.previous() == versions[2]
    assert store.versions() == sorted(versions[1:])
    assert sorted(os.listdir(os.path.join(store.base, "records"))) == [
        f"{version}.json" for version in store.versions()
    ]
    with store.locked():
        assert store.prune(keep=1) == [versions[1]]
        assert store.activate(versions[2])
        assert (store.current(), store.previous()) == (versions[2], versions[3])
        assert not store.activate(versions[2])
        assert store.prune(keep=0) == [versions[3]]
        assert (store.current(), store.previous()) == (versions[2], None)
        assert not os.path.lexists(os.path.join(store.base, "previous"))
        with pytest.raises(ModelError, match="not there"):
            store.activate(versions[1])


def test_files_that_another_version_has_are_not_fetched(store: Store, model: Path) -> None:
    place(store, of_directory(str(model)), DirectorySource(str(model)))
    source = Slow(model)
    place(store, another(model), source)
    assert [path for path, _offset in source.opened] == ["config.json"]
    assert served(store) == content(model)


@pytest.mark.parametrize("flipped", [0, 10_000, 19_999])
def test_a_flipped_byte_is_refused_by_name(store: Store, model: Path, flipped: int) -> None:
    before = place(store, of_directory(str(model)), DirectorySource(str(model)))
    (model / WEIGHTS).write_bytes(os.urandom(20_000))
    manifest = of_directory(str(model))
    damaged = bytearray((model / WEIGHTS).read_bytes())
    damaged[flipped] ^= 1
    (model / WEIGHTS).write_bytes(damaged)
    with pytest.raises(ModelError, match=WEIGHTS) as raised:
        place(store, manifest, DirectorySource(str(model)))
    assert f"{before} stays in service" in str(raised.value)
    assert store.current() == before
    damaged[flipped] ^= 1
    (model / WEIGHTS).write_bytes(damaged)
    assert place(store, manifest, DirectorySource(str(model))) == manifest.identity == store.current()


@pytest.mark.parametrize("size", [19_999, 20_001, 0])
def test_a_file_of_another_size_is_refused_by_name(store: Store, model: Path, size: int) -> None:
    manifest = of_directory(str(model))
    (model / WEIGHTS).write_bytes(b"\0" * size)
    with pytest.raises(ModelError, match=f"{WEIGHTS} with 20000 bytes"):
        place(store, manifest, DirectorySource(str(model)))
    assert store.current() is None


def test_a_source_that_lies_about_its_size_is_refused(store: Store, model: Path) -> None:
    manifest = of_directory(str(model))

    class Endless(Slow):
        @contextlib.contextmanager
        def open(self, file: ModelFile, offset: int) -> Iterator[Stream]:
            yield Stream(offset, None, iter(lambda: b"x" * 1000, b""))

    with pytest.raises(ModelError, match="Found more"):
        place(store, manifest, Endless(model))

    class Short(Slow):
        @contextlib.contextmanager
        def open(self, file: ModelFile, offset: int) -> Iterator[Stream]:
            yield Stream(offset, None, iter([b"x"]))

    with pytest.raises(ModelError, match="Found 1 bytes"):
        place(store, manifest, Short(model))


def test_a_killed_run_is_gone_on_with_at_every_byte(store: Store, model: Path) -> None:
    before = place(store, of_directory(str(model)), DirectorySource(str(model)))
    (model / WEIGHTS).write_bytes(os.urandom(20_000))
    manifest = another(model, "tokenizer/vocab.json", "x" * 2500)
    source = Slow(model)

    def kill() -> None:
        raise Killed

    chunks = 0
    while True:
        source.before_chunk = _second(kill)
        try:
            place(store, manifest, source)
            break
        except Killed:
            chunks += 1
            assert store.current() == before
            assert chunks < 100
    assert chunks > 20
    assert served(store) == content(model)
    assert source.bytes == 22_500  # no byte came twice


def _second(action: Callable[[], None]) -> Callable[[], None]:
    calls: list[None] = []

    def call() -> None:
        calls.append(None)
        if len(calls) == 2:
            action()

    return call


def _limited(function: Callable[..., Any], allowed: int) -> Callable[..., Any]:
    left = iter(range(allowed))

    def perhaps(*arguments: Any, **options: Any) -> Any:
        if next(left, None) is None:
            raise Killed
        return function(*arguments, **options)

    return perhaps


@pytest.mark.parametrize("call", ["rename", "symlink", "replace", "link", "fsync", "chown"])
def test_a_run_killed_at_any_step_leaves_the_former_version(
    store: Store, model: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    before = content(model)
    place(store, of_directory(str(model)), DirectorySource(str(model)))
    manifest = another(model)
    real: Callable[..., Any] = getattr(os, call)
    for allowed in range(100):
        monkeypatch.setattr(os, call, _limited(real, allowed))
        try:
            place(store, manifest, DirectorySource(str(model)))
            break
        except Killed:
            assert served(store) in (before, content(model))
        finally:
            monkeypatch.setattr(os, call, real)
    assert served(store) == content(model)
    assert store.previous() is not None
    assert store.incoming() == {}
    with store.locked():
        assert store.prune(1) == []


def test_what_a_former_run_left_wrong_is_fetched_once_more(store: Store, model: Path) -> None:
    manifest = of_directory(str(model))
    incoming = Path(store.base, "incoming", manifest.identity)
    incoming.mkdir(parents=True)
    (incoming / WEIGHTS).write_bytes(b"\0" * 5000)
    (incoming / "config.json").write_bytes(b"\0" * 5000)  # longer than it is
    (incoming / f"{WEIGHTS}.tmp").write_bytes(b"\0")
    (incoming / "empty").symlink_to("/etc/hostname")
    with pytest.raises(ModelError, match="empty"):
        place(store, manifest, DirectorySource(str(model)))
    (incoming / "empty").unlink()
    place(store, manifest, DirectorySource(str(model)))
    assert served(store) == content(model)


def test_time_limit_ends_a_call_and_the_next_one_goes_on(tmp_path: Path, model: Path) -> None:
    clock = Clock()
    store = Store(str(tmp_path / "models"), "qwen2", UID, GID, clock=clock, sleep=clock.sleep)
    manifest = of_directory(str(model))
    source = Slow(model, clock, seconds=1.0)
    calls = 0
    with store.locked():
        while not store.fetch(manifest, source, time_limit=4):
            calls += 1
            assert calls < 50
        assert calls >= 5
        store.activate(store.place(manifest))
    assert source.bytes == manifest.size
    assert served(store) == content(model)


def test_source_that_fails_for_a_while(store: Store, model: Path) -> None:
    manifest = of_directory(str(model))
    source = Slow(model)
    failures = iter([None, SourceInterruptedError("away"), None, None, SourceInterruptedError("away")] * 3)

    def fail() -> None:
        failure = next(failures, None)
        if failure:
            raise failure

    source.before_chunk = fail
    place(store, manifest, source)
    assert served(store) == content(model)
    assert source.bytes == manifest.size


def test_source_that_stays_away_has_an_end(tmp_path: Path, model: Path) -> None:
    clock = Clock()
    store = Store(str(tmp_path / "models"), "qwen2", UID, GID, clock=clock, sleep=clock.sleep)

    def away() -> None:
        raise SourceInterruptedError("status 503")

    source = Slow(model)
    source.before_chunk = away
    with pytest.raises(ModelError, match=r"5 tries in a row.*status 503"):
        place(store, of_directory(str(model)), source)
    assert clock.now == 1 + 2 + 4 + 8


def test_mirror_without_ranges_that_is_always_cut_has_an_end(store: Store, model: Path) -> None:
    manifest = of_directory(str(model))
    with Mirror(model) as mirror:
        mirror.behaviour.ranges = False
        mirror.behaviour.cut_after = [100_000, *[9000] * 100]
        with pytest.raises(ModelError, match="5 tries in a row"):
            place(store, manifest, HttpSource(mirror.url))
        mirror.behaviour.cut_after = [9000, 12_000]
        place(store, manifest, HttpSource(mirror.url))
    assert served(store) == content(model)


def test_a_full_disk_takes_what_was_fetched_and_nothing_else(
    store: Store, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = place(store, of_directory(str(model)), DirectorySource(str(model)))
    (model / WEIGHTS).write_bytes(os.urandom(20_000))
    manifest = of_directory(str(model))
    source = Slow(model)

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source.before_chunk = _second(full)
    with pytest.raises(ModelError, match="room for all files of qwen2") as raised:
        place(store, manifest, source)
    assert f"{before} stays in service" in str(raised.value)
    assert store.current() == before
    assert store.incoming() == {}
    assert os.listdir(os.path.join(store.base, "incoming")) == []


def test_a_second_name_of_a_file_in_service_is_never_written_to(store: Store, model: Path) -> None:
    place(store, of_directory(str(model)), DirectorySource(str(model)))
    before = served(store)
    (model / "config.json").write_text("x" * 50)
    manifest = of_directory(str(model))
    incoming = Path(store.base, "incoming", manifest.identity)
    incoming.mkdir()
    os.link(version_path(store) / "config.json", incoming / "config.json")
    shutil.rmtree(os.path.join(store.base, "records"))
    former = version_path(store)
    sizeless = Manifest(tuple(ModelFile(file.path, file.sha256, None) for file in manifest.files))
    place(store, sizeless, DirectorySource(str(model)))
    assert content(former) == before
    assert served(store) == content(model)


def test_room_is_looked_for_before(tmp_path: Path, model: Path) -> None:
    manifest = of_directory(str(model))
    for reserve, fits in [(0, True), (1 << 60, False)]:
        store = Store(str(tmp_path / "models"), "qwen2", UID, GID, reserve)
        situation = store.situation(manifest)
        store.demand(situation, manifest, None)
        assert situation.needed_bytes == situation.total_bytes == manifest.size
        with contextlib.nullcontext() if fits else pytest.raises(ModelError, match="free on the file system"):
            store.check_room(situation)
    assert not os.path.exists(store.root)


def test_demand_counts_what_is_there(store: Store, model: Path) -> None:
    first = of_directory(str(model))
    place(store, first, DirectorySource(str(model)))
    (model / WEIGHTS).write_bytes(os.urandom(20_000))
    manifest = another(model)
    incoming = Path(store.base, "incoming", manifest.identity)
    incoming.mkdir()
    (incoming / WEIGHTS).write_bytes((model / WEIGHTS).read_bytes()[:15_000])
    situation = store.situation(manifest)
    store.demand(situation, manifest, None)
    assert situation.needed_bytes == 5000 + len((model / "config.json").read_bytes())
    assert situation.reused_files == 2
    # Without sizes, the source tells them, if it is one that can.
    sizeless = Manifest(tuple(ModelFile(file.path, file.sha256, None) for file in manifest.files))
    for source, unknown in [(None, 2), (DirectorySource(str(model)), 0)]:
        situation = store.situation(sizeless)
        store.demand(situation, sizeless, source)
        assert situation.unknown_sizes == unknown
    place(store, sizeless, DirectorySource(str(model)))
    assert served(store) == content(model)


def version_path(store: Store) -> Path:
    return Path(store.base, "versions", store.current() or "")


def flip(path: Path, keep_time: bool) -> None:
    found = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    if keep_time:
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.parametrize("keep_time", [False, True])
def test_a_byte_that_flips_on_the_host_is_found_and_mended(store: Store, model: Path, keep_time: bool) -> None:
    manifest = of_directory(str(model))
    version = place(store, manifest, DirectorySource(str(model)))
    flip(version_path(store) / WEIGHTS, keep_time)
    quick = store.situation(manifest)
    assert (quick.version is None) == (not keep_time)
    full = store.situation(manifest, full=True)
    assert full.version is None
    assert [str(each).split(": ", maxsplit=1)[0] for each in full.differences] == [WEIGHTS]
    with store.locked():
        store.distrust(full, manifest)
    # It needs no second reading of everything to know it.
    assert store.situation(manifest).version is None
    source = Slow(model)
    mended = place(store, manifest, source)
    assert {path for path, _offset in source.opened} == {WEIGHTS}
    assert mended == f"{version}-2" == store.current()
    assert served(store) == content(model)
    # A damaged version is nothing to go back to.
    assert store.versions() == [mended]
    assert store.previous() is None


def test_a_mended_version_keeps_the_former_one(store: Store, model: Path) -> None:
    before = place(store, of_directory(str(model)), DirectorySource(str(model)))
    manifest = another(model)
    place(store, manifest, DirectorySource(str(model)))
    flip(version_path(store) / "config.json", keep_time=False)
    mended = place(store, manifest, DirectorySource(str(model)))
    assert (store.current(), store.previous()) == (mended, before)
    assert store.versions() == sorted([before, mended])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: (path / WEIGHTS).unlink(), "missing"),
        (lambda path: (path / WEIGHTS).write_bytes(b"x"), "1 bytes instead of 20000"),
        (lambda path: ((path / WEIGHTS).unlink(), (path / WEIGHTS).symlink_to("config.json")), "not a regular file"),
        (lambda path: (path / "modeling.py").write_text("import os"), "modeling.py: not in the manifest"),
        (lambda path: (path / "more").mkdir(), "more: a directory that is not in the manifest"),
        (lambda path: shutil.rmtree(path / "tokenizer"), "tokenizer/vocab.json: missing"),
    ],
)
def test_whatever_else_is_wrong_is_found_and_mended(
    store: Store, model: Path, damage: Callable[[Path], Any], says: str
) -> None:
    manifest = of_directory(str(model))
    place(store, manifest, DirectorySource(str(model)))
    damage(version_path(store))
    situation = store.situation(manifest)
    assert situation.version is None
    assert any(says in str(each) for each in situation.differences)
    place(store, manifest, DirectorySource(str(model)))
    assert served(store) == content(model)


def test_wrong_modes_are_found_and_mended_in_place(store: Store, model: Path) -> None:
    manifest = of_directory(str(model))
    version = place(store, manifest, DirectorySource(str(model)))
    for path, mode in [(WEIGHTS, 0o644), ("tokenizer", 0o755), (".", 0o777)]:
        (version_path(store) / path).chmod(mode)
    situation = store.situation(manifest)
    assert situation.version == version
    assert [each.path for each in situation.differences] == [".", WEIGHTS, "tokenizer"]
    with store.locked():
        store.mend_attributes(version)
    assert store.situation(manifest).differences == []


def test_a_touched_file_is_read_once(store: Store, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = of_directory(str(model))
    version = place(store, manifest, DirectorySource(str(model)))
    os.utime(version_path(store) / WEIGHTS)
    assert store.situation(manifest).version == version
    with store.locked():
        store.note_unchanged(version, manifest)
    monkeypatch.setattr(model_store, "digest_of", lambda _file: pytest.fail("a file was read"))
    assert store.situation(manifest).differences == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"schema": 2, "files": {}}', "\0\xff", '{"schema":1,"files":{"a":1}}']
)
def test_a_damaged_record_only_costs_reading(store: Store, model: Path, text: str) -> None:
    manifest = of_directory(str(model))
    version = place(store, manifest, DirectorySource(str(model)))
    Path(store.base, "records", f"{version}.json").write_text(text)
    assert store.situation(manifest).version == version


def test_bytes_brought_by_somebody_else(store: Store, model: Path, tmp_path: Path) -> None:
    manifest = of_directory(str(model))
    part = tmp_path / "part"
    with store.locked():
        rounds = 0
        while wanted := store.wanted(manifest):
            rounds += 1
            assert rounds < 20
            spans, data, room = [], b"", 7000
            for path, offset in wanted:
                piece = (model / path).read_bytes()[offset : offset + room]
                spans.append((path, offset, len(piece)))
                data += piece
                room -= len(piece)
                if room <= 0:
                    break
            part.write_bytes(data)
            store.append(manifest, Part(str(part), _sha256(data), spans))
        store.activate(store.place(manifest))
    assert served(store) == content(model)
    assert rounds == 4


def test_bytes_that_were_changed_on_the_way_are_refused(store: Store, model: Path, tmp_path: Path) -> None:
    manifest = of_directory(str(model))
    part = tmp_path / "part"
    part.write_bytes(b"x" * 20_000)
    with store.locked():
        with pytest.raises(ModelError, match="a part as it was sent"):
            store.append(manifest, Part(str(part), "0" * 64, [(WEIGHTS, 0, 20_000)]))
        with pytest.raises(ModelError, match=f"{WEIGHTS} of qwen2 with SHA-256"):
            store.append(manifest, Part(str(part), _sha256(b"x" * 20_000), [(WEIGHTS, 0, 20_000)]))
        with pytest.raises(ModelError, match="before 5"):
            store.append(manifest, Part(str(part), _sha256(b"x" * 20_000), [(WEIGHTS, 5, 100)]))
        with pytest.raises(ModelError, match="shorter"):
            store.append(
                manifest, Part(str(part), _sha256(b"x" * 20_000), [(WEIGHTS, 0, 19_000), ("config.json", 0, 1001)])
            )
        with pytest.raises(ModelError, match="missing"):
            store.place(manifest)


def _sha256(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def test_two_runs_keep_out_of_each_others_way(store: Store) -> None:
    with store.locked():
        with pytest.raises(ModelError, match="another run"), store.locked():
            pass
    with store.locked():
        pass
    descriptor = os.open(os.path.join(store.base, ".lock"), os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.close(descriptor)


def test_a_directory_of_somebody_else_is_left_alone(store: Store, model: Path) -> None:
    shutil.copytree(model, store.base)
    with pytest.raises(ModelError, match=r"made by this collection.*config.json"):
        place(store, of_directory(str(model)), DirectorySource(str(model)))
    assert served(Store(store.root, "qwen2", UID, GID)) == {}
    assert content(Path(store.base)).items() >= content(model).items()


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "-x", "a b", "a\n", "a" * 129, "ä"])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="name of letters"):
        Store(str(tmp_path), name, UID, GID)


@pytest.mark.parametrize("root", ["relative", "/", "//", "/x/.."])
def test_roots_that_are_none(root: str) -> None:
    with pytest.raises(ModelError, match="absolute root"):
        Store(root, "qwen2", UID, GID)


@pytest.mark.parametrize("target", ["versions/gone", "/etc", "../../x", "versions/../../x"])
def test_a_link_of_somebody_else_is_no_version(store: Store, target: str) -> None:
    with store.locked():
        os.symlink(target, os.path.join(store.base, "current"))
    assert store.current() is None


def test_all_of_it_is_removed(store: Store, model: Path) -> None:
    assert not store.remove()
    place(store, of_directory(str(model)), DirectorySource(str(model)))
    assert store.remove()
    assert os.listdir(store.root) == []


def test_a_directory_of_somebody_else_is_neither_changed_nor_removed(store: Store, model: Path) -> None:
    os.makedirs(store.base)
    Path(store.base, "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ModelError, match=r"other files in it: 'notes\.txt'"):
        store.remove()
    with pytest.raises(ModelError, match=r"other files in it: 'notes\.txt'"):
        place(store, of_directory(str(model)), DirectorySource(str(model)))
    assert os.listdir(store.base) == ["notes.txt"]


def test_bytes_for_people() -> None:
    assert [format_bytes(count) for count in (0, 1023, 1024, 5 << 30, 3 << 40, 5 << 50)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "5.0 GiB",
        "3.0 TiB",
        "5120.0 TiB",
    ]
