"""RLJobs, their members and their versions."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from rlightning.api.models import API_VERSION, Manifest
from rlightning_operator.rest.access import Caller
from rlightning_operator.rest.cluster import Refused, Unavailable
from rlightning_operator.rest.dependencies import CallerDep, JobName, Namespace, Page, Service, ServiceDep
from rlightning_operator.rest.problems import InvalidParameter, Problem, documented, not_found
from rlightning_operator.rest.views import JobsView, JobView, MembersView, VersionsView

router = APIRouter(prefix="/v1", tags=["jobs"])

# Good until the next question: a cache may keep the answer, but must ask whether it still holds, and for one user only.
CACHING = {"Cache-Control": "private, no-cache", "Vary": "Authorization"}
IfNoneMatch = Annotated[
    str | None,
    Header(max_length=4096, description="The ETag of what you have; unchanged is answered by 304 without a body."),
]
SINGLE = documented(304, 401, 403, 404, 422, 500, 503)
LISTED = documented(401, 403, 410, 422, 500, 503)


@router.get("/rljobs", summary="List RLJobs of all namespaces", response_model=JobsView, responses=LISTED)
async def list_all_rljobs(service: ServiceDep, caller: CallerDep, page: Annotated[Page, Query()]) -> Response:
    """Needs the right to list rljobs in all namespaces; where the service serves some only, in each of those."""
    namespaces = service.settings.namespaces
    if not namespaces:
        await service.access.require(caller, "list", "rljobs", None)
        return _answer(await _list(service, None, page.limit, page.continue_), CACHING)
    for namespace in namespaces:
        await service.access.require(caller, "list", "rljobs", namespace)
    return _answer(await _list_each(service, namespaces, page), CACHING)


@router.get(
    "/namespaces/{namespace}/rljobs",
    summary="List RLJobs of a namespace",
    response_model=JobsView,
    responses=documented(401, 403, 404, 410, 422, 500, 503),
)
async def list_rljobs(
    service: ServiceDep, caller: CallerDep, namespace: Namespace, page: Annotated[Page, Query()]
) -> Response:
    """Needs the right to list rljobs in the namespace."""
    await service.access.require(caller, "list", "rljobs", namespace)
    _served(service, namespace)
    return _answer(await _list(service, namespace, page.limit, page.continue_), CACHING)


@router.get("/namespaces/{namespace}/rljobs/{name}", summary="Get an RLJob", response_model=JobView, responses=SINGLE)
async def get_rljob(
    service: ServiceDep, caller: CallerDep, namespace: Namespace, name: JobName, if_none_match: IfNoneMatch = None
) -> Response:
    """Conditions, progress, weights, checkpoint, pools. Needs the right to get it."""
    return _single(JobView.of(await _job(service, caller, namespace, name)), if_none_match)


@router.get(
    "/namespaces/{namespace}/rljobs/{name}/members",
    summary="Members of an RLJob, with their digests",
    response_model=MembersView,
    responses=SINGLE,
)
async def get_members(
    service: ServiceDep, caller: CallerDep, namespace: Namespace, name: JobName, if_none_match: IfNoneMatch = None
) -> Response:
    """Needs the right to get the RLJob, and its PolicyGroup (policygroups), which has its name."""
    return _single(MembersView.of(name, await _group(service, caller, namespace, name)), if_none_match)


@router.get(
    "/namespaces/{namespace}/rljobs/{name}/versions",
    summary="Versions of an RLJob's weights: the learner's digest, and how many members proved it",
    response_model=VersionsView,
    responses=SINGLE,
)
async def get_versions(
    service: ServiceDep, caller: CallerDep, namespace: Namespace, name: JobName, if_none_match: IfNoneMatch = None
) -> Response:
    """The last 32. Needs the right to get the RLJob, and its PolicyGroup (policygroups), which has its name."""
    return _single(VersionsView.of(name, await _group(service, caller, namespace, name)), if_none_match)


# ------------------------------------------------------------------------------------------------------------- reading


async def _job(service: Service, caller: Caller, namespace: str, name: str) -> dict[str, Any]:
    await service.access.require(caller, "get", "rljobs", namespace, name)
    _served(service, namespace)
    stored = await _read(service, "rljobs", namespace, name)
    if stored is None:
        raise not_found("RLJob", namespace, name)
    return stored


async def _group(service: Service, caller: Caller, namespace: str, name: str) -> dict[str, Any] | None:
    """The job's PolicyGroup; None before the operator has made it."""
    await service.access.require(caller, "get", "policygroups", namespace, name)
    job = await _job(service, caller, namespace, name)
    stored = await _read(service, "policygroups", namespace, name)
    owners = stored["metadata"].get("ownerReferences", []) if stored else []
    if all(owner.get("uid") != job["metadata"]["uid"] for owner in owners):
        return None  # what is left of a job that had the same name before
    return stored


async def _read(service: Service, resource: str, namespace: str, name: str) -> dict[str, Any] | None:
    try:
        return await service.cluster.get(resource, f"{_path(resource, namespace)}/{name}")
    except Refused as error:
        if error.code != 404:
            raise
        if f'"{name}"' not in str(error):  # then the server does not mean the object
            raise _no_definition() from error
        return None


async def _list(service: Service, namespace: str | None, limit: int, token: str | None) -> JobsView:
    query = {"limit": str(limit)} | ({"continue": token} if token else {})
    async with service.lists:
        try:
            stored = await service.cluster.get("rljobs", _path("rljobs", namespace), query)
        except Refused as error:
            raise _not_listed(error, token) from None
        items: list[JobView] = []
        for item in stored.get("items") or ():
            if len(items) % 50 == 49:
                await asyncio.sleep(0)  # 500 jobs take some tenths of a second; others, and probes, have their turn
            items.append(JobView.of(item))
    metadata = stored.get("metadata") or {}
    return JobsView(
        items=items,
        continue_=metadata.get("continue") or None,
        remaining_item_count=metadata.get("remainingItemCount"),
    )


def _not_listed(error: Refused, token: str | None) -> Exception:
    """What the caller should know of a list that the API server refused."""
    match error.code:
        case 404:
            return _no_definition()
        case 410:
            detail = "this `continue` token is too old, or the list has changed too much; start again without one"
            return Problem("expired", 410, detail)
        case 400 if token:
            return _bad_continue()
    return error


async def _list_each(service: Service, namespaces: tuple[str, ...], page: Page) -> JobsView:
    """One list over several namespaces; `continue` is ``namespace:token of that namespace's list``."""
    at, _, token = (page.continue_ or f"{namespaces[0]}:").partition(":")
    if at not in namespaces:
        raise _bad_continue()
    items: list[JobView] = []
    for namespace in namespaces[namespaces.index(at) :]:
        if len(items) == page.limit:
            return JobsView(items=items, continue_=f"{namespace}:")
        part = await _list(service, namespace, page.limit - len(items), token or None)
        items += part.items
        if part.continue_:
            return JobsView(items=items, continue_=f"{namespace}:{part.continue_}")
        token = ""
    return JobsView(items=items)


def _served(service: Service, namespace: str) -> None:
    """Raise a 404 Problem for a namespace that this install leaves alone. After the caller's rights: it is a hint."""
    served = service.settings.namespaces
    if served and namespace not in served:
        detail = f"namespace {namespace} is not served by this install, which serves {', '.join(served)}"
        raise Problem("namespace-not-served", 404, detail, namespace=namespace)


def _path(resource: str, namespace: str | None) -> str:
    return f"/apis/{API_VERSION}/" + (f"namespaces/{namespace}/{resource}" if namespace else resource)


def _no_definition() -> Unavailable:
    return Unavailable(
        "this cluster does not know RLJobs: their CustomResourceDefinition is missing; install the chart with "
        "crds.install=true",
        30,
    )


def _bad_continue() -> Problem:
    error = InvalidParameter(where="query.continue", message="not a token of a page before")
    return Problem("invalid-request", 422, f"{error.where}: {error.message}", errors=[error.model_dump()])


# ----------------------------------------------------------------------------------------------------------- answering


def _answer(view: Manifest, headers: dict[str, str]) -> Response:
    # Not left to FastAPI: what is not stored must not appear, neither as null nor as a default; an ETag needs bytes.
    content = view.model_dump_json(by_alias=True, exclude_none=True, exclude_unset=True)
    return Response(content, headers=headers, media_type="application/json")


def _single(view: Manifest, if_none_match: str | None) -> Response:
    answer = _answer(view, CACHING)
    # Of the bytes and not of resourceVersion: a newer service may show the same object otherwise.
    etag = f'"{hashlib.blake2b(answer.body, digest_size=16).hexdigest()}"'
    given = {tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")}
    if etag in given or "*" in given:
        return Response(status_code=304, headers={**CACHING, "ETag": etag})
    answer.headers["ETag"] = etag
    return answer
