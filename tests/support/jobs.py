"""Small jobs that train for real, and a reporter that remembers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlightning.api.models import RLJob
from rlightning.runtime.reporter import EvaluationReport, IterationReport, Outcome, RunInfo

if TYPE_CHECKING:
    from rlightning.checkpoint.store import CheckpointInfo
    from rlightning.weights.ledger import VersionRecord


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` laid over it, mapping by mapping."""
    result = dict(base)
    for key, value in changes.items():
        inner = result.get(key)
        result[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


CARTPOLE: dict[str, Any] = {
    "seed": 7,
    "environment": {"id": "CartPole-v1", "numEnvs": 8, "shards": 4},
    "policy": {"simplePPO": {"hiddenSizes": [16, 16], "epochs": 2, "minibatchSize": 64, "learningRate": 0.003}},
    "training": {"totalEnvSteps": 2300, "rolloutSteps": 32},
}
"""10 iterations of 8 × 32 steps (a few of which are dummies)."""

HALF_CHEETAH: dict[str, Any] = merged(
    CARTPOLE,
    {
        "environment": {"id": "HalfCheetah-v5", "numEnvs": 4},
        "policy": {"simplePPO": {"normalizeObservations": True, "minibatchSize": 32}},
        "training": {"totalEnvSteps": 20 * 64, "rolloutSteps": 16},
    },
)
"""20 iterations of 4 × 16 steps (HalfCheetah has no early end, so every step is valid)."""


def job(base: dict[str, Any] = CARTPOLE, name: str = "job", **changes: Any) -> RLJob:
    """A job whose spec is ``base`` with ``changes`` (camelCase) laid over it."""
    return RLJob.from_stored(
        {
            "apiVersion": "rlightning.io/v1alpha1",
            "kind": "RLJob",
            "metadata": {"name": name},
            "spec": merged(base, changes),
        }
    )


class Recorder:
    """A reporter that keeps everything, and can act at an iteration's end."""

    def __init__(self, at_iteration: dict[int, Any] | None = None) -> None:
        self.at_iteration = at_iteration or {}
        self.run: RunInfo | None = None
        self.versions: list[VersionRecord] = []
        self.iterations: list[IterationReport] = []
        self.evaluations: list[EvaluationReport] = []
        self.checkpoints: list[CheckpointInfo] = []
        self.warnings: list[str] = []
        self.outcome: Outcome | None = None

    def started(self, run: RunInfo) -> None:
        self.run = run

    def published(self, record: VersionRecord) -> None:
        self.versions.append(record)

    def iteration(self, report: IterationReport) -> None:
        self.iterations.append(report)
        if report.iteration in self.at_iteration:
            self.at_iteration[report.iteration]()

    def evaluated(self, report: EvaluationReport) -> None:
        self.evaluations.append(report)

    def checkpointed(self, info: CheckpointInfo) -> None:
        self.checkpoints.append(info)

    def warning(self, message: str) -> None:
        self.warnings.append(message)

    def finished(self, outcome: Outcome) -> None:
        self.outcome = outcome


class Flag:
    """A stop request."""

    requested = False

    def set(self) -> None:
        self.requested = True


def run(
    of: RLJob,
    run_dir: Path,
    *,
    placement: Literal["local", "ray"] = "local",
    recorder: Recorder | None = None,
    stop: Flag | None = None,
    resume: Path | None = None,
    attempt: int = 1,
) -> tuple[Outcome, Recorder]:
    """Run a job to its end; the outcome and everything that was reported."""
    from rlightning.runtime.driver import run_job

    recorder = recorder or Recorder()
    outcome = run_job(
        of,
        run_dir=run_dir,
        placement=placement,
        reporter=recorder,
        stop=stop or Flag(),
        resume=resume,
        attempt=attempt,
    )
    assert recorder.outcome == outcome
    return outcome, recorder
