"""A run is sound if its checkpoints are, its ledger is, and the two agree."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from rlightning.checkpoint.store import CheckpointStore, Snapshot
from rlightning.checkpoint.verify import verify_run
from rlightning.weights.ledger import Ledger, MemberRecord, VersionRecord
from tests.unit.checkpoint.samples import make_snapshot


def small(iteration: int, attempt: int = 1) -> Snapshot:
    return make_snapshot(iteration, hidden=4, shards=1, attempt=attempt)


def record(version: int, parent: str | None, attempt: int = 1, digest: str | None = None) -> VersionRecord:
    """Version v has the weights of ``small(v)``."""
    digest = digest or small(version).digest.root
    members = {name: MemberRecord("Acknowledged", digest, 0.01) for name in ("eval-0", "eval-1")}
    return VersionRecord(version, attempt, digest, parent, members, verified=2, total=2, time=1.0)


def chain(first: int, last: int, attempt: int = 1, parent: str | None = None) -> list[VersionRecord]:
    records = []
    for version in range(first, last + 1):
        records.append(record(version, parent, attempt))
        parent = records[-1].digest
    return records


def write(run: Path, *snapshots: Snapshot, ledger: list[VersionRecord]) -> Path:
    store = CheckpointStore(run / "checkpoints", keep=10)
    for snapshot in snapshots:
        store.save(snapshot)
    lines = [json.dumps(entry.to_json()) + "\n" for entry in ledger]
    (run / "ledger.jsonl").write_text("".join(lines))
    return run


def test_a_sound_run_has_no_problems(tmp_path: Path) -> None:
    report = verify_run(write(tmp_path, small(2), small(4), ledger=chain(0, 4)))
    assert report.problems == []
    assert report.ok
    assert report.versions == 5
    assert [(info.path.name, info.iteration, info.digest) for info in report.checkpoints] == [
        ("iter-00000002", 2, small(2).digest.root),
        ("iter-00000004", 4, small(4).digest.root),
    ]


def test_what_the_ledger_itself_writes_is_read(tmp_path: Path) -> None:
    write(tmp_path, small(2), ledger=[])
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for entry in chain(0, 2):
        ledger.append(entry)
    ledger.close()
    assert verify_run(tmp_path).problems == []


@pytest.mark.parametrize("parent", [small(1).digest.root, small(2).digest.root], ids=["its parent", "itself"])
def test_a_resumed_run_is_sound(tmp_path: Path, parent: str) -> None:
    # Version 2 is published again by attempt 2; versions 3 and 4 of attempt 1 were lost with it.
    ledger = [*chain(0, 4), *chain(2, 5, attempt=2, parent=parent)]
    assert verify_run(write(tmp_path, small(2), small(4, attempt=2), ledger=ledger)).problems == []


def test_a_run_that_started_over_is_sound(tmp_path: Path) -> None:
    assert verify_run(write(tmp_path, ledger=[*chain(0, 1), *chain(0, 3, attempt=2)])).problems == []


def test_a_torn_last_line_is_no_problem(tmp_path: Path) -> None:
    write(tmp_path, small(2), ledger=chain(0, 3))
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"version": 4, "att')
    report = verify_run(tmp_path)
    assert (report.problems, report.versions) == ([], 4)


def test_a_checkpoint_beyond_the_ledger_is_no_contradiction(tmp_path: Path) -> None:
    assert verify_run(write(tmp_path, small(3), ledger=chain(0, 2))).problems == []


def problem(run: Path) -> str:
    report = verify_run(run)
    assert not report.ok
    (only,) = report.problems
    return only


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    write(tmp_path, ledger=chain(0, 3))
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines(keepends=True)
    lines[1] = lines[1].replace('"version": 1', '"version"; 1')
    (tmp_path / "ledger.jsonl").write_text("".join(lines))
    assert "line 2" in problem(tmp_path)


@pytest.mark.parametrize(
    "line", ["{}", "[]", "3", "null", '{"version": 1}', '"x"', '{"members": 1}', "[" * 100_000], ids=lambda x: x[:9]
)
def test_foreign_lines_are_a_problem_and_no_crash(tmp_path: Path, line: str) -> None:
    write(tmp_path, ledger=[])
    (tmp_path / "ledger.jsonl").write_text(line + "\n")
    assert "ledger" in problem(tmp_path)


@pytest.mark.parametrize("field", ["version", "attempt", "verified", "digest"])
def test_a_record_with_a_field_of_the_wrong_type_is_a_problem_and_no_crash(tmp_path: Path, field: str) -> None:
    write(tmp_path, ledger=[])
    entries = [entry.to_json() for entry in chain(0, 2)]
    entries[1][field] = ["x"]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert "wrong type" in problem(tmp_path)


def test_a_missing_ledger_is_named(tmp_path: Path) -> None:
    write(tmp_path, small(1), ledger=[])
    (tmp_path / "ledger.jsonl").unlink()
    assert "ledger.jsonl" in problem(tmp_path)


def test_a_version_that_a_member_did_not_run_is_named_with_the_difference(tmp_path: Path) -> None:
    ledger = chain(0, 3)
    ledger[2] = dataclasses.replace(ledger[2], verified=1, first_mismatch="eval-1: actor.0.weight")
    text = problem(write(tmp_path, ledger=ledger))
    assert "version 2 of attempt 1: 1 of 2 members" in text
    assert "eval-1: actor.0.weight" in text


def test_a_falling_version_is_named(tmp_path: Path) -> None:
    ledger = chain(0, 3)
    ledger.append(record(2, ledger[-1].digest))
    assert "version 2 of attempt 1 comes after version 3" in problem(write(tmp_path, ledger=ledger))


def test_a_falling_attempt_is_named(tmp_path: Path) -> None:
    ledger = [*chain(0, 1, attempt=2), *chain(0, 1)]
    assert "version 0 of attempt 1 comes after attempt 2" in problem(write(tmp_path, ledger=ledger))


def test_a_missing_version_breaks_the_chain(tmp_path: Path) -> None:
    ledger = chain(0, 4)
    del ledger[2]
    text = problem(write(tmp_path, ledger=ledger))
    assert f"version 3 of attempt 1 was trained from {small(2).digest.root}, but version 1 before it" in text


def test_a_resume_from_nowhere_is_named(tmp_path: Path) -> None:
    ledger = [*chain(0, 4), *chain(3, 5, attempt=2, parent="xxh3-128:" + "0" * 32)]
    assert "version 3 of attempt 2 was resumed from xxh3-128:000" in problem(write(tmp_path, ledger=ledger))


def test_a_later_attempt_without_a_parent_is_named(tmp_path: Path) -> None:
    ledger = [*chain(0, 4), *chain(3, 5, attempt=2)]
    assert "version 3 of attempt 2 begins an attempt" in problem(write(tmp_path, ledger=ledger))


def test_an_attempt_that_begins_with_other_weights_than_were_published_is_named(tmp_path: Path) -> None:
    other = record(3, small(2).digest.root, attempt=2, digest=small(9).digest.root)
    text = problem(write(tmp_path, ledger=[*chain(0, 4), other]))
    assert f"version 3 of attempt 2 begins an attempt with {small(9).digest.root}" in text


def test_a_checkpoint_with_other_weights_than_the_ledger_s_is_named(tmp_path: Path) -> None:
    wrong = dataclasses.replace(small(7), version=2)
    text = problem(write(tmp_path, wrong, ledger=chain(0, 4)))
    assert f"version 2 of attempt 1 is {small(2).digest.root} here and {small(7).digest.root} in checkpoint" in text


def test_a_checkpoint_whose_version_the_ledger_skips_is_named(tmp_path: Path) -> None:
    early = dataclasses.replace(small(3), version=3)
    text = problem(write(tmp_path, early, ledger=chain(4, 6)))
    assert "version 3 of attempt 1 is missing, checkpoint iter-00000003 holds it" in text


def test_every_checkpoint_is_verified_also_one_that_lost_its_manifest(tmp_path: Path) -> None:
    write(tmp_path, small(1), small(2), small(3), ledger=chain(0, 3))
    (tmp_path / "checkpoints" / "iter-00000001" / "engine.json").unlink()
    (tmp_path / "checkpoints" / "iter-00000003" / "manifest.json").unlink()
    report = verify_run(tmp_path)
    assert len(report.problems) == 2
    assert "iter-00000001: engine.json is missing" in report.problems[0]
    assert "iter-00000003: manifest.json is missing" in report.problems[1]
    assert [info.iteration for info in report.checkpoints] == [1, 2]


def test_a_run_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    assert "no such run" in problem(tmp_path / "gone")
