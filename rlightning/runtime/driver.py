"""The driver: runs one job from its start, or from a checkpoint, to its end."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlightning.api.changes import refused_changes
from rlightning.api.models import RLJob
from rlightning.api.resolve import resolve
from rlightning.checkpoint.store import CheckpointStore, Snapshot, load_checkpoint
from rlightning.engine.sync_rl_engine import Counters, StopRequest, SyncRLEngine
from rlightning.env import check_environment
from rlightning.errors import (
    CheckpointError,
    EnvironmentFault,
    EnvironmentNotFound,
    ManifestError,
    MemberDeadlineExceeded,
    MemberError,
    MemberLost,
    NonFiniteLoss,
    RayUnavailable,
    RLightningError,
    RunFolderError,
    StoppedEarly,
    Superseded,
    UnsupportedSpace,
    WeightMismatch,
    WeightsError,
)
from rlightning.runtime.numerics import numerics_key, prepare_process
from rlightning.runtime.placement import Cluster, Placement, open_group
from rlightning.runtime.progress import iso, now
from rlightning.runtime.reporter import Outcome, Reporter, RunInfo
from rlightning.runtime.stages import Stages

REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (MemberError, "PolicyError"),
    (MemberLost, "MemberLost"),
    (MemberDeadlineExceeded, "DeadlineExceeded"),
    (RayUnavailable, "RayUnavailable"),
    (NonFiniteLoss, "NonFiniteLoss"),
    (WeightMismatch, "WeightMismatch"),
    (WeightsError, "WeightsFailed"),
    (EnvironmentNotFound, "EnvironmentNotFound"),
    (EnvironmentFault, "EnvironmentFault"),
    (UnsupportedSpace, "UnsupportedSpace"),
    (CheckpointError, "CheckpointFailed"),
    (RunFolderError, "RunFolderFailed"),
    (ManifestError, "InvalidManifest"),
    (RLightningError, "Failed"),
)
"""Reason of a Failed or Lost outcome by the error that ended the run; the first that fits."""

NOT_THE_JOBS_FAULT = (MemberLost, MemberDeadlineExceeded, RayUnavailable)
"""What a further attempt, on other pods, may well not meet again."""


@dataclass
class _Life:
    """What there is to tell of when a run ends early."""

    store: CheckpointStore | None = None
    snapshot: Snapshot | None = None
    engine: SyncRLEngine | None = None
    outcome: Outcome | None = None
    error: Exception | None = None


def run_job(
    job: RLJob,
    *,
    run_dir: Path,
    placement: Placement,
    reporter: Reporter,
    stop: StopRequest,
    resume: Path | None = None,
    attempt: int = 1,
    cluster: Cluster | None = None,
    stages: Stages | None = None,
) -> Outcome:
    """Run a job.

    Args:
        job: the manifest; what it leaves to the first start is resolved here.
        run_dir: folder of the run; checkpoints go to ``checkpoints`` in it.
        placement: ``local`` (all members in this process) or ``ray`` (an actor each).
        reporter: told of everything; its ``finished`` is always called last, but not for Superseded.
        stop: asked between iterations; when set, a checkpoint is saved and the outcome is Stopped.
        resume: checkpoint to go on from.
        attempt: 1 for the first driver of this run.
        cluster: a Ray cluster that was made for this job, by an operator that starts lost attempts again.
        stages: of the start, with what went before.

    Returns:
        How it ended. Errors that are explained to the user end as a Failed outcome, or as a Lost one when they are
        not the job's fault and ``cluster`` is given. An error while members and Ray are shut down, after training has
        ended, is a warning only.

    Raises:
        Superseded: as the reporter, or ``cluster``, raised it.
        Exception: anything unexpected, after ``reporter.finished`` was told of it.
    """
    started = time.perf_counter()
    life = _Life()
    try:
        outcome = _run(job, run_dir, placement, reporter, stop, resume, attempt, cluster, stages or Stages(), life)
    except Superseded:
        raise
    except StoppedEarly as early:
        outcome = _early(life, run_dir, started, "Stopped", "Interrupted", str(early))
    except RLightningError as error:
        outcome = _failed(error, run_dir, life, started, cluster)
    except Exception as error:
        reporter.finished(_failed(error, run_dir, life, started, cluster))
        raise
    reporter.finished(outcome)
    return outcome


def _run(
    job: RLJob,
    run_dir: Path,
    placement: Placement,
    reporter: Reporter,
    stop: StopRequest,
    resume: Path | None,
    attempt: int,
    cluster: Cluster | None,
    stages: Stages,
    life: _Life,
) -> Outcome:
    spec = resolve(job.spec)
    job = job.model_copy(update={"spec": spec})
    prepare_process(spec.training.threads)
    meta = check_environment(spec.environment)
    numerics = numerics_key(spec.training.threads, spec.training.device)
    life.store = CheckpointStore(run_dir / "checkpoints", spec.checkpoints.keep)
    life.snapshot = snapshot = load_checkpoint(resume) if resume is not None else None
    if snapshot is not None:
        _check_manifest(snapshot, job)
        _check_numerics(snapshot, numerics, reporter)
    stages.done("checks")
    with _clean_up_changes_nothing(life, reporter), open_group(spec, meta, placement, cluster, stages) as group:
        counters, parent, states = Counters(), None, None
        if snapshot is not None:
            group.load_training_state(snapshot.model, _section(snapshot, "learner"))
            counters = Counters.from_state_dict(_section(snapshot, "engine"))
            states = _section(snapshot, "shards")
            parent = (snapshot.ledger_head or {}).get("parentDigest")
        assert spec.environment.shards is not None
        environment = group.host_shards(
            spec.environment,
            spec.environment.shards,
            spec.environment.num_envs // spec.environment.shards,
            spec.seed,
            states,
        )
        stages.done("environments")
        reporter.started(
            RunInfo(
                job=job,
                run_dir=run_dir,
                placement=placement,
                attempt=attempt,
                resumed_from=str(resume) if resume else None,
                start_iteration=counters.iteration,
                start_env_steps=counters.env_steps,
                total_env_steps=spec.training.total_env_steps,
                numerics=numerics,
                environment=environment,
                members=group.member_names,
                start_time=iso(now()),
                pods=group.pods,
                start_seconds=stages.seconds,
            )
        )
        if snapshot is not None and environment["resume"] != "exact":
            reporter.warning(
                f"environment {spec.environment.id} cannot save its state, so its episodes start anew: this resume is "
                "approximate"
            )
        life.engine = SyncRLEngine(
            job,
            group,
            life.store,
            reporter,
            stop,
            counters=counters,
            attempt=attempt,
            parent_digest=parent,
            numerics=numerics,
            run_dir=run_dir,
        )
        try:
            life.outcome = life.engine.run()
        except Exception as error:
            life.error = error
            raise
    if life.error is not None:  # hidden by that of a clean-up
        raise life.error
    assert life.outcome is not None
    return life.outcome


@contextmanager
def _clean_up_changes_nothing(life: _Life, reporter: Reporter) -> Iterator[None]:
    """Once training has ended, well or not, members or a Ray that cannot be shut down are a warning: how it ended, with
    what it saved, stays as it is, and their processes end with this one or with their pods.
    """
    try:
        yield
    except Exception as error:
        if life.outcome is None and life.error in (None, error):
            raise
        ended = life.outcome.state if life.outcome is not None else type(life.error).__name__
        # Not the errors that it came after: of those the outcome tells.
        shown = "".join(traceback.format_exception(error, chain=error.__cause__ is not None))
        reporter.warning(f"cleaning up failed, which does not change how the run ended ({ended}): {shown}")


def _section(snapshot: Snapshot, name: str) -> Any:
    if name not in snapshot.sections:
        raise CheckpointError(
            f"the checkpoint of iteration {snapshot.iteration} has no section {name!r}; it was not written by "
            "`rlightning run` and cannot be resumed"
        )
    return snapshot.sections[name]


def _check_manifest(snapshot: Snapshot, job: RLJob) -> None:
    """Refuse to go on with what may not change after the start, whoever changed it (an edited job.yaml, say)."""
    refused = refused_changes(RLJob.from_stored(snapshot.job), job)
    if refused:
        what = f"the manifest does not fit the checkpoint of iteration {snapshot.iteration}:"
        raise ManifestError("\n  ".join([what, *refused]))


def _check_numerics(snapshot: Snapshot, now: dict[str, str], reporter: Reporter) -> None:
    different = {k: (snapshot.numerics.get(k), v) for k, v in now.items() if snapshot.numerics.get(k) != v}
    if different:
        shown = ", ".join(f"{k}: {was} then, {is_} now" for k, (was, is_) in different.items())
        reporter.warning(f"numerics differ from the checkpoint's, so digests will too: {shown}")


def _failed(error: BaseException, run_dir: Path, life: _Life, started: float, cluster: Cluster | None) -> Outcome:
    reason = next((reason for kind, reason in REASONS if isinstance(error, kind)), "Unexpected")
    shown = "".join(traceback.format_exception(error))
    message = str(error) if isinstance(error, RLightningError) else shown
    state: Literal["Failed", "Lost"] = "Lost" if cluster is not None and _may_pass(error) else "Failed"
    return _early(life, run_dir, started, state, reason, message, traceback=shown)


def _may_pass(error: BaseException) -> bool:
    """Whether it was what the run stands on: members and Ray, whose processes end with the pods that they are in."""
    from ray.exceptions import RayError, RayTaskError

    return isinstance(error, NOT_THE_JOBS_FAULT) or (
        isinstance(error, RayError) and not isinstance(error, RayTaskError)  # that one wraps an error of the user's
    )


def _early(
    life: _Life,
    run_dir: Path,
    started: float,
    state: Literal["Stopped", "Failed", "Lost"],
    reason: str,
    message: str,
    **extra: str,
) -> Outcome:
    """The outcome of a run that its engine did not end: where it was, and what it can go on from."""
    engine, snapshot = life.engine, life.snapshot
    try:
        last = life.store.latest() if life.store else None
    except OSError:  # a volume that is away, which may be what ended the run
        last = None
    published = engine.group.published if engine else None
    before = (snapshot.iteration, snapshot.env_steps) if snapshot else (0, 0)
    iteration, env_steps = (engine.counters.iteration, engine.counters.env_steps) if engine else before
    return Outcome(
        state=state,
        reason=reason,
        message=message,
        iteration=iteration,
        env_steps=env_steps,
        version=published.version if published else None,
        digest=published.digest.root if published else None,
        checkpoint=str(last) if last else None,
        evaluation=engine.last_evaluation if engine else None,
        resume_command=f"rlightning run --resume {run_dir}" if last else None,
        seconds=time.perf_counter() - started,
        extra=dict(extra),
    )
