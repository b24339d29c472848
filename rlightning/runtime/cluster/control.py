"""What the operator wants of this driver: follows its PolicyGroup while the driver works."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from rlightning.errors import RLightningError, Superseded
from rlightning.runtime.cluster.group_client import ApiProblem, GroupClient, backoff

JOB_UID_LABEL = "rlightning.io/job-uid"
WATCH_SECONDS = 60.0
"""After which a watch is renewed, from a fresh look: so long a connection may have been dead without a sign."""
GRACE_SECONDS = 10.0
"""For a superseded driver to end by itself. An iteration may be longer, and its successor waits for the run folder."""


def first_look(
    client: GroupClient, *, job_uid: str, attempt: int, seconds: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """The PolicyGroup, once it names this attempt.

    Raises:
        Superseded: it names a later one, or belongs to another job.
        RLightningError: it was not there, or did not name this attempt, for so many seconds.
    """
    end = time.monotonic() + seconds
    failures, said = 0, ""
    while True:
        try:
            group = client.get()
            reason = superseded(group, job_uid=job_uid, attempt=attempt)
            if reason is not None:
                raise Superseded(reason)
            at = group["spec"]["attempt"]
            if at == attempt:
                return group
            problem = f"its spec.attempt is {at}, which has to become {attempt}"
        except ApiProblem as error:
            problem = str(error)
        if time.monotonic() >= end:
            raise RLightningError(f"{client} could not be used within {seconds:g} s: {problem}")
        if problem != said:
            say(f"waiting for {client}: {problem}")
            said = problem
        failures += 1
        time.sleep(min(backoff(failures, most=2.0), max(0.0, end - time.monotonic())))


def superseded(group: dict[str, Any], *, job_uid: str, attempt: int) -> str | None:
    """Why the driver of this attempt has no business with ``group`` any more; None if it has."""
    label = group["metadata"].get("labels", {}).get(JOB_UID_LABEL)
    if label != job_uid:
        return f"the PolicyGroup is another job's (uid {label})"
    if group["metadata"].get("deletionTimestamp"):
        return "the job is being deleted"
    at = max(group["spec"]["attempt"], group.get("status", {}).get("attempt", 0))
    if at > attempt:
        return f"attempt {at} has taken over"
    return None


class Control:
    """Watches the PolicyGroup in a thread. A StopRequest.

    Args:
        client: of the group.
        group: as the first look found it.
        job_uid, attempt: of this driver.
        say: told of what the operator wants, and once of every trouble with the watch.
        leave: called when the driver was superseded and does not end within :data:`GRACE_SECONDS`.
    """

    def __init__(
        self,
        client: GroupClient,
        group: dict[str, Any],
        *,
        job_uid: str,
        attempt: int,
        say: Callable[[str], None],
        leave: Callable[[], None] = lambda: os._exit(0),
    ) -> None:
        self.uid: str = group["metadata"]["uid"]
        self._client, self._job_uid, self._attempt = client, job_uid, attempt
        self._say, self._leave = say, leave
        self._stop = threading.Event()
        self._closed = threading.Event()
        self._superseded: str | None = None
        self._listeners: list[Callable[[], None]] = []
        self._version: str = group["metadata"]["resourceVersion"]
        self._take(group)
        self._thread = threading.Thread(target=self._follow, name="control", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """The driver is at its end: nothing that is wanted now can be heeded."""
        self._closed.set()

    @property
    def requested(self) -> bool:
        """``spec.state`` is Stopped: save at the next iteration's end, and report."""
        return self._stop.is_set()

    @property
    def superseded(self) -> str | None:
        """Why this driver must end and write nothing more; None while it need not."""
        return self._superseded

    def check(self) -> None:
        """Raise Superseded if the driver must end and write nothing more."""
        if self._superseded is not None:
            raise Superseded(self._superseded)

    def when_superseded(self, call: Callable[[], None]) -> None:
        """Have ``call`` called then, from whichever thread finds out."""
        self._listeners.append(call)

    def look(self) -> None:
        """Look at the PolicyGroup now (a report was refused: somebody else may be reporting).

        Raises:
            ApiProblem: it cannot be seen.
        """
        self._refresh()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        failures, said = 0, ""
        while not self._closed.is_set() and self._superseded is None:
            try:
                for kind, group in self._client.watch(self._version, WATCH_SECONDS):
                    self._take(group, gone=kind == "DELETED")
                    failures, said = 0, ""
                    if self._closed.is_set() or self._superseded is not None:
                        break
                else:
                    self._refresh()
            except ApiProblem as error:
                failures += 1
                if error.code != 410 and str(error) != said:  # 410: only too long ago
                    self._say(f"watching {self._client}: {error}; trying again")
                    said = str(error)
                self._closed.wait(backoff(failures, error.retry_after))
                self._refresh_quietly()

    def _refresh(self) -> None:
        try:
            group = self._client.get()
        except ApiProblem as error:
            if error.gone:
                self._supersede("the job is gone")
                return
            raise
        self._version = group["metadata"]["resourceVersion"]
        self._take(group)

    def _refresh_quietly(self) -> None:
        try:
            self._refresh()
        except ApiProblem:
            return  # the next watch will meet the same, and says so

    def _take(self, group: dict[str, Any], *, gone: bool = False) -> None:
        """Draw the conclusions from the group as it was seen."""
        if gone or group["metadata"]["uid"] != self.uid:
            self._supersede("the job is gone")
            return
        reason = superseded(group, job_uid=self._job_uid, attempt=self._attempt)
        if reason is not None:
            self._supersede(reason)
        elif group["spec"].get("state") == "Stopped" and not self._stop.is_set():
            self._say("asked to stop: saving at the end of this iteration")
            self._stop.set()

    def _supersede(self, reason: str) -> None:
        if self._superseded is not None:
            return
        self._superseded = reason
        self._say(f"{reason}: this driver (attempt {self._attempt}) ends without writing anything more")
        for call in self._listeners:
            call()
        threading.Thread(target=self._leave_in_time, name="leave", daemon=True).start()

    def _leave_in_time(self) -> None:
        if not self._closed.wait(GRACE_SECONDS):
            self._say("the iteration under way takes too long: leaving at once")
            self._leave()
