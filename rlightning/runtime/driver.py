"""The driver: runs one job from its start, or from a checkpoint, to its end."""

from __future__ import annotations

import datetime
import time
import traceback
from pathlib import Path
from typing import Any

from rlightning.api.models import RLJob, RLJobStatus
from rlightning.api.resolve import resolve
from rlightning.api.validate import validate_update
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
    RLightningError,
    UnsupportedSpace,
    WeightMismatch,
    WeightsError,
)
from rlightning.runtime.numerics import numerics_key, prepare_process
from rlightning.runtime.placement import Placement, open_group
from rlightning.runtime.reporter import Outcome, Reporter, RunInfo

REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (MemberError, "PolicyError"),
    (MemberLost, "MemberLost"),
    (MemberDeadlineExceeded, "DeadlineExceeded"),
    (NonFiniteLoss, "NonFiniteLoss"),
    (WeightMismatch, "WeightMismatch"),
    (WeightsError, "WeightsFailed"),
    (EnvironmentNotFound, "EnvironmentNotFound"),
    (EnvironmentFault, "EnvironmentFault"),
    (UnsupportedSpace, "UnsupportedSpace"),
    (CheckpointError, "CheckpointFailed"),
    (ManifestError, "InvalidManifest"),
    (RLightningError, "Failed"),
)
"""Reason of a Failed outcome by the error that ended the run; the first that fits."""


def run_job(
    job: RLJob,
    *,
    run_dir: Path,
    placement: Placement,
    reporter: Reporter,
    stop: StopRequest,
    resume: Path | None = None,
    attempt: int = 1,
) -> Outcome:
    """Run a job.

    Args:
        job: the manifest; what it leaves to the first start is resolved here.
        run_dir: folder of the run; checkpoints go to ``checkpoints`` in it.
        placement: ``local`` (all members in this process) or ``ray`` (an actor each).
        reporter: told of everything; its ``finished`` is always called last.
        stop: asked between iterations; when set, a checkpoint is saved and the outcome is Stopped.
        resume: checkpoint to go on from.
        attempt: 1 for the first driver of this run.

    Returns:
        How it ended. Errors that are explained to the user end as a Failed outcome.

    Raises:
        Exception: anything unexpected, after ``reporter.finished`` was told of it.
    """
    started = time.perf_counter()
    engine: list[SyncRLEngine] = []
    store: list[CheckpointStore] = []
    try:
        outcome = _run(job, run_dir, placement, reporter, stop, resume, attempt, engine, store)
    except RLightningError as error:
        outcome = _failed(error, run_dir, engine, store, started)
    except Exception as error:
        reporter.finished(_failed(error, run_dir, engine, store, started))
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
    engines: list[SyncRLEngine],
    stores: list[CheckpointStore],
) -> Outcome:
    spec = resolve(job.spec)
    job = job.model_copy(update={"spec": spec})
    prepare_process(spec.training.threads)
    meta = check_environment(spec.environment)
    numerics = numerics_key(spec.training.threads, spec.training.device)
    snapshot = load_checkpoint(resume) if resume is not None else None
    checkpoints = CheckpointStore(run_dir / "checkpoints", spec.checkpoints.keep)
    stores.append(checkpoints)
    with open_group(spec, meta, placement) as group:
        counters, parent, states = Counters(), None, None
        if snapshot is not None:
            _check_manifest(snapshot, job)
            _check_numerics(snapshot, numerics, reporter)
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
                start_time=_now(),
            )
        )
        if snapshot is not None and environment["resume"] != "exact":
            reporter.warning(
                f"environment {spec.environment.id} cannot save its state, so its episodes start anew: this resume is "
                "approximate"
            )
        engine = SyncRLEngine(
            job,
            group,
            checkpoints,
            reporter,
            stop,
            counters=counters,
            attempt=attempt,
            parent_digest=parent,
            numerics=numerics,
            run_dir=run_dir,
        )
        engines.append(engine)
        return engine.run()


def _section(snapshot: Snapshot, name: str) -> Any:
    if name not in snapshot.sections:
        raise CheckpointError(
            f"the checkpoint of iteration {snapshot.iteration} has no section {name!r}; it was not written by "
            "`rlightning run` and cannot be resumed"
        )
    return snapshot.sections[name]


def _check_manifest(snapshot: Snapshot, job: RLJob) -> None:
    """Refuse to go on with what may not change after the start, whoever changed it (an edited job.yaml, say)."""
    recorded = RLJob.from_stored(snapshot.job)
    status = RLJobStatus(start_time=_now(), shards=recorded.spec.environment.shards)
    started = recorded.model_copy(update={"status": status})
    found = validate_update(started, job.model_copy(update={"metadata": recorded.metadata, "status": None}))
    if found:
        problems = "\n".join(f"  {v.path}: {v.message} (value {v.value!r}); {v.remedy}" for v in found)
        raise ManifestError(f"the manifest does not fit the checkpoint of iteration {snapshot.iteration}:\n{problems}")


def _check_numerics(snapshot: Snapshot, now: dict[str, str], reporter: Reporter) -> None:
    different = {k: (snapshot.numerics.get(k), v) for k, v in now.items() if snapshot.numerics.get(k) != v}
    if different:
        shown = ", ".join(f"{k}: {was} then, {is_} now" for k, (was, is_) in different.items())
        reporter.warning(f"numerics differ from the checkpoint's, so digests will too: {shown}")


def _failed(
    error: BaseException,
    run_dir: Path,
    engines: list[SyncRLEngine],
    stores: list[CheckpointStore],
    started: float,
) -> Outcome:
    reason = next((reason for kind, reason in REASONS if isinstance(error, kind)), "Unexpected")
    message = str(error) if isinstance(error, RLightningError) else "".join(traceback.format_exception(error))
    engine = engines[0] if engines else None
    last = stores[0].latest() if stores else None
    published = engine.group.published if engine else None
    return Outcome(
        state="Failed",
        reason=reason,
        message=message,
        iteration=engine.counters.iteration if engine else 0,
        env_steps=engine.counters.env_steps if engine else 0,
        version=published.version if published else None,
        digest=published.digest.root if published else None,
        checkpoint=str(last) if last else None,
        evaluation=engine.last_evaluation if engine else None,
        resume_command=f"rlightning run --resume {run_dir}" if last else None,
        seconds=time.perf_counter() - started,
        extra={"traceback": "".join(traceback.format_exception(error))},
    )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
