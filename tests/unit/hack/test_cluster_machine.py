"""The cluster and the machine under it: what it refuses, and what it recognises as its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hack.cluster import addons, layout, machine, network, processes
from hack.cluster.layout import ClusterError


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
