"""The ledger: for every published version, what the learner had and what each member proved to run."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlightning.errors import RunFolderError, WeightMismatch, WeightsError
from rlightning.weights.digest import first_difference
from rlightning.weights.payload import Acknowledgement, WeightPayload

RING = 32  # versions kept in PolicyGroup.status

MemberState = Literal["Acknowledged", "Mismatch", "Superseded", "Failed"]


@dataclass(frozen=True)
class MemberRecord:
    """One member's answer to one version.

    Attributes:
        state: ``Acknowledged`` (digest equal to the learner's), ``Mismatch``, ``Superseded`` (it runs a newer
            version), ``Failed`` (it could not apply this one).
        digest: root digest of its live tensors, None if it failed.
        seconds: until it answered.
        error: why it failed.
    """

    state: MemberState
    digest: str | None
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class VersionRecord:
    """One version's line in the ledger.

    Attributes:
        version, attempt: what was published, and in which life of the driver.
        digest: the learner's root digest.
        parent_digest: digest of the version it was trained from (across a resume, the checkpoint's); None at first.
        members: by member name.
        verified, total: members whose live tensors equal the learner's, and members asked.
        first_mismatch: ``eval-1: actor.0.weight`` of the first member that differs, None if all agree.
        time: of the record, seconds since the epoch.
    """

    version: int
    attempt: int
    digest: str
    parent_digest: str | None
    members: dict[str, MemberRecord] = field(default_factory=dict)
    verified: int = 0
    total: int = 0
    first_mismatch: str | None = None
    time: float = 0.0

    @staticmethod
    def build(
        payload: WeightPayload,
        acknowledgements: Iterable[Acknowledgement],
        parent_digest: str | None,
        now: float | None = None,
    ) -> VersionRecord:
        """Compare what members run with what the learner published, tensor by tensor and names both ways."""
        members: dict[str, MemberRecord] = {}
        first_mismatch: str | None = None
        for ack in acknowledgements:
            difference: str | None = None
            state: MemberState = "Acknowledged"
            if ack.digest is None:
                state, difference = "Failed", ack.error or "no digest"
            elif ack.version != payload.version:
                state, difference = "Superseded", f"runs version {ack.version}"
            elif (difference := first_difference(payload.digest, ack.digest)) is not None:
                state = "Mismatch"
            if difference is not None and first_mismatch is None:
                first_mismatch = f"{ack.member}: {difference}"
            root = None if ack.digest is None else ack.digest.root
            members[ack.member] = MemberRecord(state, root, ack.seconds, ack.error)
        return VersionRecord(
            version=payload.version,
            attempt=payload.attempt,
            digest=payload.digest.root,
            parent_digest=parent_digest,
            members=members,
            verified=sum(member.state == "Acknowledged" for member in members.values()),
            total=len(members),
            first_mismatch=first_mismatch,
            time=time.time() if now is None else now,
        )

    @property
    def consistent(self) -> bool:
        """True if every member asked runs exactly the learner's weights."""
        return self.verified == self.total

    def require_consistent(self) -> None:
        """Nothing if all members agree with the learner.

        Raises:
            WeightsError: a member failed to apply the version; carries its cause.
            WeightMismatch: a member runs other weights; names member and tensor.
        """
        for name, member in self.members.items():
            if member.state == "Failed":
                raise WeightsError(f"member {name} could not apply version {self.version}: {member.error}")
        if not self.consistent:
            raise WeightMismatch(self.version, self.first_mismatch or "a member")

    def to_status(self) -> dict[str, Any]:
        """The entry of PolicyGroup.status.versions."""
        return {
            "version": self.version,
            "learnerDigest": self.digest,
            "parentDigest": self.parent_digest,
            "verified": self.verified,
            "total": self.total,
            "firstMismatch": self.first_mismatch,
        }

    def to_json(self) -> dict[str, Any]:
        """The object of one ledger line."""
        return {
            "version": self.version,
            "attempt": self.attempt,
            "digest": self.digest,
            "parentDigest": self.parent_digest,
            "members": {
                name: {"state": m.state, "digest": m.digest, "seconds": round(m.seconds, 6)}
                | ({} if m.error is None else {"error": m.error})
                for name, m in self.members.items()
            },
            "verified": self.verified,
            "total": self.total,
            "firstMismatch": self.first_mismatch,
            "time": round(self.time, 3),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> VersionRecord:
        """Reads :meth:`to_json`; unknown keys are ignored."""
        members = {
            name: MemberRecord(m["state"], m["digest"], m["seconds"], m.get("error"))
            for name, m in value["members"].items()
        }
        return VersionRecord(
            version=value["version"],
            attempt=value["attempt"],
            digest=value["digest"],
            parent_digest=value["parentDigest"],
            members=members,
            verified=value["verified"],
            total=value["total"],
            first_mismatch=value["firstMismatch"],
            time=value["time"],
        )


class Ledger:
    """All versions of a run as JSON lines, and the last 32 in memory.

    A version that is verified again (after a resynchronisation, say) gets a further line; the last one counts.

    Args:
        path: the file, created if it is missing and continued if it is not; None keeps the ring only.

    Raises:
        RunFolderError: the file cannot be opened, or a line other than a torn last one cannot be read.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._ring: deque[VersionRecord] = deque(maxlen=RING)
        self._fd: int | None = None
        if path is None:
            return
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunFolderError(f"ledger {path} cannot be opened: {error.strerror}") from error
        try:
            records, whole = _parse(path, _read_all(fd, path))
            os.ftruncate(fd, whole)  # the torn line of a driver that died while writing it
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self._ring.extend(records)

    def append(self, record: VersionRecord) -> None:
        """Write one line.

        Raises:
            WeightsError: its (attempt, version) is lower than the last one's.
            RunFolderError: it could not be written; the ledger is as before.
        """
        last = self.head
        if last is not None and (record.attempt, record.version) < (last.attempt, last.version):
            raise WeightsError(
                f"version {record.version} of attempt {record.attempt} follows version {last.version} of attempt "
                f"{last.attempt} in the ledger: versions never fall; a rollback is a new attempt"
            )
        if self._fd is not None:
            self._write(json.dumps(record.to_json(), separators=(",", ":")).encode() + b"\n")
        _put(self._ring, record)

    def _write(self, line: bytes) -> None:
        assert self._fd is not None
        size = os.fstat(self._fd).st_size
        try:
            if os.write(self._fd, line) != len(line):
                raise OSError(28, "No space left on device")
        except OSError as error:
            os.ftruncate(self._fd, size)
            raise RunFolderError(
                f"ledger {self._path} cannot take a line of {len(line)} bytes: {error.strerror}; free space there"
            ) from error

    @property
    def head(self) -> VersionRecord | None:
        """The last record."""
        return self._ring[-1] if self._ring else None

    @property
    def recent(self) -> list[VersionRecord]:
        """The last 32 versions, oldest first."""
        return list(self._ring)

    def to_status(self) -> list[dict[str, Any]]:
        """PolicyGroup.status.versions: the last 32, oldest first."""
        return [record.to_status() for record in self._ring]

    def close(self) -> None:
        """Close the file; the ring stays readable."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @staticmethod
    def read(path: Path) -> list[VersionRecord]:
        """All versions of a file, in order, each once with its last line. A torn last line is left out.

        Raises:
            RunFolderError: the file cannot be read, or another line is malformed; names the line.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise RunFolderError(f"ledger {path} cannot be read: {error.strerror}") from error
        return _parse(path, content)[0]


def _put(records: deque[VersionRecord] | list[VersionRecord], record: VersionRecord) -> None:
    if records and (records[-1].attempt, records[-1].version) == (record.attempt, record.version):
        records[-1] = record
    else:
        records.append(record)


def _parse(path: Path, content: bytes) -> tuple[list[VersionRecord], int]:
    """The records, and the length of the part that holds whole lines."""
    records: list[VersionRecord] = []
    whole = 0
    lines = content.split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line break is empty or torn
        try:
            record = VersionRecord.from_json(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunFolderError(f"ledger {path}, line {number} is damaged: {error!r}") from error
        _put(records, record)
        whole += len(line) + 1
    return records, whole


def _read_all(fd: int, path: Path) -> bytes:
    try:
        with open(os.dup(fd), "rb") as stream:
            stream.seek(0)
            return stream.read()
    except OSError as error:
        raise RunFolderError(f"ledger {path} cannot be read: {error.strerror}") from error
