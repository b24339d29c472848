"""The life of a job: which attempt runs on which RayCluster, how attempts end, and when the job does.

``status.attempt`` is the authority. It is stored before the PolicyGroup and the submitter follow it, so that an
operator that dies in between goes on where it was, and a driver of an older attempt stops without writing.

An attempt belongs to one RayCluster: where that is replaced, a new attempt begins. Otherwise two drivers could have
the same number, one of them in a cluster that is just being deleted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from rlightning.api.models import Condition, Restart, RLJobSpec
from rlightning_operator.reconcile import losses
from rlightning_operator.reconcile.clock import Clock
from rlightning_operator.reconcile.losses import Ended
from rlightning_operator.reconcile.objects import created, format_time, parse_time, shorten
from rlightning_operator.reconcile.observed import Observed
from rlightning_operator.reconcile.readiness import Readiness, readiness, refusal
from rlightning_operator.reconcile.snapshot import Note

Phase = Literal["Waiting", "Running", "Suspending", "Suspended", "Finished"]
RESTARTS_KEPT = 10


@dataclass(frozen=True)
class Decision:
    """What the job's life is to be from now on.

    Attributes:
        phase: Waiting: not started, for ``reason``. Running: an attempt should run. Suspending: its driver was asked
            to save and leave. Suspended: no cluster. Finished: for good.
        reason, message: of Waiting, Suspending, Suspended and Finished.
        succeeded: of a finished job.
        attempt, cluster, shards, image, ray_version, start_time, lost_attempts, restarts: for the status.
        training: what the attempt's driver is given.
        stop: the driver should save and leave at the end of its iteration.
        remark: what else the user should know of a running attempt.
        notes: events of what was decided just now.
    """

    phase: Phase
    reason: str = ""
    message: str = ""
    succeeded: bool = False
    attempt: int | None = None
    cluster: str | None = None
    shards: int | None = None
    image: str | None = None
    ray_version: str | None = None
    start_time: str | None = None
    lost_attempts: int | None = None
    restarts: tuple[Restart, ...] = ()
    training: RLJobSpec | None = None
    stop: bool = False
    remark: str | None = None
    notes: tuple[Note, ...] = ()


def decide(seen: Observed, clock: Clock, obstacle: tuple[str, str] | None) -> Decision:
    """Decide from what is observed alone.

    Args:
        seen: the job.
        clock: asked for every deadline.
        obstacle: reason and sentence why nothing can be started now (KubeRay missing, names taken).
    """
    stored = seen.stored
    image, ray_version = seen.image()
    now = Decision(
        phase="Running",
        attempt=stored.attempt,
        cluster=stored.ray_cluster,
        shards=stored.shards,
        image=image,
        ray_version=ray_version,
        start_time=stored.start_time,
        lost_attempts=stored.lost_attempts,
        restarts=tuple(stored.restarts),
    )
    if stored.start_time is None or stored.attempt is None or stored.ray_cluster is None:
        return _before_the_start(seen, clock, now, obstacle)
    if seen.spec_attempt > stored.attempt:
        # Somebody put an old status back. Which cluster and driver belong to which attempt is not known any more.
        text = f"The PolicyGroup is at attempt {seen.spec_attempt}, and the job's status was at {stored.attempt}."
        ended = Ended("StatusLost", text, counts=False, new_cluster=True)
        return _next_attempt(seen, clock, replace(now, attempt=seen.spec_attempt), ended)
    return _after_the_start(seen, clock, now, obstacle)


# ---------------------------------------------------------------------------------------------------- start and resume


def _before_the_start(seen: Observed, clock: Clock, now: Decision, obstacle: tuple[str, str] | None) -> Decision:
    if seen.spec.suspend:
        text = "The job was created suspended; it starts when spec.suspend is false."
        return replace(now, phase="Suspended", reason="Suspended", message=text)
    if obstacle is not None:
        return replace(now, phase="Waiting", reason=obstacle[0], message=obstacle[1])
    attempt, cluster = 1 + max(seen.spec_attempt, now.attempt or 0), seen.next_cluster()
    image, ray_version = seen.default_image()
    notes = [Note("Normal", "Started", f"Attempt {attempt} starts on RayCluster {cluster}.")]
    if seen.spec.checkpoints.claim_name is None:
        notes.append(Note("Warning", "NoCheckpoints", NO_CLAIM))
    return replace(
        now,
        attempt=attempt,
        cluster=cluster,
        shards=seen.shards(),
        image=image,
        ray_version=ray_version,
        start_time=now.start_time or format_time(clock.now),
        lost_attempts=now.lost_attempts or 0,
        training=_training(seen),
        notes=tuple(notes),
    )


NO_CLAIM = (
    "No claim is named (spec.checkpoints.claimName), so no checkpoint outlives the head pod: a suspended job, and one "
    "that loses its head, starts from zero."
)


def _after_the_start(seen: Observed, clock: Clock, now: Decision, obstacle: tuple[str, str] | None) -> Decision:
    report = seen.report(now.attempt)
    outcome = report.outcome if report is not None else None
    if outcome is not None and outcome.state in ("Succeeded", "Failed"):
        return finished(now, outcome.state == "Succeeded", outcome.reason, outcome.message)
    now = replace(now, training=_training_of_attempt(seen, now))
    suspended = seen.condition("Suspended")
    if seen.spec.suspend:
        return _suspend(seen, clock, now, suspended)
    if suspended is not None and suspended.status == "True":
        if obstacle is not None:
            text = f"The job is to be resumed, and waits. {obstacle[1]}"
            return replace(now, phase="Suspended", reason=obstacle[0], message=text, stop=True)
        ended = Ended("Suspended", "The job was suspended.", counts=False, new_cluster=True)
        return _next_attempt(seen, clock, now, ended, at=suspended.last_transition_time)
    limit = seen.spec.run_policy.active_deadline_seconds
    if limit is not None and clock.passed(_active_since(seen, now), limit):
        text = f"The job was not done within spec.runPolicy.activeDeadlineSeconds ({limit} s)."
        return finished(now, False, "DeadlineExceeded", text)
    if not seen.snapshot.kuberay.installed:
        return now
    state = readiness(seen, seen.cluster(now.cluster), str(now.cluster), clock)
    ended_ = losses.ended(seen, clock, now.attempt, now.cluster, ready=state.ready)
    if ended_ is not None:
        return _next_attempt(seen, clock, now, ended_)
    late = _not_scheduled(seen, clock, now, state)
    if late is not None:
        return late
    return _running(seen, clock, now)


def _running(seen: Observed, clock: Clock, now: Decision) -> Decision:
    """The attempt goes on, unless the user has changed what it trains, or how its image is pulled."""
    pulled = _pulled_otherwise(seen, now)
    if pulled is not None:
        return _next_attempt(seen, clock, now, pulled)
    if seen.group_spec is None or seen.group_spec.attempt != now.attempt:
        return now
    if seen.training == seen.group_spec.training:
        return now
    if seen.forbidden_changes:
        fields = ", ".join(f"spec.{v.path.removeprefix('spec.')}" for v in seen.forbidden_changes[:3])
        text = f"{fields} was changed after the start and is ignored; put the old value back, or start a new job."
        return replace(now, remark=text, notes=(Note("Warning", "SpecChanged", text),))
    report = seen.report(now.attempt)
    if report is None or report.driver is None:
        # Nothing to save. A driver that comes up just now sees the higher attempt and leaves.
        ended = Ended("SpecChanged", "The spec was changed before the driver started.", counts=False)
        return _next_attempt(seen, clock, now, ended)
    text = "The spec was changed: the driver saves at the end of its iteration, and the next attempt has the new one."
    return replace(now, stop=True, remark=text, notes=(Note("Normal", "SpecChanged", text),))


def _pulled_otherwise(seen: Observed, now: Decision) -> Ended | None:
    """Pods that wait for their image never learn of other credentials: they need to be made anew, and so their cluster.

    Where a driver runs, the image is there, and the change is for clusters to come.
    """
    cluster, report = seen.cluster(now.cluster), seen.report(now.attempt)
    if cluster is None or (report is not None and report.driver is not None):
        return None
    pod = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    wanted = {
        "imagePullSecrets": [secret.to_dict() for secret in seen.spec.image_pull_secrets],
        "imagePullPolicy": seen.spec.image_pull_policy,
    }
    have = {
        "imagePullSecrets": pod.get("imagePullSecrets", []),
        "imagePullPolicy": pod["containers"][0].get("imagePullPolicy"),
    }
    for field, value in wanted.items():
        if value is not None and value != have[field]:  # a policy that is left out is the operator's: no change of ours
            text = f"spec.{field} was changed before the driver started: the pods are made anew."
            return Ended("SpecChanged", text, counts=False, new_cluster=True)
    return None


def _next_attempt(seen: Observed, clock: Clock, now: Decision, ended: Ended, at: str | None = None) -> Decision:
    """The attempt has ended (``at`` a time, if not now), and another follows; unless too many were lost."""
    assert now.attempt is not None
    lost = (now.lost_attempts or 0) + ended.counts
    limit = seen.spec.run_policy.backoff_limit
    message = shorten(ended.message, 4096, keep="end")
    if ended.counts and lost > limit:
        text = (
            f"{lost} {'attempt was' if lost == 1 else 'attempts were'} lost, and spec.runPolicy.backoffLimit is "
            f"{limit}. The last one, attempt {now.attempt}, ended with {ended.reason}: {ended.message}"
        )
        return finished(replace(now, lost_attempts=lost), False, "BackoffLimitExceeded", text)
    restart = Restart(attempt=now.attempt, time=at or format_time(clock.now), reason=ended.reason, message=message)
    attempt = now.attempt + 1
    cluster = seen.next_cluster() if ended.new_cluster or now.cluster is None else now.cluster
    image, ray_version = now.image, now.ray_version
    if image is None or ray_version is None or (cluster != now.cluster and seen.untrained):
        image, ray_version = seen.default_image()
    where = f"a new RayCluster, {cluster}" if cluster != now.cluster else f"RayCluster {cluster}"
    kind: Literal["Normal", "Warning"] = "Warning" if ended.counts else "Normal"
    note = Note(kind, ended.reason, f"Attempt {now.attempt} has ended. {message} Attempt {attempt} starts on {where}.")
    return replace(
        now,
        phase="Running",
        attempt=attempt,
        cluster=cluster,
        image=image,
        ray_version=ray_version,
        lost_attempts=lost,
        restarts=(*now.restarts, restart)[-RESTARTS_KEPT:],
        training=_training(seen),
        stop=False,
        notes=(note,),
    )


def _training(seen: Observed) -> RLJobSpec:
    """For a new attempt: what the user wants now, but nothing that may not change after the start."""
    if seen.group_spec is not None and seen.forbidden_changes:
        return seen.group_spec.training
    return seen.training


def _training_of_attempt(seen: Observed, now: Decision) -> RLJobSpec:
    """For the attempt that is stored: what its PolicyGroup holds, if that was written already."""
    if seen.group_spec is not None and seen.group_spec.attempt == now.attempt:
        return seen.group_spec.training
    return _training(seen)


# ------------------------------------------------------------------------------------------------------------- suspend


def _suspend(seen: Observed, clock: Clock, now: Decision, suspended: Condition | None) -> Decision:
    """Ask the driver to save and leave; when it has, or its time is up, let the cluster go."""
    report = seen.report(now.attempt)
    drain = seen.spec.checkpoints.drain_seconds
    if suspended is not None and suspended.status == "True":
        return _suspended(seen, now)
    if report is None or report.driver is None or report.outcome is not None:
        return _suspended(seen, now)
    asked = clock.now
    if suspended is not None and suspended.reason == "Suspending":
        asked = parse_time(suspended.last_transition_time)
    # Where RayClusters cannot be read, none is seen, and the driver may well be saving.
    readable = seen.snapshot.kuberay.installed
    gone = readable and losses.ended(seen, clock, now.attempt, now.cluster, ready=False) is not None
    if gone or clock.passed(asked, drain):
        return _suspended(seen, now)
    text = (
        f"The driver was asked to save at the end of its iteration; it has spec.checkpoints.drainSeconds ({drain} s)."
    )
    return replace(now, phase="Suspending", reason="Suspending", message=text, stop=True)


def _suspended(seen: Observed, now: Decision) -> Decision:
    report = seen.report(now.attempt)
    outcome = report.outcome if report is not None else None
    saved = (report.checkpoint if report is not None else None) or seen.stored.checkpoint
    if report is None or report.driver is None:
        how = "No driver was running."
    elif outcome is not None and outcome.state == "Stopped":
        how = "The driver saved and stopped."
    else:
        seconds = seen.spec.checkpoints.drain_seconds
        how = f"The driver did not stop within spec.checkpoints.drainSeconds ({seconds} s), or was lost meanwhile."
    if seen.spec.checkpoints.claim_name is None:
        then = "it starts from zero: no claim is named (spec.checkpoints.claimName), so the checkpoints are gone"
    elif saved is None:
        then = "it starts from zero: no checkpoint was saved yet"
    else:
        then = f"it goes on from iteration {saved.iteration} (checkpoint {saved.path})"
    text = f"{how} When spec.suspend is false again, {then}."
    before = seen.condition("Suspended")
    news = () if before is not None and before.status == "True" else (Note("Normal", "Suspended", text),)
    return replace(now, phase="Suspended", reason="Suspended", message=text, stop=True, notes=news)


# ----------------------------------------------------------------------------------------------------------- deadlines


def _active_since(seen: Observed, now: Decision) -> datetime:
    """The start, or the last resume: when Suspended last became False."""
    assert now.start_time is not None
    start = parse_time(now.start_time)
    suspended = seen.condition("Suspended")
    return max(start, parse_time(suspended.last_transition_time)) if suspended is not None else start


def _not_scheduled(seen: Observed, clock: Clock, now: Decision, state: Readiness) -> Decision | None:
    """The end of a job whose pods were not all ready in time, or then its submitter, while no members are at work."""
    limit = seen.spec.run_policy.scheduling_deadline_seconds
    report, cluster = seen.report(now.attempt), seen.cluster(now.cluster)
    if limit is None or (report is not None and report.progress is not None):
        return None
    denied = refusal(seen.snapshot)
    if cluster is None and denied is None:
        return None  # it was not tried yet: an operator may have been away between the decision and the creation
    submitter = seen.submitter(now.cluster, now.attempt)
    if state.ready and ((report is not None and report.driver is not None) or losses.has_run(seen, submitter)):
        return None
    # Without a RayCluster (a quota refuses it, say) the wait is counted from the start of the job or of its resumption.
    since = [created(cluster) if cluster is not None else _active_since(seen, now)]
    since += [parse_time(restart.time) for restart in seen.stored.restarts[-1:]]
    said = seen.condition("ClusterReady")
    if said is not None:
        since.append(parse_time(said.last_transition_time) if (said.status == "True") == state.ready else clock.now)
    if not clock.passed(max(since), limit):
        return None
    deadline = f"spec.runPolicy.schedulingDeadlineSeconds ({limit} s)"
    if not state.ready:
        text = f"The pods were not all ready within {deadline}. Waited for {state.reason}: {state.message}"
    else:
        why = f"{denied[0]}: {denied[1]}" if denied is not None else f"the pod of Job {now.cluster}-{now.attempt}."
        text = f"The submitter did not start within {deadline} after the pods were ready. Waited for {why}"
    return finished(now, False, "SchedulingDeadlineExceeded", text)


# ------------------------------------------------------------------------------------------------------------- the end


def finished(now: Decision, succeeded: bool, reason: str, message: str) -> Decision:
    state = "Succeeded" if succeeded else "Failed"
    note = Note("Normal" if succeeded else "Warning", state, shorten(f"{reason}: {message}", 1000, keep="end"))
    return replace(
        now, phase="Finished", succeeded=succeeded, reason=reason, message=message, stop=False, notes=(note,)
    )
