"""A run's events, made by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlightning.api.models import RLJob
from rlightning.runtime.reporter import EvaluationReport, IterationReport, Outcome, Reporter, RunInfo

if TYPE_CHECKING:  # both import torch, which takes seconds
    from rlightning.checkpoint.store import CheckpointInfo
    from rlightning.weights.ledger import VersionRecord

STEPS = 1000  # of every sample iteration
TOTAL = 100_000


def job(name: str = "cartpole", **spec: Any) -> RLJob:
    """A resolved job: 4 shards, 1 train and 4 eval members, 100 iterations of 1000 steps."""
    manifest: dict[str, Any] = {
        "apiVersion": "rlightning.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": name},
        "spec": {
            "seed": 7,
            "environment": {"id": "CartPole-v1", "numEnvs": 8, "shards": 4},
            "policy": {"simplePPO": {}},
            "training": {"totalEnvSteps": TOTAL, "rolloutSteps": 125},
            "policyGroup": {"eval": {"replicas": 4}},
            **spec,
        },
    }
    return RLJob.model_validate(manifest)


def run_info(run_dir: Path, of: RLJob | None = None, *, attempt: int = 1, done: int = 0, **changes: Any) -> RunInfo:
    """The start of a run, or of a further attempt with ``done`` iterations behind it."""
    values: dict[str, Any] = {
        "job": of or job(),
        "run_dir": run_dir,
        "placement": "local",
        "attempt": attempt,
        "resumed_from": None if attempt == 1 else str(run_dir / "checkpoints" / f"iter-{done:08d}"),
        "start_iteration": done,
        "start_env_steps": done * STEPS,
        "total_env_steps": TOTAL,
        "numerics": {"torch": "2.15.0"},
        "environment": {"vectorization": "Native", "resume": "exact"},
        "members": ("train-0", "eval-0", "eval-1", "eval-2", "eval-3"),
        "start_time": "2026-03-01T12:00:00Z",
        **changes,
    }
    return RunInfo(**values)


def digest(version: int) -> str:
    return f"xxh3-128:{version:032x}"


def record(version: int, *, attempt: int = 1, wrong: str | None = None) -> VersionRecord:
    """A published version; the member ``wrong`` runs other weights."""
    from rlightning.weights.ledger import MemberRecord, VersionRecord

    members = {
        name: MemberRecord(
            "Mismatch" if name == wrong else "Acknowledged", digest(0 if name == wrong else version), 0.001
        )
        for name in ("eval-0", "eval-1", "eval-2", "eval-3")
    }
    return VersionRecord(
        version=version,
        attempt=attempt,
        digest=digest(version),
        parent_digest=digest(version - 1) if version > 1 else None,
        members=members,
        verified=4 - (wrong is not None),
        total=4,
        first_mismatch=f"{wrong}: actor.0.weight" if wrong else None,
        time=1_772_366_400.0,
    )


@dataclass(frozen=True)
class ShownMember:
    digest: str


@dataclass(frozen=True)
class ShownRecord:
    """What displays read of a VersionRecord, whose module imports torch: seconds in every process of a test."""

    version: int
    digest: str
    members: dict[str, ShownMember]
    total: int = 4


def shown_record(version: int, *, wrong: str | None = None) -> Any:
    names = ("eval-0", "eval-1", "eval-2", "eval-3")
    members = {name: ShownMember(digest(0 if name == wrong else version)) for name in names}
    return ShownRecord(version, digest(version), members)


def iteration(n: int, **changes: Any) -> IterationReport:
    values: dict[str, Any] = {
        "iteration": n,
        "env_steps": n * STEPS,
        "version": n,
        "episode_return_mean": 20.0 + n,
        "episode_length_mean": 20.0 + n,
        "episodes": 9,
        "steps_per_second": 65432.1,
        "metrics": {"policy_loss": -0.25 / n, "value_loss": 3.5, "entropy": 0.69, "kl": 0.01, "clip_fraction": 0.125},
        "timings": {"publish": 0.001, "rollout": 0.05, "train": 0.07},
        **changes,
    }
    return IterationReport(**values)


def evaluation(n: int, mean: float = 480.25, **changes: Any) -> EvaluationReport:
    values: dict[str, Any] = {
        "iteration": n,
        "version": n + 1,
        "episodes": 100,
        "return_mean": mean,
        "return_std": 12.5,
        "return_min": 431.0,
        "return_max": 500.0,
        "length_mean": mean,
        "seconds": 1.5,
        "target": 475.0,
        **changes,
    }
    return EvaluationReport(**values)


def checkpoint(run_dir: Path, n: int) -> CheckpointInfo:
    from rlightning.checkpoint.store import CheckpointInfo

    return CheckpointInfo(run_dir / "checkpoints" / f"iter-{n:08d}", n, digest(n + 1))


def outcome(state: str, n: int, run_dir: Path, **changes: Any) -> Outcome:
    reasons = {
        "Succeeded": ("TotalEnvStepsReached", "all 100,000 steps are done"),
        "Stopped": ("Interrupted", "asked to stop"),
        "Failed": ("NonFiniteLoss", f"iteration {n}: the loss is NaN"),
    }
    values: dict[str, Any] = {
        "state": state,
        "reason": reasons[state][0],
        "message": reasons[state][1],
        "iteration": n,
        "env_steps": n * STEPS,
        "version": n + 1,
        "digest": digest(n + 1),
        "checkpoint": str(run_dir / "checkpoints" / f"iter-{n:08d}"),
        "seconds": 12.4,
        **changes,
    }
    return Outcome(**values)


def play(reporter: Reporter, run_dir: Path, first: int, last: int, *, attempt: int = 1) -> None:
    """Iterations ``first`` to ``last`` of an attempt, with a checkpoint every ten; no end."""
    reporter.started(run_info(run_dir, attempt=attempt, done=first - 1))
    for n in range(first, last + 1):
        reporter.published(record(n, attempt=attempt))
        reporter.iteration(iteration(n))
        if n % 10 == 0:
            reporter.checkpointed(checkpoint(run_dir, n))
