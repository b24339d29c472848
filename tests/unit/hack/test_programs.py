"""Kubernetes' programs: which Go builds them, which are needed, and what happens at the same time."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from hack.cluster import kuberay
from hack.programs import binaries


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLIGHTNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    return tmp_path / "cache"


def go(folder: Path, version: str, otherwise: str = "exit 1") -> str:
    """A Go that says its version, and does something else for everything else."""
    folder.mkdir()
    program = folder / "go"
    program.write_text(f"#!/bin/sh\n[ \"$*\" = 'env GOVERSION' ] && {{ {version}; exit; }}\n{otherwise}\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("version", ["go1.26.0", "go1.27rc1", "go1.100.1", "go2.0", "devel go1.27-2f45b1a Mon Feb 2"])
def test_the_first_go_that_is_new_enough_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    old, new = go(tmp_path / "old", "echo go1.19.8"), go(tmp_path / "new", f"echo '{version}'")
    broken = go(tmp_path / "broken", "exit 126")
    monkeypatch.setattr(binaries, "_go_candidates", lambda: ["", "/no/go", broken, old, new])
    assert binaries.go_program() == new


def test_where_only_older_ones_are_the_error_names_them_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With GOTOOLCHAIN=local: else an old one may answer with the version that it would fetch.
    old = go(tmp_path / "old", '[ "$GOTOOLCHAIN" = local ] && echo go1.25.9 || echo go1.26.8')
    broken = go(tmp_path / "broken", "exit 126")
    monkeypatch.setattr(binaries, "_go_candidates", lambda: [old, broken])
    with pytest.raises(binaries.BuildError) as raised:
        binaries.program("etcd")
    assert f"{old} is go1.25.9, {broken} does not tell its version" in str(raised.value)
    assert "`hack/setup go`" in str(raised.value)


def test_named_programs_are_printed_and_a_failed_build_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(binaries, "_go_candidates", lambda: [])
    kubectl = binaries._folder("kubectl") / "kubectl"
    kubectl.parent.mkdir(parents=True)
    kubectl.touch()
    assert binaries.main(["kubectl"]) == 0
    assert capsys.readouterr().out == f"{kubectl}\n"
    for arguments, words in (
        (["kubectl", "helm"], "Kubernetes' programs are built with Go >= 1.26, and there is none. Install"),
        (["kubelt"], "there is no program kubelt; there are etcd, "),
    ):
        assert binaries.main(arguments) == 1
        assert capsys.readouterr().err.startswith(f"hack/programs/build: {words}")


def test_a_go_is_only_asked_for_where_a_needed_program_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "_go_candidates", lambda: [])
    assert binaries.main(["--check"]) == 1
    for name in binaries.WITH_KUBECONFIG:
        file = binaries._folder(name) / name
        file.parent.mkdir(parents=True)
        file.touch()
    assert binaries.main(["--check"]) == 1
    monkeypatch.setenv("KUBECONFIG", "/some/config")
    assert {"kubectl", "helm"} <= set(binaries.WITH_KUBECONFIG)
    assert binaries.main(["--check"]) == 0


def test_kuberays_crds_are_fetched_once_even_by_two_at_a_time_and_without_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    module = tmp_path / "module"
    (module / "config" / "crd" / "bases").mkdir(parents=True)
    (module / "config" / "crd" / "bases" / "ray.io_rayclusters.yaml").write_text("kind: CustomResourceDefinition\n")
    (module / "config" / "crd" / "bases" / "ray.io_rayclusters.yaml").chmod(0o444)
    fetched = tmp_path / "fetched"
    answer = json.dumps({"Dir": str(module)})
    fetch = f"echo $GOPATH $GOCACHE $GOFLAGS >>{fetched}; sleep 0.3; echo '{answer}'"
    toolchain = go(tmp_path / "go", "echo go1.26.8", fetch)
    monkeypatch.setattr(binaries, "_go_candidates", lambda: [toolchain])
    built = binaries._folder("ray-operator") / "ray-operator"
    built.parent.mkdir(parents=True)
    built.touch()
    for variable in ("HOME", "GOPATH", "GOCACHE"):
        monkeypatch.delenv(variable, raising=False)
    threads = [threading.Thread(target=kuberay.crds) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(kuberay.crds_by_name()) == ["rayclusters.ray.io"]
    assert fetched.read_text() == f"{cache / 'go'} {cache / 'go-build'} -mod=mod\n"
    assert sorted(path.name for path in built.parent.iterdir()) == ["crds", "ray-operator"]


def test_a_failed_build_shows_the_end_of_gos_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = go(tmp_path / "go", "echo go1.26.8", "echo 'go: downloading x'; echo 'no module proxy here' >&2; exit 1")
    monkeypatch.setattr(binaries, "_go_candidates", lambda: [broken])
    with pytest.raises(binaries.BuildError) as raised:
        binaries.program("etcd")
    assert str(raised.value).endswith("\nno module proxy here")
    assert not binaries.is_built("etcd")
