"""The chart, installed on the tests' cluster as a user installs it."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hack.cluster import Cluster
from hack.programs.binaries import program
from tests.support.kube import Kube, eventually

ROOT = Path(__file__).parents[2]
SYSTEM = "rlightning-system"


@dataclass(frozen=True)
class Answer:
    """What the status service said."""

    status: int
    body: str


@dataclass(frozen=True)
class StatusService:
    """The status service behind a forwarded port."""

    url: str

    def get(self, path: str, *, token: str | None) -> Answer:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"{self.url}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return Answer(answer.status, answer.read().decode())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read().decode())


@dataclass(frozen=True)
class Installation:
    """A cluster with the chart on it."""

    cluster: Cluster
    system: Kube

    @staticmethod
    def install(cluster: Cluster) -> Installation:
        """By ``hack/cluster/install``; an upgrade where it is there already (a kept cluster)."""
        script = [str(ROOT / "hack" / "cluster" / "install")]
        environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
        done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"hack/cluster/install\n{done.stdout}{done.stderr}"
        return Installation(cluster, Kube(program("kubectl"), str(cluster.kubeconfig), SYSTEM))

    def helm(self, *arguments: str, seconds: float = 240) -> str:
        """Run helm, which must succeed."""
        done = subprocess.run(
            [str(program("helm")), *arguments],
            env={**os.environ, "KUBECONFIG": self.system.kubeconfig},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, f"helm {' '.join(arguments)}\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextlib.contextmanager
    def namespace(self, name: str, claim: str | None = "runs") -> Iterator[Kube]:
        """A namespace under restricted Pod Security, with a claim for run folders; gone afterwards."""
        kube = Kube(self.system.kubectl, self.system.kubeconfig, f"{name}-{secrets.token_hex(2)}")
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": kube.namespace, "labels": labels}})
        if claim:
            kube.apply(
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "metadata": {"name": claim, "namespace": kube.namespace},
                    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
                }
            )
        try:
            yield kube
        finally:
            kube.run("delete", "namespace", kube.namespace, "--wait=false")

    def claim_directory(self, namespace: str, claim: str) -> Path:
        """Where this machine sees the files of a bound claim."""
        return self.cluster.claim_directory(namespace, claim)

    # -- the operator ------------------------------------------------------------------------------------------------

    def operator_pod(self) -> dict[str, Any]:
        """The operator's pod, which must be ready."""

        def ready() -> dict[str, Any] | None:
            pods = [
                p
                for p in self.system.all("pods", "app.kubernetes.io/component=operator")
                if "deletionTimestamp" not in p["metadata"]
            ]
            conditions = {c["type"]: c["status"] for c in pods[0]["status"].get("conditions", ())} if pods else {}
            return pods[0] if len(pods) == 1 and conditions.get("Ready") == "True" else None

        return eventually(ready, seconds=120, what="a ready operator pod")

    def operator_log(self, since: str | None = None) -> str:
        """Of the running operator."""
        arguments = ["logs", self.operator_pod()["metadata"]["name"], *([f"--since-time={since}"] if since else [])]
        return self.system.ok(*arguments)

    # -- the status service ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def status_service(self) -> Iterator[StatusService]:
        """``kubectl port-forward`` to the service."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        (service,) = self.system.all("services", "app.kubernetes.io/component=status")
        forward = subprocess.Popen(
            [
                str(self.system.kubectl), "--namespace", SYSTEM, "port-forward",
                f"service/{service['metadata']['name']}", f"{port}:{service['spec']['ports'][0]['port']}",
            ],
            env={**os.environ, "KUBECONFIG": self.system.kubeconfig},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            rest = StatusService(f"http://127.0.0.1:{port}")

            def up() -> bool:
                with contextlib.suppress(OSError):
                    return rest.get("/readyz", token=None).status == 200
                return False

            eventually(up, seconds=60, what="the status service answers through a forwarded port")
            yield rest
        finally:
            forward.kill()
            forward.wait()

    def token(self, namespace: str, account: str, *, may_read: bool) -> str:
        """A fresh token of a ServiceAccount, bound to the chart's view role or to nothing."""
        kube = Kube(self.system.kubectl, self.system.kubeconfig, namespace)
        objects: list[dict[str, Any]] = [
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account, "namespace": namespace}}
        ]
        if may_read:
            role = next(
                r["metadata"]["name"]
                for r in kube.json("get", "clusterroles")["items"]
                if re.fullmatch(r"rlightning.*-view", r["metadata"]["name"])
            )
            objects.append(
                {
                    "apiVersion": "rbac.authorization.k8s.io/v1",
                    "kind": "RoleBinding",
                    "metadata": {"name": account, "namespace": namespace},
                    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
                    "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
                }
            )
        kube.apply(*objects)
        return kube.ok("create", "token", account).strip()
