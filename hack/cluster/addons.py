"""What the cluster holds besides nodes: DNS, a default StorageClass with ready-made volumes, numbers of GPUs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from hack.cluster import layout
from hack.cluster.images import base

VOLUMES = 16
VOLUME_SIZE = "100Gi"
OWNER = 10001
"""User and group of the project's images, whom the volumes belong to."""

COREFILE = """\
cluster.local:53 in-addr.arpa:53 {
  errors
  ready
  health
  kubernetes cluster.local in-addr.arpa {
    pods insecure
  }
  cache 5
}
.:53 {
  # There is no world outside; saying so at once spares programs their timeouts.
  template ANY ANY {
    rcode NXDOMAIN
  }
}
"""


def dns() -> list[dict[str, Any]]:
    """CoreDNS, with the names and labels that it has in most clusters (NetworkPolicies select it by them)."""
    where = {"namespace": "kube-system", "name": "coredns"}
    labels = {"k8s-app": "kube-dns"}
    rules = [
        {"apiGroups": [""], "resources": ["endpoints", "services", "pods", "namespaces"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:coredns"}
    container = {
        "name": "coredns",
        "image": base.COREDNS,
        "imagePullPolicy": "Never",
        "args": ["-conf", "/etc/coredns/Corefile"],
        "ports": [
            {"containerPort": 53, "protocol": protocol, "name": f"dns-{protocol.lower()}"}
            for protocol in ("UDP", "TCP")
        ],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
        "livenessProbe": {
            "httpGet": {"path": "/health", "port": 8080},
            "initialDelaySeconds": 30,
            "failureThreshold": 5,
        },
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
        "volumeMounts": [{"name": "configuration", "mountPath": "/etc/coredns", "readOnly": True}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
        },
    }
    pod = {
        "serviceAccountName": "coredns",
        "priorityClassName": "system-cluster-critical",
        "dnsPolicy": "Default",
        "terminationGracePeriodSeconds": 0,
        "nodeSelector": {"kubernetes.io/hostname": layout.node_name(1)},
        "containers": [container],
        "volumes": [{"name": "configuration", "configMap": {"name": "coredns"}}],
    }
    service = {
        "clusterIP": layout.DNS_SERVICE,
        "selector": labels,
        "ports": [{"name": f"dns-{p.lower()}", "port": 53, "protocol": p} for p in ("UDP", "TCP")],
    }
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": where},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "system:coredns"},
            "rules": rules,
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "system:coredns"},
            "roleRef": role,
            "subjects": [{"kind": "ServiceAccount", **where}],
        },
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": where, "data": {"Corefile": COREFILE}},
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {**where, "labels": labels},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"namespace": "kube-system", "name": "kube-dns", "labels": labels},
            "spec": service,
        },
    ]


def storage() -> list[dict[str, Any]]:
    """A default StorageClass and volumes on this machine's disk, which both nodes see."""
    storage_class = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": "local", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "Immediate",
    }
    return [storage_class, *(volume(name) for name in volume_names())]


def volume(name: str) -> dict[str, Any]:
    """A PersistentVolume on a folder of its own, which is made here."""
    make_volume_folder(name)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": VOLUME_SIZE},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "local",
            "hostPath": {"path": str(volume_folder(name)), "type": "Directory"},
        },
    }


def volume_names() -> list[str]:
    return [f"volume-{number:02}" for number in range(1, VOLUMES + 1)]


def volume_folder(name: str) -> Path:
    """Where a volume's files are on this machine."""
    return layout.state() / "volumes" / name


def make_volume_folder(name: str) -> None:
    """An empty folder for a volume, writable for the images' user and group only."""
    folder = volume_folder(name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.chown(folder, OWNER, OWNER)
    folder.chmod(0o2770)
