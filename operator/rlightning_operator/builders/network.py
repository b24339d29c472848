"""NetworkPolicies of a job: its pods reach each other and nothing reaches them.

What is not listed is refused, but for one thing that no policy governs: a node always reaches its own pods, so that
the kubelet's probes work. KubeRay's operator talks to the API server only, and so does ours.
"""

from __future__ import annotations

import ipaddress
from typing import Any

from rlightning_operator.builders.names import COMPONENT_LABEL, DASHBOARD_PORT, JOB_UID_LABEL, METRICS_PORT, Identity
from rlightning_operator.reconcile.snapshot import Object, OperatorConfig

# Where the API server's addresses are not known, its usual ports anywhere: wider, but a driver can report.
_API_SERVER_PORTS = (443, 6443)


def network_policies(identity: Identity, config: OperatorConfig) -> list[Object]:
    """All of a job's policies; none where the administrator did not ask for them."""
    if not config.network_policies:
        return []
    return [_cluster(identity, config), _head(identity, config), _submitter(identity)]


def _cluster(identity: Identity, config: OperatorConfig) -> Object:
    """Ray uses ports all over the range between its nodes."""
    ray = _pods(identity, "head", "worker")
    ingress: list[dict[str, Any]] = [{"from": [{"podSelector": ray}]}]
    if config.scrape_namespaces:
        names = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": list(config.scrape_namespaces)}
        scrapers = {"namespaceSelector": {"matchExpressions": [names]}}
        ingress.append({"from": [scrapers], "ports": [_tcp(METRICS_PORT)]})
    egress = [{"to": [{"podSelector": ray}]}, _DNS]
    return _policy(identity, "cluster", ray, ingress, egress)


def _head(identity: Identity, config: OperatorConfig) -> Object:
    head = _pods(identity, "head")
    submitters = {"from": [{"podSelector": _pods(identity, "submitter")}], "ports": [_tcp(DASHBOARD_PORT)]}
    egress: list[dict[str, Any]] = [
        {"to": [{"ipBlock": {"cidr": str(ipaddress.ip_network(ip))}}], "ports": [_tcp(port)]}
        for ip, port in config.api_server_endpoints
    ]
    return _policy(
        identity, "head", head, [submitters], egress or [{"ports": [_tcp(port) for port in _API_SERVER_PORTS]}]
    )


def _submitter(identity: Identity) -> Object:
    to_head = {"to": [{"podSelector": _pods(identity, "head")}], "ports": [_tcp(DASHBOARD_PORT)]}
    return _policy(identity, "submitter", _pods(identity, "submitter"), [], [to_head, _DNS])


_DNS: dict[str, Any] = {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}


def _tcp(port: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": port}


def _pods(identity: Identity, *components: str) -> dict[str, Any]:
    return {
        "matchLabels": {JOB_UID_LABEL: identity.uid},
        "matchExpressions": [{"key": COMPONENT_LABEL, "operator": "In", "values": list(components)}],
    }


def _policy(
    identity: Identity,
    name: str,
    selector: dict[str, Any],
    ingress: list[dict[str, Any]],
    egress: list[dict[str, Any]],
) -> Object:
    spec = {"podSelector": selector, "policyTypes": ["Ingress", "Egress"], "ingress": ingress, "egress": egress}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": identity.meta(f"{identity.access}-{name}", content=spec),
        "spec": spec,
    }
