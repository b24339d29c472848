"""hack/test and hack/cluster/install where KUBECONFIG names a cluster; nothing is built or booted here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hack import cluster
from hack.programs import binaries

ROOT = Path(__file__).parents[3]


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def run(script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    left_out = ("KUBECONFIG", "VALUES", "CI")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return subprocess.run([str(script)], env={**kept, **environment}, capture_output=True, text=True, timeout=60)


# ---------------------------------------------------------------------------------------------------------- hack/test


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """hack/test in a tree whose programs only say that they were called."""
    (tmp_path / "hack").mkdir()
    shutil.copy2(ROOT / "hack" / "test", tmp_path / "hack" / "test")
    program(tmp_path / ".venv" / "bin" / "python", 'echo "called: python $*"')
    program(tmp_path / "hack" / "programs" / "build", 'echo "called: build $*"; [ "$1" != --check ] || [ -n "$GO" ]')
    program(tmp_path / "hack" / "setup", 'echo "called: setup $*"')
    return tmp_path


CLUSTER_PART = "called: python -m pytest --durations 10 -m cluster and not faults"
CHECK = "called: python -m hack.cluster check"


@pytest.mark.parametrize("environment", [{}, {"CI": "1"}])
def test_with_kubeconfig_the_clusters_tests_are_left_out(tree: Path, environment: dict[str, str]) -> None:
    done = run(tree / "hack" / "test", KUBECONFIG="/some/config", GO="1", **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "KUBECONFIG is set: the tests of the cluster boot one of their own; unset it to run them\n" in done.stdout
    assert CLUSTER_PART not in done.stdout and CHECK not in done.stdout
    assert "called: build \n" in done.stdout
    without = run(tree / "hack" / "test", GO="1", **environment)
    assert CLUSTER_PART in without.stdout


@pytest.mark.parametrize("environment", [{}, {"KUBECONFIG": "/some/config"}])
def test_a_go_is_fetched_where_one_is_needed_and_missing(tree: Path, environment: dict[str, str]) -> None:
    assert "called: setup go\ncalled: build \n" in run(tree / "hack" / "test", **environment).stdout
    assert "called: setup" not in run(tree / "hack" / "test", GO="1", **environment).stdout


# ------------------------------------------------------------------------------------------------- hack/cluster/install


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, str]:
    """The path with a kubectl and a helm, and a cache in which nothing was built."""
    for name in ("kubectl", "helm"):
        program(tmp_path / "bin" / name, f'echo "called: {name} $*" >>{tmp_path}/calls')
    return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "RLIGHTNING_CACHE": str(tmp_path / "cache")}


@pytest.mark.parametrize("script", ["install", "demo"])
def test_a_cluster_that_is_given_needs_values_for_its_images(
    tmp_path: Path, tools: dict[str, str], script: str
) -> None:
    done = run(ROOT / "hack" / "cluster" / script, KUBECONFIG="/some/config", **tools)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "KUBECONFIG=… VALUES=my-values.yaml make demo-cluster" in done.stderr
    assert not (tmp_path / "calls").exists()


def test_a_cluster_that_is_given_is_driven_by_the_programs_on_the_path(tmp_path: Path, tools: dict[str, str]) -> None:
    done = run(ROOT / "hack" / "cluster" / "install", KUBECONFIG="/some/config", VALUES="my-values.yaml", **tools)
    assert done.returncode == 0, done.stderr
    kubectl, helm = (tmp_path / "calls").read_text().splitlines()
    assert kubectl.startswith("called: kubectl get deployment rlightning-operator")
    assert helm.startswith("called: helm upgrade --install rlightning charts/rlightning")
    assert " --values my-values.yaml " in helm
    assert not (tmp_path / "cache" / "bin").exists()


def test_the_machines_own_cluster_is_no_strange_one(
    tmp_path: Path, tools: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With KUBECONFIG as `hack.cluster up` prints it the default values are right, and our programs are taken."""
    monkeypatch.setenv("RLIGHTNING_CACHE", tools["RLIGHTNING_CACHE"])
    for name in ("kubectl", "helm"):
        program(binaries._folder(name) / name, f'echo "ours: {name} $*" >>{tmp_path}/calls')
    done = run(ROOT / "hack" / "cluster" / "install", KUBECONFIG=str(cluster.kubeconfig()), **tools)
    assert done.returncode == 0, done.stderr
    kubectl, helm = (tmp_path / "calls").read_text().splitlines()
    assert kubectl.startswith("ours: kubectl")
    assert helm.startswith("ours: helm") and " --values hack/cluster/values.yaml " in helm
