"""``rlightning verify``: what was looked at, and what was found."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from rlightning.checkpoint.verify import verify_checkpoint, verify_run
from rlightning.errors import RunFolderError
from rlightning.runtime.run_folder import nearest_run
from rlightning.weights.ledger import Ledger, VersionRecord


def verify_path(path: Path) -> int:
    """Verify a run's folder or a checkpoint; returns the exit status."""
    if (path / "job.yaml").exists():
        return _run(path)
    if (path / "manifest.json").exists() or path.parent.name == "checkpoints":
        problems = verify_checkpoint(path)
        return _verdict(problems, [] if problems else [f"checkpoint {path}: every byte is as it was saved"])
    raise RunFolderError(f"{path} is neither a run folder nor a checkpoint{nearest_run(path)}")


def _run(path: Path) -> int:
    report = verify_run(path)
    lines = [
        f"checkpoints: {len(report.checkpoints)}"
        + (f" ({', '.join(info.path.name for info in report.checkpoints)})" if report.checkpoints else "")
    ]
    if report.versions:
        records = Ledger.read(path / "ledger.jsonl")
        lines.append(f"versions: {report.versions} ({members_of(records)})")
        lines += repeats_of(records)
    else:
        lines.append("versions: none in the ledger")
        if not report.checkpoints and not report.problems:
            print("\n".join(lines))
            print("nothing to verify: the run ended before it published weights", file=sys.stderr)
            return 1
    return _verdict(report.problems, lines)


def members_of(records: list[VersionRecord]) -> str:
    """``the learner's digest on all 4 members: 42``, counted from the digests themselves."""
    agreeing = sum(all(m.digest == r.digest for m in r.members.values()) for r in records)
    counts = Counter(len(r.members) for r in records)
    sizes = " or ".join(str(n) for n in sorted(counts))
    members = "the one member" if sizes == "1" else f"all {sizes} members"
    return f"the learner's digest on {members}: {agreeing}"


def repeats_of(records: list[VersionRecord]) -> list[str]:
    """Whether versions that a resumed attempt published again had the digest they had before; empty if there are none.

    A difference is no damage: the resume may have been approximate, or on another kind of machine, or with a manifest
    that changed what may change.
    """
    before: dict[int, VersionRecord] = {}
    repeated: dict[int, bool] = {}
    for record in records:
        earlier = before.get(record.version)
        if earlier is not None and earlier.attempt != record.attempt:
            repeated[record.version] = repeated.get(record.version, True) and earlier.digest == record.digest
        before[record.version] = record
    different = sorted(version for version, equal in repeated.items() if not equal)
    if not repeated:
        return []
    verdict = f"from version {different[0]} on not with the digest of before" if different else "with equal digests"
    return [f"repeated after a resume: {len(repeated)}, {verdict}"]


def _verdict(problems: list[str], lines: list[str]) -> int:
    for line in lines:
        print(line)
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    if problems:
        print(f"not verified: {len(problems)} {'problem' if len(problems) == 1 else 'problems'}", file=sys.stderr)
        return 1
    print("verified")
    return 0
