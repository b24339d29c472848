"""Saving and loading checkpoints.

A checkpoint is a directory ``iter-00000010`` that appears under this name only when all of it is on the disk, and is
never written again. It holds ``model.safetensors``, per section of other state a ``<section>.json`` (with
``<section>.safetensors`` for its arrays), and ``manifest.json``.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from rlightning.checkpoint import durable, tensor_file, tree
from rlightning.checkpoint.manifest import (
    MODEL,
    NAME,
    FileEntry,
    Manifest,
    check_file_name,
    open_regular,
    read_manifest,
)
from rlightning.errors import CheckpointError
from rlightning.weights.digest import StateDigest, digest_tensors

if TYPE_CHECKING:
    import torch

_NAME = re.compile(r"iter-(\d{8,})(?:-(\d+))?")
_TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint on the disk; ``digest`` is the root of digest v1 over its model."""

    path: Path
    iteration: int
    digest: str


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds, cut between two iterations.

    Attributes:
        iteration: iterations done.
        env_steps: valid environment steps done.
        version: version that these weights were, or will be, published as.
        attempt: the attempt that saves.
        model: the policy's persistent tensors, ties once under their first name.
        aliases: the other names of tied tensors, to the first one.
        digest: of ``model``.
        sections: all other state by name ("learner", "shards"): trees as in :mod:`rlightning.checkpoint.tree`.
        ledger_head: the ledger's last record, None before the first.
        numerics: the numerics key of the run.
        job: the resolved manifest.
    """

    iteration: int
    env_steps: int
    version: int
    attempt: int
    model: dict[str, torch.Tensor]
    aliases: dict[str, str]
    digest: StateDigest
    sections: dict[str, tree.Tree] = field(default_factory=dict)
    ledger_head: dict[str, Any] | None = None
    numerics: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)


class CheckpointStore:
    """The checkpoints of one run, for the one process that writes them.

    To read only, use :func:`latest_checkpoint` and :func:`load_checkpoint`: they change nothing.

    Args:
        directory: is created if missing; what dead processes left unfinished in it is removed.
        keep: how many checkpoints stay, at least 1.

    Raises:
        CheckpointError: nothing can be written there; says why before training starts.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        if keep < 1:
            raise CheckpointError(f"keep={keep}: at least 1 checkpoint has to stay (spec.checkpoints.keep)")
        self.directory, self.keep = Path(directory), keep
        with self._explained(self.directory, needed=0):
            _make_directories(self.directory)
            self._sweep()
            # Trying is the only sure way: root passes every check of modes, and is still refused by a read-only mount.
            probe = self._temporary("probe")
            durable.make_directory(probe)
            durable.remove_directory(probe)

    def save(self, snapshot: Snapshot) -> CheckpointInfo:
        """Write ``snapshot`` durably, then remove the oldest checkpoints until ``keep`` are left.

        Whenever the process or the machine dies, the checkpoints that were complete before stay complete.

        Raises:
            CheckpointError: ``snapshot`` cannot be saved as it is, or the disk refused; earlier checkpoints are intact.
        """
        files = _Files(snapshot)
        path = self._free_path(snapshot.iteration)
        with self._explained(path, files.nbytes):
            self._sweep()
            self._write(files, path)
        with self._explained(path, 0, f"{path} is saved, but removing older checkpoints failed"):
            self._prune(keep_path=path)
        return CheckpointInfo(path, snapshot.iteration, snapshot.digest.root)

    def latest(self) -> Path | None:
        """The complete checkpoint of the highest iteration, None if there is none."""
        return latest_checkpoint(self.directory)

    def load(self, path: Path) -> Snapshot:
        """As :func:`load_checkpoint`."""
        return load_checkpoint(path)

    def _write(self, files: _Files, path: Path) -> None:
        temporary = self._temporary(path.name)
        durable.make_directory(temporary)
        lock = durable.lock_directory(temporary)
        try:
            for name, pieces in files.contents.items():
                durable.write_file(temporary / name, pieces)
            durable.write_file(temporary / NAME, [files.manifest])
            durable.sync_directory(temporary)
            durable.rename(temporary, path)
            durable.sync_directory(self.directory)
        except OSError:
            # A full disk gets its space back at once. What cannot be removed now is left to the next sweep.
            with suppress(OSError):
                durable.remove_tree(temporary)
            raise
        finally:
            if lock is not None:
                os.close(lock)

    def _prune(self, keep_path: Path) -> None:
        complete = list_checkpoints(self.directory)
        spare = [path for path in complete if path != keep_path]
        doomed: list[Path] = []
        for path in spare[: max(0, len(complete) - self.keep)]:
            # Renamed first, and durably: a directory that is half removed must not look like a checkpoint.
            doomed.append(self._temporary(path.name))
            durable.rename(path, doomed[-1])
        if doomed:
            durable.sync_directory(self.directory)
        for path in doomed:
            durable.remove_tree(path)

    def _sweep(self) -> None:
        """Remove what saving or pruning left unfinished, unless its process is alive."""
        with os.scandir(self.directory) as entries:
            left = [e.path for e in entries if e.name.startswith(_TEMPORARY) and e.is_dir(follow_symlinks=False)]
        for path in map(Path, sorted(left)):
            lock = durable.lock_directory(path)
            if lock is None:
                continue
            try:
                durable.remove_tree(path)
            finally:
                os.close(lock)

    def _temporary(self, name: str) -> Path:
        return self.directory / f"{_TEMPORARY}{name}-{os.getpid()}-{secrets.token_hex(4)}"

    def _free_path(self, iteration: int) -> Path:
        """``iter-00000010``, or ``iter-00000010-2``… where an earlier attempt left one: nothing is ever replaced."""
        path, n = self.directory / f"iter-{iteration:08d}", 1
        while os.path.lexists(path):
            n += 1
            path = self.directory / f"iter-{iteration:08d}-{n}"
        return path

    @contextmanager
    def _explained(self, path: Path, needed: int, what: str = "") -> Iterator[None]:
        """Turn an OSError into a CheckpointError that says what to do."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{what or f'cannot write {path}'}: {self._explain(error, needed)}") from error

    def _explain(self, error: OSError, needed: int) -> str:
        reason = error.strerror or str(error)
        if error.filename and Path(error.filename) != self.directory:
            reason += f" ({error.filename})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(_existing(self.directory)).free
            space = f"it needs {needed} bytes and {free} bytes are free in {self.directory}"
            if free > needed:
                space += " (so a quota is used up, or the number of files)"
            fewer = f", keep fewer checkpoints (spec.checkpoints.keep is {self.keep})" if self.keep > 1 else ""
            return (
                f"{reason}: {space}; earlier checkpoints are intact. "
                f"Free some space there{fewer} or use a larger disk, then resume"
            )
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return f"{reason}; make {self.directory} writable for this user or choose another run folder"
        return f"{reason}; earlier checkpoints are intact"


class _Files:
    """All files of a checkpoint, ready to be written; large tensors are referred to, not copied."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.contents: dict[str, list[bytes | memoryview]] = {
            MODEL: tensor_file.pieces({name: tensor_file.store_tensor(name, t) for name, t in snapshot.model.items()})
        }
        found = digest_tensors(snapshot.model)
        if found.root != snapshot.digest.root:
            raise CheckpointError(
                f"iteration {snapshot.iteration}: the model has digest {found.root}, the snapshot says "
                f"{snapshot.digest.root}; take both at the same moment"
            )
        for section, content in snapshot.sections.items():
            self._add_section(section, content)
        entries = {name: _file_entry(pieces) for name, pieces in self.contents.items()}
        self.manifest = Manifest(
            iteration=snapshot.iteration,
            env_steps=snapshot.env_steps,
            version=snapshot.version,
            attempt=snapshot.attempt,
            state_digest=found.root,
            tensors=found.tensors,
            aliases=snapshot.aliases,
            numerics=snapshot.numerics,
            ledger_head=snapshot.ledger_head,
            job=snapshot.job,
            files=entries,
        ).to_bytes()
        self.nbytes = sum(entry.nbytes for entry in entries.values()) + len(self.manifest)

    def _add_section(self, section: str, content: tree.Tree) -> None:
        json_name, arrays_name = check_file_name(f"{section}.json"), f"{section}.safetensors"
        if arrays_name == MODEL:
            raise CheckpointError(f"a section cannot be called {section!r}: that file holds the model")
        try:
            encoded, arrays = tree.encode(content)
        except CheckpointError as error:
            raise CheckpointError(f"section {section!r}: {error}") from error
        stored = {name: tensor_file.store_array(array) for name, array in arrays.items()}
        digests = {name: xxhash.xxh3_128_hexdigest(tensor.data.data) for name, tensor in stored.items()}
        if stored:
            self.contents[arrays_name] = tensor_file.pieces(stored)
        document = json.dumps({"tree": encoded, "arrays": digests}, separators=(",", ":"), allow_nan=False)
        self.contents[json_name] = [document.encode()]


def _file_entry(pieces: list[bytes | memoryview]) -> FileEntry:
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return FileEntry(sum(len(piece) for piece in pieces), state.hexdigest())


def list_checkpoints(directory: Path) -> list[Path]:
    """All complete checkpoints in a directory, the oldest first; none if there is no such directory."""
    return [path for path in named_like_checkpoints(directory) if (path / NAME).is_file()]


def named_like_checkpoints(directory: Path) -> list[Path]:
    """As :func:`list_checkpoints`, with those that have lost their manifest."""
    if not directory.is_dir():
        return []
    matches = [(match, path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for *_, path in sorted((int(match[1]), int(match[2] or 1), path) for match, path in matches)]


def latest_checkpoint(directory: Path) -> Path | None:
    """The complete checkpoint of the highest iteration in a directory, None if there is none."""
    complete = list_checkpoints(directory)
    return complete[-1] if complete else None


def load_checkpoint(path: Path) -> Snapshot:
    """Verify a checkpoint, then read it. All tensors and arrays are new and on the CPU.

    Raises:
        CheckpointError: missing, or damaged: names every damaged file and tensor, and the checkpoint to go back to.
    """
    from rlightning.checkpoint.verify import verify_checkpoint

    path = Path(path)
    problems = verify_checkpoint(path)
    if problems:
        raise CheckpointError(
            f"the checkpoint {path} cannot be trusted:\n" + "".join(f"  {p}\n" for p in problems) + _way_back(path)
        )
    manifest = read_manifest(path)
    try:
        with open_regular(path / MODEL) as file:
            tensors = tensor_file.read_tensors(file)
        model = {name: tensors[name] for name in manifest.tensors}
        return Snapshot(
            iteration=manifest.iteration,
            env_steps=manifest.env_steps,
            version=manifest.version,
            attempt=manifest.attempt,
            model=model,
            aliases=manifest.aliases,
            digest=StateDigest(manifest.state_digest, manifest.tensors),
            sections={section: _read_section(path, section, manifest) for section in manifest.sections},
            ledger_head=manifest.ledger_head,
            numerics=manifest.numerics,
            job=manifest.job,
        )
    except (CheckpointError, OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error}") from error


def _read_section(path: Path, section: str, manifest: Manifest) -> tree.Tree:
    with open_regular(path / f"{section}.json") as file:
        document = json.loads(file.read())
    arrays: dict[str, tree.Array] = {}
    if f"{section}.safetensors" in manifest.files:  # another one was not verified
        with open_regular(path / f"{section}.safetensors") as file:
            arrays = tensor_file.read_arrays(file)
    return tree.decode(document["tree"], arrays)


def _way_back(path: Path) -> str:
    older = [p for p in list_checkpoints(path.parent) if p != path]
    if not older:
        return "There is no other checkpoint beside it: restore this one from a copy, or start the run anew."
    return f"To go back to {older[-1].name}, move {path.name} out of {path.parent} and resume."


def _existing(path: Path) -> Path:
    """``path``, or the nearest directory above it that exists."""
    while not path.is_dir():
        path = path.parent
    return path


def _make_directories(path: Path) -> None:
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        durable.make_directory(directory)
        durable.sync_directory(directory.parent)
