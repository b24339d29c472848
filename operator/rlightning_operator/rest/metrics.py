"""What Prometheus sees of the service: `/metrics`. Labels hold routes and codes, never names, users or tokens."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)
GCCollector(registry=REGISTRY)

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
REQUESTS = Counter(
    "rlightning_status_requests", "Answered requests.", ("method", "route", "code"), registry=REGISTRY
)  # exposed as …_requests_total
SECONDS = Histogram(
    "rlightning_status_request_seconds", "From request to answer.", ("route",), buckets=BUCKETS, registry=REGISTRY
)
API_SECONDS = Histogram(
    "rlightning_status_apiserver_seconds",
    "Requests to the API server, by its answer; code none: no answer.",
    ("request", "code"),
    buckets=BUCKETS,
    registry=REGISTRY,
)
CACHE = Counter(
    "rlightning_status_access_cache",
    "Questions about tokens and rights that the cache answered (hit), or the API server (miss).",
    ("cache", "result"),
    registry=REGISTRY,
)
