"""What of the driver's report goes into the job's status."""

from __future__ import annotations

from rlightning.api.models import CheckpointStatus, PolicyGroupStatus, Progress


def fold(report: PolicyGroupStatus | None, before: Progress | None) -> Progress | None:
    """The report's progress; the last known one while there is none.

    A report that says nothing new keeps the old one's time, so that ``lastReportTime`` tells when training last moved:
    a driver that hangs may go on reporting.
    """
    progress = report.progress if report is not None else None
    if progress is None:
        return before
    if before is not None and (before.iteration, before.env_steps) == _position(progress):
        return progress.model_copy(update={"last_report_time": before.last_report_time or progress.last_report_time})
    return progress


def _position(progress: Progress) -> tuple[int, int]:
    return progress.iteration, progress.env_steps


def checkpoint(report: PolicyGroupStatus | None, before: CheckpointStatus | None) -> CheckpointStatus | None:
    return report.checkpoint if report is not None and report.checkpoint is not None else before
