from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest

from rlightning.errors import RunFolderError, WeightMismatch, WeightsError
from rlightning.weights.digest import StateDigest, digest_module
from rlightning.weights.ledger import Ledger, VersionRecord
from rlightning.weights.payload import Acknowledgement
from tests.unit.weights.policies import TinyPolicy, flip_bit


def record(version: int, attempt: int = 1, parent: str | None = None) -> VersionRecord:
    return VersionRecord(version=version, attempt=attempt, digest=f"d{version}", parent_digest=parent, time=1.0)


def built(*digests: StateDigest | None) -> VersionRecord:
    payload = TinyPolicy().publish_weights(3, attempt=1)
    acks = [
        Acknowledgement(f"eval-{i}", 3, digest, 0.25, None if digest else "RuntimeError: no")
        for i, digest in enumerate(digests)
    ]
    return VersionRecord.build(payload, acks, "parent", now=12.0)


def test_agreement_is_verified_for_every_member() -> None:
    good = digest_module(TinyPolicy())
    agreed = built(good, good)
    assert (agreed.verified, agreed.total, agreed.first_mismatch, agreed.consistent) == (2, 2, None, True)
    assert agreed.digest == good.root
    agreed.require_consistent()


def test_a_mismatch_names_the_first_member_and_tensor() -> None:
    good, other = TinyPolicy(), TinyPolicy()
    flip_bit(other.log_std)
    mixed = built(digest_module(good), digest_module(other), None)
    assert [m.state for m in mixed.members.values()] == ["Acknowledged", "Mismatch", "Failed"]
    assert (mixed.verified, mixed.total, mixed.first_mismatch) == (1, 3, "eval-1: log_std")
    with pytest.raises(WeightMismatch, match="eval-1: log_std") as caught:
        built(digest_module(good), digest_module(other)).require_consistent()
    assert caught.value.version == 3


def test_a_failed_acknowledgement_carries_its_cause() -> None:
    failed = built(digest_module(TinyPolicy()), None)
    assert failed.first_mismatch == "eval-1: RuntimeError: no"
    with pytest.raises(WeightsError, match="member eval-1 could not apply version 3: RuntimeError: no"):
        failed.require_consistent()


def test_a_member_that_runs_a_newer_version_is_not_counted_as_verified() -> None:
    payload = TinyPolicy().publish_weights(3, attempt=1)
    newer = VersionRecord.build(payload, [Acknowledgement("eval-0", 4, payload.digest, 0.1)], None)
    assert (newer.verified, newer.members["eval-0"].state) == (0, "Superseded")
    assert newer.first_mismatch == "eval-0: runs version 4"


def test_records_survive_the_file(tmp_path: Path) -> None:
    good = digest_module(TinyPolicy())
    records = [built(good, None), built(good, good)]
    records = [VersionRecord.from_json(r.to_json() | {"version": v}) for v, r in enumerate(records)]
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for each in records:
        ledger.append(each)
    ledger.close()
    assert Ledger.read(tmp_path / "ledger.jsonl") == records
    assert [json.loads(line)["version"] for line in (tmp_path / "ledger.jsonl").read_text().splitlines()] == [0, 1]
    again = Ledger(tmp_path / "ledger.jsonl")
    assert again.recent == records
    again.close()


def test_status_holds_the_last_32_versions_in_the_shape_of_the_resource(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for version in range(40):
        ledger.append(record(version, parent=f"d{version - 1}"))
    ledger.close()
    assert [entry["version"] for entry in ledger.to_status()] == list(range(8, 40))
    assert ledger.to_status()[-1] == {
        "version": 39,
        "learnerDigest": "d39",
        "parentDigest": "d38",
        "verified": 0,
        "total": 0,
        "firstMismatch": None,
    }
    assert len(Ledger.read(tmp_path / "ledger.jsonl")) == 40


def test_versions_never_fall_within_an_attempt_and_a_new_attempt_may_start_lower(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(record(7))
    with pytest.raises(WeightsError, match="version 6 of attempt 1 follows version 7"):
        ledger.append(record(6))
    ledger.append(record(3, attempt=2))
    ledger.close()
    assert [(r.attempt, r.version) for r in Ledger.read(tmp_path / "ledger.jsonl")] == [(1, 7), (2, 3)]


def test_the_last_line_of_a_version_counts(tmp_path: Path) -> None:
    good, other = TinyPolicy(), TinyPolicy()
    flip_bit(other.log_std)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(built(digest_module(other)))
    ledger.append(built(digest_module(good)))  # after a resynchronisation
    ledger.close()
    assert [r.consistent for r in ledger.recent] == [True]
    assert [r.consistent for r in Ledger.read(tmp_path / "ledger.jsonl")] == [True]
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 2


def test_a_torn_last_line_is_left_out_and_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.append(record(0))
    ledger.append(record(1))
    ledger.close()
    whole = path.read_bytes()
    for cut in range(1, len(whole) // 2):
        path.write_bytes(whole[:-cut])
        assert [r.version for r in Ledger.read(path)] == [0]
    again = Ledger(path)
    again.append(record(1))
    again.close()
    assert path.read_bytes() == whole


def test_another_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"version": 1\n{}\n')
    with pytest.raises(RunFolderError, match="line 1"):
        Ledger.read(path)
    with pytest.raises(RunFolderError, match="line 1"):
        Ledger(path)


def test_a_ledger_without_a_file_keeps_the_ring() -> None:
    ledger = Ledger()
    ledger.append(record(1))
    assert ledger.head == record(1)


def test_a_ledger_that_cannot_be_opened_says_where(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="missing"):
        Ledger(tmp_path / "missing" / "ledger.jsonl")
    with pytest.raises(RunFolderError, match="missing"):
        Ledger.read(tmp_path / "missing")


def test_a_line_that_does_not_fit_leaves_the_ledger_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.append(record(1))
    size = path.stat().st_size
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))  # a disk with room for ten more bytes
    try:
        with pytest.raises(RunFolderError, match=r"ledger\.jsonl cannot take a line of \d+ bytes"):
            ledger.append(record(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.stat().st_size == size
    assert ledger.recent == [record(1)]
    ledger.append(record(2))
    ledger.close()
    assert [r.version for r in Ledger.read(path)] == [1, 2]
