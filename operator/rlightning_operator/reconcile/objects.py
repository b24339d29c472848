"""Reading raw Kubernetes objects: owners, times, conditions, containers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from rlightning_operator.reconcile.snapshot import Object


def name_of(obj: Object) -> str:
    return str(obj["metadata"]["name"])


def uid_of(obj: Object) -> str:
    return str(obj["metadata"]["uid"])


def labels_of(obj: Object) -> Mapping[str, str]:
    labels: Mapping[str, str] = obj["metadata"].get("labels") or {}
    return labels


def is_owned_by(obj: Object, uid: str) -> bool:
    """By its ownerReferences: labels can be written by anybody who can write the object."""
    return any(owner.get("uid") == uid for owner in obj["metadata"].get("ownerReferences") or ())


def is_deleted(obj: Object) -> bool:
    """Whether its deletion was asked for; it may stay a while, for finalizers or a pod's grace period."""
    return bool(obj["metadata"].get("deletionTimestamp"))


def created(obj: Object) -> datetime:
    return parse_time(obj["metadata"]["creationTimestamp"])


def parse_time(text: str) -> datetime:
    """RFC 3339, with ``Z`` or an offset, and up to nine digits of a second."""
    return datetime.fromisoformat(text).astimezone(UTC)


def format_time(time: datetime) -> str:
    """As the API server writes times: UTC, whole seconds."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(obj: Object | None, type_: str) -> Mapping[str, Any] | None:
    """The object's status condition of the type."""
    if obj is None:
        return None
    for entry in (obj.get("status") or {}).get("conditions") or ():
        if entry.get("type") == type_:
            found: Mapping[str, Any] = entry
            return found
    return None


def is_true(obj: Object | None, type_: str) -> bool:
    entry = condition(obj, type_)
    return entry is not None and entry.get("status") == "True"


def container_statuses(pod: Object) -> Iterator[Mapping[str, Any]]:
    """Of init containers first, as they run."""
    status = pod.get("status") or {}
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def container_status(pod: Object, name: str) -> Mapping[str, Any] | None:
    return next((c for c in container_statuses(pod) if c.get("name") == name), None)


def newest(objects: Iterable[Object]) -> Object | None:
    return max(objects, key=lambda o: (created(o), name_of(o)), default=None)


def shorten(text: str, limit: int, *, keep: str = "start") -> str:
    """At most ``limit`` characters. Of a traceback keep the ``end``: that is where the error stands."""
    text = text.strip()
    if len(text) <= limit:
        return text
    return text[: limit - 1] + "…" if keep == "start" else "…" + text[len(text) - limit + 1 :]


def sentence(text: str) -> str:
    """Foreign words as the end of a sentence of ours: one line where it is short, one full stop."""
    text = text.strip()
    return text if text.endswith((".", "!", "?", "…")) or not text else f"{text}."


def own_sentence(text: str) -> str:
    """Foreign words as a sentence by themselves."""
    text = sentence(text)
    return text[:1].upper() + text[1:]
