"""How an attempt can end without the job being done: its driver stopped, or what it ran on was lost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from rlightning.api.models import PolicyGroupStatus
from rlightning_operator.builders.names import HEAD_CONTAINER, SUBMITTER_CONTAINER
from rlightning_operator.reconcile.clock import Clock
from rlightning_operator.reconcile.objects import (
    condition,
    container_status,
    created,
    is_deleted,
    is_true,
    name_of,
    own_sentence,
    parse_time,
    sentence,
    uid_of,
)
from rlightning_operator.reconcile.observed import Observed
from rlightning_operator.reconcile.pod_trouble import describe_end
from rlightning_operator.reconcile.snapshot import Object

# How much longer than its grace period a deleted pod may stay before its node is taken for dead.
STUCK_SECONDS = 15
# The same for pods that an attempt without members still waits for. Only a busy node could be taken for a dead one, at
# the price of a cluster that was not at work; so more time is given.
GONE_SECONDS = 60
# How long a driver may have run before its pod, which is older, must have been seen.
UNSEEN_SECONDS = 10


@dataclass(frozen=True)
class Ended:
    """The current attempt is over.

    Attributes:
        reason: for ``status.restarts``: CamelCase.
        message: a sentence.
        counts: against ``runPolicy.backoffLimit``: what was lost, not what was asked for.
        new_cluster: the next attempt needs another RayCluster.
    """

    reason: str
    message: str
    counts: bool = True
    new_cluster: bool = False


def ended(seen: Observed, clock: Clock, attempt: int | None, cluster_name: str | None, *, ready: bool) -> Ended | None:
    """Whether the attempt is over, the surest sign first: what its driver said itself.

    Args:
        seen: the job.
        clock: asked for every deadline.
        attempt: as stored.
        cluster_name: as stored.
        ready: all pods of the cluster are: only then can the driver be blamed for standing still.
    """
    if attempt is None or cluster_name is None:
        return None
    report = seen.report(attempt)
    found = (
        _outcome(seen, report, cluster_name)
        or _cluster_deleted(seen, report, cluster_name)
        or _head_lost(seen, clock, report, cluster_name)
        or _driver_lost(seen, clock, attempt, cluster_name)
        or _stands_still(seen, clock, attempt, cluster_name, ready)
        or _head_stays_away(seen, clock, attempt, cluster_name)
        or _pods_stay(seen, clock, report, cluster_name, ready)
    )
    if found is not None and seen.cluster(cluster_name) is None:
        return replace(found, new_cluster=True)  # whatever ended the attempt, its cluster is gone as well
    return found


def _is_evicted(pod: Object) -> bool:
    """Whether Kubernetes takes the pod away: its node is drained, or somebody of a higher priority needs the place."""
    return is_true(pod, "DisruptionTarget")


def _outcome(seen: Observed, report: PolicyGroupStatus | None, cluster_name: str) -> Ended | None:
    outcome = report.outcome if report is not None else None
    if outcome is None or outcome.state in ("Succeeded", "Failed"):
        return None
    if outcome.state == "Lost":
        evicted = [name_of(pod) for pod in seen.ray_pods(seen.cluster(cluster_name)) if _is_evicted(pod)]
        if evicted:
            text = f"Pod {', '.join(evicted)} was evicted. {sentence(outcome.message)}"
            return Ended("Evicted", text, counts=False)
        return Ended(outcome.reason, outcome.message)
    if seen.group_spec is not None and seen.training != seen.group_spec.training:
        return Ended("SpecChanged", f"The spec was changed. {own_sentence(outcome.message)}", counts=False)
    return Ended("Stopped", f"The driver has stopped. {own_sentence(outcome.message)}", counts=False)


def _cluster_deleted(seen: Observed, report: PolicyGroupStatus | None, name: str) -> Ended | None:
    if seen.cluster(name) is not None:
        return None
    if seen.existed(name) or (report is not None and report.driver is not None):
        return Ended("RayClusterDeleted", f"RayCluster {name} was deleted, and not by the operator.", new_cluster=True)
    return None


def _head_lost(seen: Observed, clock: Clock, report: PolicyGroupStatus | None, cluster_name: str) -> Ended | None:
    """The process that reports is gone with its pod or container. KubeRay itself notices that later, or never."""
    driver = report.driver if report is not None else None
    if driver is None:
        return None
    cluster = seen.cluster(cluster_name)
    pod = next((head for head in seen.heads(cluster) if uid_of(head) == driver.pod_uid), None)
    if pod is None:
        # Pods and reports come through different watches: a driver may be heard of before its pod is seen.
        seen_before = any(created(head) <= parse_time(driver.start_time) for head in seen.heads(cluster))
        if seen_before or not clock.passed(parse_time(driver.start_time), UNSEEN_SECONDS):
            return None
        return Ended("HeadLost", f"Head pod {driver.pod}, where the driver ran, is gone.")
    status = pod.get("status") or {}
    container = container_status(pod, HEAD_CONTAINER) or {}
    state = container.get("state") or {}
    how = describe_end(container)
    if status.get("phase") in ("Failed", "Succeeded"):
        words = ": ".join(str(status[k]) for k in ("reason", "message") if status.get(k))
        return Ended("HeadLost", sentence(f"Head pod {driver.pod} has ended: {words or how or 'no reason is given'}"))
    if state.get("terminated") or (state.get("waiting") and how is not None):
        return Ended("HeadLost", sentence(f"Container {HEAD_CONTAINER} of head pod {driver.pod} {how}"))
    running = (state.get("running") or {}).get("startedAt")
    if running and parse_time(running) > parse_time(driver.start_time):
        why = f"; before, it {how}" if how is not None else ""
        text = f"Container {HEAD_CONTAINER} of head pod {driver.pod} was started again at {running}{why}"
        return Ended("HeadLost", sentence(text))
    if _is_evicted(pod):
        disruption = condition(pod, "DisruptionTarget") or {}
        text = sentence(f"Head pod {driver.pod} is evicted: {disruption.get('message')}")
        return Ended("Evicted", text, counts=False)
    if is_deleted(pod):
        # The driver goes on until its pod is really gone. deletionTimestamp is when that should be.
        until = parse_time(pod["metadata"]["deletionTimestamp"])
        if clock.passed(until, STUCK_SECONDS):
            node = (pod.get("spec") or {}).get("nodeName")
            text = f"Head pod {driver.pod} was to be gone at {until:%H:%M:%S} and is not: node {node} does not answer."
            return Ended("NodeLost", text, new_cluster=True)
    return None


def _driver_lost(seen: Observed, clock: Clock, attempt: int, cluster: str) -> Ended | None:
    """The submitter follows the driver to its end; and a driver stores its outcome before it ends."""
    job = seen.submitter(cluster, attempt)
    if job is None:
        return None
    done = next((c for t in ("Complete", "Failed") if (c := condition(job, t)) and c.get("status") == "True"), None)
    if done is None:
        return None
    since = parse_time(str(done["lastTransitionTime"]))
    if not clock.passed(since, seen.snapshot.config.outcome_seconds):
        return None
    return Ended("DriverLost", sentence(f"The driver has ended and said nothing of it: {last_words(seen, job)}"))


def last_words(seen: Observed, job: Object) -> str:
    """Of the Job's newest pod: the termination message holds the end of the log; or else the Job's condition."""
    for pod in sorted(seen.submitter_pods(job), key=created, reverse=True):
        words = describe_end(container_status(pod, SUBMITTER_CONTAINER) or {})
        if words is not None:
            return f"its submitter, pod {name_of(pod)}, {words}"
    failed = condition(job, "Failed")
    if failed is not None:
        return f"its submitter, Job {name_of(job)}, failed ({failed.get('reason')}): {failed.get('message')}"
    return f"its submitter, Job {name_of(job)}, is complete"


def _pods_stay(
    seen: Observed, clock: Clock, report: PolicyGroupStatus | None, cluster_name: str, ready: bool
) -> Ended | None:
    """A pod on a dead node stays in deletion, and as long as it is there KubeRay makes none in its place."""
    if ready or (report is not None and report.progress is not None):  # a driver with members says itself what it lost
        return None
    for pod in seen.ray_pods(seen.cluster(cluster_name)):
        if not is_deleted(pod):
            continue
        until = parse_time(pod["metadata"]["deletionTimestamp"])
        if clock.passed(until, GONE_SECONDS):
            node = (pod.get("spec") or {}).get("nodeName")
            where = f"node {node} does not answer" if node else "a finalizer keeps it"
            text = f"Pod {name_of(pod)} was to be gone at {until:%H:%M:%S} and is not: {where}."
            # What cost the attempt before was counted then, unless it was the same.
            before = seen.stored.restarts[-1:]
            counts = not before or before[0].reason == "NodeLost"
            return Ended("NodeLost", text, counts=counts, new_cluster=True)
    return None


def _stands_still(seen: Observed, clock: Clock, attempt: int, cluster: str, ready: bool) -> Ended | None:
    limit = seen.spec.run_policy.progress_deadline_seconds
    if not ready or not clock.passed(_last_moved(seen, clock, attempt, cluster), limit):
        return None
    # An API server that was away has had no reports either: the drivers, which went on, are given time to be heard.
    answers = seen.snapshot.answers_since
    if answers is not None and not clock.passed(answers, seen.snapshot.config.report_seconds):
        return None
    text = f"No iteration was reported for spec.runPolicy.progressDeadlineSeconds ({limit} s), with all pods ready."
    # The old driver may hang and hold the members' places: only with its pods is it sure to be gone.
    return Ended("NoProgress", text, new_cluster=True)


def _last_moved(seen: Observed, clock: Clock, attempt: int, cluster: str) -> datetime:
    """The latest sign of life: pods became ready, the attempt or its driver began, an iteration was reported."""
    ready = seen.condition("ClusterReady")
    times = [parse_time(ready.last_transition_time) if ready is not None and ready.status == "True" else clock.now]
    times += [parse_time(r.time) for r in seen.stored.restarts[-1:]]
    job = seen.submitter(cluster, attempt)
    times += [created(job)] if job is not None else []
    # Where its report cannot be read, or was deleted a moment ago, a driver has had no chance to say how far it is.
    times += [created(seen.group)] if seen.group is not None and seen.unreadable is None else [clock.now]
    report = seen.report(attempt)
    if report is not None and report.driver is not None:
        times.append(parse_time(report.driver.start_time))
    elif not has_run(seen, job):
        times.append(clock.now)  # nobody has told a driver to start: a pod without room, say: not the cluster's fault
    if report is None and seen.stored.progress is not None and seen.stored.progress.last_report_time is not None:
        times.append(parse_time(seen.stored.progress.last_report_time))
    if report is not None and report.progress is not None:
        # The stored time is that of the last new iteration; a newer one in the report counts only with an iteration.
        before = seen.stored.progress
        moved = before is None or (before.iteration, before.env_steps) != (
            report.progress.iteration,
            report.progress.env_steps,
        )
        last = report.progress.last_report_time if moved else (before.last_report_time if before is not None else None)
        times += [parse_time(last)] if last is not None else []
    return max(times)


def has_run(seen: Observed, job: Object | None) -> bool:
    """Whether a container of this submitter was started."""
    if job is None:
        return False
    states = ((container_status(pod, SUBMITTER_CONTAINER) or {}).get("state") or {} for pod in seen.submitter_pods(job))
    return any(state.get("running") or state.get("terminated") for state in states)


def _head_stays_away(seen: Observed, clock: Clock, attempt: int, cluster_name: str) -> Ended | None:
    """A later attempt waits for the head of an old cluster: KubeRay makes a new one, which is not ready in time."""
    cluster, restarts = seen.cluster(cluster_name), seen.stored.restarts
    report = seen.report(attempt)
    if cluster is None or not restarts or restarts[-1].attempt != attempt - 1:
        return None
    if (report is not None and report.driver is not None) or seen.head_is_ready(cluster):
        return None
    since = parse_time(restarts[-1].time)
    seconds = seen.snapshot.config.head_return_seconds
    if created(cluster) >= since or not clock.passed(since, seconds):
        return None
    text = f"The head of RayCluster {cluster_name} was not ready within {seconds} s after attempt {attempt - 1}."
    # Uncounted: what cost the attempt before was counted then.
    return Ended("HeadNotBack", text, counts=False, new_cluster=True)
