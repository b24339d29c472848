"""Waiting until the Ray cluster offers the places that the members need."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rlightning.errors import StoppedEarly

if TYPE_CHECKING:
    from rlightning.api.models import RLJobSpec
    from rlightning.runtime.cluster.control import Control

POLL_SECONDS = 0.25
SAY_SECONDS = 10.0


class JobCluster:
    """The Ray cluster that the operator made for this job; see :class:`rlightning.runtime.placement.Cluster`.

    There is no deadline here: the operator has one (``runPolicy.schedulingDeadlineSeconds``) and knows why pods are
    late.

    Args:
        spec: of the job.
        control: may say stop meanwhile.
        say: told every ten seconds who is missing.
    """

    def __init__(self, spec: RLJobSpec, control: Control, say: Callable[[str], None]) -> None:
        self._wanted, self._control, self._say = places_wanted(spec), control, say

    def wait_until_ready(self) -> None:
        import ray

        started = time.monotonic()
        say_at = started + 1.0  # a cluster that is there already is no news
        while missing := places_missing(self._wanted, ray.nodes()):
            self._control.check()
            if self._control.requested:
                raise StoppedEarly(f"stopped as asked, while waiting for {missing}")
            if time.monotonic() >= say_at:
                self._say(f"waiting for {missing}")
                say_at = time.monotonic() + SAY_SECONDS
            time.sleep(POLL_SECONDS)
        if self._wanted:
            self._say(f"all pools are there, after {time.monotonic() - started:.1f} s")


def places_wanted(spec: RLJobSpec) -> dict[str, int]:
    """Members by pool."""
    wanted: dict[str, int] = {}
    for role in (spec.policy_group.train, spec.policy_group.eval):
        if role.pool is not None:
            wanted[role.pool] = wanted.get(role.pool, 0) + role.replicas
    return wanted


def places_missing(wanted: dict[str, int], nodes: Iterable[dict[str, Any]]) -> str:
    """``pool actors (2 of 4 places), pool learners (0 of 1 place)``; empty if none are.

    Args:
        wanted: places by pool.
        nodes: as ``ray.nodes()`` lists them, with the dead ones (a replaced pod stays listed), which do not count.
    """
    from rlightning.runtime.placement import POOL_RESOURCE

    alive = [node["Resources"] for node in nodes if node["Alive"]]
    late = []
    for pool, places in wanted.items():
        offered = int(sum(resources.get(f"{POOL_RESOURCE}{pool}", 0) for resources in alive))
        if offered < places:
            late.append(f"pool {pool} ({offered} of {places} {'place' if places == 1 else 'places'})")
    return ", ".join(late)
