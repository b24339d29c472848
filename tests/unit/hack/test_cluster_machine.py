"""The cluster and the machine under it: what it refuses, and what it recognises as its own."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hack.cluster import addons, cgroups, cluster, layout, machine, network, processes, teardown
from hack.cluster.layout import ClusterError
from hack.programs import binaries


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLIGHTNING_CACHE", str(tmp_path))
    return tmp_path


def test_without_roots_rights_it_says_what_to_use_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match=r"takes root.*KUBECONFIG"):
        machine.check(policies=True, install=False)


def test_a_network_that_the_machine_uses_itself_is_refused() -> None:
    routes = [{"dst": "default", "dev": "eth0"}, {"dst": "10.96.4.0/24", "dev": "docker0"}]
    assert "10.96.4.0/24 to docker0" in network.conflict(routes)
    assert network.conflict([{"dst": "default", "dev": "eth0"}, {"dst": "192.168.0.0/16", "dev": "eth0"}]) == ""
    assert network.conflict([{"dst": "10.0.0.0/8", "dev": "vpn0"}]) != ""
    assert network.conflict([{"dst": "10.244.0.0/16", "dev": network.HOST_LINK}]) == ""


def test_a_process_that_got_the_number_of_one_that_ended_is_not_ours() -> None:
    pids = layout.state() / "pids"
    pids.mkdir(parents=True)
    mine = {"pid": os.getpid(), "start": processes.start_time(os.getpid())}
    (pids / "etcd").write_text(json.dumps(mine))
    (pids / "kubelet-1").write_text(json.dumps({**mine, "start": "1"}))
    (pids / "half-written").write_text("{")
    assert processes.running("etcd") == os.getpid()
    assert processes.running("kubelet-1") is None
    assert processes.running("half-written") is None
    assert processes.running("never-started") is None


def test_a_program_that_ended_before_it_was_noted_does_not_count_as_running() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    pids = layout.state() / "pids"
    pids.mkdir(parents=True)
    (pids / "etcd").write_text(json.dumps({"pid": child.pid, "start": ""}))
    assert processes.running("etcd") is None
    with pytest.raises(ClusterError, match="etcd ended"):
        processes.wait_for("etcd", lambda: True, 5, ["etcd"])


def test_a_program_that_ends_at_once_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "services", lambda: tmp_path / "cgroup.procs")
    start_time = processes.start_time

    def ended(pid: int) -> str:
        deadline = time.monotonic() + 10
        while start_time(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        return start_time(pid)

    monkeypatch.setattr(processes, "start_time", ended)
    with pytest.raises(ClusterError, match="kubelet-1 ended at once: no such flag"):
        processes.start("kubelet-1", ["sh", "-c", "echo no such flag >&2; exit 2"])
    assert processes.started() == ["kubelet-1"]
    assert processes.running("kubelet-1") is None


def test_a_wait_says_what_for_and_shows_the_log_of_the_program_that_ended() -> None:
    layout.logs().mkdir(parents=True)
    processes.log("etcd").write_text("first\nlast words\n")
    with pytest.raises(ClusterError, match=r"(?s)waited for the moon: etcd ended.*last words"):
        processes.wait_for("the moon", lambda: True, 5, ["etcd"])
    with pytest.raises(ClusterError, match=r"waited for the moon: it did not happen within 0\.1 s"):
        processes.wait_for("the moon", lambda: False, 0.1)


def test_a_failed_program_is_quoted() -> None:
    with pytest.raises(ClusterError, match="`sh -c echo no >&2; exit 3` failed with exit status 3: no"):
        processes.run("sh", "-c", "echo no >&2; exit 3")
    with pytest.raises(ClusterError, match="no-such-program is not on this machine"):
        processes.run("no-such-program")


def test_sockets_and_links_keep_within_the_kernels_limits() -> None:
    assert len(network.HOST_LINK) <= 15
    assert len(str(layout.containerd_socket(1)) + ".ttrpc") <= 107


def test_volumes_belong_to_the_user_that_images_run_as() -> None:
    dockerfile = (Path(__file__).parents[3] / "Dockerfile").read_text()
    assert f"USER {addons.OWNER}:{addons.OWNER}\n" in dockerfile


@pytest.fixture
def removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The machine's note of whose cluster is up, in a folder of the test's; what `down` removed."""
    monkeypatch.setattr(layout, "RUN", tmp_path / "run")
    layout.RUN.mkdir()
    calls: list[str] = []
    monkeypatch.setattr(teardown, "remove_all", lambda: calls.append("all"))
    return calls


def test_down_leaves_a_cluster_alone_that_has_its_state_elsewhere(tmp_path: Path, removed: list[str]) -> None:
    theirs = tmp_path / "theirs" / "cluster"
    theirs.mkdir(parents=True)
    (layout.RUN / "owner").write_text(str(theirs))
    says = f"another cluster is up, with its state in {theirs}; take it down first: RLIGHTNING_CACHE={theirs.parent} "
    with pytest.raises(ClusterError, match=re.escape(says)):
        cluster.down()
    assert removed == []
    assert cluster.status().startswith(says)


@pytest.mark.parametrize("owner", [None, "", "/gone/cluster", "ours"])
def test_down_cleans_up_what_is_ours_or_nobodys(removed: list[str], owner: str | None) -> None:
    if owner is not None:
        (layout.RUN / "owner").write_text(str(layout.state()) if owner == "ours" else owner)
    cluster.down()
    assert removed == ["all"]


def test_a_container_without_the_real_cgroup_root_is_told_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    monkeypatch.setattr(cgroups, "roots", lambda: [tmp_path])
    monkeypatch.setattr(cgroups, "_hybrid", lambda _: False)
    write = Path.write_text

    def busy(path: Path, text: str) -> int:
        if path.name == "cgroup.subtree_control":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", busy)
    with pytest.raises(ClusterError, match=r"resource busy.*run the container with --cgroupns=host\. Or "):
        cgroups.prepare(1)


def test_an_old_go_is_told_before_anything_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "go"
    old.write_text("#!/bin/sh\necho go1.19.8\n")
    old.chmod(0o755)
    monkeypatch.setattr(binaries, "_go_candidates", lambda: [str(old)])
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(ClusterError, match=rf"{old} is go1\.19\.8\. .*`hack/setup go`"):
        machine.check_system(install=False)


class Listing(contextlib.AbstractContextManager["Listing"], Iterator["os.DirEntry[Any]"]):
    """What `os.scandir` returns, read to its end already."""

    def __init__(self, entries: Iterable[os.DirEntry[Any]]) -> None:
        self._left = list(entries)

    def __next__(self) -> os.DirEntry[Any]:
        if not self._left:
            raise StopIteration
        return self._left.pop()

    def __exit__(self, *_: object) -> None:
        self._left.clear()


def test_a_cgroup_that_goes_away_while_processes_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, pid in (("pod-a", 41), ("pod-b", 42)):
        (tmp_path / "top" / name / "container").mkdir(parents=True)
        (tmp_path / "top" / name / "cgroup.procs").write_text(f"{pid}\n0\n")
    scandir = os.scandir

    def listed(path: str | Path | int) -> Listing:
        with scandir(path) as entries:
            found = Listing(entries)
        if path in (tmp_path / "top", str(tmp_path / "top")) and (tmp_path / "top" / "pod-b").exists():
            shutil.rmtree(tmp_path / "top" / "pod-b")
        return found

    monkeypatch.setattr(os, "scandir", listed)
    monkeypatch.setattr(cgroups, "ours", lambda: iter([tmp_path / "top"]))
    assert cgroups.processes() == {41}
    assert not (tmp_path / "top" / "pod-b").exists()
