"""The test bed's own promises: it goes without a trace, whoever is killed, and says what it lacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hack.apiserver import server
from hack.programs import binaries

pytestmark = pytest.mark.apiserver

CALLER = """
import sys, time
from hack.apiserver.server import ApiServer
with ApiServer() as server:
    print(server.kubeconfig, server._supervisor.pid, flush=True)
    time.sleep(600)
"""


def eventually(condition: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def programs_of(state: Path) -> list[int]:
    """PIDs of all processes that work in the state folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd").startswith(str(state)):
                found.append(int(process.name))
        except OSError:
            continue
    return found


@pytest.fixture
def caller() -> tuple[subprocess.Popen[str], Path, int]:
    """A process that has booted a server, the server's state folder, and its supervisor's PID."""
    if os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG is set: no server of our own is used")
    process = subprocess.Popen(
        [sys.executable, "-c", CALLER],
        cwd=binaries.ROOT,
        env={**os.environ, "PYTHONPATH": str(binaries.ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    kubeconfig, supervisor = process.stdout.readline().split()
    state = Path(kubeconfig).parent
    assert len(programs_of(state)) == 2
    return process, state, int(supervisor)


def test_nothing_stays_behind_when_the_test_run_is_killed(caller: tuple[subprocess.Popen[str], Path, int]) -> None:
    process, state, _ = caller
    process.kill()
    process.wait()
    assert eventually(lambda: not state.exists())
    assert programs_of(state) == []


def test_a_killed_supervisor_takes_its_programs_along_and_the_next_boot_sweeps_up(
    caller: tuple[subprocess.Popen[str], Path, int],
) -> None:
    process, state, supervisor = caller
    os.kill(supervisor, signal.SIGKILL)
    assert eventually(lambda: programs_of(state) == [])
    assert state.exists()
    process.kill()  # reaps the supervisor, whose number nobody else may have
    process.wait()
    assert eventually(lambda: not Path(f"/proc/{supervisor}").exists())
    server._sweep()
    assert not state.exists()


def test_without_go_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLIGHTNING_CACHE", str(tmp_path))
    monkeypatch.setattr(binaries, "_go_candidates", lambda: [])
    with pytest.raises(binaries.BuildError, match=r"Install Go 1\.26 or newer .* or set KUBECONFIG"):
        binaries.program("etcd")


def test_a_failed_build_shows_the_end_of_gos_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "go"
    version = "[ $1 = env ] && { echo go1.26.8; exit; }\n"
    broken.write_text(f"#!/bin/sh\n{version}echo 'go: downloading x'\necho 'no module proxy here' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("RLIGHTNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(binaries, "_go_candidates", lambda: [str(broken)])
    with pytest.raises(binaries.BuildError) as raised:
        binaries.program("etcd")
    assert str(raised.value).endswith("\nno module proxy here")
    assert not binaries.is_built("etcd")
