"""One cluster for all tests that need one: this machine's own, or the one that KUBECONFIG names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hack import cluster as local
from hack.cluster import Cluster, ClusterError
from hack.programs.binaries import BuildError
from tests.support.cluster_jobs import Job, Start
from tests.support.installation import Installation
from tests.support.kube import Kube, eventually
from tests.support.local_runs import LocalRuns

BOOTED = pytest.StashKey[Cluster | str]()
"""The cluster, or why there is none."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Boot before the first test: building images may take longer than a test is allowed to."""
    needed = any("cluster" in getattr(item, "fixturenames", ()) for item in session.items)
    if not needed or session.config.option.collectonly:
        return
    if given := os.environ.get("KUBECONFIG"):
        session.config.stash[BOOTED] = Cluster(Path(given), local=Path(given) == local.kubeconfig())
        return
    cleanup = contextlib.ExitStack()
    session.config.add_cleanup(cleanup.close)
    try:
        cleanup.enter_context(local.session())
        if not local.is_up() and not os.environ.get("KEEP_CLUSTER"):  # what was up before stays up
            cleanup.callback(local.down)
        session.config.stash[BOOTED] = local.up()
    except (ClusterError, BuildError) as error:
        session.config.stash[BOOTED] = str(error)


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config) -> Cluster:
    """Up, with KubeRay, policies enforced and the images as the code is now."""
    booted = pytestconfig.stash[BOOTED]
    if isinstance(booted, str):
        pytest.fail(booted, pytrace=False)
    return booted


@pytest.fixture(scope="session")
def installation(cluster: Cluster) -> Installation:
    """With the chart on it."""
    return Installation.install(cluster)


@pytest.fixture(scope="module")
def namespace(installation: Installation, request: pytest.FixtureRequest) -> Iterator[Kube]:
    """A namespace for the tests of one file, with a bound claim ``runs``."""
    with installation.namespace(request.module.__name__.rpartition("test_")[2].replace("_", "-")) as kube:
        yield kube


@pytest.fixture(scope="session")
def local_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRuns]:
    """Undisturbed runs on this machine."""
    runs = LocalRuns(tmp_path_factory.mktemp("local-runs"))
    yield runs
    runs.close()


@pytest.fixture
def start(namespace: Kube) -> Iterator[Start]:
    """Applies RLJobs; afterwards they are deleted and their pods gone, so that the next test has the nodes."""
    jobs: list[Job] = []

    def apply(manifest: dict[str, Any]) -> Job:
        jobs.append(Job(namespace, manifest))
        return jobs[-1].create()

    yield apply
    for job in jobs:
        namespace.run("delete", "rljob", job.name, "--ignore-not-found", "--wait=false")
    for job in jobs:
        eventually(job.is_released, seconds=90, what=f"the pods of {job.name} are gone", now=job.describe_leftovers)
