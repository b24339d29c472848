"""Whether a RayCluster's pods are all ready; and if not, the one reason and sentence that explain it best.

Taken from the pods. KubeRay's own ``state: ready`` and ``RayClusterProvisioned`` stay as they are when pods die later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlightning.api.models import PoolStatus
from rlightning_operator.reconcile import schedulable
from rlightning_operator.reconcile.clock import Clock
from rlightning_operator.reconcile.objects import condition, created, is_deleted, labels_of, name_of, sentence, shorten
from rlightning_operator.reconcile.observed import Observed
from rlightning_operator.reconcile.pod_trouble import Trouble, trouble
from rlightning_operator.reconcile.snapshot import Object, Snapshot

KUBERAY_PODS = "kubectl get pods -A -l app.kubernetes.io/name=kuberay-operator"


@dataclass(frozen=True)
class Readiness:
    """What the condition ClusterReady says, and the pools of the status.

    Attributes:
        ready: head and workers are all there and Ready.
        reason: of the condition.
        message: of the condition.
        pools: in the order of the spec.
        blocked: somebody has to do something, or room has to come: it does not pass by itself in a minute.
    """

    ready: bool
    reason: str
    message: str
    pools: tuple[PoolStatus, ...] = ()
    blocked: bool = False


@dataclass(frozen=True)
class _Group:
    """Head or pool: how many pods it should have, those that are there, and what keeps each from being ready."""

    name: str
    wanted: int
    pods: list[Object]
    troubles: list[Trouble]

    @property
    def ready(self) -> int:
        return len(self.pods) - len(self.troubles)

    @property
    def missing(self) -> int:
        return max(0, self.wanted - len(self.pods))


def readiness(seen: Observed, cluster: Object | None, cluster_name: str, clock: Clock) -> Readiness:
    """Look at the pods of ``cluster``; None where it is not there (yet)."""
    head, *pools = _groups(seen, cluster)
    statuses = tuple(_pool_status(seen, pool) for pool in pools)
    if all(group.ready >= group.wanted for group in (head, *pools)):
        workers = sum(pool.wanted for pool in pools)
        message = f"The head and all {workers} workers of RayCluster {cluster_name} are ready."
        return Readiness(True, "AllPodsReady", message if workers else "The head is ready.", statuses)
    reason, message, blocked = _why(seen, cluster, cluster_name, head, pools, clock)
    return Readiness(False, reason, message, statuses, blocked)


def _why(
    seen: Observed, cluster: Object | None, cluster_name: str, head: _Group, pools: list[_Group], clock: Clock
) -> tuple[str, str, bool]:
    claim = _claim(seen, head) if head.ready < head.wanted else None
    if claim is not None:
        return (*claim, True)
    if cluster is None:
        if (denied := refusal(seen.snapshot)) is not None:
            return (*denied, True)
        return "PodsPending", f"RayCluster {cluster_name} is being created.", False
    refused = condition(cluster, "ReplicaFailure")
    groups = [head, *pools]
    if refused is not None and refused.get("status") == "True" and any(group.missing for group in groups):
        words = shorten(str(refused.get("message") or refused.get("reason")), 2048)
        return "PodsRefused", f"KubeRay could not create the pods of RayCluster {cluster_name}: {words}", True
    if not any(group.pods for group in groups) and not cluster.get("status"):
        seconds = seen.snapshot.config.kuberay_seconds
        if clock.passed(created(cluster), seconds):
            message = (
                f"KubeRay has done nothing about RayCluster {cluster_name} for {seconds} s: it has neither pods nor "
                f"status. Is KubeRay's operator running? `{KUBERAY_PODS}`"
            )
            return "KubeRayNotResponding", message, True
        return "PodsPending", f"KubeRay has not made the pods of RayCluster {cluster_name} yet.", False
    return _of_pods(seen, cluster, head, pools)


def refusal(snapshot: Snapshot) -> tuple[str, str] | None:
    """Reason and sentence where the API server refuses what the job needs: quota, admission, a name that is taken."""
    words = snapshot.refused
    return ("WriteRefused", f"{sentence(shorten(words, 2048))} It is tried again.") if words is not None else None


def _of_pods(seen: Observed, cluster: Object, head: _Group, pools: list[_Group]) -> tuple[str, str, bool]:
    """The worst trouble of a pod, its group named, with the number of pods that share it."""
    troubles = [(t, group) for group in (head, *pools) for t in sorted(group.troubles, key=lambda t: name_of(t.pod))]
    worst, group = min(troubles, key=lambda item: item[0].rank, default=(None, head))  # the first one of equals
    missing = next((g for g in (head, *pools) if g.missing), None)
    if worst is None or (missing is not None and worst.reason == "PodsStarting"):
        missing = missing or head
        of = "the head pod" if missing is head else f"{missing.missing} of {missing.wanted} pods of pool {missing.name}"
        verb = "does" if missing is head or missing.missing == 1 else "do"
        return "PodsPending", f"KubeRay has to make {of}, which {verb} not exist yet.", False
    message = _explained(seen, cluster, worst)
    same = sum(t.reason == worst.reason for t in group.troubles)
    if group is not head:
        message = f"{same} of {group.wanted} pods of pool {group.name}: {message}"
    reason = worst.reason
    if reason == "PodsStarting" and head.ready < head.wanted:
        reason = "HeadNotReady"
        if group is not head:  # what the workers wait for is the head
            message = next((t.message for t in head.troubles), message)
    return reason, message, reason in ("ImagePull", "PodFailed", "Unschedulable")


def _explained(seen: Observed, cluster: Object, worst: Trouble) -> str:
    if worst.reason == "Unschedulable" and seen.snapshot.nodes is not None:
        pods = [pod for pod in seen.ray_pods(cluster) if not is_deleted(pod)]
        return f"{worst.message} {schedulable.verdict(worst.pod, pods, seen.snapshot.nodes)}"
    if worst.reason == "ImagePull" and not worst.detailed:
        # While the kubelet only waits to try again, what it said about this image before still holds.
        before = [c.message for c in seen.stored.conditions if (c.type, c.reason) == ("ClusterReady", "ImagePull")]
        for message in before:
            if f"image {worst.image}:" in message:
                return message[message.index("Pod ") :]
    return worst.message


def _claim(seen: Observed, head: _Group) -> tuple[str, str] | None:
    """The claim as the reason why the head does not run.

    A claim that waits for its first consumer is not in the way of anything: it is named only where the scheduler
    names it.
    """
    name = seen.spec.checkpoints.claim_name
    if name is None:
        return None
    what = f"PersistentVolumeClaim {name} (spec.checkpoints.claimName)"
    claim = seen.snapshot.claim
    if claim is None:
        where = f"namespace {seen.identity.namespace}"
        return "ClaimNotFound", f"{what} does not exist in {where}. Create it; the job goes on by itself then."
    phase = (claim.get("status") or {}).get("phase") or "Pending"
    if phase == "Bound":
        return None
    if phase == "Lost":
        return "ClaimUnbound", f"{what} has lost its volume (phase Lost). Bind it to one, or make it anew."
    for pod in head.pods:
        scheduled = condition(pod, "PodScheduled") or {}
        words = str(scheduled.get("message") or "")
        if scheduled.get("status") == "False" and "persistentvolume" in words.lower().replace(" ", ""):
            storage_class = (claim.get("spec") or {}).get("storageClassName")
            provisioner = f"of StorageClass {storage_class}" if storage_class else "that it could bind to"
            return "ClaimUnbound", (
                f"{what} is not bound (phase {phase}): there is no volume {provisioner} yet. `kubectl describe pvc "
                f"{name}` says why; create a volume, or name another claim. The scheduler: {shorten(words, 1024)}"
            )
    return None


def _groups(seen: Observed, cluster: Object | None) -> Iterator[_Group]:
    """The head, then the pools. Pods that are being deleted still stand in the way, but are no longer counted."""
    pods = seen.ray_pods(cluster)
    nodes = seen.snapshot.nodes
    heads = [p for p in pods if labels_of(p).get("ray.io/node-type") == "head"]
    workers = [p for p in pods if labels_of(p).get("ray.io/node-type") == "worker"]
    wanted: list[tuple[str, int, list[Object]]] = [("head", 1, heads)]
    wanted += [
        (pool.name, pool.replicas, [w for w in workers if labels_of(w).get("ray.io/group") == pool.name])
        for pool in seen.spec.pools
    ]
    for name, replicas, members in wanted:
        there = [pod for pod in members if not is_deleted(pod)]
        troubles = [t for pod in there if (t := trouble(pod, nodes)) is not None]
        if len(there) < replicas:
            troubles += [t for pod in members if is_deleted(pod) and (t := trouble(pod, nodes)) is not None]
            there += [pod for pod in members if is_deleted(pod)]
        yield _Group(name, replicas, there, troubles)


def _pool_status(seen: Observed, pool: _Group) -> PoolStatus:
    ready = min(pool.ready, pool.wanted)
    if ready >= pool.wanted:
        return PoolStatus(name=pool.name, wanted=pool.wanted, ready=ready)
    worst = min(pool.troubles, key=lambda t: (t.rank, name_of(t.pod)), default=None)
    if worst is None:
        text = f"{pool.missing} of {pool.wanted} pods do not exist yet."
        return PoolStatus(name=pool.name, wanted=pool.wanted, ready=ready, reason="PodsPending", message=text)
    message = shorten(worst.message, 4096)
    return PoolStatus(name=pool.name, wanted=pool.wanted, ready=ready, reason=worst.reason, message=message)


def head_is_leaving(seen: Observed, cluster: Object | None) -> bool:
    """A head is being deleted and its successor is not there: who talks to it now talks to the old one."""
    heads = seen.heads(cluster)
    return bool(heads) and all(is_deleted(head) for head in heads)
