"""Looking for damage in checkpoints, and for contradictions between a run's checkpoints and its ledger."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from rlightning.checkpoint import tensor_file
from rlightning.checkpoint.manifest import MODEL, Manifest, open_regular, read_manifest
from rlightning.checkpoint.store import CheckpointInfo, named_like_checkpoints
from rlightning.errors import CheckpointError, RLightningError
from rlightning.weights.digest import digest_tensors, state_digest
from rlightning.weights.ledger import Ledger, VersionRecord

_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class VerifyReport:
    """What :func:`verify_run` looked at, and found.

    Attributes:
        checkpoints: those whose manifest can be read, the oldest first.
        versions: number of versions in the ledger.
        problems: one sentence each; empty if all is well.
    """

    checkpoints: list[CheckpointInfo]
    versions: int
    problems: list[str]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_checkpoint(path: Path) -> list[str]:
    """What is wrong with a checkpoint, one sentence each; empty if every byte is as it was saved.

    A changed byte is put down to its tensor if it lies in one, else to its file. Files that the manifest does not list
    are not looked at: nothing reads them.
    """
    path = Path(path)
    if not path.is_dir():
        return [f"{path}: there is no such checkpoint"]
    try:
        manifest = read_manifest(path)
    except RLightningError as error:
        return [str(error)]
    problems: list[str] = []
    for name in manifest.files:
        try:
            with open_regular(path / name) as file:
                problems += _verify_file(path, file, name, manifest)
        except CheckpointError as error:  # begins with the file's name
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
    for section in manifest.sections:
        if f"{section}.safetensors" not in manifest.files and _section_digests(path / f"{section}.json"):
            problems.append(f"{section}.safetensors is not in the manifest, but {section}.json needs it")
    return [f"{path}: {problem}" for problem in problems]


def verify_run(run_dir: Path) -> VerifyReport:
    """Verify every checkpoint of a run, its ledger, and that they agree.

    In the ledger, every line must parse (a driver that is killed may leave the last one unfinished), versions must not
    fall within an attempt, all members must have run the learner's weights, and every version must name the one that it
    was trained from. A checkpoint must hold the weights that the ledger has for its version, and the last version and
    checkpoint that ``status.json`` names at the end of a run must be there.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        return VerifyReport([], 0, [f"{run_dir}: there is no such run"])
    problems: list[str] = []
    manifests: dict[Path, Manifest] = {}
    for path in named_like_checkpoints(run_dir / "checkpoints"):
        problems += verify_checkpoint(path)
        try:
            manifests[path] = read_manifest(path)
        except RLightningError:
            continue  # among the problems already
    records: list[VersionRecord] = []
    try:
        records = Ledger.read(run_dir / "ledger.jsonl")
    except RLightningError as error:
        problems.append(str(error))
    except RecursionError:
        problems.append(f"{run_dir / 'ledger.jsonl'}: a line is nested too deeply to be read")
    else:
        problems += [f"{run_dir / 'ledger.jsonl'}: {problem}" for problem in _verify_ledger(records, manifests)]
        problems += [f"{run_dir / 'status.json'}: {problem}" for problem in _verify_status(run_dir, records)]
    checkpoints = [CheckpointInfo(path, m.iteration, m.state_digest) for path, m in manifests.items()]
    return VerifyReport(checkpoints, len(records), problems)


def _verify_file(path: Path, file: BinaryIO, name: str, manifest: Manifest) -> list[str]:
    entry, size = manifest.files[name], os.fstat(file.fileno()).st_size
    state = xxhash.xxh3_128()
    for chunk in tensor_file.chunks(file, 0, size, _READ_BYTES):
        state.update(chunk)
    changed = size != entry.nbytes or state.hexdigest() != entry.xxh3
    problems: list[str] = []
    if name == MODEL:
        problems += _verify_tensors(file, name, manifest.tensors, size, model=True)
        if not problems and state_digest(manifest.tensors).root != manifest.state_digest:
            problems.append(f"stateDigest {manifest.state_digest} does not follow from the digests of the tensors")
    elif changed and name.endswith(".safetensors"):
        expected = _section_digests(path / f"{name.removesuffix('.safetensors')}.json")
        problems += [] if expected is None else _verify_tensors(file, name, expected, size, model=False)
    if size != entry.nbytes:
        what = "cut off" if size < entry.nbytes else "too long"
        problems.insert(0, f"{name} is {what}: it has {size} bytes, {entry.nbytes} were written")
    elif changed and not problems:
        problems.append(
            f"{name} was changed: the xxh3-128 of its bytes is {state.hexdigest()}, {entry.xxh3} was written"
        )
    return problems


def _verify_tensors(file: BinaryIO, name: str, expected: Mapping[str, str], size: int, model: bool) -> list[str]:
    """Compare tensors one by one: digest v1 for a model, xxh3-128 of the bytes for a section's arrays."""
    try:
        entries = {entry.name: entry for entry in tensor_file.read_header(file)}
    except CheckpointError as error:
        return [f"{name}: {error}"]
    problems = [f"{name}: tensor {tensor!r} is missing" for tensor in expected if tensor not in entries]
    for entry in entries.values():
        if entry.name not in expected:
            problems.append(f"{name}: tensor {entry.name!r} was not saved here")
        elif entry.end > size:
            problems.append(f"{name}: tensor {entry.name!r} is cut off")
        elif _digest(file, entry, model) != expected[entry.name]:
            problems.append(
                f"{name}: tensor {entry.name!r} was changed: its bytes do not have the digest it was saved with"
            )
    return problems


def _digest(file: BinaryIO, entry: tensor_file.Entry, model: bool) -> str | None:
    if model:
        try:
            return digest_tensors({entry.name: tensor_file.read_tensor(file, entry)}).tensors[entry.name]
        except RLightningError:  # a name that cannot be hashed was not saved by us
            return None
    data = np.empty(entry.end - entry.start, np.uint8)
    tensor_file.read(file, entry, data)
    return xxhash.xxh3_128_hexdigest(data.data)


def _section_digests(path: Path) -> dict[str, str] | None:
    """The digests of a section's arrays; None if that file is damaged too, and has its own line in the report."""
    try:
        with open_regular(path) as file:
            digests = json.loads(file.read())["arrays"]
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return digests if isinstance(digests, dict) else None


def _verify_ledger(records: list[VersionRecord], manifests: Mapping[Path, Manifest]) -> list[str]:
    malformed = [record for record in records if not _well_typed(record)]
    if malformed:
        return [f"the record of version {record.version!r} has fields of the wrong type" for record in malformed]
    return [*_verify_versions(records, manifests), *_verify_against_ledger(records, manifests)]


def _verify_versions(records: list[VersionRecord], manifests: Mapping[Path, Manifest]) -> list[str]:
    problems: list[str] = []
    known: set[str | None] = {manifest.state_digest for manifest in manifests.values()}
    known |= {(manifest.ledger_head or {}).get("parentDigest") for manifest in manifests.values()}
    published: dict[int, str] = {}  # by version, the latest attempt's
    for previous, record in zip([None, *records], records, strict=False):
        if record.verified != record.total:
            first = f"; first difference: {record.first_mismatch}" if record.first_mismatch else ""
            problems.append(
                f"{_name(record)}: {record.verified} of {record.total} members ran the learner's weights{first}"
            )
        if previous is None or record.attempt != previous.attempt:
            if previous is not None and record.attempt < previous.attempt:
                problems.append(f"{_name(record)} comes after attempt {previous.attempt}")
            problems += _verify_first(record, records[0].version, known, published)
        else:
            if record.version <= previous.version:
                problems.append(f"{_name(record)} comes after version {previous.version}")
            if record.parent_digest != previous.digest:
                problems.append(
                    f"{_name(record)} was trained from {record.parent_digest}, but version {previous.version} before "
                    f"it is {previous.digest}"
                )
        known.add(record.digest)
        published[record.version] = record.digest
    return problems


def _verify_first(
    record: VersionRecord, very_first: int, known: Set[str | None], published: Mapping[int, str]
) -> list[str]:
    """The first version of an attempt: either of a fresh start, or of the weights of a checkpoint."""
    if record.parent_digest is None:
        if record.version == very_first:
            return []
        return [f"{_name(record)} begins an attempt and does not say what it was resumed from"]
    if record.parent_digest not in known and record.parent_digest != record.digest:
        return [f"{_name(record)} was resumed from {record.parent_digest}, which is nowhere in this run"]
    before = published.get(record.version, record.digest)
    if before != record.digest:
        return [f"{_name(record)} begins an attempt with {record.digest}; the attempt before published {before}"]
    return []


def _verify_status(run_dir: Path, records: list[VersionRecord]) -> list[str]:
    """A run that says it has ended must still have the last version and the checkpoint that it ended with."""
    path = run_dir / "status.json"
    if not path.exists():
        return []
    try:
        status = json.loads(path.read_bytes())
        ended = status.get("state") in ("Succeeded", "Failed", "Stopped")
        weights, checkpoint = status.get("weights") or {}, status.get("checkpoint") or {}
        version, digest = weights.get("version"), weights.get("digest")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        return [f"cannot be read: {error}"]
    problems: list[str] = []
    if ended and version is not None:
        last = records[-1] if records else None
        if last is None or (last.version, last.digest) != (version, digest):
            have = f"ends with version {last.version}, {last.digest}" if last else "is empty"
            problems.append(f"the run ended with version {version}, {digest}, and the ledger {have}")
    if ended and checkpoint.get("path") and not (run_dir / "checkpoints" / Path(checkpoint["path"]).name).is_dir():
        problems.append(f"checkpoint {Path(checkpoint['path']).name}, which the run ended with, is gone")
    return problems


def _verify_against_ledger(records: list[VersionRecord], manifests: Mapping[Path, Manifest]) -> list[str]:
    problems: list[str] = []
    digests = {(record.attempt, record.version): record.digest for record in records}
    last: dict[int, int] = {}
    for record in records:
        last[record.attempt] = max(record.version, last.get(record.attempt, -1))
    for path, manifest in manifests.items():
        attempt, version = manifest.attempt, manifest.version
        named = int(path.name.split("-")[1])
        if named != manifest.iteration:
            problems.append(f"checkpoint {path.name} is of iteration {manifest.iteration}: it was renamed or copied")
        if last and attempt not in last:
            problems.append(f"checkpoint {path.name} is of attempt {attempt}, which has published nothing here")
        digest = digests.get((attempt, version))
        if digest is not None and digest != manifest.state_digest:
            problems.append(
                f"version {version} of attempt {attempt} is {digest} here and {manifest.state_digest} in checkpoint "
                f"{path.name}"
            )
        elif digest is None and version < last.get(attempt, -1):
            # Later than the last line is no contradiction: a power cut can take lines that were not yet on the disk.
            problems.append(f"version {version} of attempt {attempt} is missing, checkpoint {path.name} holds it")
    return problems


def _name(record: VersionRecord) -> str:
    return f"version {record.version} of attempt {record.attempt}"


def _well_typed(record: VersionRecord) -> bool:
    numbers = (record.version, record.attempt, record.verified, record.total)
    return all(type(n) is int for n in numbers) and isinstance(record.digest, str)
