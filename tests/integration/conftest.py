"""One API server for all tests that need one: a bare one of ours, or the cluster that KUBECONFIG names."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hack.programs.binaries import BuildError, program
from hack.apiserver.server import ApiServer, ServerError
from rlightning.api import crds


@dataclass(frozen=True)
class Kube:
    """An API server with a namespace of the tests' own."""

    kubectl: Path
    kubeconfig: str
    namespace: str

    def run(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl; the caller looks at the exit status."""
        return subprocess.run(
            [str(self.kubectl), "--namespace", self.namespace, *arguments],
            env={**os.environ, "KUBECONFIG": self.kubeconfig},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def ok(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl, which must succeed; returns its output."""
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}\n{done.stderr}"
        return done.stdout

    def json(self, *arguments: str, stdin: str | None = None) -> Any:
        """Run kubectl, which must succeed; returns its JSON output."""
        return json.loads(self.ok(*arguments, "--output", "json", stdin=stdin))

    def patch_status(self, kind: str, name: str, status: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        """Merge into an object's status, through its subresource; the caller looks at the exit status."""
        patch = json.dumps({"status": status})
        return self.run("patch", kind, name, "--subresource=status", "--type=merge", "--patch", patch)


@pytest.fixture(scope="session")
def bare_kube() -> Iterator[Kube]:
    """Without our CRDs."""
    given = os.environ.get("KUBECONFIG")
    namespace = f"rlightning-test-{secrets.token_hex(3)}"
    if given:
        found = shutil.which("kubectl")
        kube = Kube(Path(found) if found else program("kubectl"), given, namespace)
        kube.ok("create", "namespace", namespace)
        try:
            yield kube
        finally:
            kube.run("delete", "namespace", namespace, "--wait=false")
        return
    try:
        with ApiServer() as server:
            kube = Kube(program("kubectl"), str(server.kubeconfig), namespace)
            kube.ok("create", "namespace", namespace)
            yield kube
    except (BuildError, ServerError) as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def kube(bare_kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """With our CRDs as the code generates them now."""
    folder = tmp_path_factory.mktemp("crds")
    for name, text in crds.files().items():
        (folder / name).write_text(text)
    names = ["rljobs.rlightning.io", "policygroups.rlightning.io"]
    existed = all(bare_kube.run("get", "crd", name).returncode == 0 for name in names)
    bare_kube.ok("apply", "--server-side", "--force-conflicts", "--filename", str(folder))
    bare_kube.ok("wait", "--for=condition=Established", "--timeout=30s", *(f"crd/{name}" for name in names))
    # Established comes a moment before every path of the server knows the schema.
    for _ in range(100):
        if bare_kube.run("explain", "rljob.spec.policy").returncode == 0:
            break
        time.sleep(0.1)
    try:
        yield bare_kube
    finally:
        if not existed:
            bare_kube.run("delete", "crd", "--wait=false", *names)
