"""Every error of the service, as RFC 9457 `application/problem+json`, those of the framework included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from rlightning_operator.rest.cluster import Refused, Unavailable

MEDIA_TYPE = "application/problem+json"
# A tag URI (RFC 4151): a stable name that promises no page behind it.
TYPES = "tag:rlightning.io,2026:problem/"


class InvalidParameter(BaseModel):
    """One value of the request that cannot be taken."""

    where: str = Field(description="`path`, `query` or `header`, and the parameter's name.", examples=["query.limit"])
    message: str = Field(description="What is wrong with it.")


class ProblemDetails(BaseModel):
    """RFC 9457 problem details."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description="Stable name of the kind of problem.", examples=[f"{TYPES}forbidden"])
    title: str = Field(description="The kind of problem in words; the same each time.", examples=["Forbidden"])
    status: int = Field(description="The HTTP status code.", examples=[403])
    detail: str = Field(description="What happened this time, and what to do.")
    instance: str = Field(description="The path that was asked for.", examples=["/v1/namespaces/team-a/rljobs"])
    request_id: str = Field(alias="requestId", description="Of this request, as in the service's log.")
    user: str | None = Field(default=None, description="403: who the token says that the caller is.")
    verb: str | None = Field(default=None, description="403: the verb that the caller lacks.")
    resource: str | None = Field(default=None, description="403 and 404: the resource meant.")
    namespace: str | None = Field(default=None, description="403 and 404: the namespace meant.")
    name: str | None = Field(default=None, description="404: the object meant.")
    errors: list[InvalidParameter] | None = Field(default=None, description="422: each value that cannot be taken.")


class Problem(Exception):
    """An answer that is an error; ``names`` are further members of the problem's JSON."""

    def __init__(self, kind: str, status: int, detail: str, headers: Mapping[str, str] | None = None, **names: Any):
        super().__init__(detail)
        self.kind = kind
        self.status = status
        self.detail = detail
        self.headers = dict(headers or {})
        self.names = names


def unauthenticated(detail: str, error: str | None = None) -> Problem:
    """401, with the challenge that RFC 6750 asks for; no error code where no token was given."""
    challenge = 'Bearer realm="rlightning"' + (f', error="{error}"' if error else "")
    return Problem("unauthenticated", 401, detail, {"WWW-Authenticate": challenge})


def not_found(resource: str, namespace: str, name: str) -> Problem:
    """404 for an object."""
    detail = f"there is no {resource} {name} in namespace {namespace}"
    return Problem("not-found", 404, detail, resource=resource, namespace=namespace, name=name)


def response(request: Request, problem: Problem) -> JSONResponse:
    """The answer to the caller."""
    content = {
        "type": TYPES + problem.kind,
        "title": HTTPStatus(problem.status).phrase,
        "status": problem.status,
        "detail": problem.detail,
        "instance": request.scope["path"],
        "requestId": request.scope.get("state", {}).get("request_id", ""),
        **{key: value for key, value in problem.names.items() if value is not None},
    }
    return JSONResponse(content, problem.status, problem.headers, MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Have every exception answered as a problem."""

    async def problem(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, Problem)
        return response(request, error)

    async def framework(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        match error.status_code:
            case 404:
                detail = f"there is nothing at {request.scope['path']}; /openapi.json lists what there is"
                found = Problem("no-such-path", 404, detail)
            case 405:
                detail = f"{request.method} is not allowed here: this service only reads, by GET"
                found = Problem("method-not-allowed", 405, detail, error.headers)
            case code:
                found = Problem("http", code, str(error.detail), error.headers)
        return response(request, found)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        errors = _parameters(error.errors())
        detail = "; ".join(f"{e.where}: {e.message}" for e in errors)
        return response(request, Problem("invalid-request", 422, detail, errors=jsonable_encoder(errors)))

    async def unavailable(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, Unavailable)
        headers = {"Retry-After": str(error.retry_after)}
        return response(request, Problem("unavailable", 503, f"{error}; try again", headers))

    async def refused(request: Request, error: Exception) -> JSONResponse:
        # Whoever could be refused was asked about before; what is left is the service's own account, or a bug.
        assert isinstance(error, Refused)
        detail = f"the API server refused the status service's own request ({error.code} {error.reason}): {error}"
        return response(request, Problem("refused", 500, detail))

    app.add_exception_handler(Problem, problem)
    app.add_exception_handler(HTTPException, framework)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Unavailable, unavailable)
    app.add_exception_handler(Refused, refused)


def _parameters(errors: Sequence[Any]) -> list[InvalidParameter]:
    """Pydantic's errors without the input: it may be long, and comes from the caller."""
    return [InvalidParameter(where=".".join(str(part) for part in e["loc"]), message=e["msg"]) for e in errors]


def documented(*codes: int) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of a route in the OpenAPI document."""
    words = {
        304: "Not modified: If-None-Match names what it is now.",
        401: "No bearer token, or one that the API server does not take.",
        403: "The caller lacks a right; verb, resource and namespace are named.",
        404: "No such object.",
        405: "Only GET.",
        410: "The `continue` token is too old; start again without one.",
        422: "A parameter cannot be taken; each is named.",
        500: "A bug, or the service's own account lacks a right.",
        503: "The API server cannot be reached or cannot answer now; Retry-After says when to try again.",
    }
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}
    return {c: {"description": words[c], **({} if c == 304 else {"content": content})} for c in codes}
