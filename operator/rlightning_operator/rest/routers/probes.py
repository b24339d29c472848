"""Is the service alive, can it answer, what does it do: without a token."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from rlightning_operator.rest import metrics
from rlightning_operator.rest.dependencies import ServiceDep
from rlightning_operator.rest.problems import documented

router = APIRouter(tags=["probes"])


class Health(BaseModel):
    """A yes; a no is a problem."""

    status: str = "ok"


@router.get("/healthz", summary="Alive")
async def healthz() -> Health:
    """200 while the service answers at all. The API server plays no part: a restart would not bring it back."""
    return Health()


@router.get("/readyz", summary="Ready", responses=documented(503))
async def readyz(service: ServiceDep) -> Health:
    """200 while the API server can be reached and takes the service's own token; asked at most once in 2 s."""
    await service.ready()
    return Health()


@router.get("/metrics", summary="Prometheus metrics", response_class=Response)
async def get_metrics() -> Response:
    """In Prometheus' text format. Holds routes and codes, never names, users or tokens."""
    return Response(await run_in_threadpool(generate_latest, metrics.REGISTRY), media_type=CONTENT_TYPE_LATEST)
