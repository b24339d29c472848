"""``progress`` in a status, the same in a run folder and in a PolicyGroup."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from rlightning.runtime.pace import Pace

if TYPE_CHECKING:
    from rlightning.runtime.reporter import IterationReport, Outcome, RunInfo

MAX_METRICS = 64
MAX_NAME = 128
FAR_AWAY = 10 * 365 * 86400
"""Seconds. An end further away than ten years is no estimate."""


def started_progress(run: RunInfo, pace: Pace) -> dict[str, Any]:
    """Before the first iteration of an attempt: what was done before it."""
    return {
        "iteration": run.start_iteration,
        "envSteps": run.start_env_steps,
        "percent": math.floor(pace.percent),
        "lastReportTime": iso(now()),
    }


def iteration_progress(report: IterationReport, pace: Pace) -> dict[str, Any]:
    """After an iteration; what was not measured, or is not finite, is left out."""
    at = now()
    metrics = {name[:MAX_NAME]: float(value) for name, value in report.metrics.items() if math.isfinite(value)}
    progress: dict[str, Any] = {
        "iteration": report.iteration,
        "envSteps": report.env_steps,
        "percent": math.floor(pace.percent),
        "lastReportTime": iso(at),
        "metrics": [{"name": name, "value": value} for name, value in list(metrics.items())[:MAX_METRICS]],
    }
    if report.episode_return_mean is not None and math.isfinite(report.episode_return_mean):
        # kubectl prints a number with all its digits; metrics.jsonl keeps them.
        progress["episodeReturnMean"] = round(float(report.episode_return_mean), 3)
    if math.isfinite(report.steps_per_second):
        progress["stepsPerSecond"] = round(report.steps_per_second, 1)
    remaining = pace.remaining_seconds()
    if remaining is not None and remaining < FAR_AWAY:
        progress["estimatedCompletionTime"] = iso(at + timedelta(seconds=remaining))
    return progress


def finished_progress(last: dict[str, Any], outcome: Outcome, pace: Pace | None) -> dict[str, Any]:
    """At the end: ``last`` as it ended; there is nothing to estimate any more."""
    progress = last | {"iteration": outcome.iteration, "envSteps": outcome.env_steps, "lastReportTime": iso(now())}
    progress.pop("estimatedCompletionTime", None)
    if pace is not None:
        progress["percent"] = math.floor(Pace(pace.total, outcome.env_steps).percent)
    return progress


def now() -> datetime:
    return datetime.now(UTC)


def iso(when: datetime, *, milliseconds: bool = False) -> str:
    """``2026-03-01T12:00:00Z``."""
    return when.isoformat(timespec="milliseconds" if milliseconds else "seconds").replace("+00:00", "Z")
