"""The operator as a process of its own, against a bare API server of these tests' own.

Not the one that KUBECONFIG names: these tests take CRDs away and stop the server. Nothing else runs on a bare one: no
garbage collector, no KubeRay, no scheduler. So every change is the operator's, or the test's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kopf
import pytest

from hack.apiserver.server import ApiServer, ServerError
from hack.cluster import kuberay
from hack.cluster.layout import ClusterError
from hack.programs.binaries import ROOT, BuildError
from rlightning.api import crds
from rlightning_operator.kube import kinds
from rlightning_operator.kube.kinds import Kind, Object
from tests.support.api import Api, Space
from tests.support.apiproxy import ApiProxy
from tests.support.kube import eventually
from tests.support.ports import free_port


@dataclass
class Operator:
    """One process at a time; :meth:`start` again after it ended."""

    log: Path
    kubeconfig: Path
    flags: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self, *, ready: bool = True) -> None:
        """Start, and wait until it is ready. The log is continued."""
        image = ROOT / "tests" / "support" / "operator_image"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RLIGHTNING_")}
        environment |= {"KUBECONFIG": str(self.kubeconfig), "PYTHONPATH": f"{image}:{ROOT / 'operator'}:{ROOT}"}
        flags = ["--host", "127.0.0.1", "--port", str(self.port), *self.flags]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlightning_operator.main", *flags],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        if ready:
            eventually(self.ready, seconds=30, what="the operator is ready", every=0.05, now=self.text)

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self.process is not None
        return self.process.pid

    def ended(self) -> bool:
        """Whether it is gone, as it must be by a SIGKILL of the test's: another end is an error."""
        assert self.process is not None
        code = self.process.poll()
        assert code in (None, -signal.SIGKILL), f"the operator ended by itself ({code})\n{self.text()}"
        return code is not None

    def ready(self) -> bool:
        """What /readyz says. Raises AssertionError if the process has ended."""
        assert self.process is not None
        assert self.process.poll() is None, f"the operator ended ({self.process.returncode})\n{self.text()}"
        return self.get("/readyz")[0] == 200

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a page; 0 if nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metric(self, name: str) -> float:
        """The sum of a metric's values over all its labels."""
        lines = self.get("/metrics")[1].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " ")))

    def resident(self) -> float:
        """Memory in MB."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1000
        raise AssertionError("no VmRSS")

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)

    def stop(self) -> tuple[int, float]:
        """SIGTERM; returns the exit status and how long that took."""
        assert self.process is not None
        start = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20), time.monotonic() - start

    def text(self) -> str:
        """The log."""
        return self.log.read_text()

    def complaints(self) -> list[str]:
        """Lines of the log that say ERROR, and tracebacks."""
        return [line for line in self.text().splitlines() if " ERROR " in line or "Traceback" in line]


@dataclass
class World:
    """An API server, a proxy in front of it, and operators."""

    server: ApiServer
    api: Api
    proxy: ApiProxy
    folder: Path
    operators: list[Operator] = field(default_factory=list)

    def operator(self, *flags: str, token: str | None = None) -> Operator:
        """One that is not started yet, and reaches the server through the proxy."""
        number = len(self.operators)
        kubeconfig = self.proxy.kubeconfig(self.folder / f"kubeconfig-{number}", token or self.api.token)
        operator = Operator(self.folder / f"operator-{number}.log", kubeconfig, flags)
        self.operators.append(operator)
        return operator

    def install_ours(self) -> None:
        """RLJob's and PolicyGroup's CRDs."""
        files = crds.files()
        for kind in (kinds.RLJOB, kinds.POLICY_GROUP):
            self._install(kind, files[f"{kind.plural}.yaml"])

    def install_kuberay(self) -> None:
        """RayCluster's."""
        self._install(kinds.RAY_CLUSTER, (kuberay.crds() / "ray.io_rayclusters.yaml").read_text())

    def _install(self, kind: Kind, crd: str) -> None:
        self.api.install(kind, crd)
        eventually(lambda: self.api.serves(kind), seconds=30, what=f"{kind.plural} are served", every=0.1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Without any CRD."""
    folder = tmp_path_factory.mktemp("operator")
    try:
        with ApiServer() as server:
            content = json.loads(server.kubeconfig.read_text())["clusters"][0]["cluster"]
            info = kopf.ConnectionInfo(server=content["server"], ca_data=content["certificate-authority-data"])
            with ApiProxy(info) as proxy:
                world = World(server, Api.of(server.kubeconfig), proxy, folder)
                try:
                    yield world
                finally:
                    for operator in world.operators:
                        operator.kill()
    except (BuildError, ServerError, ClusterError) as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture
def healthy(world: World) -> Iterator[World]:
    """The world with all CRDs; no faults, operators or jobs before and after the test."""
    if not world.api.serves(kinds.RLJOB):
        world.install_ours()
    if not world.api.serves(kinds.RAY_CLUSTER):
        world.install_kuberay()
    yield world
    for operator in world.operators:
        operator.kill()
    world.proxy.before, world.proxy.after, world.proxy.down = lambda _: None, lambda _: None, False
    for one in world.api.request("GET", kinds.RLJOB.path())["items"]:
        Space(world.api, one["metadata"]["namespace"]).delete(kinds.RLJOB, one["metadata"]["name"])


def job(name: str = "cartpole", **spec: Any) -> dict[str, Any]:
    """An RLJob of one train and two eval members on one pool."""
    return {
        "apiVersion": "rlightning.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": name},
        "spec": {
            "environment": {"id": "CartPole-v1", "numEnvs": 8},
            "policy": {"simplePPO": {"minibatchSize": 64}},
            "training": {"totalEnvSteps": 100_000, "rolloutSteps": 32},
            "policyGroup": {"train": {"replicas": 1, "pool": "all"}, "eval": {"replicas": 2, "pool": "all"}},
            "pools": [{"name": "all", "replicas": 1, "membersPerReplica": 3}],
            **spec,
        },
    }


# What a job consists of on the API server once it was started.
STARTED: dict[Kind, int] = {
    kinds.SERVICE_ACCOUNT: 1,
    kinds.ROLE: 1,
    kinds.ROLE_BINDING: 1,
    kinds.NETWORK_POLICY: 3,
    kinds.POLICY_GROUP: 1,
    kinds.RAY_CLUSTER: 1,
    kinds.JOB: 1,
}


def objects(space: Space, name: str = "cartpole") -> dict[Kind, list[Object]]:
    """The objects of a job."""
    return {kind: space.all(kind, f"rlightning.io/job={name}") for kind in STARTED}


def count(space: Space, name: str = "cartpole") -> dict[str, int]:
    """How many objects of each kind the job has."""
    return {kind.plural: len(found) for kind, found in objects(space, name).items()}


def started(space: Space, name: str = "cartpole") -> Callable[[], bool]:
    """Whether the job has all of them, for :func:`eventually`."""
    return lambda: count(space, name) == {kind.plural: number for kind, number in STARTED.items()}


def status_of(space: Space) -> dict[str, Any]:
    """The RLJob's status; {} as long as there is none."""
    found = space.get(kinds.RLJOB, "cartpole") or {}
    return dict(found.get("status", {}))


def condition(space: Space, kind: str) -> dict[str, Any]:
    """A condition of the RLJob; {} if there is none yet."""
    return next((one for one in status_of(space).get("conditions", []) if one["type"] == kind), {})
