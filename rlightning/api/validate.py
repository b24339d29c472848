"""The offline check of manifests: the verdict of the API server, with file, line, value and remedy.

``rlightning validate`` and everything else that reads a manifest go through here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlightning.api import crds, rules
from rlightning.api.manifests import LoadedManifest, Path_, Problem, dotted, load_manifests, show
from rlightning.api.models import API_VERSION, GROUP, PolicyGroupResource, RLJob, drop_nulls
from rlightning.errors import ManifestError

_KINDS: dict[str, type[RLJob] | type[PolicyGroupResource]] = {"RLJob": RLJob, "PolicyGroup": PolicyGroupResource}


def validate_sources(sources: Sequence[str | Path]) -> list[Problem]:
    """Check every document of the files (``-``: stdin), in order.

    Returns errors and warnings; see :func:`errors`. Raises ManifestError when a file cannot be opened.
    """
    return [p for source in sources for loaded in load_manifests(source) for p in validate_manifest(loaded)]


def errors(problems: Iterable[Problem]) -> list[Problem]:
    """Those that make a manifest unusable."""
    return [p for p in problems if p.severity == "error"]


def validate_manifest(loaded: LoadedManifest) -> list[Problem]:
    """The problems of one document, by line."""
    found = list(loaded.problems)
    if loaded.value is not None:
        found += _check(loaded)[1]
    return sorted(found, key=lambda p: (p.line, p.column))


def load_job(source: str | Path) -> RLJob:
    """The one RLJob of a file (``-``: stdin).

    Raises ManifestError, which lists every problem, one a line.
    """
    jobs: list[RLJob] = []
    problems: list[Problem] = []
    for loaded in load_manifests(source):
        model, found = _check(loaded) if loaded.value is not None else (None, [])
        problems += [*loaded.problems, *found]
        if isinstance(model, RLJob):
            jobs.append(model)
    bad = errors(problems)
    if bad:
        raise ManifestError("\n".join(str(p) for p in bad))
    if len(jobs) != 1:
        what = "no RLJob" if not jobs else f"{len(jobs)} RLJobs ({', '.join(j.metadata.name for j in jobs)})"
        raise ManifestError(f"{source}: holds {what}, and one is needed. Put it into a file of its own.")
    return jobs[0]


def validate_update(old: RLJob, new: RLJob) -> list[rules.Violation]:
    """What the API server would refuse in a change from ``old`` (with its status) to ``new``."""
    return rules.update_violations(rules.JOB_RULES, old, new)


# ------------------------------------------------------------------------------------------------------- one document


def _check(loaded: LoadedManifest) -> tuple[RLJob | PolicyGroupResource | None, list[Problem]]:
    value = loaded.value
    if not isinstance(value, dict):
        return None, [loaded.problem((), "is not a Kubernetes object", value, "begin with apiVersion, kind, metadata")]
    kind, version = value.get("kind"), value.get("apiVersion")
    problems = list(_kind_problems(loaded, kind, version))
    model = _KINDS.get(kind) if isinstance(kind, str) else None
    if model is None or any(p.severity == "error" for p in problems):
        return None, problems
    try:
        return model.model_validate(drop_nulls(model, value), by_alias=True, by_name=False), problems
    except ValidationError as error:
        return None, problems + [p for detail in error.errors() for p in _explain(loaded, model, detail)]


def _kind_problems(loaded: LoadedManifest, kind: Any, version: Any) -> Iterator[Problem]:
    known = ", ".join(_KINDS)
    if not isinstance(kind, str) or not isinstance(version, str):
        for name, given, example in (("apiVersion", version, API_VERSION), ("kind", kind, "RLJob")):
            if not isinstance(given, str):
                message = "is required" if given is None else "must be text"
                yield loaded.problem((name,), message, given, f"write {name}: {example}")
    elif kind in _KINDS and version != API_VERSION:
        yield loaded.problem(("apiVersion",), f"must be {API_VERSION}", version, f"write {API_VERSION}")
    elif kind not in _KINDS:
        near = _near(kind, _KINDS)
        if near or version.split("/")[0] == GROUP:
            remedy = f"did you mean {near}?" if near else f"use one of {known}"
            yield loaded.problem(("kind",), "is no kind of RLightning's", kind, remedy)
        else:
            yield loaded.problem(
                ("kind",),
                "is not RLightning's; this document was not checked",
                kind,
                "kubectl apply --dry-run=server checks it",
                severity="warning",
            )


def _near(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant: the same but for case, ``_`` and ``-``, or few letters off."""

    def fold(text: str) -> str:
        return text.replace("_", "").replace("-", "").lower()

    by_fold = {fold(k): k for k in known}
    matches = difflib.get_close_matches(fold(word), by_fold, n=1, cutoff=0.7)
    return by_fold[matches[0]] if matches else None


# ------------------------------------------------------------------------------- pydantic's errors, in the user's words

_A = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
}
_PATTERNS = {
    r"^[a-z]([-a-z0-9]*[a-z0-9])?$": "must be of a-z, 0-9 and -, begin with a letter and not end with -",
    r"^\S+$": "must not contain spaces",
}


def _a(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return f"the word {str(value).lower()}"
        case int():
            return "a whole number"
        case float():
            return "a number with a fraction"
        case str():
            return "text"
        case list():
            return "a list"
    return "a mapping"


@cache
def _schema(model: type[RLJob] | type[PolicyGroupResource]) -> dict[str, Any]:
    return crds.openapi_schema(model)


def _schema_at(model: type[RLJob] | type[PolicyGroupResource], path: Path_) -> dict[str, Any]:
    node = _schema(model)
    for part in path:
        if isinstance(part, int):
            node = node.get("items", {})
        else:
            node = node.get("properties", {}).get(part) or node.get("additionalProperties") or {}
    return node


def _explain(loaded: LoadedManifest, model: type[RLJob] | type[PolicyGroupResource], error: Any) -> Iterator[Problem]:
    path: Path_ = tuple(error["loc"])
    value = error["input"]
    context = error.get("ctx", {})
    if path and path[-1] == "[key]":  # a key of a labels map
        path = path[:-1]
        yield loaded.problem(path, "is not a valid key", path[-1], "write name or prefix/name", at_key=True)
        return
    schema = _schema_at(model, path)
    if error["type"] == "rules":
        for violation in context["violations"]:
            at = (*path, *_split(violation.path))
            yield loaded.problem(at, violation.message, violation.value, violation.remedy)
    elif error["type"] == "extra_forbidden":
        yield loaded.problem(path, "is an unknown field", None, _where_it_belongs(model, path), at_key=True)
    elif error["type"] == "missing":
        yield loaded.problem(path, "is required", None, _to_add(schema, str(path[-1])), at_key=True)
    elif error["type"] == "value_error":
        yield loaded.problem(path, str(context["error"]), value, "write what JSON can carry")
    elif error["type"] == "quantity":
        yield loaded.problem(path, str(error["msg"]), value, "write cores like 4 or 500m, memory like 16Gi")
    else:
        message, remedy = _out_of_schema(schema, value, error)
        yield loaded.problem(path, message, value, remedy)


def _out_of_schema(schema: dict[str, Any], value: Any, error: Any) -> tuple[str, str]:
    """Message and remedy for a value that its field's schema does not take."""
    wanted = schema.get("type", "")
    if "enum" in schema:
        options = ", ".join(schema["enum"])
        near = _near(value, schema["enum"]) if isinstance(value, str) else None
        return f"must be one of {options}", f"did you mean {near}?" if near else f"write one of {options}"
    if _json_type(value) != wanted and not (wanted == "number" and _json_type(value) == "integer"):
        return f"must be {_A.get(wanted, wanted)}, is {_a(value)}", _to_convert(wanted, value)
    if wanted in ("integer", "number"):
        return f"must be {_range(schema)}", f"choose a value that is {_range(schema)}"
    if "pattern" in schema and error["type"] == "string_pattern_mismatch":
        text = _PATTERNS.get(schema["pattern"], f"does not match {schema['pattern']}")
        return text, schema.get("description", "").rstrip(".") or "change it"
    unit = {"string": "characters", "array": "items", "object": "entries"}.get(wanted, "")
    low = schema.get("minLength", schema.get("minItems"))
    high = schema.get("maxLength", schema.get("maxItems", schema.get("maxProperties")))
    if high is not None and len(value) > high:
        return f"must have at most {high} {unit}, has {len(value)}", "shorten it"
    if low is not None and len(value) < low:
        return f"must have at least {low} {unit}, has {len(value)}", "fill it in"
    return str(error["msg"]), "change it"


def _json_type(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
    return "null"


def _to_convert(wanted: str, value: Any) -> str:
    if wanted == "string" and isinstance(value, bool | int | float):
        return f'quote it: "{show(value)}"'
    if wanted in ("integer", "number", "boolean") and isinstance(value, str):
        return "write it without quotes" if _is_number(value) or value in ("true", "false") else f"write {_A[wanted]}"
    if wanted == "array":
        return "begin each element with -"
    return f"write {_A.get(wanted, 'another value')}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _range(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    parts = []
    if low is not None:
        parts.append(f"{'above' if schema.get('exclusiveMinimum') else 'at least'} {low:.16g}")
    if high is not None:
        parts.append(f"{'below' if schema.get('exclusiveMaximum') else 'at most'} {high:.16g}")
    return " and ".join(parts)


def _to_add(schema: dict[str, Any], name: str) -> str:
    description = schema.get("description", "")
    return f"add {name}" + (f": {description.rstrip('.')}" if description else "")


def _split(path: str) -> Path_:
    parts: list[str | int] = []
    for word in path.split(".") if path else ():
        name, *indexes = word.replace("]", "").split("[")
        parts += [name, *map(int, indexes)]
    return tuple(parts)


def _where_it_belongs(model: type[RLJob] | type[PolicyGroupResource], path: Path_) -> str:
    *_, name = path
    siblings = _schema_at(model, path[:-1]).get("properties", {})
    near = _near(str(name), siblings)
    if near:
        return f"did you mean {near}?"
    elsewhere = [p for p in _field_paths(_schema(model), ()) if p[-1] == name and "status" not in p]
    if elsewhere:
        return f"it belongs under {dotted(elsewhere[0][:-1])}"
    return f"known here: {', '.join(siblings)}" if siblings else "remove it"


def _field_paths(schema: dict[str, Any], path: Path_) -> Iterator[Path_]:
    for name, child in schema.get("properties", {}).items():
        yield (*path, name)
        yield from _field_paths(child, (*path, name))
        if "items" in child:
            yield from _field_paths(child["items"], (*path, name, 0))


__all__ = ["Problem", "errors", "load_job", "validate_manifest", "validate_sources", "validate_update"]
