"""A small model of what surrounds the reconciler: API server with garbage collection, KubeRay, kubelet, driver, user.

Everything is a dict with uid and resourceVersion, as in the real thing. The operator's round is modelled as the shell
runs it: status first, with an optimistic lock, then the actions in order; it may die between any two writes, and may
see each kind as it was some writes ago.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import ValidationError

from rlightning.api import rules
from rlightning.api.models import PolicyGroupResource, RLJob, RLJobStatus
from rlightning_operator.reconcile.objects import format_time, is_owned_by
from rlightning_operator.reconcile.plan import reconcile
from rlightning_operator.reconcile.snapshot import (
    Create,
    Delete,
    KubeRay,
    Note,
    OperatorConfig,
    Patch,
    Plan,
    Snapshot,
)

NAMESPACE = "team"
CONFIG = OperatorConfig(trainer_image="trainer:test", network_policies=True, api_server_endpoints=(("10.0.0.1", 6443),))
OTHERS = ("ServiceAccount", "Role", "RoleBinding", "NetworkPolicy")
START = datetime(2026, 11, 29, 12, tzinfo=UTC)


def digest(version: int) -> str:
    return f"xxh3-128:{version:032x}"


def job_spec(**changes: Any) -> dict[str, Any]:
    """One learner on a pool with a device, four eval members on two pods."""
    spec: dict[str, Any] = {
        "environment": {"id": "CartPole-v1", "numEnvs": 8},
        "policy": {"simplePPO": {"minibatchSize": 64}},
        "training": {"totalEnvSteps": 1000, "rolloutSteps": 32},
        "policyGroup": {"train": {"replicas": 1, "pool": "learners"}, "eval": {"replicas": 4, "pool": "actors"}},
        "pools": [
            {"name": "learners", "replicas": 1, "gpusPerReplica": 1},
            {"name": "actors", "replicas": 2, "membersPerReplica": 2},
        ],
        "checkpoints": {"claimName": "runs", "drainSeconds": 60},
    }
    return {**spec, **changes}


@dataclass
class Driver:
    """A driver process in a head pod."""

    attempt: int
    cluster_uid: str
    pod: str
    pod_uid: str
    container_start: str
    report: dict[str, Any] = field(default_factory=dict)
    ended: bool = False
    iteration: int = 0


class Conflict(Exception):
    """The API server refused: 409 or 422."""


class World:
    """One namespace with one job in it."""

    def __init__(
        self, spec: dict[str, Any] | None = None, name: str = "walker", config: OperatorConfig = CONFIG
    ) -> None:
        self.now = START
        self.config = config
        self.kuberay = KubeRay(installed=True)
        self.refused: str | None = None
        self.answers_since: datetime | None = None
        self.nodes: tuple[dict[str, Any], ...] | None = None
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.drivers: list[Driver] = []
        self.notes: list[Note] = []
        self.writes: list[str] = []
        self.after_each_write: Callable[[], None] = lambda: None
        self._version = 0
        self._uids = 0
        self._history: dict[str, list[tuple[dict[str, Any], ...]]] = {}
        self._seen: dict[str, int] = {}
        self.name = name
        self.add(
            {
                "apiVersion": "rlightning.io/v1alpha1",
                "kind": "RLJob",
                "metadata": {"name": name, "namespace": NAMESPACE, "generation": 1},
                "spec": spec if spec is not None else job_spec(),
            }
        )
        self.job_uid = str(self.job["metadata"]["uid"])
        self.add({"kind": "PersistentVolumeClaim", "metadata": {"name": "runs"}, "status": {"phase": "Bound"}})

    # ---------------------------------------------------------------------------------------------------- API server

    @property
    def job(self) -> dict[str, Any]:
        return self.objects["RLJob", self.name]

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.job.get("status") or {}
        return status

    @property
    def group(self) -> dict[str, Any]:
        return self.objects["PolicyGroup", self.name]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [obj for (k, _), obj in self.objects.items() if k == kind]

    def clusters(self) -> list[dict[str, Any]]:
        return [c for c in self.of_kind("RayCluster") if not c["metadata"].get("deletionTimestamp")]

    def condition(self, type_: str) -> dict[str, Any]:
        return next(c for c in self.status["conditions"] if c["type"] == type_)

    def add(self, obj: dict[str, Any]) -> dict[str, Any]:
        key = (obj["kind"], obj["metadata"]["name"])
        if key in self.objects:
            raise Conflict("AlreadyExists")
        obj = copy.deepcopy(obj)
        self._uids += 1
        obj["metadata"]["uid"] = f"{self._uids:08x}-0000-4000-8000-000000000000"
        obj["metadata"]["creationTimestamp"] = format_time(self.now)
        self.objects[key] = obj
        self.touch(obj)
        return obj

    def touch(self, obj: dict[str, Any]) -> None:
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        self._remember(obj["kind"])

    def remove(self, kind: str, name: str) -> None:
        self.objects.pop((kind, name), None)
        self._remember(kind)
        self.collect()

    def collect(self) -> None:
        """Garbage collection: objects none of whose owners is there; and references to owners that are gone."""
        uids = {obj["metadata"]["uid"] for obj in self.objects.values()}
        for key, obj in list(self.objects.items()):
            owners = obj["metadata"].get("ownerReferences")
            if not owners:
                continue
            there = [owner for owner in owners if owner["uid"] in uids]
            if not there:
                self.objects.pop(key)
                self._remember(key[0])
                self.collect()
                return
            if len(there) < len(owners):
                obj["metadata"]["ownerReferences"] = there
                self.touch(obj)

    def _remember(self, kind: str) -> None:
        state = tuple(copy.deepcopy(obj) for obj in self.of_kind(kind))
        self._history.setdefault(kind, []).append(state)

    # ------------------------------------------------------------------------------------------------------ operator

    def snapshot(self, lag: int = 0) -> Snapshot:
        """What the operator's caches hold. ``lag``: each kind but the job may be so many changes old."""

        def cached(kind: str) -> tuple[dict[str, Any], ...]:
            history = self._history.get(kind, [()])
            at = max(self._seen.get(kind, 0), len(history) - 1 - lag)
            self._seen[kind] = at
            return copy.deepcopy(history[at])

        job = copy.deepcopy(self.job)
        groups = [g for g in cached("PolicyGroup") if g["metadata"]["name"] == self.name]
        claims = [c for c in cached("PersistentVolumeClaim") if c["metadata"]["name"] == "runs"]
        named = (job["spec"].get("checkpoints") or {}).get("claimName")
        return Snapshot(
            job=job,
            now=self.now,
            group=groups[0] if groups else None,
            clusters=cached("RayCluster") if self.kuberay.installed else (),
            submitters=cached("Job"),
            pods=cached("Pod"),
            others=tuple(obj for kind in OTHERS for obj in cached(kind)),
            claim=claims[0] if claims and named else None,
            nodes=self.nodes,
            kuberay=self.kuberay,
            refused=self.refused,
            config=self.config,
            answers_since=self.answers_since,
        )

    def operate(self, lag: int = 0, dies_after: int | None = None) -> Plan:
        """One round of the operator; it dies after so many writes."""
        snapshot = self.snapshot(lag)
        before = json.dumps(snapshot.job, sort_keys=True)
        plan = reconcile(snapshot)
        assert json.dumps(snapshot.job, sort_keys=True) == before, "the snapshot was changed"
        left = dies_after if dies_after is not None else 10**6
        if plan.status != snapshot.job.get("status", {}):
            if left == 0:
                return self._died(plan)
            left -= 1
            self._store_status(plan.status)
            self.after_each_write()
        self.notes += plan.notes
        for action in plan.actions:
            if left == 0:
                return self._died(plan)
            left -= 1
            try:
                self._do(action)
                self.after_each_write()
            except Conflict:
                self._catch_up()
                break
        return plan

    def _died(self, plan: Plan) -> Plan:
        self._catch_up()  # its successor lists everything anew
        return plan

    def _catch_up(self) -> None:
        self._seen = {kind: len(history) - 1 for kind, history in self._history.items()}

    def _store_status(self, status: dict[str, Any]) -> None:
        self.writes.append("status")
        self.job["status"] = copy.deepcopy(status)
        RLJobStatus.from_stored(status)  # what the CRD would refuse
        self.touch(self.job)

    def _do(self, action: Create | Patch | Delete) -> None:
        match action:
            case Create(obj):
                self.writes.append(f"create {obj['kind']} {obj['metadata']['name']}")
                assert is_owned_by(obj, self.job_uid), f"{obj['kind']} without its owner"
                assert obj["metadata"]["labels"]["rlightning.io/job-uid"] == self.job_uid
                if obj["kind"] == "PolicyGroup":
                    PolicyGroupResource.from_stored(obj)
                if obj["kind"] == "RayCluster":
                    # One that was gone before it left a trace may be made again: nobody can know that it was there.
                    traces = [job["metadata"]["name"].rpartition("-")[0] for job in self.of_kind("Job")]
                    assert obj["metadata"]["name"] not in traces, "a cluster's name is used again"
                self.add(obj)
                kind = obj["kind"]
            case Patch(kind, name, patch, type_, uid):
                self.writes.append(f"patch {kind} {name}")
                there = self.objects.get((kind, name))
                if there is None:
                    return
                assert type_ == "json"
                assert isinstance(patch, list)
                assert patch[0] == {"op": "test", "path": "/metadata/uid", "value": uid}
                if there["metadata"]["uid"] != uid:
                    raise Conflict("test failed")
                changed = copy.deepcopy(there)
                for step in patch[1:]:
                    *path, last = step["path"].strip("/").split("/")
                    at = changed
                    for part in path:
                        at = at[part]
                    assert step["op"] == "add" or last in at
                    at[last] = copy.deepcopy(step["value"])
                if kind == "PolicyGroup":
                    old, new = PolicyGroupResource.from_stored(there), PolicyGroupResource.from_stored(changed)
                    if rules.update_violations(rules.GROUP_RULES, old, new):
                        raise Conflict("refused by a rule")
                self.objects[kind, name] = changed
                self.touch(changed)
            case Delete(kind, name, uid, propagation):
                self.writes.append(f"delete {kind} {name}")
                assert propagation == "Background"
                there = self.objects.get((kind, name))
                if there is None or there["metadata"]["uid"] != uid:
                    return
                assert uid == self.job_uid or is_owned_by(there, self.job_uid), "somebody else's object was deleted"
                self.remove(kind, name)
        # The shell puts the answers of its own writes into its caches.
        if kind in self._history:
            self._seen[kind] = len(self._history[kind]) - 1

    def settle(self, rounds: int = 12) -> None:
        """Operator and KubeRay, and submitters of drivers that said how they ended, until all is done."""
        for _ in range(rounds):
            before = len(self.writes)
            self.operate()
            made = self.kuberay_acts()
            left = self.submitters_leave()
            if len(self.writes) == before and not made and not left:
                return
        raise AssertionError(f"the operator does not come to rest: {self.writes[-10:]}")

    # ------------------------------------------------------------------------------------------------ KubeRay, kubelet

    def kuberay_acts(self) -> bool:
        """Make the pods that are missing, and give up those that have ended."""
        acted = False
        if not self.kuberay.installed:
            return False
        for cluster in self.clusters():
            cluster.setdefault("status", {"state": "ready"})
            uid = cluster["metadata"]["uid"]
            groups = [("head", 1, cluster["spec"]["headGroupSpec"])]
            groups += [(g["groupName"], g["replicas"], g) for g in cluster["spec"]["workerGroupSpecs"]]
            for group, wanted, spec in groups:
                pods = [p for p in self.pods(group) if is_owned_by(p, uid)]
                for pod in pods:
                    if pod["status"].get("phase") in ("Failed", "Succeeded"):
                        self.remove("Pod", pod["metadata"]["name"])
                        acted = True
                pods = [p for p in self.pods(group) if is_owned_by(p, uid)]
                for _ in range(wanted - len(pods)):
                    self._make_pod(cluster, group, spec["template"])
                    acted = True
        return acted

    def _make_pod(self, cluster: dict[str, Any], group: str, template: dict[str, Any]) -> None:
        node_type = "head" if group == "head" else "worker"
        name = f"{cluster['metadata']['name']}-{group}-{self._uids:04x}"
        labels = {
            **template["metadata"]["labels"],
            "ray.io/cluster": cluster["metadata"]["name"],
            "ray.io/node-type": node_type,
            "ray.io/group": "headgroup" if group == "head" else group,
        }
        owner = {"kind": "RayCluster", "name": cluster["metadata"]["name"], "uid": cluster["metadata"]["uid"]}
        self.add(
            {
                "kind": "Pod",
                "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
                "spec": copy.deepcopy(template["spec"]),
                "status": {"phase": "Pending"},
            }
        )

    def pods(self, group: str | None = None) -> list[dict[str, Any]]:
        """Ray pods: of the head, of a pool, or all."""
        found = []
        for pod in self.of_kind("Pod"):
            labels = pod["metadata"].get("labels") or {}
            of = "head" if labels.get("ray.io/node-type") == "head" else labels.get("ray.io/group")
            if "ray.io/cluster" in labels and group in (None, of):
                found.append(pod)
        return found

    @property
    def head(self) -> dict[str, Any]:
        (head,) = self.pods("head")
        return head

    def make_ready(self, *pods: dict[str, Any]) -> None:
        for pod in pods or self.pods():
            if pod["status"].get("phase") in ("Failed", "Succeeded"):
                continue
            container = pod["spec"]["containers"][0]["name"]
            statuses = pod["status"].get("containerStatuses") or [{"name": container, "restartCount": 0}]
            if "running" not in statuses[0].get("state", {}):
                statuses[0]["state"] = {"running": {"startedAt": format_time(self.now)}}
            pod["spec"]["nodeName"] = pod["spec"].get("nodeName", "node1")
            pod["status"] = {
                **pod["status"],
                "phase": "Running",
                "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}],
                "containerStatuses": statuses,
            }
            self.touch(pod)

    def restart_head_container(self, exit_code: int = 137, reason: str = "OOMKilled", message: str = "") -> None:
        """Ray's container ends and is started again in the same pod; what ran in it is gone."""
        head = self.head
        self.now += timedelta(seconds=2)
        ended = {"exitCode": exit_code, "reason": reason, "finishedAt": format_time(self.now), "message": message}
        before = head["status"]["containerStatuses"][0]
        head["status"]["containerStatuses"] = [
            {
                "name": "ray-head",
                "restartCount": before["restartCount"] + 1,
                "state": {"running": {"startedAt": format_time(self.now)}},
                "lastState": {"terminated": ended},
            }
        ]
        head["status"]["conditions"] = [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "False"},
        ]
        self.touch(head)
        self._reap_drivers()

    def lose_pod(self, pod: dict[str, Any]) -> None:
        self.remove("Pod", pod["metadata"]["name"])
        self._reap_drivers()

    def delete_cluster(self) -> None:
        for cluster in self.clusters():
            self.remove("RayCluster", cluster["metadata"]["name"])
        self._reap_drivers()

    # -------------------------------------------------------------------------------------------- submitter and driver

    def _reap_drivers(self) -> None:
        """Drivers die with their container."""
        for driver in self.drivers:
            pod = next((p for p in self.of_kind("Pod") if p["metadata"]["uid"] == driver.pod_uid), None)
            started = pod and pod["status"].get("containerStatuses", [{}])[0].get("state", {}).get("running", {})
            if not started or started.get("startedAt") != driver.container_start:
                driver.ended = True

    def live_drivers(self) -> list[Driver]:
        self._reap_drivers()
        return [d for d in self.drivers if not d.ended]

    def open_jobs(self) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None, int]]:
        """Submitters that have not ended: the Job, its cluster (None if that is gone), its attempt."""
        for job in self.of_kind("Job"):
            if not (job.get("status") or {}).get("conditions"):
                cluster, _, attempt = job["metadata"]["name"].rpartition("-")
                yield job, self.objects.get(("RayCluster", cluster)), int(attempt)

    def submitters_act(self) -> bool:
        """Start drivers, attach to those that run, and end with those that have ended."""
        acted = False
        for job, cluster, attempt in list(self.open_jobs()):
            uid = cluster["metadata"]["uid"] if cluster else job["metadata"].get("cluster-was", "")
            mine = [d for d in self.drivers if d.attempt == attempt and d.cluster_uid == uid]
            if cluster:
                job["metadata"]["cluster-was"] = uid
            if any(not d.ended for d in mine):
                continue
            if mine:
                outcome = mine[-1].report.get("outcome", {}).get("state")
                ended = {"Succeeded": 0, "Stopped": 0, "Superseded": 0, "Failed": 1}.get(outcome or "", 3)
                self.end_job(job, ended)
                acted = True
                continue
            heads = [p for p in self.pods("head") if cluster and is_owned_by(p, cluster["metadata"]["uid"])]
            ready = [p for p in heads if {"type": "Ready", "status": "True"} in p["status"].get("conditions", [])]
            if cluster and ready:
                self._start_driver(cluster, ready[0], attempt)
                acted = True
        return acted

    def submitters_leave(self) -> bool:
        """End those whose driver has stored its outcome."""
        left = False
        for job, _, attempt in list(self.open_jobs()):
            mine = [d for d in self.drivers if d.attempt == attempt and "outcome" in d.report and d.ended]
            if mine:
                state = mine[-1].report["outcome"]["state"]
                self.end_job(job, {"Failed": 1, "Lost": 3}.get(state, 0))
                left = True
        return left

    def end_job(self, job: dict[str, Any], exit_code: int, message: str = "") -> None:
        type_ = "Failed" if exit_code else "Complete"
        job["status"] = {
            "conditions": [
                {
                    "type": type_,
                    "status": "True",
                    "lastTransitionTime": format_time(self.now),
                    "reason": "PodFailurePolicy" if exit_code else "CompletionsReached",
                    "message": f"Container submitter failed with exit code {exit_code}" if exit_code else "done",
                }
            ]
        }
        self.touch(job)
        if message:
            terminated = {"exitCode": exit_code, "reason": "Error", "message": message}
            self.submitter_pod(job, {"terminated": terminated}, phase="Failed")

    def submitter_pod(self, job: dict[str, Any], state: dict[str, Any], phase: str = "Pending") -> dict[str, Any]:
        name = f"{job['metadata']['name']}-x{self._uids:04x}"
        return self.add(
            {
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "labels": job["spec"]["template"]["metadata"]["labels"],
                    "ownerReferences": [{"kind": "Job", "uid": job["metadata"]["uid"]}],
                },
                "spec": job["spec"]["template"]["spec"],
                "status": {
                    "phase": phase,
                    "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "False"}],
                    "containerStatuses": [{"name": "submitter", "restartCount": 0, "state": state}],
                },
            }
        )

    def _start_driver(self, cluster: dict[str, Any], head: dict[str, Any], attempt: int) -> None:
        self.now += timedelta(seconds=1)
        driver = Driver(
            attempt=attempt,
            cluster_uid=cluster["metadata"]["uid"],
            pod=head["metadata"]["name"],
            pod_uid=head["metadata"]["uid"],
            container_start=head["status"]["containerStatuses"][0]["state"]["running"]["startedAt"],
        )
        self.drivers.append(driver)
        group = self.objects.get(("PolicyGroup", self.name))
        assert group is None or group["spec"]["attempt"] >= attempt, "a driver runs before its attempt is stored"
        started = {"pod": driver.pod, "podUID": driver.pod_uid, "startTime": format_time(self.now)}
        self.report(driver, driver=started)

    def report(self, driver: Driver, /, **fields: Any) -> None:
        """Store a report, unless the driver is superseded: then it ends without writing."""
        group = self.objects.get(("PolicyGroup", self.name))
        if group is None or not is_owned_by(group, self.job_uid) or group["spec"]["attempt"] != driver.attempt:
            driver.report = {"outcome": {"state": "Superseded"}}
            driver.ended = True
            return
        driver.report = {"attempt": driver.attempt, **driver.report, **fields}
        changed = {**group, "status": copy.deepcopy(driver.report)}
        old, new = PolicyGroupResource.from_stored(group), PolicyGroupResource.from_stored(changed)
        if rules.update_violations(rules.GROUP_RULES, old, new):
            driver.ended = True
            return
        group["status"] = copy.deepcopy(driver.report)
        self.touch(group)

    def driver_runs(self, driver: Driver) -> None:
        """One iteration; or the end, if it was asked to stop."""
        group = self.objects.get(("PolicyGroup", self.name))
        if group is not None and group["spec"]["state"] == "Stopped":
            self.driver_ends(driver, "Stopped", "Interrupted", f"stopped after iteration {driver.iteration}, as asked")
            return
        driver.iteration += 1
        members = [("train-0", "Train")]
        members += [(f"eval-{i}", "Eval") for i in range(group["spec"]["evalReplicas"] if group else 0)]
        version = driver.iteration
        self.report(
            driver,
            version=version,
            progress={
                "iteration": driver.iteration,
                "envSteps": 256 * driver.iteration,
                "lastReportTime": format_time(self.now),
                "metrics": [],
            },
            members=[
                {"name": name, "role": role, "state": "Ready", "version": version, "digest": digest(version)}
                for name, role in members
            ],
            versions=[
                {"version": v, "learnerDigest": digest(v), "verified": len(members), "total": len(members)}
                for v in range(max(1, version - 3), version + 1)
            ],
            checkpoint={"path": f"checkpoints/{version}", "iteration": version, "digest": digest(version)},
        )

    def driver_ends(self, driver: Driver, state: str, reason: str, message: str = "") -> None:
        self.report(driver, outcome={"state": state, "reason": reason, "message": message})
        driver.ended = True

    # ---------------------------------------------------------------------------------------------------------- user

    def edit(self, *, unchecked: bool = False, **spec: Any) -> None:
        """Change the spec. What the API server's rules refuse does not happen, unless it is ``unchecked``."""
        changed = {**self.job, "spec": {**copy.deepcopy(self.job["spec"]), **spec}}
        if changed["spec"] == self.job["spec"]:
            return
        if not unchecked:
            try:
                old, new = RLJob.from_stored(self.job), RLJob.from_stored(changed)
            except ValidationError:
                return
            if rules.update_violations(rules.JOB_RULES, old, new):
                return
        self.job["spec"] = changed["spec"]
        self.job["metadata"]["generation"] += 1
        self.touch(self.job)

    def passes(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    # ------------------------------------------------------------------------------------------------------- ready-made

    def train(self, iterations: int = 3) -> Driver:
        """From nothing to a driver that trains on ready pods."""
        self.settle()
        self.make_ready()
        self.settle()
        self.submitters_act()
        self.settle()
        (driver,) = self.live_drivers()
        for _ in range(iterations):
            self.passes(10)
            self.driver_runs(driver)
            self.settle()
        return driver
