"""Busy now, or never: with the largest node that there is."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from rlightning_operator.reconcile.quantities import parse_quantity, show_quantity
from rlightning_operator.reconcile.schedulable import requests, verdict

GPU = "nvidia.com/gpu"


def pod(cpu: str = "1", memory: str = "4Gi", gpus: int = 0, **spec: Any) -> dict[str, Any]:
    devices = {GPU: str(gpus)} if gpus else {}
    resources = {"requests": {"cpu": cpu, "memory": memory, **devices}, "limits": {"memory": memory, **devices}}
    return {"metadata": {"name": "p"}, "spec": {"containers": [{"resources": resources}], **spec}}


def node(
    name: str,
    cpu: str = "4",
    memory: str = "16Gi",
    gpus: int = 0,
    ready: bool = True,
    labels: dict[str, str] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": spec,
        "status": {
            "allocatable": {"cpu": cpu, "memory": memory, GPU: str(gpus)},
            "conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}],
        },
    }


def of(one: dict[str, Any], *nodes: dict[str, Any], others: int = 0) -> str:
    return verdict(one, [one] * (1 + others), nodes)


def test_busy_names_nodes_that_are_large_enough() -> None:
    nodes = [node(f"n{i}", gpus=i) for i in range(6)]
    assert of(pod(gpus=2), *nodes) == (
        "Busy now: it would fit n2, n3, n4 and 1 more when that is emptier; it starts by itself then."
    )


def test_never_for_a_device_says_what_the_largest_node_has() -> None:
    assert of(pod(gpus=4), node("a", gpus=1), node("b")) == (
        "Never as it is: it asks for 4 nvidia.com/gpu, and the largest node that it may run on has 1. Ask for less, or "
        "add a node."
    )


def test_never_for_memory_in_units_that_people_use() -> None:
    text = of(pod(memory="64Gi"), node("a", memory="16331752Ki"))
    assert "asks for 64Gi memory, and the only node that it may run on has 15.6Gi" in text


def test_each_resource_is_somewhere_but_not_together() -> None:
    text = of(pod(cpu="8", gpus=1), node("cpus", cpu="16"), node("gpus", cpu="2", gpus=1))
    assert text.startswith("Never as it is: no single node that it may run on has 8 cpu, 4Gi memory, 1 nvidia.com/gpu")


def test_all_pods_together_are_more_than_all_nodes() -> None:
    """Each alone would fit."""
    nodes = [node("a", gpus=2), node("b", gpus=1)]
    assert of(pod(gpus=1), *nodes, others=3) == (
        "Never as it is: the job's pods ask for 4 nvidia.com/gpu together, and all nodes have 3. Ask for less, or add "
        "a node."
    )
    assert of(pod(gpus=1), *nodes, others=2).startswith("Busy now")


def test_a_label_that_no_node_has() -> None:
    text = of(pod(nodeSelector={"pool": "gpu", "zone": "b"}), node("a", labels={"pool": "gpu"}))
    assert text == (
        "Never as it is: no node has the labels that nodeSelector asks for (pool=gpu, zone=b). Change it, or label one."
    )


@pytest.mark.parametrize(
    ("toleration", "fits"),
    [
        ({}, False),
        ({"key": "gpu", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "gpu", "value": "yes"}, True),
        ({"key": "gpu", "operator": "Equal", "value": "no"}, False),
        ({"key": "gpu", "value": "yes", "effect": "NoExecute"}, False),
    ],
)
def test_taints_and_tolerations(toleration: dict[str, str], fits: bool) -> None:
    tainted = node("a", taints=[{"key": "gpu", "value": "yes", "effect": "NoSchedule"}])
    text = of(pod(tolerations=[toleration] if toleration else []), tainted)
    assert text.startswith("Busy now" if fits else "Never as it is: each node")
    assert fits or "(a: gpu=yes:NoSchedule)" in text


def test_a_node_that_is_cordoned_or_not_ready_is_no_never() -> None:
    cordoned = node(
        "a", unschedulable=True, taints=[{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]
    )
    assert of(pod(), cordoned, node("b", ready=False)) == (
        "It would fit, but not now: a is cordoned; b is not Ready. It starts by itself when that ends."
    )


def test_no_nodes() -> None:
    assert of(pod()) == "Never as it is: the cluster has no nodes."


def test_what_the_scheduler_reserves_is_the_larger_of_containers_and_init_containers() -> None:
    init = {"resources": {"requests": {"cpu": "200m", "memory": "8Gi"}}}
    assert requests(pod(cpu="500m", initContainers=[init])) == {"cpu": Decimal("0.5"), "memory": Decimal(8 * 2**30)}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("500m", "0.5"),
        ("4", "4"),
        (4, "4"),
        ("16Gi", str(2**34)),
        ("1e3", "1000"),
        ("2k", "2000"),
        ("1.5Mi", "1572864"),
    ],
)
def test_quantities(text: str | int, number: str) -> None:
    assert parse_quantity(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "Gi", "4GiB", "inf", "one"])
def test_no_quantities(text: str) -> None:
    with pytest.raises(ValueError, match="no Kubernetes quantity"):
        parse_quantity(text)


def test_quantities_for_people() -> None:
    assert show_quantity("memory", Decimal(2**34)) == "16Gi"
    assert show_quantity("cpu", Decimal("0.50")) == "0.5"
    assert show_quantity("cpu", Decimal("100")) == "100"
