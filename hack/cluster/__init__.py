"""A real Kubernetes cluster of two nodes with KubeRay on this machine: ``python -m hack.cluster``, see README.md."""

from hack.cluster.cluster import Cluster, build_images, check, down, is_up, session, status, up
from hack.cluster.layout import ClusterError, kubeconfig

__all__ = ["Cluster", "ClusterError", "build_images", "check", "down", "is_up", "kubeconfig", "session", "status", "up"]
