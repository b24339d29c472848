"""What the API server holds of the jobs, as far as it was seen.

Objects come from watches, from lists and from the answers to our own writes, in any order; the highest
resourceVersion wins. So after a write the cache holds its result at once, and an older event that arrives later
changes nothing: no job is ever reconciled on a state from before the operator's own last write.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from datetime import datetime

from rlightning_operator.kube import kinds
from rlightning_operator.kube.kinds import JOB_LABEL, Kind, Object, trimmed
from rlightning_operator.reconcile.snapshot import KubeRay, OperatorConfig, Snapshot

Key = tuple[str, str]  # namespace and name of an RLJob
TOMBSTONES = 10_000


def version(obj: Object) -> int:
    """The resourceVersion as a number: etcd's revision, which orders all states of objects of one kind."""
    text = obj["metadata"].get("resourceVersion") or "0"
    return int(text) if text.isdigit() else 0


def job_key(kind: Kind, obj: Object) -> Key | None:
    """The job that an object belongs to; None for claims and nodes, which belong to nobody."""
    metadata = obj["metadata"]
    if kind in (kinds.RLJOB, kinds.POLICY_GROUP):
        return metadata["namespace"], metadata["name"]
    name = (metadata.get("labels") or {}).get(JOB_LABEL) if kind.of_jobs else None
    return (metadata["namespace"], name) if name else None


NOT_LOOKED_FOR = KubeRay(installed=False, message="not looked for yet")


class Cache:
    """Objects by kind and uid, and by job."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[str, Object]] = {name: {} for name in kinds.KINDS}
        self._of_job: dict[Key, dict[str, set[str]]] = {}
        self._gone: OrderedDict[str, float] = OrderedDict()  # uid: nothing up to this version is news
        # By namespace, None: all of them. What one namespace's watch is refused says nothing of another's.
        self.kuberay: dict[str | None, KubeRay] = {}
        self.nodes_readable = False

    # ------------------------------------------------------------------------------------------------------- changes

    def put(self, kind: Kind, obj: Object) -> bool:
        """Remember an object; False if that is no news: it, or something newer, or all but its version was known."""
        uid = obj["metadata"]["uid"]
        known = self._objects[kind.name].get(uid)
        if version(obj) <= self._gone.get(uid, -1) or (known is not None and version(known) >= version(obj)):
            return False
        self._gone.pop(uid, None)
        if known is not None:
            self._unindex(kind, known)
        obj = trimmed(kind, obj)
        self._objects[kind.name][uid] = obj
        key = job_key(kind, obj)
        if key is not None:
            self._of_job.setdefault(key, {}).setdefault(kind.name, set()).add(uid)
        return known is None or _content(known) != _content(obj)

    def remove(self, kind: Kind, uid: str, at: float = math.inf) -> Object | None:
        """Forget an object, and whatever a late answer says of it; returns what was known.

        Args:
            kind: of the object.
            uid: of the object.
            at: the resourceVersion at which a watch or a list no longer had it. It may come back with a higher one: to
                a watch that selects by label, an object whose label is taken off and put back is deleted and made.
                Without it the object is gone for good.
        """
        self._gone[uid] = max(at, self._gone.get(uid, at))
        while len(self._gone) > TOMBSTONES:
            self._gone.popitem(last=False)
        known = self._objects[kind.name].get(uid)
        if known is None or version(known) > at:
            return None
        self._unindex(kind, known)
        return self._objects[kind.name].pop(uid)

    def replace(self, kind: Kind, namespace: str | None, items: Iterable[Object], at: str) -> list[Object]:
        """Take over a whole list, made at resourceVersion ``at``; returns the objects that changed or are gone."""
        at_version = int(at) if at.isdigit() else 0
        items = list(items)
        listed = {item["metadata"]["uid"] for item in items}
        changed = [
            obj
            for uid, obj in list(self._objects[kind.name].items())
            if uid not in listed
            and (namespace is None or obj["metadata"].get("namespace") == namespace)
            and version(obj) <= at_version  # a newer one was made after the list
            and self.remove(kind, uid, at_version) is not None
        ]
        changed += [item for item in items if self.put(kind, item)]
        return changed

    def clear(self, kind: Kind, namespace: str | None = None) -> list[Object]:
        """Forget all objects of a kind (in one namespace), though not for good; returns them."""
        known = self._objects[kind.name]
        objects = [obj for obj in known.values() if namespace is None or obj["metadata"].get("namespace") == namespace]
        for obj in objects:
            self._unindex(kind, obj)
            del known[obj["metadata"]["uid"]]
        return objects

    def start_over(self, kind: Kind) -> None:
        """Forget a kind's objects, and what is gone: the API server's versions have fallen back behind both."""
        self.clear(kind)
        self._gone.clear()

    def _unindex(self, kind: Kind, obj: Object) -> None:
        key = job_key(kind, obj)
        if key is None:
            return
        of_job = self._of_job[key]
        of_job[kind.name].discard(obj["metadata"]["uid"])
        if not of_job[kind.name]:
            del of_job[kind.name]
        if not of_job:
            del self._of_job[key]

    # ------------------------------------------------------------------------------------------------------- reading

    def highest(self, kind: Kind) -> int:
        """The highest resourceVersion among the objects of a kind."""
        return max(map(version, self._objects[kind.name].values()), default=0)

    def all(self, kind: Kind) -> Iterator[Object]:
        """All objects of a kind."""
        return iter(list(self._objects[kind.name].values()))

    def jobs(self) -> set[Key]:
        """All jobs."""
        return {key for key, of_job in self._of_job.items() if kinds.RLJOB.name in of_job}

    def unfinished(self) -> set[Key]:
        """The jobs whose status does not say that they are over."""
        jobs = self._objects[kinds.RLJOB.name].values()
        return {
            (job["metadata"]["namespace"], job["metadata"]["name"])
            for job in jobs
            if not job.get("status", {}).get("completionTime")
        }

    def users(self, claim: Object) -> set[Key]:
        """The jobs that name a claim."""
        namespace, name = claim["metadata"]["namespace"], claim["metadata"]["name"]
        return {key for key in self.jobs() if key[0] == namespace and _claim_name(self.job(key)) == name}

    def has(self, kind: Kind, uid: str) -> bool:
        """Whether the object is here."""
        return uid in self._objects[kind.name]

    def of_job(self, kind: Kind, key: Key) -> tuple[Object, ...]:
        """The objects of one job, by name."""
        uids = self._of_job.get(key, {}).get(kind.name, ())
        return tuple(sorted((self._objects[kind.name][uid] for uid in uids), key=lambda obj: obj["metadata"]["name"]))

    def job(self, key: Key) -> Object | None:
        """The RLJob itself. Of two of one name, for a moment, the newer one."""
        return max(self.of_job(kinds.RLJOB, key), key=version, default=None)

    def snapshot(self, key: Key, config: OperatorConfig, now: datetime) -> Snapshot | None:
        """All that is known of a job; None if there is no such job."""
        job = self.job(key)
        if job is None:
            return None
        name = _claim_name(job)
        claims = (
            claim
            for claim in self._objects[kinds.CLAIM.name].values()
            if name and (claim["metadata"]["namespace"], claim["metadata"]["name"]) == (key[0], name)
        )
        nodes = sorted(self._objects[kinds.NODE.name].values(), key=lambda node: str(node["metadata"]["name"]))
        return Snapshot(
            job=job,
            group=max(self.of_job(kinds.POLICY_GROUP, key), key=version, default=None),
            clusters=self.of_job(kinds.RAY_CLUSTER, key),
            submitters=self.of_job(kinds.JOB, key),
            pods=self.of_job(kinds.POD, key),
            others=tuple(obj for kind in kinds.OTHERS for obj in self.of_job(kind, key)),
            claim=max(claims, key=version, default=None),
            nodes=tuple(nodes) if self.nodes_readable else None,
            kuberay=self.kuberay.get(key[0]) or self.kuberay.get(None) or NOT_LOOKED_FOR,
            config=config,
            now=now,
        )


def _content(obj: Object) -> Object:
    metadata = {name: value for name, value in obj["metadata"].items() if name != "resourceVersion"}
    return {**obj, "metadata": metadata}


def _claim_name(job: Object | None) -> str | None:
    checkpoints = (job or {}).get("spec", {}).get("checkpoints")
    return checkpoints.get("claimName") if isinstance(checkpoints, dict) else None
