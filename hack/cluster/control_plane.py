"""etcd, kube-apiserver, kube-controller-manager and kube-scheduler, in node 1's network namespace."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from hack.cluster import certificates, layout, processes
from hack.cluster.certificates import certificate, key
from hack.programs.binaries import program

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")


def audit_log() -> Path:
    """Every write that a ServiceAccount asked for, a JSON object a line: who does what, told by the API server."""
    return layout.logs() / "audit.log"


def _audit_policy() -> Path:
    path = layout.state() / "audit-policy.json"
    writes = {
        "level": "Metadata",
        "verbs": ["create", "update", "patch", "delete", "deletecollection"],
        "userGroups": ["system:serviceaccounts"],
        "omitStages": ["RequestReceived"],
    }
    policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": [writes, {"level": "None"}]}
    path.write_text(json.dumps(policy))
    return path


def start() -> None:
    """Start all four and wait until the API server is ready."""
    certificates.make_authority()
    certificates.make_user("admin", "/O=system:masters/CN=admin")
    first = layout.namespace(1)
    processes.start(
        "etcd",
        [
            program("etcd"),
            f"--data-dir={layout.state() / 'etcd'}",
            "--unsafe-no-fsync",  # nothing survives the cluster anyway
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--log-level=warn",
        ],
        first,
    )
    processes.start(
        "kube-apiserver",
        [
            program("kube-apiserver"),
            "--etcd-servers=http://127.0.0.1:2379",
            f"--advertise-address={layout.API_ADDRESS}",
            f"--tls-cert-file={certificate('apiserver')}",
            f"--tls-private-key-file={key('apiserver')}",
            f"--client-ca-file={certificate('ca')}",
            f"--service-account-key-file={certificates.certificate('ca').parent / 'sa.pub'}",
            f"--service-account-signing-key-file={key('sa')}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-cluster-ip-range={layout.SERVICE_NETWORK}",
            "--authorization-mode=Node,RBAC",
            # The second is what OpenShift and hardened clusters have: an operator must be allowed to block deletion.
            "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement",
            "--allow-privileged",
            # Else `exec` and `logs` look up the node's name in DNS.
            "--kubelet-preferred-address-types=InternalIP",
            # Webhooks reach pods without service rules on the API server's side.
            "--enable-aggregator-routing",
            f"--kubelet-client-certificate={certificate('admin')}",
            f"--kubelet-client-key={key('admin')}",
            f"--audit-policy-file={_audit_policy()}",
            f"--audit-log-path={audit_log()}",
            "--audit-log-maxsize=50",
            "--profiling=false",
        ],
        first,
    )
    controllers = certificates.make_user("controller-manager", "/CN=system:kube-controller-manager")
    scheduler = certificates.make_user("scheduler", "/CN=system:kube-scheduler")
    processes.wait_for("the API server to be ready", ready, 90, ["etcd", "kube-apiserver"])
    processes.start(
        "kube-controller-manager",
        [
            program("kube-controller-manager"),
            f"--kubeconfig={controllers}",
            f"--authentication-kubeconfig={controllers}",
            f"--authorization-kubeconfig={controllers}",
            "--leader-elect=false",
            f"--service-account-private-key-file={key('sa')}",
            f"--root-ca-file={certificate('ca')}",
            "--use-service-account-credentials",
            f"--cluster-signing-cert-file={certificate('ca')}",
            f"--cluster-signing-key-file={key('ca')}",
            f"--flex-volume-plugin-dir={layout.state() / 'volume-plugins'}",
            "--profiling=false",
        ],
        first,
    )
    processes.start(
        "kube-scheduler",
        [program("kube-scheduler"), f"--kubeconfig={scheduler}", "--leader-elect=false", "--profiling=false"],
        first,
    )


def ready() -> bool:
    """Whether the API server says that it is ready."""
    done = subprocess.run(
        [
            *(str(program("kubectl")), "--kubeconfig", str(layout.kubeconfig())),
            *("--request-timeout=5s", "get", "--raw", "/readyz"),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=processes.environment(),
        timeout=20,
        check=False,
    )
    return done.returncode == 0
