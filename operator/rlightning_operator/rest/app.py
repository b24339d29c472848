"""The application: routers, errors and what stands around every request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from rlightning_operator.rest import problems
from rlightning_operator.rest.cluster import Cluster
from rlightning_operator.rest.dependencies import Service
from rlightning_operator.rest.observe import Observe
from rlightning_operator.rest.problems import ProblemDetails
from rlightning_operator.rest.routers import jobs, probes
from rlightning_operator.rest.settings import Settings

DESCRIPTION = """\
A read-only view of RLJobs: conditions, progress, weights with their digests, members.

Send a Kubernetes token as `Authorization: Bearer TOKEN`. The service asks the API server whose it is (TokenReview) and
what that user may read (SubjectAccessReview), and keeps the answers for seconds. The rights are those of `kubectl`:
the ClusterRole `rlightning-view`, or the built-in `view`, bound in a namespace.

Errors are RFC 9457 problem details. Numbers that were not measured yet are absent, never 0.
"""


def create_app(settings: Settings, cluster: Cluster) -> FastAPI:
    """The application, which opens and closes ``cluster``."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await cluster.open()
        app.state.service = Service.of(settings, cluster)
        try:
            yield
        finally:
            await cluster.close()

    app = FastAPI(
        title="RLightning status service",
        version=version("rlightning"),
        description=DESCRIPTION,
        docs_url="/docs" if settings.docs else None,
        redoc_url=None,
        lifespan=lifespan,
        generate_unique_id_function=lambda route: route.name,  # what generated clients call the function
        redirect_slashes=False,  # a redirect would send the token to whatever host the request named
    )
    app.include_router(jobs.router)
    app.include_router(probes.router)
    problems.install(app)
    app.add_middleware(Observe, seconds=settings.request_seconds, pages=frozenset({"/docs"} if settings.docs else ()))
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with the schema of problems, which its routes only refer to."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes, tags=TAGS
        )
        problem = ProblemDetails.model_json_schema(by_alias=True, ref_template="#/components/schemas/{model}")
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(problem.pop("$defs", {}))
        schemas["ProblemDetails"] = problem
        app.openapi_schema = _without_null(document)
    return app.openapi_schema


def _without_null(node: Any) -> Any:
    """``X or null`` as ``X``: what is not known is left out of an answer, and null is no parameter."""
    if isinstance(node, list):
        return [_without_null(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: _without_null(value) for key, value in node.items()}
    options = [option for option in node.get("anyOf", ()) if option != {"type": "null"}]
    if len(options) == 1:
        del node["anyOf"]
        node = {**options[0], **node}
    return node


TAGS: list[dict[str, Any]] = [
    {"name": "jobs", "description": "RLJobs, for callers with a token."},
    {"name": "probes", "description": "For the kubelet and Prometheus, without a token."},
]
