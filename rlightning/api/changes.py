"""What may not change between the manifest that a run began with and the one it is to go on with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlightning.api import rules
from rlightning.api.manifests import show
from rlightning.api.models import RLJob, RLJobStatus
from rlightning.api.validate import validate_update


def refused_changes(recorded: RLJob, wanted: RLJob) -> list[str]:
    """A line for each thing that keeps a run of ``recorded`` from going on as ``wanted``; empty if nothing does.

    Args:
        recorded: as the run began, resolved.
        wanted: resolved; its metadata and status do not matter.
    """
    # As if it had started, whenever that was: from then on the rules freeze most of the spec.
    status = RLJobStatus(start_time="1970-01-01T00:00:00Z", shards=recorded.spec.environment.shards)
    started = recorded.model_copy(update={"status": status})
    wanted = wanted.model_copy(update={"metadata": recorded.metadata, "status": None})
    old, new = recorded.to_dict(), wanted.to_dict()
    lines = []
    for frozen in validate_update(started, wanted):
        changes = ", ".join(_changes(_at(old, frozen.path), _at(new, frozen.path), ""))
        lines.append(f"{frozen.path}: {frozen.message}: {changes}; put it back, or start a new job")
    for broken in rules.violations(rules.SPEC_RULES, wanted.spec):
        lines.append(f"spec.{broken.path}: {broken.message} (value {show(broken.value)}); {broken.remedy}")
    return lines


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _changes(old: Any, new: Any, path: str) -> Iterator[str]:
    """``simplePPO.gamma is 0.5, was 0.99`` for each difference: a whole policy side by side hides it."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _changes(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _changes(before, after, f"{path}[{i}]")
    elif old != new:
        yield f"{path} is {_shown(new)}, was {_shown(old)}".lstrip()


def _shown(value: Any) -> str:
    return "left out" if value is None else show(value)
