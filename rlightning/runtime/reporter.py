"""What a running job tells the world; a terminal, a run folder or a custom resource listens."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from rlightning.api.models import RLJob
    from rlightning.checkpoint.store import CheckpointInfo
    from rlightning.weights.ledger import VersionRecord


@dataclass(frozen=True)
class RunInfo:
    """A run as it starts.

    Attributes:
        job: the resolved manifest (shards filled in).
        run_dir: its folder.
        placement: where members run.
        attempt: 1 for the first life of a driver on this folder.
        resumed_from: the checkpoint's path, None at the first start.
        start_iteration: iterations that were done before this attempt.
        start_env_steps: valid environment steps before this attempt.
        total_env_steps: where it will end.
        numerics: the numerics key: equal keys promise equal digests.
        environment: how environments were resolved: ``vectorization`` and ``resume`` (exact or approximate).
        members: names of all members, train first.
        start_time: UTC, ISO 8601 with ``Z``.
        pods: name of the Kubernetes pod of each member that is in one.
        start_seconds: where the time went until now, by stage.
    """

    job: RLJob
    run_dir: Path
    placement: Literal["local", "ray"]
    attempt: int
    resumed_from: str | None
    start_iteration: int
    start_env_steps: int
    total_env_steps: int
    numerics: dict[str, str]
    environment: dict[str, str]
    members: tuple[str, ...]
    start_time: str
    pods: dict[str, str] = field(default_factory=dict)
    start_seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class IterationReport:
    """One finished iteration.

    Attributes:
        iteration: 1 after the first one.
        env_steps: valid steps so far, all attempts together.
        version: the weights that this iteration's fragments were rolled out with.
        episode_return_mean: mean return of the last (at most 100) finished episodes; None before the first.
        episode_length_mean: likewise.
        episodes: episodes that finished in this iteration.
        steps_per_second: valid steps of this iteration by its wall time.
        metrics: losses and the like, by name.
        timings: seconds per stage: publish, rollout, train.
    """

    iteration: int
    env_steps: int
    version: int
    episode_return_mean: float | None
    episode_length_mean: float | None
    episodes: int
    steps_per_second: float
    metrics: dict[str, float] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationReport:
    """A deterministic evaluation with frozen weights."""

    iteration: int
    version: int
    episodes: int
    return_mean: float
    return_std: float
    return_min: float
    return_max: float
    length_mean: float
    seconds: float
    target: float | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        state: Succeeded (total reached or target met), Stopped (asked to; resumable), Failed, Lost (members were,
            not the job's fault; resumable. In a cluster only, where an operator tries again).
        reason: CamelCase and stable: TotalEnvStepsReached, TargetReached, Interrupted, PolicyError, NonFiniteLoss…
        message: a sentence for the user.
        iteration, env_steps: where it ended.
        version, digest: of the last published weights; None when nothing was published.
        checkpoint: path of the last durable checkpoint.
        evaluation: the last evaluation.
        resume_command: how to go on; None when there is nothing to resume.
    """

    state: Literal["Succeeded", "Stopped", "Failed", "Lost"]
    reason: str
    message: str
    iteration: int
    env_steps: int
    version: int | None
    digest: str | None
    checkpoint: str | None
    evaluation: EvaluationReport | None = None
    resume_command: str | None = None
    seconds: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)


class Reporter(Protocol):
    """Called by the engine from the driver's main thread, in order. An exception here stops the run: it is not lost."""

    def started(self, run: RunInfo) -> None: ...

    def published(self, record: VersionRecord) -> None:
        """A version was published and every member answered (or failed: ``record`` says which)."""

    def iteration(self, report: IterationReport) -> None: ...

    def evaluated(self, report: EvaluationReport) -> None: ...

    def checkpointed(self, info: CheckpointInfo) -> None: ...

    def warning(self, message: str) -> None: ...

    def finished(self, outcome: Outcome) -> None: ...


class Reporters:
    """Several reporters as one, called in the order given."""

    def __init__(self, *reporters: Reporter) -> None:
        self.reporters = reporters

    def started(self, run: RunInfo) -> None:
        for r in self.reporters:
            r.started(run)

    def published(self, record: VersionRecord) -> None:
        for r in self.reporters:
            r.published(record)

    def iteration(self, report: IterationReport) -> None:
        for r in self.reporters:
            r.iteration(report)

    def evaluated(self, report: EvaluationReport) -> None:
        for r in self.reporters:
            r.evaluated(report)

    def checkpointed(self, info: CheckpointInfo) -> None:
        for r in self.reporters:
            r.checkpointed(info)

    def warning(self, message: str) -> None:
        for r in self.reporters:
            r.warning(message)

    def finished(self, outcome: Outcome) -> None:
        """All are told, even if one of them fails; then the first failure is raised."""
        errors: list[Exception] = []
        for r in self.reporters:
            try:
                r.finished(outcome)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
