"""A pod that finds no node: are the nodes busy now, or will it never fit?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from rlightning_operator.reconcile.objects import is_true, name_of
from rlightning_operator.reconcile.quantities import parse_quantity, show_quantity
from rlightning_operator.reconcile.snapshot import Object


def verdict(pod: Object, job_pods: Iterable[Object], nodes: Sequence[Object]) -> str:
    """One sentence: on which node the pod would fit if that were emptier, or why on none.

    An empty node is taken to have all that it can allocate, although pods of its own (DaemonSets) take some of that:
    "never" is sure for these nodes, "busy" is not.

    Args:
        pod: that the scheduler placed nowhere.
        job_pods: all pods of the job's cluster: each alone may fit where all together do not.
        nodes: of the cluster.
    """
    if not nodes:
        return "Never as it is: the cluster has no nodes."
    wanted = requests(pod)
    places = _allowed(pod, nodes)
    if isinstance(places, str):
        return places
    fitting = [node for node in places if _fits(wanted, node)]
    usable = [node for node in fitting if _takes_pods(node)]
    if usable:
        short = _short_in_all(job_pods, nodes)
        if short:
            return short
        names = ", ".join(sorted(name_of(node) for node in usable)[:3])
        more = f" and {len(usable) - 3} more" if len(usable) > 3 else ""
        return f"Busy now: it would fit {names}{more} when that is emptier; it starts by itself then."
    if fitting:
        states = "; ".join(f"{name_of(n)} {_why_not(n)}" for n in sorted(fitting, key=name_of)[:3])
        return f"It would fit, but not now: {states}. It starts by itself when that ends."
    return _too_large(wanted, places)


def requests(pod: Object) -> dict[str, Decimal]:
    """What the scheduler reserves: the containers' sum, or the largest init container where that is more."""
    spec = pod.get("spec") or {}
    total = _sum(_requests(c) for c in spec.get("containers") or ())
    for init in spec.get("initContainers") or ():
        for resource, amount in _requests(init).items():
            total[resource] = max(total.get(resource, Decimal(0)), amount)
    return {resource: amount for resource, amount in total.items() if amount > 0}


def _requests(container: Mapping[str, Any]) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {resource: parse_quantity(amount) for resource, amount in asked.items()}


def _sum(parts: Iterable[Mapping[str, Decimal]]) -> dict[str, Decimal]:
    total: dict[str, Decimal] = {}
    for part in parts:
        for resource, amount in part.items():
            total[resource] = total.get(resource, Decimal(0)) + amount
    return total


def _allocatable(node: Object) -> dict[str, Decimal]:
    return {r: parse_quantity(a) for r, a in ((node.get("status") or {}).get("allocatable") or {}).items()}


def _fits(wanted: Mapping[str, Decimal], node: Object) -> bool:
    there = _allocatable(node)
    return all(there.get(resource, Decimal(0)) >= amount for resource, amount in wanted.items())


def _allowed(pod: Object, nodes: Sequence[Object]) -> list[Object] | str:
    """The nodes on which the pod may be, whatever their size; or the sentence that says that there is none."""
    selector: Mapping[str, str] = (pod.get("spec") or {}).get("nodeSelector") or {}
    selected = [n for n in nodes if all((n["metadata"].get("labels") or {}).get(k) == v for k, v in selector.items())]
    if not selected:
        labels = ", ".join(f"{k}={v}" for k, v in sorted(selector.items()))
        return f"Never as it is: no node has the labels that nodeSelector asks for ({labels}). Change it, or label one."
    tolerations = (pod.get("spec") or {}).get("tolerations") or ()
    tolerated = [n for n in selected if not _taints(n, tolerations)]
    if not tolerated:
        node = min(selected, key=name_of)
        taint = _taints(node, tolerations)[0]
        shown = f"{taint.get('key')}={taint['value']}" if taint.get("value") else str(taint.get("key"))
        return (
            f"Never as it is: each node that it may run on has a taint that it does not tolerate ({name_of(node)}: "
            f"{shown}:{taint.get('effect')}). Add a toleration, or take the taint away."
        )
    return tolerated


# Kubernetes puts these on nodes that have a trouble of their own, which passes; they say nothing of who may be there.
_PASSING = "node.kubernetes.io/"


def _taints(node: Object, tolerations: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [
        taint
        for taint in (node.get("spec") or {}).get("taints") or ()
        if taint.get("effect") in ("NoSchedule", "NoExecute")
        and not str(taint.get("key")).startswith(_PASSING)
        and not any(_tolerates(t, taint) for t in tolerations)
    ]


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return not toleration.get("key") or toleration["key"] == taint.get("key")
    return toleration.get("key") == taint.get("key") and (toleration.get("value") or "") == (taint.get("value") or "")


def _takes_pods(node: Object) -> bool:
    return is_true(node, "Ready") and not (node.get("spec") or {}).get("unschedulable")


def _why_not(node: Object) -> str:
    return "is not Ready" if not is_true(node, "Ready") else "is cordoned"


def _too_large(wanted: Mapping[str, Decimal], nodes: Sequence[Object]) -> str:
    for resource, amount in sorted(wanted.items(), key=lambda item: (item[0] in ("cpu", "memory"), item[0])):
        largest = max(_allocatable(node).get(resource, Decimal(0)) for node in nodes)
        if largest < amount:
            asked, has = show_quantity(resource, amount), show_quantity(resource, largest)
            which = "largest" if len(nodes) > 1 else "only"
            return (
                f"Never as it is: it asks for {asked} {resource}, and the {which} node that it may run on has {has}. "
                "Ask for less, or add a node."
            )
    asked = ", ".join(f"{show_quantity(r, a)} {r}" for r, a in sorted(wanted.items()))
    return f"Never as it is: no single node that it may run on has {asked} together. Ask for less, or add a node."


def _short_in_all(pods: Iterable[Object], nodes: Sequence[Object]) -> str | None:
    """That all nodes together have less than all pods of the job ask for."""
    wanted = _sum(requests(pod) for pod in pods)
    there = _sum(_allocatable(node) for node in nodes)
    for resource, amount in sorted(wanted.items(), key=lambda item: (item[0] in ("cpu", "memory"), item[0])):
        if there.get(resource, Decimal(0)) < amount:
            asked, has = show_quantity(resource, amount), show_quantity(resource, there.get(resource, Decimal(0)))
            return (
                f"Never as it is: the job's pods ask for {asked} {resource} together, and all nodes have {has}. "
                "Ask for less, or add a node."
            )
    return None
