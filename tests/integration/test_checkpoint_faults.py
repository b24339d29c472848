"""Saving while the process dies, the power fails, the disk is full or read-only: the checkpoint before stays whole.

The crash tests end a real process with ``os._exit`` at the k-th operation on the disk, for every k. This file is also
the program that they run: it builds a state once and forks a child for every k. They use a disk in memory where there
is one: thousands of real fsyncs would take minutes, and a dying process loses the same on any disk.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlightning.checkpoint import durable
from rlightning.checkpoint.store import CheckpointStore, Snapshot, latest_checkpoint, list_checkpoints, load_checkpoint
from rlightning.checkpoint.verify import verify_checkpoint
from rlightning.errors import CheckpointError
from tests.unit.checkpoint.samples import make_snapshot

CRASHED = 77
ITERATIONS = {1: [10], 2: [10, 20]}  # what was saved before, by `keep`


def small(iteration: int) -> Snapshot:
    return make_snapshot(iteration, hidden=4, shards=1)


class Crash:
    """Wraps the primitives of ``durable``; ends the process at number ``k``.

    Args:
        k: counted from 1.
        report: descriptor to write the name of that operation to.
        kind: ``kill`` ends it before the operation, or in the middle of it if it is a write; ``power`` ends it before
            the operation and takes all that was not yet synced: bytes of files, and names in directories.
    """

    def __init__(self, k: int, kind: str, report: int) -> None:
        self.k, self.kind, self.report, self.count = k, kind, report, 0
        self.files: dict[int, Path] = {}
        self.dirty: set[Path] = set()  # files whose bytes are not synced
        self.unnamed: set[Path] = set()  # files and directories whose names are not synced
        self.renamed: list[tuple[Path, Path]] = []  # renames whose directory is not synced
        for name in durable.PRIMITIVES:
            setattr(durable, name, self._wrap(name, getattr(durable, name)))

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def primitive(*args: Any) -> Any:
            self.count += 1
            if self.count == self.k:
                if self.kind == "kill" and name == "write":
                    original(args[0], bytes(args[1])[: len(args[1]) // 2])
                if self.kind == "power":
                    self._lose()
                os.write(self.report, name.encode())
                os._exit(CRASHED)
            result = original(*args)
            self._note(name, args, result)
            return result

        return primitive

    def _note(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name == "create_file":
            self.files[result] = args[0]
            self.dirty.add(args[0])
            self.unnamed.add(args[0])
        elif name == "make_directory":
            self.unnamed.add(args[0])
        elif name == "sync_file":
            self.dirty.discard(self.files[args[0]])
        elif name == "sync_directory":
            self.unnamed = {path for path in self.unnamed if path.parent != args[0]}
            self.renamed = [pair for pair in self.renamed if pair[1].parent != args[0]]
        elif name == "rename":
            source, target = args
            for paths in (self.dirty, self.unnamed):
                for path in [p for p in paths if source == p or source in p.parents]:
                    paths.remove(path)
                    paths.add(target / path.relative_to(source))
            self.renamed.append((source, target))

    def _lose(self) -> None:
        for path in self.dirty:
            if path.exists():
                os.truncate(path, 0)
        for path in sorted(self.unnamed, reverse=True):  # what is in a directory before the directory
            if path.is_file():
                path.unlink()
        for source, target in reversed(self.renamed):
            if target.exists():
                target.rename(source)


def crash_everywhere(base: Path, kind: str, keep: int) -> list[str]:
    """For k = 1, 2, …: a fresh copy of the earlier checkpoints, and a child that saves one more and dies at k.

    Returns the operation that was hit at each k.
    """
    template = base / "template"
    store = CheckpointStore(template, keep=keep)
    for iteration in ITERATIONS[keep]:
        store.save(small(iteration))
    snapshot = small(30)
    hit: list[str] = []
    while True:
        directory = base / f"{len(hit) + 1:03d}"
        shutil.copytree(template, directory)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            Crash(len(hit) + 1, kind, writing)
            CheckpointStore(directory, keep=keep).save(snapshot)
            os._exit(0)
        os.close(writing)
        with open(reading) as pipe:
            name = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            return hit
        if status != CRASHED:
            sys.exit(f"{kind}, keep={keep}, operation {len(hit) + 1}: the child ended with {status}")
        hit.append(name)


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, list[str]]]]:
    """The directories that dead processes left, and the operations they died at, by case."""
    base = tmp_path_factory.mktemp("crashed")
    if os.access("/dev/shm", os.W_OK):
        base = Path(tempfile.mkdtemp(prefix="rlightning-test-", dir="/dev/shm"))
    command = [sys.executable, "-m", "tests.integration.test_checkpoint_faults", str(base)]
    try:
        root = Path(__file__).parents[2]
        ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=150, check=False)
        assert ended.returncode == 0, ended.stderr
        yield base, json.loads(ended.stdout)
    finally:
        shutil.rmtree(base)


@pytest.mark.parametrize("keep", ITERATIONS)
@pytest.mark.parametrize("kind", ["kill", "power"])
def test_dying_at_any_operation_leaves_the_checkpoints_before_whole(
    crashed: tuple[Path, dict[str, list[str]]], kind: str, keep: int
) -> None:
    base, hit = crashed[0] / f"{kind}-{keep}", crashed[1][f"{kind}-{keep}"]
    # Opening takes 2 operations (a probe); saving 4 of its own and 3 for each of 7 files; pruning 3 and one per file.
    assert len(hit) == 2 + (4 + 3 * 7) + (3 + 7)
    assert set(hit) == set(durable.PRIMITIVES)
    appears = hit.index("rename") + 1  # the k of the rename that gives the new checkpoint its name
    before, following = ITERATIONS[keep], small(40)
    for k, name in enumerate(hit, start=1):
        directory, where = base / f"{k:03d}", f"killed at {k}, {name}"
        complete = list_checkpoints(directory)
        assert [verify_checkpoint(path) for path in complete] == [[]] * len(complete), where
        iterations = [load_checkpoint(path).iteration for path in complete]
        if k <= appears:
            assert iterations == before, where  # the new one is not there, nothing old is missing
        else:
            assert iterations in ([*before, 30], [*before, 30][-keep:], before), where  # `before`: its name was lost
        # The next life saves as usual and clears up.
        info = CheckpointStore(directory, keep=keep).save(following)
        assert verify_checkpoint(info.path) == [], where
        assert latest_checkpoint(directory) == info.path, where
        assert len(list(directory.iterdir())) == keep, where


@contextmanager
def mounted(target: Path, *arguments: str) -> Iterator[Path]:
    """Mount something at ``target``; skips where that is not allowed, always unmounts."""
    target.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(target)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"needs the right to mount file systems: {done.stderr.strip()}")
    try:
        yield target
    finally:
        subprocess.run(["umount", str(target)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m", "tmpfs") as disk:
        yield disk


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A directory with one checkpoint, mounted read-only (root is not stopped by modes)."""
    CheckpointStore(tmp_path / "writable" / "checkpoints", keep=3).save(small(10))
    with mounted(tmp_path / "read-only", "--bind", str(tmp_path / "writable")) as target:
        remount = ["mount", "-o", "remount,ro,bind", str(target)]
        done = subprocess.run(remount, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"needs read-only bind mounts: {done.stderr.strip()}")
        yield target


def test_a_full_disk_leaves_the_old_checkpoint_and_says_how_much_is_missing(small_disk: Path) -> None:
    store = CheckpointStore(small_disk, keep=3)
    old = store.save(small(10))
    large = make_snapshot(20, hidden=400)  # 2 × 0.16 M parameters and two moments of each: 4 MB
    with pytest.raises(CheckpointError) as error:
        store.save(large)
    text = str(error.value)
    assert str(small_disk / "iter-00000020") in text
    assert "No space left on device" in text
    needed, free = (int(word) for word in text.split() if word.isdigit() and int(word) > 1000)
    assert 3_900_000 < needed < 4_100_000
    assert free == shutil.disk_usage(small_disk).free  # what was half written is gone again
    assert "Free some space there, keep fewer checkpoints (spec.checkpoints.keep is 3) or use a larger disk" in text
    assert [path.name for path in small_disk.iterdir()] == [old.path.name]
    assert verify_checkpoint(old.path) == []
    assert latest_checkpoint(small_disk) == old.path
    # With space it goes on.
    new = store.save(small(30))
    assert verify_checkpoint(new.path) == []


def test_a_disk_that_fills_up_checkpoint_by_checkpoint_keeps_all_that_were_complete(small_disk: Path) -> None:
    store = CheckpointStore(small_disk, keep=100)
    saved: list[Path] = []

    def fill() -> None:
        for iteration in range(1, 100):
            saved.append(store.save(make_snapshot(iteration)).path)

    with pytest.raises(CheckpointError, match="No space left"):
        fill()
    assert 3 < len(saved) < 20
    assert list_checkpoints(small_disk) == saved
    assert [verify_checkpoint(path) for path in saved] == [[]] * len(saved)


def test_a_completely_full_disk_is_explained(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints", keep=1)
    old = store.save(small(10))
    with (small_disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free)
    with pytest.raises(CheckpointError, match=r"No space left on device.* and 0 bytes are free"):
        store.save(small(20))
    assert verify_checkpoint(old.path) == []


def test_a_disk_that_takes_no_more_files_is_told_from_a_full_one(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m,nr_inodes=24", "tmpfs") as disk:
        store = CheckpointStore(disk / "checkpoints", keep=100)
        first, second = store.save(small(10)), store.save(small(20))  # 8 inodes each
        with pytest.raises(CheckpointError, match=r"No space left.*\(so a quota is used up, or the number of files\)"):
            store.save(small(30))
        assert verify_checkpoint(first.path) == verify_checkpoint(second.path) == []
        assert list_checkpoints(disk / "checkpoints") == [first.path, second.path]


def test_a_disk_that_takes_no_file_at_all_is_refused_when_the_store_is_opened(tmp_path: Path) -> None:
    disk, options = tmp_path / "disk", "size=1m,nr_inodes=1"
    with mounted(disk, "-t", "tmpfs", "-o", options, "tmpfs"), pytest.raises(CheckpointError, match="No space left"):
        CheckpointStore(disk / "runs" / "checkpoints", keep=1)


def test_a_read_only_directory_is_refused_when_the_store_is_opened(read_only: Path) -> None:
    directory = read_only / "checkpoints"
    with pytest.raises(CheckpointError) as error:
        CheckpointStore(directory, keep=3)
    assert str(directory) in str(error.value)
    assert "Read-only file system" in str(error.value)
    assert "choose another run folder" in str(error.value)


def test_a_new_store_in_a_read_only_directory_is_refused(read_only: Path) -> None:
    with pytest.raises(CheckpointError, match="Read-only file system"):
        CheckpointStore(read_only / "other", keep=3)


def test_checkpoints_can_be_read_from_a_read_only_directory(read_only: Path) -> None:
    latest = latest_checkpoint(read_only / "checkpoints")
    assert latest is not None
    assert verify_checkpoint(latest) == []
    assert load_checkpoint(latest).iteration == 10


def test_an_error_of_the_disk_in_any_operation_is_explained_and_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the crash, but the operation fails with EIO and the process lives on."""
    template = tmp_path / "template"
    CheckpointStore(template, keep=1).save(small(10))
    during, after = small(20), small(30)
    originals = {name: getattr(durable, name) for name in durable.PRIMITIVES}

    def save_with_error_at(k: int, store: CheckpointStore) -> str | None:
        """The message, None if saving takes fewer than ``k`` operations."""
        count = 0

        def failing(original: Callable[..., Any]) -> Callable[..., Any]:
            def primitive(*args: Any) -> Any:
                nonlocal count
                count += 1
                if count == k:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return original(*args)

            return primitive

        with monkeypatch.context() as patch:
            for name, original in originals.items():
                patch.setattr(durable, name, failing(original))
            try:
                store.save(during)
            except CheckpointError as error:
                return str(error)
        return None

    k = 1
    while True:
        directory = tmp_path / f"{k:03d}"
        shutil.copytree(template, directory)
        message = save_with_error_at(k, CheckpointStore(directory, keep=1))
        if message is None:
            break
        assert "Input/output error" in message
        assert "earlier checkpoints are intact" in message
        assert str(directory) in message
        complete = list_checkpoints(directory)
        assert complete
        assert [verify_checkpoint(path) for path in complete] == [[]] * len(complete)
        assert CheckpointStore(directory, keep=1).save(after).path == directory / "iter-00000030"
        assert len(list(directory.iterdir())) == 1
        k += 1
    assert k == (4 + 3 * 7) + (3 + 7) + 1


def main(base: Path) -> None:
    cases = [(kind, keep) for kind in ("kill", "power") for keep in ITERATIONS]
    hit = {f"{kind}-{keep}": crash_everywhere(base / f"{kind}-{keep}", kind, keep) for kind, keep in cases}
    print(json.dumps(hit))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
