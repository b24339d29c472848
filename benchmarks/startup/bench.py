"""From ``kubectl apply`` to the first iteration, second by second, beside a bare RayCluster of the same shape.

Both take turns on one cluster in one run: the RLJob of ``manifests/cartpole-cluster.yaml``, then the very RayCluster
that the operator had made for it, applied by hand. What the job needs on top is the operator's reaction, the driver's
start and the members' start.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.report import Row, write
from hack import cluster as cluster_of_ours
from hack.cluster import Cluster
from rlightning.api.manifests import load_manifests

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "manifests" / "cartpole-cluster.yaml"
NAMESPACE = "bench-startup"
DEADLINE = 300


def seconds(moment: str) -> float:
    """A timestamp of the API as seconds since the epoch."""
    return datetime.datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()


def shipped(kind: str) -> dict[str, Any]:
    """The document of that kind in the manifest, its numbers as kubectl reads them."""
    (found,) = [d.value for d in load_manifests(MANIFEST) if d.value["kind"] == kind]
    return dict(found)


def condition_time(obj: dict[str, Any], type_: str) -> float | None:
    """When a condition became True."""
    for condition in obj.get("status", {}).get("conditions", ()):
        if condition["type"] == type_ and condition["status"] == "True":
            return seconds(condition["lastTransitionTime"])
    return None


class Bench:
    """Two contenders on one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def objects(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        extra = ["--selector", selector] if selector else []
        items: list[dict[str, Any]] = self.cluster.get(kind, "--namespace", NAMESPACE, *extra)["items"]
        return items

    def wait(self, look: Any, what: str) -> Any:
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            if found := look():
                return found
            time.sleep(1)
        raise SystemExit(f"{what}: not within {DEADLINE} s")

    def pods_ready(self, selector: str, number: int) -> float | None:
        """When the last of so many pods became ready, None if they are not."""
        times = [condition_time(pod, "Ready") for pod in self.objects("pods", selector)]
        return max(t for t in times if t) if len(times) == number and all(times) else None

    def job(self) -> tuple[dict[str, float], dict[str, Any]]:
        """One RLJob up to its first iterations; milestones in seconds since `apply`, and its RayCluster."""
        job = {**shipped("RLJob"), "metadata": {"name": "startup", "namespace": NAMESPACE}}
        applied = time.time()
        self.cluster.apply(job)

        def first_iteration() -> dict[str, Any] | None:
            (found,) = self.objects("rljobs")
            return found if found.get("status", {}).get("progress", {}).get("iteration", 0) >= 1 else None

        stored = self.wait(first_iteration, "a first iteration")
        status = stored["status"]
        (ray,) = self.objects("rayclusters")
        (group,) = self.objects("policygroups")
        pods = self.objects("pods", "ray.io/is-ray-node=yes")
        (head,) = [p for p in pods if p["metadata"]["labels"]["ray.io/node-type"] == "head"]
        (submitter,) = self.objects("pods", "rlightning.io/component=submitter")
        folder = self.cluster.claim_directory(NAMESPACE, "runs") / status["runPath"]
        ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
        times = {
            "RayCluster created": seconds(ray["metadata"]["creationTimestamp"]),
            "head container started": seconds(head["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]),
            "head ready": condition_time(head, "Ready") or 0,
            "all pods ready": self.wait(lambda: self.pods_ready("ray.io/is-ray-node=yes", 4), "all pods ready"),
            "submitter started": seconds(submitter["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]),
            "driver started": seconds(group["status"]["driver"]["startTime"]),
            "members proved version 0": ledger[0]["time"],
            "first iteration": ledger[1]["time"],
        }
        self.cluster.kubectl("delete", "rljob", "startup", "--namespace", NAMESPACE, "--timeout=90s", seconds=120)
        self.gone()
        return {what: at - applied for what, at in times.items()}, ray

    def bare(self, ray: dict[str, Any]) -> float:
        """Seconds until all pods of the same RayCluster are ready, made by hand."""
        metadata = {"name": "bare", "namespace": NAMESPACE}
        spec = json.loads(json.dumps(ray["spec"]))
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):  # made for the job, and gone with it
            group["template"]["spec"].pop("serviceAccountName", None)
            group["template"]["spec"]["automountServiceAccountToken"] = False
        applied = time.time()
        self.cluster.apply({"apiVersion": ray["apiVersion"], "kind": "RayCluster", "metadata": metadata, "spec": spec})
        ready = float(self.wait(lambda: self.pods_ready("ray.io/cluster=bare", 4), "the bare RayCluster"))
        self.cluster.kubectl("delete", "raycluster", "bare", "--namespace", NAMESPACE, "--timeout=90s", seconds=120)
        self.gone()
        return ready - applied

    def gone(self) -> None:
        self.wait(lambda: not self.objects("pods", "ray.io/is-ray-node=yes"), "pods are gone")


def main(arguments: list[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args(arguments).rounds
    cluster = cluster_of_ours.up()
    bench = Bench(cluster)
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    claim = shipped("PersistentVolumeClaim")
    cluster.apply({**claim, "metadata": {**claim["metadata"], "namespace": NAMESPACE}})
    milestones: list[dict[str, float]] = []
    bare: list[float] = []
    try:
        for number in range(rounds):
            times, ray = bench.job()
            milestones.append(times)
            bare.append(bench.bare(ray))
            shown = ", ".join(f"{what} {at:.1f}" for what, at in times.items())
            print(f"round {number + 1}: {shown}; bare RayCluster ready {bare[-1]:.1f}", flush=True)
    finally:
        cluster.try_kubectl("delete", "namespace", NAMESPACE, "--wait=false")
    rows = [
        Row.of_rounds(f"apply to: {what}", "s", [m[what] for m in milestones], {"bare RayCluster ready": bare})
        for what in milestones[0]
    ]
    write("startup", rows, packages=())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
