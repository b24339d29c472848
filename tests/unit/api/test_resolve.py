"""Resolved specs, their hash, and YAML that means the same to everybody."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from pydantic import ValidationError

from rlightning.api.manifests import load_text
from rlightning.api.models import (
    EnvironmentSpec,
    EvalRoleSpec,
    ObjectMeta,
    PolicySpec,
    RLJob,
    RLJobSpec,
    RolesSpec,
    SimplePPOSpec,
    TrainingSpec,
)
from rlightning.api.resolve import resolve, spec_hash, to_yaml
from tests.unit.api.strategies import FREE_FORM, specs


def spec(evals: int = 1, **environment: Any) -> RLJobSpec:
    return RLJobSpec(
        environment=EnvironmentSpec(id="CartPole-v1", **environment),
        policy=PolicySpec(simple_ppo=SimplePPOSpec()),
        training=TrainingSpec(total_env_steps=1000),
        policy_group=RolesSpec(eval=EvalRoleSpec(replicas=evals)),
    )


def job(**environment: Any) -> RLJob:
    return RLJob(metadata=ObjectMeta(name="cartpole"), spec=spec(**environment))


def test_shards_become_the_eval_replicas_of_the_first_start() -> None:
    resolved = resolve(spec(evals=4))
    assert resolved.environment.shards == 4
    assert resolved == spec(evals=4, shards=4)
    assert resolve(resolved) == resolved


def test_given_shards_stay() -> None:
    assert resolve(spec(evals=2, shards=4)).environment.shards == 4


def test_environments_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"environment\.shards: must divide numEnvs, 8"):
        resolve(spec(evals=3))


def test_the_hash_is_of_the_meaning_not_of_the_text() -> None:
    written = {
        "training": {"totalEnvSteps": 1000},
        "policy": {"simplePPO": {"gamma": 0.99}},
        "environment": {"numEnvs": 8, "id": "CartPole-v1", "kwargs": {"b": 1.0, "a": 2}},
    }
    read = RLJobSpec.model_validate(written, by_alias=True, by_name=False)
    assert spec_hash(read) == spec_hash(spec(kwargs={"a": 2, "b": 1}))
    assert spec_hash(read) != spec_hash(spec(kwargs={"a": 2, "c": 1}))  # a renamed key, which CEL's == misses


@pytest.mark.parametrize(
    "text",
    ["010", "1e3", "3e-4", "on", "y", "No", "null", "~", "", "1_000", "0b1", ".5", "12:30", "2024-01-01", "<<", "a: b",
     "# c", " x", "x ", "é", "-", "---", "*a", "!b", "1e400", ".inf", "true", "\t", "a\nb", "\x85", "\u2028", "\x07"],
)  # fmt: skip
def test_text_stays_text_through_yaml(text: str) -> None:
    written = to_yaml(job(kwargs={"value": text, text: "key"}))
    (loaded,) = load_text(written)
    assert loaded.problems == []
    assert loaded.value["spec"]["environment"]["kwargs"] == {"value": text, text: "key"}


@settings(max_examples=30)
@given(specs())
def test_yaml_reads_back_as_the_same_job(drawn: dict[str, Any]) -> None:
    written = {"metadata": {"name": "drawn"}, "spec": drawn}
    original = RLJob.model_validate(written, by_alias=True, by_name=False)
    (loaded,) = load_text(to_yaml(original))
    assert loaded.problems == []
    assert RLJob.from_stored(loaded.value) == original


@settings(max_examples=30)
@given(FREE_FORM)
def test_free_form_values_read_back_by_us_as_by_yaml(kwargs: dict[str, Any]) -> None:
    original = job(kwargs=kwargs)
    (loaded,) = load_text(to_yaml(original))
    assert RLJob.from_stored(loaded.value) == original


def test_fields_come_in_the_order_of_the_models() -> None:
    read = yaml.safe_load(to_yaml(RLJob(metadata=ObjectMeta(name="cartpole"), spec=resolve(spec()))))
    assert list(read) == ["apiVersion", "kind", "metadata", "spec"]
    assert list(read["spec"]) == [
        "seed", "environment", "policy", "training", "evaluation", "policyGroup", "pools", "head",
        "imagePullSecrets", "weights", "checkpoints", "deadlines", "runPolicy", "suspend",
    ]  # fmt: skip
