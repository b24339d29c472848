"""When a RayCluster that is not needed any more goes: at once, but for a driver that is just leaving."""

from __future__ import annotations

from datetime import datetime

from rlightning_operator.builders.names import ATTEMPT_LABEL
from rlightning_operator.reconcile.clock import Clock
from rlightning_operator.reconcile.objects import is_deleted, is_owned_by, is_true, name_of, uid_of
from rlightning_operator.reconcile.snapshot import Delete, Object, Snapshot


def clusters_to_release(snapshot: Snapshot, clock: Clock, attempt: int | None, since: datetime) -> list[Delete]:
    """All of the job's, unless the submitter still prints the end of the log of a driver that stored its outcome.

    Without its head a submitter cannot tell a driver that is done from one that is lost. It needs seconds.

    Args:
        snapshot: of the job.
        clock: asked whether the submitter's time is up.
        attempt: the last one.
        since: when the job ended or was suspended.
    """
    uid = uid_of(snapshot.job)
    clusters = [c for c in snapshot.clusters if is_owned_by(c, uid) and not is_deleted(c)]
    leaving = bool(clusters) and _says_farewell(snapshot, uid, attempt)
    if leaving and not clock.passed(since, snapshot.config.farewell_seconds):
        return []
    return [Delete("RayCluster", name_of(cluster), uid_of(cluster)) for cluster in clusters]


def is_over(job: Object) -> bool:
    """Whether a Job has ended."""
    return is_true(job, "Complete") or is_true(job, "Failed")


def _says_farewell(snapshot: Snapshot, uid: str, attempt: int | None) -> bool:
    group = snapshot.group
    if group is None or not is_owned_by(group, uid):
        return False
    report = group.get("status") or {}
    if attempt is None or report.get("attempt") != attempt or "outcome" not in report:
        return False
    return any(
        is_owned_by(job, uid)
        and not is_deleted(job)
        and not is_over(job)
        and (job["metadata"].get("labels") or {}).get(ATTEMPT_LABEL) == str(attempt)
        for job in snapshot.submitters
    )
