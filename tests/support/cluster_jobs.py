"""Jobs on a real cluster, for tests: made from the shipped manifest, watched, and disturbed."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlightning.api.manifests import load_manifests
from tests.support.jobs import merged
from tests.support.kube import Kube, eventually

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "manifests" / "cartpole-cluster.yaml"


def shipped() -> dict[str, Any]:
    """The RLJob of the shipped manifest."""
    documents = [loaded.value for loaded in load_manifests(MANIFEST)]  # numbers as kubectl reads them
    (job,) = [document for document in documents if document["kind"] == "RLJob"]
    return dict(job)


def job_like_shipped(name: str, **spec: Any) -> dict[str, Any]:
    """The shipped RLJob under another name, with changes to its spec laid over it."""
    job = shipped()
    return {**job, "metadata": {"name": name}, "spec": merged(job["spec"], spec)}


def long_job(name: str) -> dict[str, Any]:
    """The shipped job without its target: at least 60 s of training."""
    return job_like_shipped(
        name, evaluation={"everyIterations": 0, "stopAtReturn": None}, training={"totalEnvSteps": 75_000}
    )


def head_only(name: str, **spec: Any) -> dict[str, Any]:
    """A short job without pools: the head's pod hosts its two members, so that it starts quickly."""
    base = {
        "seed": 7,
        "environment": {"id": "CartPole-v1", "numEnvs": 8},
        "policy": {"simplePPO": {"hiddenSizes": [16, 16], "epochs": 2, "minibatchSize": 64}},
        "training": {"totalEnvSteps": 2300, "rolloutSteps": 32},
        "head": {"resources": {"cpu": "500m", "memory": "3Gi"}},
    }
    return {
        "apiVersion": "rlightning.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": name},
        "spec": merged(base, spec),
    }


@dataclass
class Job:
    """One RLJob on the cluster."""

    kube: Kube
    manifest: dict[str, Any]
    name: str = ""
    uid: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.name = self.manifest["metadata"]["name"]

    def create(self) -> Job:
        """Apply it, and learn its uid."""
        self.kube.apply(self.manifest)
        self.uid = self.get()["metadata"]["uid"]
        return self

    def get(self) -> dict[str, Any]:
        """The object as it is now."""
        found = self.kube.get("rljob", self.name)
        assert found is not None, f"RLJob {self.name} is gone"
        return found

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.get().get("status") or {})

    def condition(self, type_: str, status: dict[str, Any] | None = None) -> dict[str, Any]:
        """One condition, {} if it is not there."""
        conditions = (self.status if status is None else status).get("conditions", ())
        return next((dict(c) for c in conditions if c["type"] == type_), {})

    @property
    def iteration(self) -> int:
        """As the status says; -1 before the first report."""
        return int(self.status.get("progress", {}).get("iteration", -1))

    def describe(self) -> str:
        """What a person would look at first."""
        status = self.status
        conditions = [
            f"{c['type']}={c['status']} {c['reason']}: {c['message'][:300]}" for c in status.get("conditions", ())
        ]
        pods = [
            f"{p['metadata']['name']} {p['status'].get('phase')}"
            for p in self.kube.all("pods", f"rlightning.io/job={self.name}")
        ]
        brief = {key: value for key, value in status.items() if key != "conditions"}
        return "\n".join([json.dumps(brief), *conditions, *pods, *self.kube.events(self.name)])

    def until(self, look: Any, *, seconds: float, what: str, every: float = 0.3) -> Any:
        """Wait until ``look(status)`` is something."""
        return eventually(lambda: look(self.status), seconds=seconds, what=what, every=every, now=self.describe)

    def until_condition(self, type_: str, *, seconds: float, **wanted: str) -> dict[str, Any]:
        """Wait until a condition has the wanted status, reason…"""

        def look(status: dict[str, Any]) -> dict[str, Any] | None:
            condition = self.condition(type_, status)
            return condition if all(condition.get(k) == v for k, v in wanted.items()) else None

        found: dict[str, Any] = self.until(look, seconds=seconds, what=f"{self.name}: condition {type_} {wanted}")
        return found

    def until_iteration(self, k: int, *, seconds: float) -> int:
        """Wait until the status reports iteration k or a later one, which is returned."""
        found: int = self.until(
            lambda s: (
                s.get("progress", {}).get("iteration", -1) if s.get("progress", {}).get("iteration", -1) >= k else None
            ),
            seconds=seconds,
            what=f"{self.name}: iteration {k}",
        )
        return found

    def finished(self, *, seconds: float) -> dict[str, Any]:
        """Wait for the end; returns the status."""
        self.until_condition("Finished", seconds=seconds, status="True")
        return self.status

    def succeeded(self, *, seconds: float) -> dict[str, Any]:
        """Wait for the end, which must be a good one."""
        status = self.finished(seconds=seconds)
        assert self.condition("Succeeded", status)["status"] == "True", self.describe()
        return status

    # -- its parts ---------------------------------------------------------------------------------------------------

    def group(self) -> dict[str, Any]:
        found = self.kube.get("policygroup", self.name)
        assert found is not None
        return found

    def clusters(self) -> list[dict[str, Any]]:
        return self.kube.all("rayclusters", f"rlightning.io/job={self.name}")

    def pods(self, **labels: str) -> list[dict[str, Any]]:
        """Pods with these labels (``_`` for ``-``, prefix ``rlightning.io/`` or ``ray.io/`` written as ``ray__``)."""
        selector = [f"rlightning.io/job={self.name}"]
        for key, value in labels.items():
            prefix, _, rest = key.rpartition("__")
            selector.append(f"{(prefix or 'rlightning')}.io/{rest.replace('_', '-')}={value}")
        return self.kube.all("pods", ",".join(selector))

    def head(self) -> dict[str, Any]:
        """The head's pod, which must be there and run."""

        def running() -> dict[str, Any] | None:
            pods = [p for p in self.pods(ray__node_type="head") if p["status"].get("phase") == "Running"]
            return pods[0] if len(pods) == 1 else None

        return eventually(running, seconds=60, what=f"{self.name}: a running head pod")

    def workers(self, pool: str) -> list[dict[str, Any]]:
        return self.pods(ray__group=pool)

    def is_released(self) -> bool:
        """Whether neither a RayCluster nor one of its pods is left."""
        return not self.clusters() and not self.pods(ray__is_ray_node="yes")

    def is_gone(self) -> bool:
        """Whether nothing that was made for it is left."""
        return not self.leftovers()

    def driver_pid(self) -> int:
        """Of the driver's process in the head's pod."""
        script = (
            "import glob\n"
            "for p in glob.glob('/proc/[0-9]*/cmdline'):\n"
            "    try: a = open(p, 'rb').read().split(b'\\0')\n"
            "    except OSError: continue\n"  # it has just ended
            "    if b'rlightning.runtime.cluster.driver' in a and b'python' in a[0]: print(p.split('/')[2])\n"
        )
        out = self.exec_head("python3", "-c", script)
        pids = [int(line) for line in out.split()]
        assert len(pids) == 1, f"driver processes: {pids}"
        return pids[0]

    def exec_head(self, *command: str) -> str:
        return self.kube.ok("exec", self.head()["metadata"]["name"], "--container", "ray-head", "--", *command)

    def leftovers(self) -> list[str]:
        """Everything that still carries the job's label."""
        kinds = (
            "policygroups,rayclusters,pods,jobs,serviceaccounts,roles,rolebindings,networkpolicies,services,secrets,"
            "configmaps"
        )
        mine = self.kube.json("get", kinds, "--selector", f"rlightning.io/job={self.name}")["items"]
        # KubeRay's own (services, the token's Secret) carry the name of the cluster only.
        rest = self.kube.json("get", "services,secrets,configmaps")["items"]
        named = [o for o in rest if o["metadata"]["name"].startswith(f"{self.name}-{self.uid[:4]}")]
        return sorted({f"{o['kind']}/{o['metadata']['name']}" for o in (*mine, *named)})

    def describe_leftovers(self) -> str:
        return ", ".join(self.leftovers())


Start = Callable[[dict[str, Any]], Job]
"""The fixture ``start``: applies an RLJob, which is deleted after the test."""


def ledger(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's ledger."""
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def iterations(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics that are iterations."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [line for line in lines if line["type"] == "iteration"]


def seconds_since_epoch(moment: str) -> float:
    """Of a timestamp of the API."""
    return datetime.datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()


def follow(arguments: Iterable[str], kubeconfig: str) -> subprocess.Popen[str]:
    """A kubectl that goes on in the background, its output in a pipe."""
    return subprocess.Popen(
        list(arguments),
        env={**os.environ, "KUBECONFIG": kubeconfig},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
