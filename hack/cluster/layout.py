"""Where the cluster lives on this machine: its folders, names and addresses; fixed, for there is one at a time."""

from __future__ import annotations

import re
from pathlib import Path

from hack.programs.binaries import cache_folder

NAME = "rlightning"
"""Network namespaces and cgroups are ``rlightning-<node>``, the link to the host is ``rlightning-host``."""

RUN = Path("/run/rlightning")
"""Sockets, which must have short paths (at most 107 characters), and a note of whose cluster it is."""

DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")
"""Where every kubelet looks for devices, whatever its own folder is."""

NODES = 2
POD_NETWORK = "10.244.0.0/16"
SERVICE_NETWORK = "10.96.0.0/16"
NODE_NETWORK = "10.250.0.0/24"
HOST_ADDRESS = "10.250.0.254"
API_ADDRESS = "10.250.0.1"
API = f"https://{API_ADDRESS}:6443"
KUBERNETES_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"

INSTEAD = (
    "Or `KUBECONFIG=… VALUES=… make demo-cluster`, on a cluster that has KubeRay and can pull the images that VALUES "
    "names"
)
"""What to do where this cluster cannot run."""


class ClusterError(Exception):
    """The cluster cannot do what was asked; the message says what, where and what to do about it."""


def state() -> Path:
    """Everything of the running cluster: certificates, logs, etcd's data, the nodes' folders, volumes."""
    return cache_folder() / "cluster"


def logs() -> Path:
    """One log per component; ``down`` keeps them as ``cluster-last-logs`` beside."""
    return state() / "logs"


def kubeconfig() -> Path:
    """An administrator's."""
    return state() / "admin.kubeconfig"


def node_name(number: int) -> str:
    return f"node{number}"


def node_state(number: int) -> Path:
    return state() / node_name(number)


def node_address(number: int) -> str:
    return f"10.250.0.{number}"


def node_pods(number: int) -> str:
    return f"10.244.{number}.0/24"


def namespace(number: int) -> str:
    """The network namespace of a node; node 1's also holds the control plane."""
    return f"{NAME}-{number}"


def is_node_mark(name: str) -> bool:
    """Whether a network namespace or cgroup of this name is a node's of ours."""
    return re.fullmatch(rf"{NAME}-\d+", name) is not None


def containerd_socket(number: int) -> Path:
    return RUN / f"{node_name(number)}.sock"
