"""The cluster's cgroups, version 1 (one tree per controller) or 2: in them ``down`` finds every process of the cluster.

``/rlightning`` holds the programs that are started here, with containerd's shims; ``/rlightning-<node>`` is where a
node's kubelet makes the cgroups of its pods.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

from hack.cluster import layout
from hack.cluster.layout import INSTEAD, ClusterError


def prepare(nodes: int) -> None:
    """Make the cgroups. Raises ClusterError where this machine does not let us."""
    try:
        services().parent.mkdir(exist_ok=True)
        for root in roots():
            controllers = _controllers(root)
            if _version_2(root) and not _hybrid(root):
                (root / "cgroup.subtree_control").write_text(" ".join(f"+{c}" for c in controllers))
            for number in range(1, nodes + 1):
                group = root / f"{layout.NAME}-{number}"
                group.mkdir(exist_ok=True)
                if (root / "cpuset.cpus").exists():  # version 1: a new cpuset is empty, and takes no process
                    for file in ("cpuset.cpus", "cpuset.mems"):
                        (group / file).write_text((root / file).read_text())
                # A node competes with every single process outside: at one process' share its pods would starve
                # beside a test run, and Ray's programs give one another up.
                for file, share in (("cpu.shares", "8192"), ("cpu.weight", "800")):
                    if (group / file).exists():
                        (group / file).write_text(share)
    except OSError as error:
        remedy = "Run this as root on the machine itself or in a privileged container with a writable /sys/fs/cgroup"
        if error.errno == errno.EBUSY:  # version 2 hands out no controllers where processes are; only the real root may
            remedy = "This container sees its own cgroup as the root: run the container with --cgroupns=host"
        raise ClusterError(
            f"cgroups cannot be made here ({error}); a kubelet needs that. {remedy}. {INSTEAD}"
        ) from None


def services() -> Path:
    """The file that a process writes its number into to join ``/rlightning``."""
    trees = roots()
    # Version 1: any one tree will do to find a process by; `pids` limits nothing by itself.
    chosen = next((root for root in trees if root.name == "pids"), trees[0])
    return chosen / layout.NAME / "cgroup.procs"


def processes() -> set[int]:
    """Every process in the cluster's cgroups."""
    found: set[int] = set()
    for top in ours():
        for group in _below(top):
            with contextlib.suppress(OSError):  # it went away meanwhile
                found.update(int(line) for line in (group / "cgroup.procs").read_text().split() if line != "0")
    return found


def remove(seconds: float = 10) -> None:
    """Remove the cgroups, which must be empty of processes; the kernel may need a moment for that."""
    deadline = time.monotonic() + seconds
    while True:
        stuck = []
        for top in ours():
            for group in sorted(_below(top), reverse=True):
                try:
                    group.rmdir()
                except FileNotFoundError:
                    continue
                except OSError as error:
                    stuck.append(f"{group}: {error.strerror}")
        if not stuck:
            return
        if time.monotonic() > deadline:
            raise ClusterError(f"cgroups could not be removed: {'; '.join(stuck[:3])}. `cat {top}/**/cgroup.procs`")
        time.sleep(0.2)


def _below(top: Path) -> list[Path]:
    """A cgroup and all in it. Of those that go away meanwhile, as cgroups do whose processes were just killed, some may
    be missing and some be named: `os.walk` passes over what is gone, where `Path.rglob` of Python 3.11 raises.
    """
    return [Path(path) for path, _, _ in os.walk(top)]


def roots() -> list[Path]:
    """Where the trees of cgroups are mounted. Raises ClusterError if none is, or not for writing."""
    found = _mounted()
    if not found:
        raise ClusterError(
            "no writable cgroup tree is mounted under /sys/fs/cgroup, which a kubelet needs. Run this as root on the "
            f"machine itself or in a privileged container. {INSTEAD}"
        )
    return found


def _mounted() -> list[Path]:
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
    except OSError:  # not a Linux
        return []
    found: dict[Path, None] = {}
    for line in mounts:
        _, where, kind, options, *_ = line.split()
        # A mount that another one lies over is listed, too.
        if kind in ("cgroup", "cgroup2") and "ro" not in options.split(",") and (Path(where) / "cgroup.procs").exists():
            found[Path(where)] = None
    return list(found)


def ours() -> Iterator[Path]:
    """The cluster's top cgroups that exist, in every tree."""
    for root in _mounted():
        for child in root.iterdir():
            if child.is_dir() and (child.name == layout.NAME or layout.is_node_mark(child.name)):
                yield child


def _version_2(root: Path) -> bool:
    return (root / "cgroup.controllers").exists()


def _hybrid(root: Path) -> bool:
    """A version 2 tree beside those of version 1, without controllers."""
    return root != Path("/sys/fs/cgroup")


def _controllers(root: Path) -> list[str]:
    return (root / "cgroup.controllers").read_text().split() if _version_2(root) else []
