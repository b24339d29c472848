"""The machine's part of the cluster's network: a namespace per node, joined by a bridge; nothing else is touched.

Node 1's namespace also holds the control plane and the bridge, on which the host is one more port: from it the API,
pods and services are reachable. There is no way out to the world; the cluster never fetches anything.
"""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path
from typing import Any

from hack.cluster import layout
from hack.cluster.layout import INSTEAD, ClusterError
from hack.cluster.processes import in_namespace, run

HOST_LINK = f"{layout.NAME}-host"  # 15 characters, the most that the kernel allows
BRIDGE = "br0"


def check_addresses() -> None:
    """Raises ClusterError if this machine uses one of the cluster's networks for something else."""
    if said := conflict(json.loads(run("ip", "-json", "-4", "route", "show") or "[]")):
        raise ClusterError(said)


def conflict(routes: list[dict[str, Any]]) -> str:
    """What in the machine's routes (as of ``ip -json route``) the cluster's networks would hide; "" if nothing."""
    for route in routes:
        if route["dst"] == "default" or route.get("dev") == HOST_LINK:
            continue
        taken = ipaddress.ip_network(route["dst"], strict=False)
        for name in (layout.NODE_NETWORK, layout.POD_NETWORK, layout.SERVICE_NETWORK):
            if taken.overlaps(ipaddress.ip_network(name)):
                return (
                    f"this machine routes {route['dst']} to {route.get('dev', 'somewhere')} (`ip route`), which the "
                    f"cluster's network {name} would hide. If that is another local cluster, stop it first. {INSTEAD}"
                )
    return ""


def up(nodes: int) -> None:
    """Make namespaces, bridge, links and routes."""
    first = layout.namespace(1)
    for number in range(1, nodes + 1):
        run("ip", "netns", "add", layout.namespace(number))
        _ip(number, "link", "set", "lo", "up")
    _ip(1, "link", "add", BRIDGE, "type", "bridge")
    _ip(1, "address", "add", f"{layout.node_address(1)}/24", "dev", BRIDGE)
    _ip(1, "link", "set", BRIDGE, "up")
    run("ip", "link", "add", HOST_LINK, "type", "veth", "peer", "name", "host", "netns", first)
    _ip(1, "link", "set", "host", "master", BRIDGE, "up")
    run("ip", "address", "add", f"{layout.HOST_ADDRESS}/24", "dev", HOST_LINK)
    run("ip", "link", "set", HOST_LINK, "up")
    for network in (layout.POD_NETWORK, layout.SERVICE_NETWORK):
        run("ip", "route", "add", network, "via", layout.API_ADDRESS, "dev", HOST_LINK)
    _ip(1, "route", "add", "default", "via", layout.HOST_ADDRESS)
    for number in range(2, nodes + 1):
        name = layout.node_name(number)
        _ip(1, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", layout.namespace(number))
        _ip(1, "link", "set", name, "master", BRIDGE, "up")
        _ip(number, "address", "add", f"{layout.node_address(number)}/24", "dev", "eth0")
        _ip(number, "link", "set", "eth0", "up")
        _ip(number, "route", "add", "default", "via", layout.node_address(1))
    for number in range(1, nodes + 1):
        for other in range(1, nodes + 1):
            if other != number:
                _ip(number, "route", "add", layout.node_pods(other), "via", layout.node_address(other))
        # These settings belong to a namespace each, not to the machine.
        settings = ("net.ipv4.ip_forward", "net.bridge.bridge-nf-call-iptables")
        for setting in settings:
            path = f"/proc/sys/{setting.replace('.', '/')}"
            run(*in_namespace(layout.namespace(number), "sh", "-c", f"echo 1 >{path}"))


def namespaces() -> list[str]:
    """Names of the cluster's network namespaces that exist."""
    return sorted(path.name for path in Path("/run/netns").glob("*") if layout.is_node_mark(path.name))


def down() -> None:
    """Remove namespaces and links, as far as they are there. The nodes' rules and routes go with their namespaces."""
    # The link first: with the namespace that its other end is in it would go by itself, at any moment.
    if any(link["ifname"] == HOST_LINK for link in json.loads(run("ip", "-json", "link", "show"))):
        run("ip", "link", "delete", HOST_LINK)
    for name in namespaces():
        run("ip", "netns", "delete", name)


def _ip(node: int, *words: str) -> None:
    run("ip", "-netns", layout.namespace(node), *words)
