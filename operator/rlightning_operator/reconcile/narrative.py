"""What users read of a job that is not finished: its conditions, one sentence each, and the word for its state.

Sentences hold no times and no counts that move by themselves, so that a job at rest is not written.
"""

from __future__ import annotations

from rlightning.api.models import PolicyGroupStatus
from rlightning_operator.builders.names import SUBMITTER_CONTAINER
from rlightning_operator.reconcile.attempts import NO_CLAIM, Decision
from rlightning_operator.reconcile.conditions import Said
from rlightning_operator.reconcile.objects import container_status, created, is_deleted
from rlightning_operator.reconcile.observed import Observed
from rlightning_operator.reconcile.pod_trouble import trouble
from rlightning_operator.reconcile.readiness import Readiness, refusal
from rlightning_operator.reconcile.weights import Proof


def narrate(
    seen: Observed,
    decision: Decision,
    report: PolicyGroupStatus | None,
    state: Readiness | None,
    proof: Proof,
    obstacle: tuple[str, str] | None,
) -> tuple[list[Said], str]:
    """All conditions, in the order in which they are shown, and the state."""
    progressing, word = _progressing(seen, decision, report, state, obstacle)
    said = [
        _suspended(decision),
        _cluster_ready(seen, decision, state),
        progressing,
        Said("WeightsConsistent", proof.status, proof.reason, proof.message),
        Said("Finished", "False", "NotFinished", "The job has not finished."),
        Said("Succeeded", "Unknown", "NotFinished", "Known when the job has finished."),
    ]
    return said, word


def _suspended(decision: Decision) -> Said:
    if decision.phase == "Suspended":
        return Said("Suspended", "True", decision.reason, decision.message)
    if decision.phase == "Suspending":
        # Unknown, so that the time of this condition is when the driver was asked: its deadline counts from there.
        return Said("Suspended", "Unknown", "Suspending", decision.message)
    return Said("Suspended", "False", "NotSuspended", "spec.suspend is false.")


def _cluster_ready(seen: Observed, decision: Decision, state: Readiness | None) -> Said:
    if state is not None:
        return Said("ClusterReady", "True" if state.ready else "False", state.reason, state.message)
    if decision.phase == "Suspended":
        return Said("ClusterReady", "False", "Suspended", f"A suspended job needs no RayCluster.{_unless(seen)}")
    return Said("ClusterReady", "False", decision.reason, f"{decision.message}{_unless(seen)}")


def _unless(seen: Observed) -> str:
    """That something could not be done, as a further sentence."""
    refused = refusal(seen.snapshot)
    return f" {refused[1]}" if refused is not None else ""


def _progressing(
    seen: Observed,
    decision: Decision,
    report: PolicyGroupStatus | None,
    state: Readiness | None,
    obstacle: tuple[str, str] | None,
) -> tuple[Said, str]:
    if state is None:
        word = "Suspended" if decision.phase == "Suspended" else "Pending"
        text = "The job is suspended." if word == "Suspended" else f"The job has not started. {decision.message}"
        return Said("Progressing", "False", decision.reason, text), word
    if decision.phase == "Suspending":
        return Said("Progressing", "False", "Suspending", f"{decision.message}{_unless(seen)}"), "Suspending"

    started = report is not None and report.driver is not None
    if report is not None and started:
        trains = report.progress is not None
        word, reason = "Running", "Training"
        text = f"Attempt {decision.attempt} trains."
        if not trains:
            word, reason = ("Pending", "WaitingForCluster") if state.blocked else ("Starting", "MembersStarting")
            text = f"The driver of attempt {decision.attempt} is up and waits for its members."
            text += f" {state.message}" if not state.ready else ""
    else:
        word = "Pending" if state.blocked or not _any_pod(seen, decision) else "Starting"
        reason, text = _before_the_driver(seen, decision, state)
    if decision.restarts and not (started and report is not None and report.progress is not None):
        last = decision.restarts[-1]
        text += f" Attempt {last.attempt} ended with {last.reason}: {last.message}"
    remarks = [decision.remark]
    refused = refusal(seen.snapshot)
    if refused is not None and reason != refused[0]:
        remarks.append(refused[1])
    if obstacle is not None and obstacle[0] != "KubeRayMissing":
        remarks.append(obstacle[1])
    if started and seen.spec.checkpoints.claim_name is None:
        remarks.append(NO_CLAIM)
    if decision.stop:
        reason = "SpecChanged"
    text = " ".join([text, *(r for r in remarks if r)])
    moves = started and reason != "WaitingForCluster"
    return Said("Progressing", "True" if moves else "False", reason, text), word


def _before_the_driver(seen: Observed, decision: Decision, state: Readiness) -> tuple[str, str]:
    """What an attempt waits for that has no driver yet: the cluster, the submitter, or the driver itself."""
    job = seen.submitter(decision.cluster, decision.attempt)
    refused = refusal(seen.snapshot)
    if refused is not None and (job is None or seen.cluster(decision.cluster) is None):
        return refused[0], f"Attempt {decision.attempt} cannot start. {refused[1]}"
    if not state.ready:
        return "WaitingForCluster", f"Attempt {decision.attempt} waits for its RayCluster. {state.message}"
    pods = [pod for pod in seen.submitter_pods(job) if not is_deleted(pod)] if job is not None else []
    pod = max(pods, key=created, default=None)
    if pod is None:
        return "SubmitterPending", f"Attempt {decision.attempt} waits for the pod of its submitter."
    found = trouble(pod, seen.snapshot.nodes)
    container = container_status(pod, SUBMITTER_CONTAINER) or {}
    if found is not None and "running" not in (container.get("state") or {}):
        return "SubmitterPending", f"Attempt {decision.attempt} waits for its submitter. {found.message}"
    return "DriverStarting", f"Attempt {decision.attempt} waits for its driver to start."


def _any_pod(seen: Observed, decision: Decision) -> bool:
    return any(not is_deleted(pod) for pod in seen.ray_pods(seen.cluster(decision.cluster)))
