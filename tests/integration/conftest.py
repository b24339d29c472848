"""One API server for all tests that need one: a bare one of ours, or the cluster that KUBECONFIG names."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.apiserver.server import ApiServer, ServerError
from hack.programs.binaries import BuildError, program
from rlightning.api import crds
from tests.support.kube import Kube, eventually


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
    # Again, if need be: where a CRD has no conditions yet, kubectl says that they are no list.
    established = ("wait", "--for=condition=Established", "--timeout=30s", *(f"crd/{name}" for name in names))
    eventually(lambda: bare_kube.run(*established).returncode == 0, seconds=30, what="the CRDs are established")
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


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """One Ray for all tests of a file; the driver uses a Ray that is already up."""
    import ray

    ray.init(
        address="local",
        include_dashboard=False,
        logging_level=logging.WARNING,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()
