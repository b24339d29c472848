"""Values that people use, by name."""

from __future__ import annotations

from typing import Any

DIGEST = "sha256:" + "ab" * 32

CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "namespaced": {"watchNamespaces": ["team-a", "team-b"], "rbac": {"nodes": False}},
    "small": {
        "statusService": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "jobs": {"networkPolicies": False},
        "crds": {"install": False},
    },
    "no rbac": {"rbac": {"create": False}, "operator": {"serviceAccount": {"create": False, "name": "mine"}}},
    "everything": {
        "nameOverride": "rl",
        "fullnameOverride": "rl-prod",
        "image": {"repository": "mirror.example/rl/operator", "digest": DIGEST, "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "mirror"}],
        "trainer": {
            "image": {"repository": "mirror.example/rl/trainer", "tag": "1.2", "pullPolicy": "Never"},
            "rayVersion": "2.60.0",
        },
        "watchNamespaces": ["team-a"],
        "crds": {"keep": False},
        "rbac": {"aggregate": False},
        "operator": {
            "workers": 8,
            "extraEnv": [{"name": "PYTHONMALLOC", "value": "debug"}],
            "extraArgs": ["--startup-seconds=5"],
            "serviceAccount": {"annotations": {"a": "b"}},
        },
        "statusService": {
            "replicas": 2,
            "audiences": ["rlightning", "other"],
            "cacheSeconds": 2.5,
            "docs": True,
            "service": {"type": "NodePort", "port": 8443, "annotations": {"c": "d"}},
            "tls": {"secretName": "status-tls"},
            "extraEnv": [{"name": "X", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        },
        "jobs": {"scrapeNamespaces": ["monitoring"]},
        "networkPolicy": {
            "statusClients": [{"namespaceSelector": {"matchLabels": {"team": "ml"}}}],
            "metricsNamespaces": ["monitoring"],
        },
        "apiServerEndpoints": ["10.0.0.7:6443", "[fd00::7]:6443"],
        "serviceMonitor": {"enabled": True, "interval": "15s", "labels": {"release": "prometheus"}},
        "logLevel": "debug",
        "logFormat": "json",
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "infra", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "system-cluster-critical",
        "podAnnotations": {"e": "f"},
        "podLabels": {"g": "h"},
        "commonLabels": {"team": "platform"},
        "global": {"anything": 1},
    },
}
