"""Ray's Jobs API over HTTP, without Ray: one job, by its submission ID."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp

from rlightning.errors import RLightningError

REQUEST_SECONDS = 20.0
SILENT_SECONDS = 300.0
"""After which a log stream without a line is opened anew: it may have died without a sign."""
FINAL = ("SUCCEEDED", "FAILED", "STOPPED")


class JobsUnreachable(RLightningError):
    """The Jobs API does not answer, or answers that it cannot now."""


class JobsRefused(RLightningError):
    """The Jobs API refused a request, and will again."""


@dataclass(frozen=True)
class RayJob:
    """A job as the API has it.

    Attributes:
        status: PENDING, RUNNING, or one of :data:`FINAL`.
        message: Ray's account of it.
        exit_code: of its process; None while it runs, or if it never did.
    """

    status: str
    message: str = ""
    exit_code: int | None = None

    @property
    def ended(self) -> bool:
        return self.status in FINAL


@dataclass
class RayJobs:
    """The Jobs API of one Ray head, for one submission.

    Args:
        address: ``http://host:8265``.
        submission_id: of the job.
        token: of the Ray cluster; empty where it asks for none.

    Raises:
        JobsUnreachable, JobsRefused: from every method.
    """

    address: str
    submission_id: str
    token: str = field(default="", repr=False)

    async def __aenter__(self) -> Self:
        # No proxy from the environment: the head is in this cluster, and the token is for nobody else.
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self.token}"} if self.token else None,
            timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS, connect=5),
            trust_env=False,
        )
        self._jobs = f"{self.address.rstrip('/')}/api/jobs/"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()

    async def get(self) -> RayJob | None:
        """The job; None if there is none of this ID."""
        found = await self._ask("GET", self.submission_id)
        if found is None:
            return None
        return RayJob(str(found.get("status")), str(found.get("message") or ""), found.get("driver_exit_code"))

    async def submit(self, entrypoint: str, environment: dict[str, str]) -> None:
        """Start it. Refused if it is there already."""
        job: dict[str, Any] = {"entrypoint": entrypoint, "submission_id": self.submission_id}
        if environment:
            job["runtime_env"] = {"env_vars": environment}
        if await self._ask("POST", "", job) is None:
            raise JobsUnreachable(f"{self.address} does not serve the Jobs API yet")

    async def log(self, most: int) -> str | None:
        """All of its log so far; None if that is more than so many bytes."""
        found = await self._ask("GET", f"{self.submission_id}/logs", most=most)
        return None if found is None else str(found.get("logs") or "")

    async def follow(self) -> AsyncIterator[str]:
        """Its log from the beginning, in pieces as they are written, until the stream ends.

        It ends with the job, but also when the connection or a process on the way does: look what became of the job.
        """
        try:
            async with self._session.ws_connect(
                f"{self._jobs}{self.submission_id}/logs/tail",
                # Not ours to time: lines may be minutes apart. Ray does not answer pings on this stream.
                timeout=aiohttp.ClientWSTimeout(ws_receive=SILENT_SECONDS, ws_close=5),
                max_msg_size=0,
            ) as stream:
                async for message in stream:
                    if message.type is aiohttp.WSMsgType.TEXT:
                        yield message.data
        except TimeoutError:
            return
        except (aiohttp.ClientError, OSError) as error:
            raise JobsUnreachable(f"the log stream broke: {_words(error)}") from error

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, most: int = 1 << 24
    ) -> dict[str, Any] | None:
        """The answer's JSON object; None for 404, and for an answer of more than ``most`` bytes."""
        try:
            async with self._session.request(method, self._jobs + path, json=body) as response:
                if response.status == 404:
                    if method == "GET" and "does not exist" not in await response.text():  # Ray's words of a job
                        raise JobsUnreachable(f"{self.address} does not serve the Jobs API yet")
                    return None
                if response.status in (401, 403):
                    raise JobsRefused(
                        f"Ray at {self.address} refuses the token (HTTP {response.status}): RAY_AUTH_TOKEN must be "
                        "that of this Ray cluster (key auth_token of the Secret with its name)"
                    )
                if response.status >= 400:
                    text = (await response.text()).strip()
                    reason = text.splitlines()[-1][:500] if text else response.reason
                    said = f"Ray at {self.address} answers {method} with HTTP {response.status}: {reason}"
                    raise (JobsRefused if response.status < 500 else JobsUnreachable)(said)
                answer = bytearray()
                async for piece in response.content.iter_any():  # its length is not announced
                    answer += piece
                    if len(answer) > most:
                        return None
                found: dict[str, Any] = json.loads(answer)
                return found
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise JobsUnreachable(f"{self.address} does not answer: {_words(error)}") from error


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
