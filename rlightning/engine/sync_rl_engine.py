"""The synchronous engine: publish, roll out, learn, publish."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Protocol

from rlightning.api.models import RLJob
from rlightning.checkpoint.store import CheckpointInfo, CheckpointStore, Snapshot
from rlightning.errors import WeightMismatch
from rlightning.policy.base_policy import TrainingProgress
from rlightning.policy.policy_group import PolicyGroup
from rlightning.runtime.reporter import EvaluationReport, IterationReport, Outcome, Reporter
from rlightning.types import Fragment
from rlightning.weights.ledger import VersionRecord

EPISODE_WINDOW = 100
"""Finished episodes that ``episodeReturnMean`` is taken over."""


class StopRequest(Protocol):
    """Somebody may want the run to stop at the next iteration boundary."""

    @property
    def requested(self) -> bool: ...


@dataclass
class Counters:
    """What the engine counts; part of a checkpoint.

    Attributes:
        iteration: iterations done.
        env_steps: valid environment steps done.
        episodes: (return, length) of the last finished episodes, oldest first.
    """

    iteration: int = 0
    env_steps: int = 0
    episodes: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=EPISODE_WINDOW))

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self.iteration, "env_steps": self.env_steps, "episodes": list(self.episodes)}

    @staticmethod
    def from_state_dict(state: dict[str, Any]) -> Counters:
        episodes = deque((tuple(e) for e in state["episodes"]), maxlen=EPISODE_WINDOW)
        return Counters(state["iteration"], state["env_steps"], episodes)


class SyncRLEngine:
    """Runs a job to its end on a group that is ready: initialized, weights loaded, shards hosted.

    Version v holds the weights after v iterations. Iteration i rolls out with version i − 1, learns, and publishes
    version i; evaluation and checkpoints come after that, between two fragments.

    Args:
        job: the resolved manifest.
        group: the members.
        checkpoints: where to save.
        reporter: who is told.
        stop: asked between iterations.
        counters: where to start.
        attempt: of this driver.
        parent_digest: of the version before the first one published here, None at the very start.
        numerics: the numerics key, kept in every checkpoint.
        run_dir: for the command that resumes.
    """

    def __init__(
        self,
        job: RLJob,
        group: PolicyGroup,
        checkpoints: CheckpointStore,
        reporter: Reporter,
        stop: StopRequest,
        *,
        counters: Counters,
        attempt: int,
        parent_digest: str | None,
        numerics: dict[str, str],
        run_dir: Path,
    ) -> None:
        self.job, self.spec, self.group = job, job.spec, group
        self.checkpoints, self.reporter, self.stop = checkpoints, reporter, stop
        self.counters, self.attempt, self.numerics, self.run_dir = counters, attempt, numerics, run_dir
        self.last_checkpoint: CheckpointInfo | None = None
        self.last_evaluation: EvaluationReport | None = None
        self._record: VersionRecord | None = None
        self._shard_states: dict[int, dict[str, Any]] = {}
        self._started = time.perf_counter()
        group.start_versions(counters.iteration, attempt, parent_digest)

    def run(self) -> Outcome:
        """Train until the total, the target or a request to stop.

        Raises:
            RLightningError: what a member, the weight plane or the checkpoint store could not do; the last durable
                checkpoint is whole.
        """
        self._shard_states = self.group.shard_states()
        self._publish()
        every, target = self.spec.evaluation.every_iterations, self.spec.evaluation.stop_at_return
        total = self.spec.training.total_env_steps
        at = self.counters
        if target is not None and at.iteration and (at.iteration % every == 0 or at.env_steps >= total):
            # What this goes on from may be the end: the target was reached and saved, and the driver lost before
            # anybody was told. An evaluation repeats to the bit, so it is only told if it was the last one.
            report = self._evaluate()
            if report.return_mean >= target:
                self.reporter.evaluated(report)
                return self._reached(report, target)
        while self.counters.env_steps < total:
            if self.stop.requested:
                self._checkpoint()
                return self._outcome(
                    "Stopped", "Interrupted", f"stopped after iteration {self.counters.iteration}, as asked"
                )
            self._iterate()
            done = self.counters.env_steps >= total
            if every and (self.counters.iteration % every == 0 or done):
                report = self._evaluate()
                self.reporter.evaluated(report)
                if target is not None and report.return_mean >= target:
                    return self._reached(report, target)
            if not done and self.counters.iteration % self.spec.checkpoints.every_iterations == 0:
                self._checkpoint()
        self._checkpoint()
        return self._outcome(
            "Succeeded",
            "TotalEnvStepsReached",
            f"{self.counters.env_steps} environment steps reach the total of {total} (spec.training.totalEnvSteps)",
        )

    def _reached(self, report: EvaluationReport, target: float) -> Outcome:
        self._checkpoint()
        return self._outcome(
            "Succeeded",
            "TargetReached",
            f"mean return {report.return_mean:.1f} over {report.episodes} episodes reached the target {target:g} "
            "(spec.evaluation.stopAtReturn)",
        )

    def _iterate(self) -> None:
        started = time.perf_counter()
        version = self.group.version
        fragments = self._checked(self.group.rollout(self.spec.training.rollout_steps))
        rolled_out = time.perf_counter()
        progress = TrainingProgress(
            self.counters.iteration + 1, self.counters.env_steps, self.spec.training.total_env_steps
        )
        self.group.update_dataset([fragments] * len(self.group.train_members), progress)
        metrics = self.group.train()
        trained = time.perf_counter()
        # Only now does the iteration count: an error above leaves counters and states at its start.
        steps = sum(f.steps for f in fragments)
        self._shard_states = {f.shard: f.shard_state for f in fragments}
        self.counters.iteration += 1
        self.counters.env_steps += steps
        finished = [e for f in fragments for e in f.episodes]
        self.counters.episodes.extend(finished)
        self._publish()
        ended = time.perf_counter()
        window = self.counters.episodes
        self.reporter.iteration(
            IterationReport(
                iteration=self.counters.iteration,
                env_steps=self.counters.env_steps,
                version=version,
                episode_return_mean=fmean(r for r, _ in window) if window else None,
                episode_length_mean=fmean(n for _, n in window) if window else None,
                episodes=len(finished),
                steps_per_second=steps / (ended - started),
                metrics=metrics,
                timings={
                    "rollout": rolled_out - started,
                    "train": trained - rolled_out,
                    "publish": ended - trained,
                },
            )
        )

    # --- weights ---------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        record = self.group.sync_weights()
        self._report(record)
        if record.first_mismatch is None or not self._mismatch_matters(record):
            return
        # Resync: once more, from the learner's tensors; a member that still differs is broken.
        again = self.group.republish_weights()
        self._report(again)
        if again.first_mismatch is not None:
            raise WeightMismatch(again.version, again.first_mismatch)

    def _checked(self, fragments: list[Fragment]) -> list[Fragment]:
        """The fragments, once their members have proved that they still run the version they acted with."""
        record = self.group.verify_weights()
        if record.first_mismatch is None:
            return fragments
        self._report(record)
        if not self._mismatch_matters(record):
            return fragments
        tainted = [name for name, member in record.members.items() if member.state != "Acknowledged"]
        again = self.group.republish_weights()
        self._report(again)
        if again.first_mismatch is not None:
            raise WeightMismatch(again.version, again.first_mismatch)
        steps = self.spec.training.rollout_steps
        return self.group.redo_rollout(tainted, self._shard_states, fragments, steps)

    def _mismatch_matters(self, record: VersionRecord) -> bool:
        """What spec.weights.onMismatch says of a mismatch: False to go on, True to resynchronise.

        Raises:
            WeightMismatch: with onMismatch Fail.
        """
        assert record.first_mismatch is not None
        error = WeightMismatch(record.version, record.first_mismatch)
        if self.spec.weights.on_mismatch == "Fail":
            raise error
        self.reporter.warning(f"{error} (spec.weights.onMismatch is {self.spec.weights.on_mismatch})")
        return self.spec.weights.on_mismatch == "Resync"

    def _report(self, record: VersionRecord) -> None:
        self._record = record
        self.reporter.published(record)

    # --- evaluation and checkpoints --------------------------------------------------------------------------------

    def _evaluate(self) -> EvaluationReport:
        started = time.perf_counter()
        spec = self.spec.evaluation
        episodes = self.group.evaluate(self.spec.environment, self.spec.seed, spec.episodes)
        report = evaluation_report(
            episodes, self.counters.iteration, self.group.version, time.perf_counter() - started, spec.stop_at_return
        )
        self.last_evaluation = report
        return report

    def _checkpoint(self) -> None:
        if self.last_checkpoint is not None and self.last_checkpoint.iteration == self.counters.iteration:
            return
        payload = self.group.published
        assert payload is not None and self._record is not None
        info = self.checkpoints.save(
            Snapshot(
                iteration=self.counters.iteration,
                env_steps=self.counters.env_steps,
                version=self.group.version,
                attempt=self.attempt,
                model=payload.layout.views(payload.data),
                aliases=dict(payload.layout.aliases),
                digest=payload.digest,
                sections={
                    "learner": self.group.training_state(),
                    "shards": self._shard_states,
                    "engine": self.counters.state_dict(),
                },
                ledger_head=self._record.to_json(),
                numerics=self.numerics,
                job=self.job.to_dict(),
            )
        )
        self.last_checkpoint = info
        self.reporter.checkpointed(info)

    def _outcome(self, state: Any, reason: str, message: str) -> Outcome:
        published = self.group.published
        return Outcome(
            state=state,
            reason=reason,
            message=message,
            iteration=self.counters.iteration,
            env_steps=self.counters.env_steps,
            version=self.group.version if published else None,
            digest=published.digest.root if published else None,
            checkpoint=str(self.last_checkpoint.path) if self.last_checkpoint else None,
            evaluation=self.last_evaluation,
            resume_command=f"rlightning run --resume {self.run_dir}" if state == "Stopped" else None,
            seconds=time.perf_counter() - self._started,
        )


def evaluation_report(
    episodes: list[tuple[float, int]], iteration: int, version: int, seconds: float, target: float | None
) -> EvaluationReport:
    """Statistics of evaluation episodes (return, length)."""
    returns = [r for r, _ in episodes]
    return EvaluationReport(
        iteration=iteration,
        version=version,
        episodes=len(episodes),
        return_mean=fmean(returns),
        return_std=pstdev(returns),
        return_min=min(returns),
        return_max=max(returns),
        length_mean=fmean(n for _, n in episodes),
        seconds=seconds,
        target=target,
    )
