"""Whether this machine can carry a cluster: what is missing is installed where that is possible, or said."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hack.cluster import cgroups, layout, network, processes
from hack.cluster.layout import INSTEAD, ClusterError
from hack.cluster.nodes import CNI_PLUGINS
from hack.programs.binaries import BuildError, go_program, is_built

# A program (or file) that is needed → the Debian packages that bring it.
PACKAGES: dict[str, tuple[str, ...]] = {
    "containerd": ("containerd",),
    "ctr": ("containerd",),
    "runc": ("runc",),
    str(CNI_PLUGINS / "bridge"): ("containernetworking-plugins",),
    "buildah": ("buildah",),
    "debootstrap": ("debootstrap",),
    "iptables": ("iptables",),
    "ipset": ("ipset",),
    "ip": ("iproute2",),
    "conntrack": ("conntrack",),
    "gcc": ("gcc", "libc6-dev"),
    "openssl": ("openssl",),
    "nsenter": ("util-linux",),
    "modprobe": ("kmod",),
}

# What the kernel must be able to do, each tried in a network namespace that is gone afterwards.
KERNEL = {
    "bridges": "ip link add name br9 type bridge",
    "pairs of virtual links": "ip link add name v9 type veth peer name w9",
    "netfilter on bridges (module br_netfilter)": "test -e /proc/sys/net/bridge/bridge-nf-call-iptables",
    "iptables with NAT": "iptables -t nat -A POSTROUTING -m comment --comment x -j MASQUERADE",
    "iptables with connection tracking": "iptables -A FORWARD -m conntrack --ctstate ESTABLISHED -j ACCEPT",
    "iptables with statistics": "iptables -A FORWARD -m statistic --mode random --probability 0.5 -j ACCEPT",
}
POLICIES = {"ipset": "ipset create x9 hash:ip && iptables -A FORWARD -m set --match-set x9 src -j ACCEPT"}


PROGRAMS = (
    *("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"),
    *("kubelet", "kube-proxy", "kube-router", "coredns", "ray-operator"),
)


def check(policies: bool, install: bool = True) -> None:
    """Raises ClusterError with the remedy if the cluster cannot run here.

    With ``install``, Debian packages that are missing are installed; else it suffices that they could be.
    """
    check_system(install)
    if not any(not _there(needed) for needed in PACKAGES):
        _check_kernel({**KERNEL, **POLICIES} if policies else KERNEL)
    longest = layout.node_state(1) / "kubelet" / "pod-resources" / "kubelet.sock"
    if len(str(longest)) > 100:
        raise ClusterError(
            f"the path {longest} is too long for a socket (107 characters at most); set RLIGHTNING_CACHE to a folder "
            "with a shorter path"
        )
    check_owner()
    if (layout.DEVICE_PLUGINS / "kubelet.sock").exists() and not layout.state().exists():
        raise ClusterError(
            f"{layout.DEVICE_PLUGINS / 'kubelet.sock'} exists: this machine is a node of another Kubernetes cluster "
            f"(if it no longer is, remove that file). {INSTEAD}"
        )
    cgroups.roots()
    if shutil.which("ip"):
        network.check_addresses()


def check_system(install: bool) -> None:
    """Raises ClusterError unless this is Linux, with root's rights, the programs and packages that are needed."""
    if platform.system() != "Linux":
        raise ClusterError(f"the cluster needs Linux; this is {platform.system()}. {INSTEAD}")
    if os.geteuid() != 0:
        raise ClusterError(f"the cluster makes network namespaces, mounts and cgroups, which takes root. {INSTEAD}")
    if not all(is_built(name) for name in PROGRAMS):
        try:
            go_program()
        except BuildError as error:
            raise ClusterError(str(error)) from None
    if install:
        install_packages()
    elif not shutil.which("apt-get"):
        _missing_packages()


def check_owner() -> None:
    """Raises ClusterError if the cluster that is up on this machine has its state in another folder."""
    if (owner := _owner()) != str(layout.state()):
        raise ClusterError(
            f"another cluster is up, with its state in {owner}; take it down first: "
            f"RLIGHTNING_CACHE={Path(owner).parent} python -m hack.cluster down"
        )


def claim() -> None:
    """Note that the cluster of this state folder is the machine's one."""
    layout.RUN.mkdir(mode=0o700, exist_ok=True)
    (layout.RUN / "owner").write_text(str(layout.state()))


def install_packages() -> None:
    """Install what is missing, or say what is."""
    packages = _missing_packages()
    if not packages:
        return
    print(f"installing Debian packages: {' '.join(packages)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    for command in (["apt-get", "update", "-qq"], install):
        processes.run(*command, seconds=900, env=environment)
    if still := [needed for needed in PACKAGES if not _there(needed)]:
        raise ClusterError(f"apt-get installed {' '.join(packages)}, and yet there is no {', '.join(still)}. {INSTEAD}")


def _missing_packages() -> list[str]:
    """Debian packages to install. Raises ClusterError if there are some, and no apt-get."""
    missing = [needed for needed in PACKAGES if not _there(needed)]
    packages = sorted({package for needed in missing for package in PACKAGES[needed]})
    if missing and not shutil.which("apt-get"):
        raise ClusterError(
            f"missing: {', '.join(missing)}. Install them (Debian's packages: {' '.join(packages)}); there is no "
            f"apt-get here to do so. {INSTEAD}"
        )
    return packages


def _there(needed: str) -> bool:
    return shutil.which(needed, path=processes.environment()["PATH"]) is not None


def _check_kernel(features: dict[str, str]) -> None:
    if "overlay" not in Path("/proc/filesystems").read_text():
        _load("overlay")
    if "overlay" not in Path("/proc/filesystems").read_text():
        raise ClusterError(f"this kernel has no overlay file system, which containers' files are made of. {INSTEAD}")
    if not Path("/proc/sys/net/bridge").exists():
        _load("br_netfilter")
    lacking = {feature: _try(["unshare", "--net", "sh", "-ec", command]) for feature, command in features.items()}
    lacking = {feature: said for feature, said in lacking.items() if said}
    if lacking:
        what = "; ".join(f"{feature} ({said})" for feature, said in lacking.items())
        remedy = "Run it on a kernel that has that"
        if set(lacking) <= set(POLICIES):
            remedy = "`--no-policies` does without NetworkPolicies"
        raise ClusterError(f"this kernel, or this container, does not offer: {what}. {remedy}. {INSTEAD}")


def _load(module: str) -> None:
    _try(["modprobe", module])  # built in, or not allowed: the check afterwards decides


def _try(command: Sequence[str]) -> str:
    """Run a command; what it complained of, "" if it succeeded."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=processes.environment(), check=False
    )
    return "" if done.returncode == 0 else done.stderr.strip()[:200] or f"exit status {done.returncode}"


def _owner() -> str:
    """The state folder of the cluster that is up. Where none is noted, or one that is gone, it is ours to clean up."""
    try:
        owner = (layout.RUN / "owner").read_text()
    except OSError:
        owner = ""
    return owner if owner and Path(owner).is_dir() else str(layout.state())


# Settings of the whole machine that a kubelet changes for itself; `down` puts them back.
_KUBELET_SETTINGS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)


def remember_settings() -> None:
    for name in _KUBELET_SETTINGS:
        kept = layout.state() / "settings" / name
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text((Path("/proc/sys") / name).read_text())


def restore_settings() -> None:
    for name in _KUBELET_SETTINGS:
        kept = layout.state() / "settings" / name
        if kept.exists() and (before := kept.read_text()) != (Path("/proc/sys") / name).read_text():
            (Path("/proc/sys") / name).write_text(before)
