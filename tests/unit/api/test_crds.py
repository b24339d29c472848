"""The generated CRDs, without a server; tests/integration/test_crds.py installs them on one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rlightning.api import crds
from rlightning.api.models import RLJob, RLJobSpec
from rlightning.api.resolve import to_yaml
from tests.unit.api.strategies import specs

CRDS = {"RLJob": crds.rljob_crd(), "PolicyGroup": crds.policygroup_crd()}


def schema_of(crd: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}[]")


NODES = [
    (f"{kind}{path}", node)
    for kind, crd in CRDS.items()
    for path, node in nodes(schema_of(crd))
    if path.startswith((".spec", ".status"))
]


def test_the_files_in_the_chart_are_what_the_models_generate() -> None:
    assert crds.main(["--check"]) == 0, "run: python -m rlightning.api.crds"


def test_a_changed_file_is_found_and_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "new")
    assert crds.main(["--check", folder]) == 1
    assert "rljobs.yaml differs from the models; run: python -m rlightning.api.crds" in capsys.readouterr().err
    assert crds.main([folder]) == 0
    assert crds.main(["--check", folder]) == 0
    assert yaml.safe_load((tmp_path / "new" / "rljobs.yaml").read_text()) == CRDS["RLJob"]


def test_schemas_are_structural() -> None:
    # https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema
    forbidden = {
        "$ref",
        "$defs",
        "anyOf",
        "oneOf",
        "allOf",
        "not",
        "const",
        "title",
        "patternProperties",
        "definitions",
    }
    for path, node in NODES:
        assert "type" in node or node["x-kubernetes-int-or-string"] is True, path
        assert not forbidden & set(node), path
        assert not ("properties" in node and "additionalProperties" in node), path
        for bound in ("exclusiveMinimum", "exclusiveMaximum"):
            assert node.get(bound, True) is True, path


def test_every_list_map_and_string_is_bounded() -> None:
    for path, node in NODES:
        if "type" not in node:  # a whole number or text
            assert {"minimum", "maximum", "maxLength", "pattern"} <= set(node), path
        elif node["type"] == "array":
            assert "maxItems" in node, path
            assert node["x-kubernetes-list-type"] in ("atomic", "map", "set"), path
            for key in node.get("x-kubernetes-list-map-keys", ()):
                assert key in node["items"]["required"], path
        elif node["type"] == "string":
            assert "maxLength" in node or "enum" in node, path
        elif node["type"] == "object" and "properties" not in node:
            assert "maxProperties" in node, path
        elif node["type"] == "integer":
            assert {"minimum", "maximum"} <= set(node), path


def test_bounds_fit_64_bits() -> None:
    # The server compares a whole number with the bound cut to an int64: 1e300 becomes the smallest one.
    for path, node in NODES:
        for bound in ("minimum", "maximum"):
            assert abs(node.get(bound, 0)) < 2**63, path


TOLERATION = ("key", "value", "effect", "tolerationSeconds")


def test_only_optional_fields_of_the_spec_without_a_default_take_null() -> None:
    nullable = {path for path, node in NODES if node.get("nullable")}
    assert {path.removeprefix("RLJob.spec.") for path in nullable if path.startswith("RLJob")} == {
        "environment.shards",
        "environment.maxEpisodeSteps",
        "policy.simplePPO",
        "policy.simplePPO.targetKL",
        "policy.custom",
        "evaluation.stopAtReturn",
        "policyGroup.train.pool",
        "policyGroup.eval.pool",
        *(f"{group}.tolerations[].{name}" for group in ("head", "pools[]") for name in TOLERATION),
        "image",
        "imagePullPolicy",
        "checkpoints.claimName",
        "runPolicy.activeDeadlineSeconds",
        "runPolicy.schedulingDeadlineSeconds",
        "runPolicy.ttlSecondsAfterFinished",
    }
    assert not [path for path, node in NODES if node.get("nullable") and "default" in node]


def test_every_rule_has_a_message_that_names_a_remedy() -> None:
    rules = [rule for _, node in nodes(schema_of(CRDS["RLJob"])) for rule in node.get("x-kubernetes-validations", ())]
    assert len(rules) >= 20
    for rule in rules:
        assert ";" in rule["messageExpression"], rule


SPEC_SCHEMA = schema_of(CRDS["RLJob"])["properties"]["spec"]


def standard(schema: Any) -> Any:
    """The schema with Kubernetes' own word for "a whole number or text" said in JSON schema's."""
    if isinstance(schema, list):
        return [standard(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    known = {key: standard(value) for key, value in schema.items() if key != "x-kubernetes-int-or-string"}
    return {**known, "type": ["integer", "string"]} if "x-kubernetes-int-or-string" in schema else known


CHECKER = jsonschema.Draft4Validator(standard(SPEC_SCHEMA))  # like OpenAPI 3.0, it has boolean exclusive bounds


def job(spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "rlightning.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "drawn"},
        "spec": spec,
    }


@settings(max_examples=40)
@given(specs())
def test_valid_specs_pass_the_schema_and_the_models_and_come_back_the_same(spec: dict[str, Any]) -> None:
    CHECKER.validate(spec)
    read = RLJob.model_validate(job(spec), by_alias=True, by_name=False)
    CHECKER.validate(read.to_dict()["spec"])
    assert RLJob.from_stored(read.to_dict()) == read
    assert RLJob.from_stored(yaml.safe_load(to_yaml(read))).to_dict()["metadata"] == {"name": "drawn"}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict) and path[-1:] not in (("kwargs",), ("config",)):
        for key, child in value.items():
            yield from leaves(child, (*path, key))
    elif isinstance(value, list):
        for i, child in enumerate(value):
            yield from leaves(child, (*path, i))
    elif not isinstance(value, dict):
        yield path


ODD = st.sampled_from(
    [-1, 0, 1, 2**31, 10**15 + 1, -0.5, 0.5, 1.5, 1e16, True, False, "", "a", "A", "1", "head", "x" * 254, [], [1], {}]
)


@settings(max_examples=100)
@given(specs(), st.data())
def test_one_odd_value_gets_the_same_verdict_from_the_schema_and_the_models(
    spec: dict[str, Any], data: st.DataObject
) -> None:
    read = RLJob.model_validate(job(spec), by_alias=True, by_name=False).to_dict()["spec"]
    path = data.draw(st.sampled_from(sorted(leaves(read), key=str)))
    odd = data.draw(ODD)
    changed = copy.deepcopy(read)
    node = changed
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = odd
    try:
        RLJobSpec.model_validate(changed, by_alias=True, by_name=False)
        verdict = True
    except ValidationError as error:
        verdict = {e["type"] for e in error.errors()} == {"rules"}  # those are for CEL
    assert verdict == CHECKER.is_valid(changed), (path, odd)
