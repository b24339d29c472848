"""Carries out a plan: the status first, then the writes in their order, each only as long as those before succeeded.

Everything here may be cut off between any two requests: the next pass starts from what is stored. Answers go into the
cache at once, so the next pass sees its own writes.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from rlightning_operator import metrics
from rlightning_operator.kube import kinds
from rlightning_operator.kube.cache import Cache, Key, job_key
from rlightning_operator.kube.client import ApiError, Client
from rlightning_operator.kube.kinds import KINDS, Kind, Object
from rlightning_operator.reconcile.snapshot import Action, Create, Delete, Patch, Plan, Snapshot

log = logging.getLogger(__name__)

REMEMBERED = 5_000  # jobs


class Stale(Exception):
    """What the plan was made from is no longer so; the cache knows better now. Not an error: plan again."""


class Gone(Exception):
    """The job, or its namespace, is being deleted: nothing is left to do."""


class Refused(Exception):
    """The API server does not take a write that the job needs; the message says which, and has the server's words.

    Attributes:
        write: which one, in words that stay the same as long as it is the same.
        transient: the same request may well succeed a little later.
    """

    def __init__(self, write: str, words: str, transient: bool = False) -> None:
        super().__init__(f"{write}: {words}")
        self.write, self.transient = write, transient


class NameTaken(Refused):
    """An object that is not ours has a name that the job needs; the message names it."""


class Executor:
    """Writes to the API server on behalf of jobs."""

    def __init__(self, client: Client, cache: Cache) -> None:
        self._client = client
        self._cache = cache
        # What was last stored for a job, and the version that made: a field that the CRD does not have is pruned, and
        # wanting it again and again would be a write each time.
        self._stored: OrderedDict[str, tuple[Object, str]] = OrderedDict()

    async def carry_out(self, key: Key, job: Object, plan: Plan, stored: Callable[[], None] = lambda: None) -> int:
        """Make the plan's writes; returns how many there were. Raises Stale, Gone, Refused, ApiError, Unreachable.

        Args:
            key: of the job.
            job: as it was when the plan was made.
            plan: see there.
            stored: called once the status is stored, before the actions.
        """
        writes = 0
        try:
            if await self._store_status(key, job, plan.status):
                writes += 1
            stored()
            for action in plan.actions:
                writes += await self._carry_out(key, action)
        except ApiError as error:
            if error.namespace_ending:
                raise Gone(str(error)) from error
            raise
        return writes

    async def news_of_driver(self, key: Key, snapshot: Snapshot) -> bool:
        """Whether the API server knows more of the driver than the watches have brought; the cache learns it.

        Each kind has a watch of its own, and one of them may be seconds behind the others.
        """
        group = snapshot.group
        if group is None:
            return False
        news = await self._look_again(kinds.POLICY_GROUP, *key, group["metadata"]["uid"]) is not None
        driver = group.get("status", {}).get("driver")
        if driver is not None:
            known = next((pod for pod in snapshot.pods if pod["metadata"]["name"] == driver["pod"]), None)
            uid = known["metadata"]["uid"] if known is not None else None
            pod = await self._look_again(kinds.POD, key[0], driver["pod"], uid)
            # One without the job's label is not cached, and so would be news for ever.
            news = news or (pod is not None and job_key(kinds.POD, pod) is not None)
        return news

    # -------------------------------------------------------------------------------------------------------- status

    async def _store_status(self, key: Key, job: Object, status: Object) -> bool:
        uid, version = job["metadata"]["uid"], job["metadata"]["resourceVersion"]
        patch = merge_patch(job.get("status", {}), status)
        if not patch or self._stored.get(uid) == (status, version):
            return False
        body = {"metadata": {"resourceVersion": version}, "status": patch}
        try:
            stored = await self._client.patch(kinds.RLJOB, *key, body, subresource="status")
        except ApiError as error:
            if error.conflict:
                await self._look_again(kinds.RLJOB, *key, uid)
                raise Stale("the RLJob has changed meanwhile") from error
            if error.object_missing:
                self._cache.remove(kinds.RLJOB, uid)
                raise Gone("the RLJob is gone") from error
            raise
        metrics.WRITES.labels("RLJob", "status").inc()
        self._cache.put(kinds.RLJOB, stored)
        self._stored[uid] = (status, stored["metadata"]["resourceVersion"])
        while len(self._stored) > REMEMBERED:
            self._stored.popitem(last=False)
        left = merge_patch(stored.get("status", {}), status)
        if left:
            log.warning(
                "the API server does not keep these fields of the status: %s; is the CRD older than the operator?",
                ", ".join(sorted(left)),
                extra={"job": "/".join(key)},
            )
        for line in transitions(job.get("status", {}), stored.get("status", {})):
            log.info("%s", line, extra={"job": "/".join(key)})
        return True

    # ------------------------------------------------------------------------------------------------------- actions

    async def _carry_out(self, key: Key, action: Action) -> int:
        try:
            match action:
                case Create(obj):
                    return await self._create(key, obj)
                case Patch():
                    return await self._patch(key, action)
                case Delete():
                    return await self._delete(key, action)
        except ApiError as error:
            if error.namespace_ending:
                raise
            raise Refused(_described(action), error.message, error.transient) from error

    async def _create(self, key: Key, obj: Object) -> int:
        kind, name = KINDS[obj["kind"]], obj["metadata"]["name"]
        if kind is kinds.RAY_CLUSTER:
            await self._no_other_cluster(key)
        try:
            stored = await self._client.create(kind, obj)
        except ApiError as error:
            if error.conflict:  # of a quota's bookkeeping, not of the object
                raise Stale(str(error)) from error
            if not error.already_exists:
                raise
            seen = await self._look_again(kind, key[0], name, None)
            if seen is not None and job_key(kind, seen) != key:
                raise NameTaken(
                    f"{kind.name} {name} could not be created",
                    f"the {kind.name} {key[0]}/{name} is not of this job, which needs its name; "
                    f"delete it, or give the job another name",
                ) from error
            raise Stale(f"{kind.name} {name} exists already") from error
        self._cache.put(kind, stored)
        metrics.WRITES.labels(kind.name, "create").inc()
        log.info("created %s %s", kind.name, name, extra={"job": "/".join(key)})
        return 1

    async def _no_other_cluster(self, key: Key) -> None:
        """Before paying for a RayCluster: is there one that the watch has not brought yet?"""
        items, _ = await self._client.list_all(kinds.RAY_CLUSTER, key[0], f"{kinds.JOB_LABEL}={key[1]}")
        unseen = [item for item in items if self._cache.put(kinds.RAY_CLUSTER, item)]
        if unseen:
            raise Stale(f"RayCluster {unseen[0]['metadata']['name']} exists already")

    async def _patch(self, key: Key, action: Patch) -> int:
        kind = KINDS[action.kind]
        patch = action.patch
        if isinstance(patch, dict) and action.uid is not None:
            patch = {**patch, "metadata": {**patch.get("metadata", {}), "uid": action.uid}}  # another uid: a conflict
        try:
            stored = await self._client.patch(kind, key[0], action.name, patch)
        except ApiError as error:
            if error.object_missing:
                if action.uid is not None:
                    self._cache.remove(kind, action.uid)
                raise Stale(f"{kind.name} {action.name} is gone") from error
            # 422 is how a JSON patch's failed `test` is answered, and also a patch that is wrong: which it must be if
            # the object is as it was known.
            test_failed = error.code == 422 and isinstance(patch, list)
            news = (
                await self._look_again(kind, key[0], action.name, action.uid) if error.conflict or test_failed else None
            )
            if error.conflict or news is not None:
                raise Stale(f"{kind.name} {action.name} has changed meanwhile") from error
            raise
        changed = self._cache.put(kind, stored)
        metrics.WRITES.labels(kind.name, "patch").inc()
        if changed:
            log.info("changed %s %s", kind.name, action.name, extra={"job": "/".join(key)})
        return 1

    async def _delete(self, key: Key, action: Delete) -> int:
        kind = KINDS[action.kind]
        try:
            answer = await self._client.delete(kind, key[0], action.name, action.uid, action.propagation)
        except ApiError as error:
            if error.object_missing or error.conflict:
                self._cache.remove(kind, action.uid)  # it, or the object of this uid, is gone
                return 0
            raise
        if answer.get("kind") == kind.name:
            self._cache.put(kind, answer)  # being deleted: finalizers, or a grace period
        else:
            self._cache.remove(kind, action.uid)
        metrics.WRITES.labels(kind.name, "delete").inc()
        log.info("deleted %s %s", kind.name, action.name, extra={"job": "/".join(key)})
        return 1

    async def _look_again(self, kind: Kind, namespace: str, name: str, uid: str | None) -> Object | None:
        """Ask for the object as it is now, for the cache; returns it if that was news."""
        try:
            seen = await self._client.get(kind, namespace, name)
        except ApiError as error:
            if not error.object_missing:
                raise
            seen = None
        if uid is not None and (seen is None or seen["metadata"]["uid"] != uid):
            self._cache.remove(kind, uid)
        if seen is None:
            return None
        # One of somebody else's is no business of the cache's.
        if job_key(kind, seen) is not None:
            return seen if self._cache.put(kind, seen) else None
        return seen


def _described(action: Action) -> str:
    match action:
        case Create(obj):
            return f"{obj['kind']} {obj['metadata']['name']} could not be created"
        case Patch():
            return f"{action.kind} {action.name} could not be changed"
        case Delete():
            return f"{action.kind} {action.name} could not be deleted"


def merge_patch(old: Any, new: Any) -> Object:
    """The smallest JSON merge patch (RFC 7386) from one object to another; {} if they are equal.

    An empty list or map is the same as none: the API server fills in the CRD's defaults, which are such.
    """
    patch: Object = {name: None for name in old if name not in new and old[name] not in ([], {})}
    for name, value in new.items():
        if name not in old:
            if value not in ([], {}):
                patch[name] = value
        elif isinstance(value, dict) and isinstance(old[name], dict):
            inner = merge_patch(old[name], value)
            if inner:
                patch[name] = inner
        elif old[name] != value:
            patch[name] = value
    return patch


def transitions(old: Object, new: Object) -> list[str]:
    """One line for each thing worth a line in the log: the state, the attempt, a condition's status or reason."""
    lines = []
    if old.get("state") != new.get("state"):
        lines.append(f"state {old.get('state', 'none')} -> {new.get('state', 'none')}")
    if old.get("attempt") != new.get("attempt"):
        restarts = new.get("restarts") or []
        why = f" ({restarts[-1].get('reason')}: {restarts[-1].get('message', '')})" if restarts else ""
        lines.append(f"attempt {old.get('attempt', 0)} -> {new.get('attempt', 0)}{why}")
    before = {condition["type"]: condition for condition in old.get("conditions") or ()}
    for condition in new.get("conditions") or ():
        known = before.get(condition["type"], {})
        if (known.get("status"), known.get("reason")) != (condition["status"], condition["reason"]):
            message = " ".join(str(condition.get("message", "")).split())[:300]
            lines.append(f"{condition['type']}={condition['status']} {condition['reason']}: {message}")
    return lines
