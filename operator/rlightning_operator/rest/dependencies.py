"""What routes ask for: the API server, who calls, and parameters that were checked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Path, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field

from rlightning_operator.rest.access import Access, Cache, Caller
from rlightning_operator.rest.cluster import Cluster
from rlightning_operator.rest.settings import Settings

LISTS = 4  # at once; each may hold megabytes, and the rest waits for its turn or its deadline
READY_SECONDS = 2.0  # probes come without a token: strangers must not make the API server work


@dataclass(frozen=True)
class Service:
    """What lives as long as the application."""

    settings: Settings
    cluster: Cluster
    access: Access
    readiness: Cache[None]
    lists: asyncio.Semaphore

    @classmethod
    def of(cls, settings: Settings, cluster: Cluster) -> Service:
        """With caches of its own."""
        access = Access(cluster, settings.audiences, settings.cache_seconds, settings.cache_size)
        return cls(settings, cluster, access, Cache("ready", READY_SECONDS, 1), asyncio.Semaphore(LISTS))

    async def ready(self) -> None:
        """Return when the API server can be asked. Raises Unavailable."""
        await self.readiness.get("", self.cluster.reachable)


def service(request: Request) -> Service:
    """The application's one Service."""
    found = request.app.state.service
    assert isinstance(found, Service)
    return found


bearer = HTTPBearer(
    scheme_name="token",
    description="A Kubernetes token: of a ServiceAccount (`kubectl create token NAME`) or of your identity provider.",
    auto_error=False,
)


async def caller(
    request: Request,
    service: Annotated[Service, Depends(service)],
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)],
) -> Caller:
    """Who calls; solved before parameters are looked at, so a stranger learns nothing of them."""
    found = await service.access.caller(credentials.credentials if credentials else None)
    request.state.user = found.username  # for the log
    return found


ServiceDep = Annotated[Service, Depends(service)]
CallerDep = Annotated[Caller, Depends(caller)]

Namespace = Annotated[
    str,
    Path(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", description="A namespace.", examples=["team-a"]),
]
JobName = Annotated[
    str, Path(max_length=40, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", description="An RLJob.", examples=["cartpole"])
]


class Page(BaseModel):
    """Which part of a list."""

    model_config = ConfigDict(extra="forbid")  # `?limt=5` is an error, not everything

    limit: int = Field(default=100, ge=1, le=500, description="At most so many items.")
    continue_: str | None = Field(
        default=None,
        alias="continue",
        max_length=4096,
        pattern=r"^[A-Za-z0-9_=.:~-]+$",
        description="From the page before; good for some minutes.",
    )
