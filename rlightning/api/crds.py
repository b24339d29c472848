"""The CustomResourceDefinitions, generated from the models: ``python -m rlightning.api.crds [--check] [FOLDER]``.

What pydantic calls a JSON schema is not yet a structural schema: references are inlined, ``anyOf null`` becomes an
optional field, exclusive bounds become booleans, and the rules of ``rules.py`` are attached in CEL.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rlightning.api import rules
from rlightning.api.models import GROUP, VERSION, Manifest, PolicyGroupResource, RLJob

FOLDER = Path(__file__).parents[2] / "charts" / "rlightning" / "crds-generated"
HEADER = "# Generated from rlightning/api/models.py and rules.py by `python -m rlightning.api.crds`. Do not edit.\n"

_AGE = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}


def rljob_crd() -> dict[str, Any]:
    """The CRD of RLJob."""
    return _crd(
        RLJob,
        plural="rljobs",
        short_name="rlj",
        rule_tables=[("spec", rules.SPEC_RULES), ("", rules.JOB_RULES)],
        columns=[
            {"name": "State", "type": "string", "jsonPath": ".status.state"},
            {"name": "Iteration", "type": "integer", "jsonPath": ".status.progress.iteration"},
            {"name": "Return", "type": "number", "jsonPath": ".status.progress.episodeReturnMean"},
            {"name": "Version", "type": "integer", "jsonPath": ".status.weights.version"},
            {"name": "Consistent", "type": "string", "jsonPath": ".status.weights.consistentMembers"},
            _AGE,
        ],
        scale={
            "specReplicasPath": ".spec.policyGroup.eval.replicas",
            "statusReplicasPath": ".status.evalReplicas",
        },
    )


def policygroup_crd() -> dict[str, Any]:
    """The CRD of PolicyGroup."""
    return _crd(
        PolicyGroupResource,
        plural="policygroups",
        short_name=None,
        rule_tables=[("spec.training", rules.SPEC_RULES), ("", rules.GROUP_RULES)],
        columns=[
            {"name": "Job", "type": "string", "jsonPath": ".spec.job"},
            {"name": "Wanted", "type": "string", "jsonPath": ".spec.state"},
            {"name": "Attempt", "type": "integer", "jsonPath": ".spec.attempt"},
            {"name": "Version", "type": "integer", "jsonPath": ".status.version"},
            {"name": "Outcome", "type": "string", "jsonPath": ".status.outcome.state"},
            _AGE,
        ],
        scale=None,
    )


def _crd(
    model: type[RLJob] | type[PolicyGroupResource],
    plural: str,
    short_name: str | None,
    rule_tables: Sequence[tuple[str, Sequence[rules.Rule]]],
    columns: list[dict[str, Any]],
    scale: dict[str, str] | None,
) -> dict[str, Any]:
    kind = model.model_fields["kind"].default
    subresources: dict[str, Any] = {"status": {}}
    if scale:
        subresources["scale"] = scale
    schema = openapi_schema(model)
    schema["properties"]["metadata"] = {"type": "object"}
    for at in ("apiVersion", "kind"):
        schema["properties"][at] = {"type": "string"}
    schema["required"] = ["spec"]
    _never_null(schema["properties"]["status"])  # people write specs, programs write status
    for prefix, table in rule_tables:
        for rule in table:
            if rule.cel is not None:
                _attach(schema, ".".join(p for p in (prefix, rule.at) if p), rule)
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {**names, **({"shortNames": [short_name]} if short_name else {}), "categories": ["rlightning"]},
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": subresources,
                    "additionalPrinterColumns": columns,
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def openapi_schema(model: type[Manifest]) -> dict[str, Any]:
    """The structural schema of a model, without rules."""
    generated = model.model_json_schema(by_alias=True)
    definitions = generated.pop("$defs", {})
    return _structural(generated, definitions)


def _structural(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    node = dict(node)
    if "anyOf" in node:
        # X | None: an optional X. Null is taken for "left out", as the server takes it where there is a default;
        # without nullable a server-side apply would refuse it and a client-side one would not.
        (only,) = [option for option in node.pop("anyOf") if option != {"type": "null"}]
        node = {**only, **node, "nullable": True}
    if "$ref" in node:
        target = definitions[node.pop("$ref").removeprefix("#/$defs/")]
        node = {**target, **node}
    out: dict[str, Any] = {}
    for key, value in node.items():
        match key:
            case "title" | "propertyNames":
                pass
            case "description":
                out[key] = " ".join(value.split())
            case "const":
                out["enum"] = [value]
            case "default":
                if value is not None:
                    out[key] = value
            case "exclusiveMinimum" | "exclusiveMaximum":
                out[key.removeprefix("exclusive").lower()] = value
                out[key] = True
            case "additionalProperties":
                if isinstance(value, dict):
                    out[key] = _structural(value, definitions)
            case "items":
                out[key] = _structural(value, definitions)
            case "properties":
                out[key] = {name: _structural(item, definitions) for name, item in value.items()}
                for name, item in value.items():
                    if "$ref" in item and name not in node.get("required", ()):
                        out[key][name]["default"] = {}  # so that the defaults inside apply
            case _:
                out[key] = value
    if out.get("type") == "integer":
        out["format"] = "int32" if out.get("maximum", 2**31) < 2**31 else "int64"
    elif out.get("type") == "number":
        out["format"] = "double"
    return out


def _never_null(node: dict[str, Any]) -> None:
    node.pop("nullable", None)
    for child in (*node.get("properties", {}).values(), *filter(None, [node.get("items")])):
        _never_null(child)


def _attach(schema: dict[str, Any], at: str, rule: rules.Rule) -> None:
    node = schema
    for part in at.split(".") if at else ():
        node = node["properties"][part.removesuffix("[]")]
        if part.endswith("[]"):
            node = node["items"]
    validation = {"rule": rule.cel, "messageExpression": rule.message_expression, "reason": "FieldValueInvalid"}
    if rule.field:
        validation["fieldPath"] = f".{rule.field}"
    node.setdefault("x-kubernetes-validations", []).append(validation)


class _Dumper(yaml.SafeDumper):
    """Without anchors, and lists indented by nothing, as kubectl prints them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def files() -> dict[str, str]:
    """Name and text of each generated file."""
    crds = {"rljobs.yaml": rljob_crd(), "policygroups.yaml": policygroup_crd()}
    return {
        name: HEADER + yaml.dump(crd, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
        for name, crd in crds.items()
    }


def main(arguments: Sequence[str]) -> int:
    """Write the files, or with ``--check`` say which differ; returns the exit status."""
    check = "--check" in arguments
    rest = [a for a in arguments if a != "--check"]
    folder = Path(rest[0]) if rest else FOLDER
    wanted = files()
    stale = [name for name, text in wanted.items() if not _same(folder / name, text)]
    if check:
        for name in stale:
            print(f"{folder / name} differs from the models; run: python -m rlightning.api.crds", file=sys.stderr)
        return 1 if stale else 0
    folder.mkdir(parents=True, exist_ok=True)
    for name in stale:
        (folder / name).write_text(wanted[name], encoding="utf-8")
        print(folder / name)
    return 0


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
