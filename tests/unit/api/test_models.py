"""What the models take, refuse and fill in."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlightning.api.models import (
    EnvironmentSpec,
    EvalRoleSpec,
    PolicySpec,
    RLJob,
    RLJobSpec,
    RoleSpec,
    RolesSpec,
    SimplePPOSpec,
    TrainingSpec,
    TrainRoleSpec,
)


def stored(**spec: Any) -> dict[str, Any]:
    """A stored job: the smallest one, with changes to its spec."""
    base = {
        "environment": {"id": "CartPole-v1"},
        "policy": {"simplePPO": {}},
        "training": {"totalEnvSteps": 1000},
    }
    return {
        "apiVersion": "rlightning.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "cartpole"},
        "spec": {**base, **spec},
    }


def spec(**changes: Any) -> RLJobSpec:
    return RLJob.from_stored(stored(**changes)).spec


def paths(error: ValidationError) -> list[tuple[int | str, ...]]:
    return [e["loc"] for e in error.errors()]


def test_defaults_of_simple_ppo_are_those_of_stable_baselines3() -> None:
    # stable_baselines3.PPO.__init__ and ActorCriticPolicy, version 2.7.
    assert spec().policy.simple_ppo == SimplePPOSpec(
        hidden_sizes=[64, 64],
        activation="Tanh",
        learning_rate=3e-4,
        gamma=0.99,
        gae_lambda=0.95,
        clip_range=0.2,
        epochs=10,
        minibatch_size=64,
        entropy_coef=0.0,
        value_coef=0.5,
        max_grad_norm=0.5,
        normalize_advantages=True,
        target_kl=None,
        log_std_init=0.0,
    )


def test_a_spec_can_be_built_in_python_by_attribute_names() -> None:
    built = RLJobSpec(
        environment=EnvironmentSpec(id="CartPole-v1"),
        policy=PolicySpec(simple_ppo=SimplePPOSpec()),
        training=TrainingSpec(total_env_steps=1000),
    )
    assert built == spec()


def test_a_plain_role_serves_both_roles_within_their_bounds() -> None:
    roles = RolesSpec(train=RoleSpec(replicas=2), eval=RoleSpec(replicas=200))  # type: ignore[arg-type]
    assert roles == RolesSpec(train=TrainRoleSpec(replicas=2), eval=EvalRoleSpec(replicas=200))
    with pytest.raises(ValidationError, match="less than or equal to 16"):
        RolesSpec(train=RoleSpec(replicas=17))  # type: ignore[arg-type]


def test_models_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        spec().seed = 3


@pytest.mark.parametrize("value", ["8", 8.0, True, None, [8]])
def test_a_number_is_not_guessed_from_something_else(value: Any) -> None:
    with pytest.raises(ValidationError):
        EnvironmentSpec(id="x", num_envs=value)


def test_a_manifest_takes_camel_case_only() -> None:
    with pytest.raises(ValidationError) as raised:
        RLJobSpec.model_validate(stored(environment={"id": "x", "num_envs": 3})["spec"], by_alias=True, by_name=False)
    assert paths(raised.value) == [("environment", "num_envs")]


def test_readers_of_stored_objects_ignore_unknown_fields_at_any_depth() -> None:
    newer = stored(environment={"id": "CartPole-v1", "wrappers": ["x"]}, queueName="a")
    newer["status"] = {"state": "Queued", "queue": "a"}
    newer["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    job = RLJob.from_stored(newer)
    assert job.spec == spec()
    assert job.status is not None
    assert job.status.state == "Queued"


def test_null_means_left_out_but_not_in_free_form_maps() -> None:
    read = spec(
        environment={"id": "CartPole-v1", "shards": None, "numEnvs": None, "kwargs": {"a": None}},
        policy={"custom": None, "simplePPO": {"epochs": None, "targetKL": None}},
        pools=None,
        evaluation=None,
    )
    assert read == spec(environment={"id": "CartPole-v1", "kwargs": {"a": None}})


def test_free_form_values_become_what_json_carries() -> None:
    kwargs = {"gravity": 10.0, "wind": 0.5, "steps": (1, 2.0), "deep": {"x": -0.0}}
    assert EnvironmentSpec(id="x", kwargs=kwargs).kwargs == {
        "gravity": 10,
        "wind": 0.5,
        "steps": [1, 2],
        "deep": {"x": 0},
    }
    assert type(EnvironmentSpec(id="x", kwargs=kwargs).kwargs["gravity"]) is int


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "is nan, which JSON cannot carry"),
        (2**63, "does not fit 64 bits"),
        (object(), "is a object"),
        ({1: 2}, "has the key 1; keys must be strings"),
    ],
)
def test_free_form_values_that_json_cannot_carry_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EnvironmentSpec(id="x", kwargs={"a": [value]})


def test_broken_rules_are_refused_in_python_too_all_at_once() -> None:
    with pytest.raises(ValidationError) as raised:
        spec(evaluation={"stopAtReturn": 1.0}, environment={"id": "x", "numEnvs": 10, "shards": 4})
    assert "environment.shards: must divide numEnvs, 10" in str(raised.value)
    assert "evaluation.stopAtReturn: needs evaluations" in str(raised.value)


def test_eval_replicas_may_be_fewer_than_resolved_shards_without_dividing_the_environments() -> None:
    three = {"policyGroup": {"eval": {"replicas": 3}}}
    with pytest.raises(ValidationError, match="numEnvs: must be a multiple"):
        RLJob.from_stored(stored(**three))
    assert RLJob.from_stored({**stored(**three), "status": {"shards": 4}}).spec.policy_group.eval.replicas == 3
    with pytest.raises(ValidationError, match="at most the job's shards, 2"):
        RLJob.from_stored({**stored(**three), "status": {"shards": 2}})


def test_to_dict_is_what_a_manifest_would_say() -> None:
    job = RLJob.from_stored(stored())
    assert RLJob.from_stored(job.to_dict()) == job
    assert list(job.to_dict()["spec"])[:4] == ["seed", "environment", "policy", "training"]
    assert job.to_dict()["metadata"] == {"name": "cartpole"}
    assert "status" not in job.to_dict()
