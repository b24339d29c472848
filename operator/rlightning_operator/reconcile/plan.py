"""The reconciler: from everything that is observed of a job to the status it should have and the writes to be done.

It decides from observations alone, every time anew: nothing is remembered but what stands in the job's status. So it
does not matter which event woke it, how many were missed, or whether an operator died between two writes. Applied to
what it brought about itself it asks for nothing more.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rlightning.api.models import CheckpointStatus, Progress, RLJobStatus
from rlightning_operator.reconcile import attempts, conditions, progress, wanted, weights
from rlightning_operator.reconcile.attempts import Decision
from rlightning_operator.reconcile.clock import Clock
from rlightning_operator.reconcile.conditions import Said, as_said
from rlightning_operator.reconcile.narrative import narrate
from rlightning_operator.reconcile.objects import (
    format_time,
    is_deleted,
    is_owned_by,
    name_of,
    parse_time,
    shorten,
    uid_of,
)
from rlightning_operator.reconcile.observed import InvalidSpec, Observed, read_status
from rlightning_operator.reconcile.readiness import Readiness, readiness, refusal
from rlightning_operator.reconcile.release import clusters_to_release, is_over
from rlightning_operator.reconcile.snapshot import Action, Delete, Note, Plan, Snapshot

PASSING = ("ClaimUnbound",)  # mostly a moment at the start: no event
NO_CLUSTER = "The job has finished and needs no RayCluster."


def reconcile(snapshot: Snapshot) -> Plan:
    """Decide what to do about one job now."""
    job = snapshot.job
    if is_deleted(job):  # what is left goes with it: everything has an ownerReference
        return Plan(status=job.get("status") or {})
    stored = read_status(job)
    clock = Clock(snapshot.now)
    if stored.completion_time is not None:
        return _after_the_end(snapshot, stored, clock)
    try:
        return _reconcile(Observed.of(snapshot, stored), clock)
    except InvalidSpec as invalid:
        decision = attempts.finished(Decision("Running"), False, "InvalidSpec", str(invalid))
        status = _finished_status(snapshot, stored, decision, stored.progress, stored.checkpoint)
        released = clusters_to_release(snapshot, clock, stored.attempt, clock.now)
        return Plan(status, tuple(released), decision.notes, clock.requeue_after)


def _reconcile(seen: Observed, clock: Clock) -> Plan:
    """Of a job that is not finished."""
    stored = seen.stored
    supporting = wanted.supporting(seen)
    obstacle = wanted.obstacle(seen, supporting)
    decision = attempts.decide(seen, clock, obstacle)
    # What was reported of the attempt that is stored; a new one that was just decided has reported nothing.
    report = seen.report(decision.attempt)
    folded = progress.fold(report, stored.progress)
    checkpoint = progress.checkpoint(report, stored.checkpoint)
    proof = _proof(seen, decision)
    notes = [*decision.notes, *proof.notes]
    if seen.unreadable is not None:
        text = f"The driver's report was not understood and is ignored: {seen.unreadable}"
        notes.append(Note("Warning", "ReportUnreadable", text))
    if decision.phase == "Finished":
        status = _finished_status(seen.snapshot, stored, decision, folded, checkpoint, proof)
        released = clusters_to_release(seen.snapshot, clock, decision.attempt, clock.now)
        return Plan(status, tuple(released), tuple(notes), clock.requeue_after)

    state = _readiness(seen, decision, clock, obstacle)
    if state is not None and state.blocked and state.reason not in PASSING:
        notes.append(Note("Warning", state.reason, shorten(state.message, 1000)))
    said, word = narrate(seen, decision, report, state, proof, obstacle)
    status_model = RLJobStatus(
        observed_generation=_generation(seen.snapshot),
        conditions=conditions.merge(stored.conditions, said, _generation(seen.snapshot), format_time(clock.now)),
        state=word,
        attempt=decision.attempt,
        lost_attempts=decision.lost_attempts,
        restarts=list(decision.restarts),
        start_time=decision.start_time,
        shards=decision.shards,
        image=decision.image,
        ray_version=decision.ray_version,
        ray_cluster=decision.cluster,
        run_path=seen.identity.run_path if decision.attempt and seen.spec.checkpoints.claim_name else None,
        pools=list(state.pools) if state is not None else [],
        progress=folded,
        weights=proof.weights,
        eval_replicas=proof.eval_replicas if decision.phase in ("Running", "Suspending") else None,
        checkpoint=checkpoint,
    )
    actions = wanted.actions(seen, supporting, decision, clock, _quiet_since(status_model, clock.now))
    return Plan(status_model.to_dict(), tuple(actions), tuple(notes), clock.requeue_after)


def _readiness(seen: Observed, decision: Decision, clock: Clock, obstacle: tuple[str, str] | None) -> Readiness | None:
    """Of the cluster of the attempt; None where there should be none."""
    if decision.phase not in ("Running", "Suspending"):
        return None
    if not seen.snapshot.kuberay.installed and obstacle is not None:
        return Readiness(False, *obstacle, blocked=True)
    return readiness(seen, seen.cluster(decision.cluster), str(decision.cluster), clock)


def _proof(seen: Observed, decision: Decision) -> weights.Proof:
    """Against the roles of the attempt, which the user may have changed since."""
    group = seen.group_spec
    if group is not None and group.attempt == decision.attempt:
        trains, evals = group.train_replicas, group.eval_replicas
    else:
        trains, evals = seen.spec.policy_group.train.replicas, seen.spec.policy_group.eval.replicas
    return weights.proof(seen.report(decision.attempt), trains, evals, seen.stored.weights)


def _quiet_since(status: RLJobStatus, now: datetime) -> datetime:
    """When the last attempt before the present one ended."""
    suspended = next((c for c in status.conditions if c.type == "Suspended" and c.status == "True"), None)
    times = [r.time for r in status.restarts[-1:]] + ([suspended.last_transition_time] if suspended else [])
    return max((parse_time(time) for time in times), default=now)


# ------------------------------------------------------------------------------------------------------------- the end


def _finished_status(
    snapshot: Snapshot,
    stored: RLJobStatus,
    decision: Decision,
    folded: Progress | None,
    checkpoint: CheckpointStatus | None,
    proof: weights.Proof | None = None,
) -> dict[str, Any]:
    """The last status of a job."""
    now = format_time(snapshot.now)
    outcome = "Succeeded" if decision.succeeded else "Failed"
    proved = Said("WeightsConsistent", "Unknown", "NothingPublished", "No version of the weights was published.")
    if proof is not None and proof.reason != "NothingPublished":
        proved = Said("WeightsConsistent", proof.status, proof.reason, proof.message)
    else:
        proved = as_said(stored.conditions, "WeightsConsistent") or proved
    said = [
        Said("Suspended", "False", "Finished", "The job has finished."),
        Said("ClusterReady", "False", "Finished", NO_CLUSTER),
        Said("Progressing", "False", decision.reason, f"The job has {outcome.lower()}."),
        proved,
        Said("Finished", "True", decision.reason, decision.message),
        Said("Succeeded", "True" if decision.succeeded else "False", decision.reason, decision.message),
    ]
    fields: dict[str, Any] = {
        "observed_generation": _generation(snapshot),
        "conditions": conditions.merge(stored.conditions, said, _generation(snapshot), now),
        "state": outcome,
        "completion_time": now,
        "progress": folded,
        "checkpoint": checkpoint,
        "pools": [],
        "eval_replicas": None,
    }
    if decision.attempt is not None:
        fields |= {"attempt": decision.attempt, "lost_attempts": decision.lost_attempts}
        fields |= {"restarts": list(decision.restarts)}
    if proof is not None and proof.weights is not None and proof.reason != "NothingPublished":
        fields["weights"] = proof.weights
    return RLJobStatus.model_validate({**dict(stored), **fields}).to_dict()


def _after_the_end(snapshot: Snapshot, stored: RLJobStatus, clock: Clock) -> Plan:
    """Terminal stays terminal, whatever becomes of the spec. The cluster goes; and one day the job."""
    generation = _generation(snapshot)
    refused = refusal(snapshot)
    held = f"{NO_CLUSTER} {refused[1]}" if refused is not None else NO_CLUSTER
    conditions_ = [
        c.model_copy(
            update={"observed_generation": generation} | ({"message": held} if c.type == "ClusterReady" else {})
        )
        for c in stored.conditions
    ]
    status = stored.model_copy(update={"observed_generation": generation, "conditions": conditions_})
    assert stored.completion_time is not None
    completed = parse_time(stored.completion_time)
    actions: list[Action] = list(clusters_to_release(snapshot, clock, stored.attempt, completed))
    uid = uid_of(snapshot.job)
    late = [job for job in snapshot.submitters if is_owned_by(job, uid) and not is_deleted(job) and not is_over(job)]
    if late and clock.passed(completed, snapshot.config.leftover_seconds):
        actions += [Delete("Job", name_of(job), uid_of(job)) for job in late]
    ttl = ((snapshot.job.get("spec") or {}).get("runPolicy") or {}).get("ttlSecondsAfterFinished")
    if isinstance(ttl, int) and clock.passed(completed, ttl):
        actions.append(Delete("RLJob", name_of(snapshot.job), uid))
    return Plan(status.to_dict(), tuple(actions), (), clock.requeue_after)


def _generation(snapshot: Snapshot) -> int | None:
    generation: int | None = snapshot.job["metadata"].get("generation")
    return generation


__all__ = ["reconcile"]
