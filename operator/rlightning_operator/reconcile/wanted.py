"""The writes that bring a job's objects nearer to what was decided."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal

from rlightning_operator.builders import access, names, network
from rlightning_operator.builders.names import CONTENT_HASH_ANNOTATION
from rlightning_operator.builders.policy_group import policy_group, policy_group_spec
from rlightning_operator.builders.ray_cluster import ray_cluster
from rlightning_operator.builders.submitter import submitter
from rlightning_operator.reconcile.attempts import Decision
from rlightning_operator.reconcile.clock import Clock
from rlightning_operator.reconcile.objects import created, is_deleted, name_of, parse_time, uid_of
from rlightning_operator.reconcile.observed import Observed
from rlightning_operator.reconcile.readiness import head_is_leaving
from rlightning_operator.reconcile.release import clusters_to_release, is_over
from rlightning_operator.reconcile.snapshot import Action, Create, Delete, Object, Patch

SUBMITTERS_KEPT = 10  # finished ones, for their logs; as many as status.restarts remembers


def actions(
    seen: Observed, supporting: list[Object], decision: Decision, clock: Clock, quiet_since: datetime
) -> list[Action]:
    """In the order in which they have to be done.

    Args:
        seen: the job.
        supporting: see there.
        decision: its status is stored before any of these is done.
        clock: asked when leftovers are due.
        quiet_since: when the last attempt before this one ended.
    """
    done: list[Action] = []
    if decision.phase in ("Running", "Suspending"):
        done += _clusters_to_delete(seen, decision.cluster)
    else:
        done += clusters_to_release(seen.snapshot, clock, decision.attempt, _suspended_since(seen, clock))
    if decision.phase in ("Running", "Suspending"):
        done += _for_the_driver(seen, supporting)
        done += _group(seen, decision)
        done += _cluster_and_submitter(seen, decision)
    elif decision.phase == "Suspended" and seen.group is not None:
        done += _stop(seen.group, "Stopped")
    done += submitters_to_delete(seen, decision, clock, quiet_since)
    return done


def _suspended_since(seen: Observed, clock: Clock) -> datetime:
    stored = seen.condition("Suspended")
    if stored is None or stored.status != "True":
        return clock.now
    return parse_time(stored.last_transition_time)


def _clusters_to_delete(seen: Observed, keep: str | None) -> Iterator[Action]:
    for cluster in seen.clusters:
        if name_of(cluster) != keep:
            yield Delete("RayCluster", name_of(cluster), uid_of(cluster))


def obstacle(seen: Observed, supporting: list[Object]) -> tuple[str, str] | None:
    """Why nothing can be started: KubeRay is missing, or the job's names are taken."""
    if not seen.snapshot.kuberay.installed:
        return kuberay_missing(seen)
    there = {(o["kind"], name_of(o)): o for o in _others(seen)}
    if seen.snapshot.group is not None:
        there["PolicyGroup", seen.identity.name] = seen.snapshot.group
    wanted = [("PolicyGroup", seen.identity.name), *((o["kind"], name_of(o)) for o in supporting)]
    for kind, name in wanted:
        found = there.get((kind, name))
        if found is None or seen.owns(found):
            continue
        owners = found["metadata"].get("ownerReferences") or ()
        owner = next((o for o in owners if o.get("kind") == "RLJob"), None)
        if owner is None:
            text = f"{kind} {name} is there already and belongs to no RLJob. Delete it, or give the job another name."
            return "NameTaken", text
        text = (
            f"{kind} {name} is left of an earlier RLJob of this name (uid {owner.get('uid')}). The job starts when "
            f"Kubernetes has collected it; if that takes minutes: `kubectl delete {kind.lower()} {name}`."
        )
        return "LeftoverObjects", text
    return None


def kuberay_missing(seen: Observed) -> tuple[str, str]:
    words = seen.snapshot.kuberay.message
    if words:
        return "KubeRayMissing", (
            f"The operator cannot look for RayClusters: {words}. Give its account that right (the chart does, with "
            "rbac.create), or install KubeRay 1.6 or later; the job goes on by itself then."
        )
    return "KubeRayMissing", (
        "KubeRay is not installed: the API server does not serve rayclusters.ray.io. Install KubeRay 1.6 or later; the "
        "job goes on by itself then."
    )


# ------------------------------------------------------------------------------------------------ for the driver's pod


def supporting(seen: Observed) -> list[Object]:
    """What a driver needs beside its cluster: ServiceAccount, Role, RoleBinding, NetworkPolicies."""
    identity = seen.identity
    return [
        access.service_account(identity),
        access.role(identity),
        access.role_binding(identity),
        *network.network_policies(identity, seen.snapshot.config),
    ]


def _others(seen: Observed) -> Iterator[Object]:
    """With their kind: a client that lists objects leaves it out of each."""
    for obj in seen.snapshot.others:
        if obj.get("kind"):
            yield obj


def _for_the_driver(seen: Observed, supporting: list[Object]) -> Iterator[Action]:
    """Those with a content of their own carry its hash: it tells a newer operator, or one with other settings, to write
    them anew. Comparing contents would not do: the API server stores some of it in another form.
    """
    there = {(o["kind"], name_of(o)): o for o in _others(seen)}
    for wanted in supporting:
        kind, name = wanted["kind"], name_of(wanted)
        found = there.pop((kind, name), None)
        if found is None:
            yield Create(wanted)
        elif seen.owns(found) and not is_deleted(found):
            hash_ = (wanted["metadata"].get("annotations") or {}).get(CONTENT_HASH_ANNOTATION)
            if hash_ != (found["metadata"].get("annotations") or {}).get(CONTENT_HASH_ANNOTATION):
                content = "rules" if kind == "Role" else "spec"
                annotations = {**(found["metadata"].get("annotations") or {}), CONTENT_HASH_ANNOTATION: hash_}
                yield Patch(
                    kind,
                    name,
                    [
                        _same(found),
                        {"op": "add", "path": "/metadata/annotations", "value": annotations},
                        {"op": "add", "path": f"/{content}", "value": wanted[content]},
                    ],
                    "json",
                    uid_of(found),
                )
    for (kind, name), found in there.items():
        if kind == "NetworkPolicy" and seen.owns(found) and not is_deleted(found):
            yield Delete(kind, name, uid_of(found))


# ------------------------------------------------------------------------------------------------------- the attempt


def _group(seen: Observed, decision: Decision) -> Iterator[Action]:
    assert decision.attempt is not None
    assert decision.training is not None
    state: Literal["Running", "Stopped"] = "Stopped" if decision.stop else "Running"
    group = seen.group
    if group is None:
        if seen.snapshot.group is None:
            spec = policy_group_spec(seen.identity, decision.training, decision.attempt, state)
            yield Create(policy_group(seen.identity, spec))
    elif is_deleted(group):
        return
    elif seen.spec_attempt != decision.attempt:
        spec = policy_group_spec(seen.identity, decision.training, decision.attempt, state)
        patch = [_same(group), {"op": "replace", "path": "/spec", "value": spec}]
        yield Patch("PolicyGroup", name_of(group), patch, "json", uid_of(group))
    else:
        yield from _stop(group, state)


def _stop(group: Object, state: str) -> Iterator[Action]:
    """Ask the driver to stop, or no longer."""
    if group["spec"].get("state", "Running") != state and not is_deleted(group):
        patch = [_same(group), {"op": "add", "path": "/spec/state", "value": state}]
        yield Patch("PolicyGroup", name_of(group), patch, "json", uid_of(group))


def _cluster_and_submitter(seen: Observed, decision: Decision) -> Iterator[Action]:
    assert decision.attempt is not None
    assert decision.cluster is not None
    if not seen.snapshot.kuberay.installed:
        return
    config = seen.snapshot.config
    config = replace(
        config,
        trainer_image=decision.image or config.trainer_image,
        ray_version=decision.ray_version or config.ray_version,
    )
    cluster = seen.cluster(decision.cluster)
    if cluster is None:
        if not any(name_of(c) == decision.cluster for c in seen.snapshot.clusters):
            yield Create(ray_cluster(seen.identity, seen.spec, decision.cluster, config))
        return
    # Its uid is needed, so that the submitter comes in the next round. Not while the head is leaving: a driver that
    # is started there now dies with it.
    name = names.submitter(decision.cluster, decision.attempt)
    if not any(name_of(job) == name for job in seen.snapshot.submitters) and not head_is_leaving(seen, cluster):
        yield Create(submitter(seen.identity, seen.spec, cluster, decision.attempt, config))


def submitters_to_delete(seen: Observed, decision: Decision, clock: Clock, quiet_since: datetime) -> Iterator[Action]:
    """Those that would wait for ever for a driver of the past, and the oldest logs of many."""
    current = None
    if decision.phase in ("Running", "Suspending") and decision.cluster and decision.attempt:
        current = names.submitter(decision.cluster, decision.attempt)
    past = [job for job in seen.submitters if name_of(job) != current and not is_deleted(job)]
    over = [job for job in past if is_over(job)]
    waiting = [job for job in past if not is_over(job)]
    # Most see for themselves that their driver is gone, and end with its last words.
    if waiting and clock.passed(quiet_since, seen.snapshot.config.leftover_seconds):
        for job in waiting:
            yield Delete("Job", name_of(job), uid_of(job))
    for job in sorted(over, key=created, reverse=True)[SUBMITTERS_KEPT:]:
        yield Delete("Job", name_of(job), uid_of(job))


def _same(obj: Object) -> dict[str, Any]:
    """The patch is for this object, and not for one of the same name that was made since."""
    return {"op": "test", "path": "/metadata/uid", "value": uid_of(obj)}
