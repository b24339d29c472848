"""Which places the members need, and which of them Ray offers."""

from __future__ import annotations

from typing import Any

import pytest

from rlightning.errors import StoppedEarly, Superseded
from rlightning.runtime.cluster.pools import JobCluster, places_missing, places_wanted
from tests.support.jobs import CARTPOLE, job

POOLED: dict[str, Any] = {
    "policyGroup": {"train": {"pool": "learners"}, "eval": {"replicas": 4, "pool": "actors"}},
    "pools": [{"name": "learners"}, {"name": "actors", "replicas": 3, "membersPerReplica": 2}],
}


def node(alive: bool, **resources: float) -> dict[str, Any]:
    """As ``ray.nodes()`` lists it."""
    return {"Alive": alive, "Resources": {"CPU": 1.0, **{f"rlightning-pool-{k}": v for k, v in resources.items()}}}


def test_members_need_places_not_all_that_their_pool_could_offer() -> None:
    assert places_wanted(job(CARTPOLE, **POOLED).spec) == {"learners": 1, "actors": 4}


def test_two_roles_on_one_pool_add_up() -> None:
    one: dict[str, Any] = {
        "policyGroup": {"train": {"pool": "all"}, "eval": {"replicas": 2, "pool": "all"}},
        "pools": [{"name": "all", "membersPerReplica": 3}],
    }
    assert places_wanted(job(CARTPOLE, **one).spec) == {"all": 3}
    assert places_wanted(job(CARTPOLE).spec) == {}


def test_who_is_missing_is_named_with_what_is_there() -> None:
    wanted = {"learners": 1, "actors": 4}
    assert places_missing(wanted, [node(True)]) == "pool learners (0 of 1 place), pool actors (0 of 4 places)"
    assert places_missing(wanted, [node(True, learners=1), node(True, actors=2)]) == "pool actors (2 of 4 places)"
    assert places_missing(wanted, [node(True, learners=1), node(True, actors=2), node(True, actors=2)]) == ""


def test_the_pod_that_was_replaced_does_not_count() -> None:
    nodes = [node(True, learners=1), node(True, actors=2), node(False, actors=2)]
    assert places_missing({"learners": 1, "actors": 4}, nodes) == "pool actors (2 of 4 places)"


class Wishes:
    """What the operator wants, instead of a Control that needs an API server."""

    def __init__(self, *, stop: bool = False, superseded: bool = False) -> None:
        self.requested, self._superseded = stop, superseded

    def check(self) -> None:
        if self._superseded:
            raise Superseded("attempt 2 has taken over")


@pytest.mark.parametrize(
    ("wishes", "error"), [(Wishes(stop=True), StoppedEarly), (Wishes(superseded=True), Superseded)]
)
def test_whoever_waits_can_be_stopped(wishes: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "nodes", lambda: [node(True, actors=2)])
    with pytest.raises(error):
        JobCluster(job(CARTPOLE, **POOLED).spec, wishes, lambda line: None).wait_until_ready()


def test_what_it_waits_for_is_said_and_that_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    said: list[str] = []
    looks = iter(range(100))

    def nodes() -> list[dict[str, Any]]:
        return [node(True, learners=1), node(True, actors=4 if next(looks) > 6 else 2)]  # a look takes 0.25 s

    monkeypatch.setattr(ray, "nodes", nodes)
    JobCluster(job(CARTPOLE, **POOLED).spec, Wishes(), said.append).wait_until_ready()  # type: ignore[arg-type]
    assert said[0] == "waiting for pool actors (2 of 4 places)"
    assert said[-1].startswith("all pools are there, after ") and len(said) == 2
