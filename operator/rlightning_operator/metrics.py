"""What the operator counts; served at /metrics."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

PREFIX = "rlightning_operator"

disable_created_metrics()  # type: ignore[no-untyped-call]

REQUESTS = Counter(
    f"{PREFIX}_api_requests",
    'Requests to the API server, by verb, kind and HTTP code ("none": no answer), watches of kopf not included.',
    ["verb", "kind", "code"],
)
REQUEST_SECONDS = Histogram(
    f"{PREFIX}_api_request_seconds", "Duration of a request.", buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
)
WRITES = Counter(f"{PREFIX}_writes", "Writes that changed something, by kind and verb.", ["kind", "verb"])
RECONCILES = Counter(
    f"{PREFIX}_reconciles", "Passes over a job, by result: unchanged, wrote, conflict, error, gone.", ["result"]
)
RECONCILE_SECONDS = Histogram(
    f"{PREFIX}_reconcile_seconds", "Duration of a pass.", buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
)
ERRORS = Counter(f"{PREFIX}_errors", "Errors, by part.", ["part"])
OBSERVED = Counter(f"{PREFIX}_observed_events", "Events from watches, by kind.", ["kind"])
RELISTS = Counter(f"{PREFIX}_relists", "Whole listings, by kind.", ["kind"])
MISSED = Counter(
    f"{PREFIX}_missed_changes", "Changes that a listing found before its watch said so, by kind.", ["kind"]
)
EVENTS = Counter(
    f"{PREFIX}_events", "Kubernetes Events on jobs, by result: sent, repeated, dropped, failed.", ["result"]
)
QUEUE_DEPTH = Gauge(f"{PREFIX}_queue_depth", "Jobs that wait to be looked at, now or later.")
QUEUE_OVERDUE = Gauge(f"{PREFIX}_queue_overdue_seconds", "For how long the job that waits longest has been due.")


class JobStates(Collector):
    """``rlightning_operator_jobs{state}``, counted when asked for."""

    def __init__(self, states: Callable[[], Iterable[str]]) -> None:
        self._states = states

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """One number for each state that occurs."""
        family = GaugeMetricFamily(f"{PREFIX}_jobs", "RLJobs by status.state.", labels=["state"])
        for state, count in sorted(Tally(self._states()).items()):
            family.add_metric([state], count)
        return [family]


def register(states: Callable[[], Iterable[str]], depth: Callable[[], float], overdue: Callable[[], float]) -> None:
    """Connect the numbers that are read when asked for. Once in a process."""
    REGISTRY.register(JobStates(states))
    QUEUE_DEPTH.set_function(depth)
    QUEUE_OVERDUE.set_function(overdue)
