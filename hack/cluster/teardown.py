"""Taking a cluster down, whatever state it is in: no process, mount, namespace, link, cgroup or file of it stays.

Only what bears the cluster's mark is touched: processes in its cgroups and network namespaces, or with a pid file whose
start time agrees; mounts and files below its folders.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from hack.cluster import cgroups, layout, machine, network, processes
from hack.cluster.images.buildah import unmount_below
from hack.cluster.layout import ClusterError
from hack.cluster.processes import run
from hack.programs.binaries import cache_folder


def traces() -> list[str]:
    """What there is of a cluster, running or not; empty after ``down``."""
    found = [f"folder {path}" for path in (layout.state(), layout.RUN) if path.exists()]
    found += [f"process {pid}" for pid in sorted(_processes())]
    found += [f"network namespace {name}" for name in network.namespaces()]
    found += [f"cgroup {group}" for group in cgroups.ours()]
    found += [f"link {network.HOST_LINK}"] if Path(f"/sys/class/net/{network.HOST_LINK}").exists() else []
    return found


def remove_all() -> None:
    """Remove every trace."""
    if not traces():
        return
    sockets = _shim_sockets()
    _end_processes()
    for folder in (layout.state(), layout.RUN):
        unmount_below(folder)
    network.down()
    cgroups.remove()
    machine.restore_settings()
    for socket in sockets:
        socket.unlink(missing_ok=True)
    _remove_links_outside()
    _keep_logs()
    for folder in (layout.state(), layout.RUN):
        if folder.exists():
            run("rm", "-rf", "--one-file-system", folder, seconds=300)
    if left := traces():
        raise ClusterError(f"left of the cluster after taking it down: {', '.join(left)}")


def _processes() -> set[int]:
    found = cgroups.processes()
    found |= {pid for name in processes.started() if (pid := processes.running(name)) is not None}
    for name in network.namespaces():
        found |= {int(pid) for pid in run("ip", "netns", "pids", name).split()}
    return found - {os.getpid()}


def _end_processes(seconds: float = 30) -> None:
    """Kill, again and again until nobody is left: what is being killed may just have started another."""
    deadline = time.monotonic() + seconds
    while left := _processes():
        if time.monotonic() > deadline:
            raise ClusterError(f"processes of the cluster do not end: {_describe(left)}")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _describe(pids: set[int]) -> str:
    names = []
    for pid in sorted(pids):
        with contextlib.suppress(OSError):
            names.append(f"{pid} {Path(f'/proc/{pid}/comm').read_text().strip()}")
    return ", ".join(names)


def _shim_sockets() -> list[Path]:
    """Sockets of containerd's shims, which have one folder for all containerds of a machine."""
    found = []
    for file in layout.state().glob("node*/run/io.containerd.runtime.v2.task/*/*/address"):
        with contextlib.suppress(OSError):
            found.append(Path(file.read_text().strip().removeprefix("unix://")))
    return found


def _remove_links_outside() -> None:
    """Files in folders whose place is fixed: the network plugins' cache, the kubelet's socket for devices and its links
    to logs; and the folders themselves, if they are empty now.
    """
    for file in ("kubelet.sock", "kubelet_internal_checkpoint"):
        (layout.DEVICE_PLUGINS / file).unlink(missing_ok=True)
    for cached in Path("/var/lib/cni/results").glob("*"):
        with contextlib.suppress(OSError):
            if f"{layout.state()}/" in cached.read_text(errors="replace"):  # the path of the pod's network namespace
                cached.unlink()
    for link in Path("/var/log/containers").glob("*.log"):
        with contextlib.suppress(OSError):
            if link.is_symlink() and os.readlink(link).startswith(f"{layout.state()}/"):
                link.unlink()
    for folder in _OUTSIDE:
        with contextlib.suppress(OSError):  # not there, or others use it
            os.rmdir(folder)


_OUTSIDE = (
    str(layout.DEVICE_PLUGINS),
    "/var/lib/kubelet",
    "/var/lib/cni/results",
    "/var/lib/cni/cache",
    "/var/lib/cni",
    "/var/log/containers",
    "/run/containerd/s",
    "/run/containerd",
)


def _keep_logs() -> None:
    """Logs outlive the cluster by one: whoever asks why a test failed still finds them."""
    if layout.logs().exists():
        last = cache_folder() / "cluster-last-logs"
        run("rm", "-rf", last)
        layout.logs().rename(last)
