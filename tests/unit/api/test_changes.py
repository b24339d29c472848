"""What keeps a run from going on with a changed manifest, in the words of the manifest."""

from __future__ import annotations

from typing import Any

import pytest

from rlightning.api.changes import refused_changes
from rlightning.api.models import RLJob
from tests.support.jobs import CARTPOLE, job, merged

POOLED: dict[str, Any] = {
    "policyGroup": {"train": {"pool": "all"}, "eval": {"replicas": 2, "pool": "all"}},
    "pools": [{"name": "all", "membersPerReplica": 3}],
}


def changed(**changes: Any) -> tuple[RLJob, RLJob]:
    base = merged(CARTPOLE, POOLED)
    return job(base), job(base, name="other", **changes)


def test_what_may_change_is_not_refused() -> None:
    assert refused_changes(*changed(training={"totalEnvSteps": 9}, checkpoints={"keep": 9}, suspend=True)) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"seed": 8}, "spec.seed: cannot change once the job has started: is 8, was 7; "),
        (
            {"policy": {"simplePPO": {"gamma": 0.5, "targetKL": 0.01}}},
            "spec.policy: cannot change once the job has started: simplePPO.gamma is 0.5, was 0.99, "
            "simplePPO.targetKL is 0.01, was left out; ",
        ),
        (
            {"pools": [{"name": "all", "membersPerReplica": 4}]},
            "spec.pools: cannot change once the job has started: [0].membersPerReplica is 4, was 3; ",
        ),
        (
            {"environment": {"kwargs": {"render_mode": None, "words": ["a"]}}},
            'spec.environment: cannot change once the job has started: kwargs.words is ["a"], was left out; ',
        ),
    ],
)
def test_the_difference_is_shown_as_a_manifest_would_show_it(change: dict[str, Any], line: str) -> None:
    (refused,) = refused_changes(*changed(**change))
    assert refused == line + "put it back, or start a new job"


def test_members_that_no_longer_fit_their_shards_are_refused() -> None:
    recorded, wanted = changed()
    roles = wanted.spec.policy_group
    more = roles.model_copy(update={"eval": roles.eval.model_copy(update={"replicas": 5})})  # of 4 shards
    wanted = wanted.model_copy(update={"spec": wanted.spec.model_copy(update={"policy_group": more})})
    lines = refused_changes(recorded, wanted)
    assert any(
        line.startswith("spec.policyGroup.eval.replicas: must be at most environment.shards, 4") for line in lines
    )
