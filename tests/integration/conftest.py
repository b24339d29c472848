"""One API server for all tests that need one: a bare one of ours, or the cluster that KUBECONFIG names."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.apiserver.server import ApiServer, ServerError
from hack.programs.binaries import BuildError, program
from rlightning.api import crds
from tests.support.kube import Kube, wait_for_crds


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
    wait_for_crds(bare_kube, names)
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
