"""Reports a run into its PolicyGroup's status, which the operator folds into the job's."""

from __future__ import annotations

import dataclasses
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlightning.errors import RLightningError
from rlightning.runtime.cluster.control import Control
from rlightning.runtime.cluster.group_client import ApiProblem, GroupClient, backoff
from rlightning.runtime.pace import Pace
from rlightning.runtime.progress import finished_progress, iteration_progress, started_progress

if TYPE_CHECKING:
    from rlightning.checkpoint.store import CheckpointInfo
    from rlightning.runtime.reporter import EvaluationReport, IterationReport, Outcome, RunInfo
    from rlightning.weights.ledger import Ledger, MemberRecord, VersionRecord

TRANSITION_SECONDS = 1.0
"""Between two reports at least, even of transitions: checkpoints may be saved several times a second."""
START_SECONDS = 60.0
OUTCOME_SECONDS = 3600.0
"""For the outcome: an API server may be away for long, and a driver that gives up costs a whole attempt."""
MAX_MESSAGE = 4096
MAX_MISMATCH = 253


class ReportFailed(RLightningError):
    """What has to be stored before the driver goes on could not be."""


class GroupReporter:
    """A Reporter that keeps the newest state and has a thread apply it, so that a slow API server never slows training.

    Transitions (the start, the first version, a mismatch, a checkpoint, the outcome) are sent at once, progress every
    ``seconds``. Only the newest state is ever sent: what the server missed while it was away is in the run folder.

    Args:
        client: of the group.
        control: says whether this driver may still write.
        attempt: of this driver.
        driver: ``{pod, podUID, startTime}``.
        run_dir: ``…/<namespace>/<job>-<uid>``; checkpoints are named as seen from the claim's root.
        seconds: between reports of progress.
        say: told once of every trouble.
        outcome_seconds: for the outcome to be stored.
    """

    def __init__(
        self,
        client: GroupClient,
        control: Control,
        *,
        attempt: int,
        driver: dict[str, str],
        run_dir: Path,
        seconds: float = 10.0,
        say: Callable[[str], None],
        outcome_seconds: float = OUTCOME_SECONDS,
    ) -> None:
        self._client, self._control, self._say = client, control, say
        self._attempt, self._driver, self._run_dir = attempt, driver, run_dir
        self._seconds, self._outcome_seconds = seconds, outcome_seconds
        # What there is to tell, guarded by the condition; the thread makes a status of it when it sends one.
        self._changed = threading.Condition()
        self._run: RunInfo | None = None
        self._pace: Pace | None = None
        self._progress: dict[str, Any] | None = None
        self._ring: Ledger | None = None
        self._checkpoint: CheckpointInfo | None = None
        self._outcome: Outcome | None = None
        # How many changes were told, and of how many it is settled that they are stored, or never will be.
        self._told, self._settled = 0, 0
        self._urgent = True
        self._sent_at = self._not_before = float("-inf")
        self._failures, self._said = 0, ""
        self._refused: tuple[int, ApiProblem] | None = None
        self._broken: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="group-reporter", daemon=True)
        control.when_superseded(self._wake)

    def start(self) -> None:
        """Say that this driver is at work, and return once that is stored.

        Raises:
            Superseded: it must not start.
            ReportFailed: the API server did not take it.
        """
        self._thread.start()
        self._tell()
        self._wait(START_SECONDS, "the start of the driver")

    def resuming(self, checkpoint: CheckpointInfo) -> None:
        """Name the checkpoint that the run goes on from."""
        with self._changed:
            self._checkpoint = checkpoint

    @property
    def outcome(self) -> Outcome | None:
        """What :meth:`finished` was told; None before."""
        return self._outcome

    @property
    def stored(self) -> bool:
        """Whether the API server has everything that was told."""
        with self._changed:
            return self._settled >= self._told and (self._refused is None or self._refused[0] < self._told)

    def close(self) -> None:
        """End the thread; what is not stored by then is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- Reporter ------------------------------------------------------------------------------------------------

    def started(self, run: RunInfo) -> None:
        from rlightning.weights.ledger import Ledger

        self._control.check()
        with self._changed:
            self._run, self._ring = run, Ledger()
            self._pace = Pace(run.total_env_steps, run.start_env_steps)
            self._progress = started_progress(run, self._pace)
        self._tell()

    def published(self, record: VersionRecord) -> None:
        self._control.check()
        assert self._ring is not None, "published() before started()"
        with self._changed:
            before = self._ring.head
            first = before is None
            if before is not None and (before.attempt, before.version) == (record.attempt, record.version):
                # Published again after a mismatch, perhaps before that was sent: it stays in the status.
                record = dataclasses.replace(record, first_mismatch=record.first_mismatch or before.first_mismatch)
            self._ring.append(record)
        self._tell(urgent=first or not record.consistent)

    def iteration(self, report: IterationReport) -> None:
        self._control.check()
        assert self._pace is not None, "iteration() before started()"
        with self._changed:
            self._pace.update(report.env_steps)
            self._progress = iteration_progress(report, self._pace)
        self._tell(urgent=False)

    def evaluated(self, report: EvaluationReport) -> None:
        """Not reported: it is in the run folder and in the log."""

    def checkpointed(self, info: CheckpointInfo) -> None:
        with self._changed:
            self._checkpoint = info
        self._tell()

    def warning(self, message: str) -> None:
        """Not reported: it is in the log."""

    def finished(self, outcome: Outcome) -> None:
        """Return once the outcome is stored.

        Raises:
            Superseded: it must not be.
            ReportFailed: the server refused it, or did not answer before the deadline.
        """
        self._control.check()
        with self._changed:
            self._outcome = outcome
            if self._progress is not None:
                self._progress = finished_progress(self._progress, outcome, self._pace)
        self._tell()
        self._wait(self._outcome_seconds, f"the outcome {outcome.state} ({outcome.reason})")

    # -- the state -----------------------------------------------------------------------------------------------

    def _tell(self, *, urgent: bool = True) -> None:
        with self._changed:
            self._told += 1
            self._urgent = self._urgent or urgent
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wait(self, seconds: float, what: str) -> None:
        """Until everything told is stored."""
        with self._changed:
            wanted = self._told
            self._changed.wait_for(
                lambda: self._settled >= wanted or self._control.superseded is not None or self._broken is not None,
                seconds,
            )
            self._control.check()
            if self._broken is not None:
                raise ReportFailed(f"{what} could not be reported: {self._broken!r}")
            if self._settled < wanted:
                raise ReportFailed(f"{what} could not be stored within {seconds:g} s: {self._said or 'no answer'}")
            if self._refused is not None and self._refused[0] >= wanted:
                raise ReportFailed(f"the API server refused {what}: {self._refused[1]}")

    def _status(self) -> dict[str, Any]:
        """The whole status as it is now; what is unknown is left out."""
        status: dict[str, Any] = {"attempt": self._attempt, "driver": self._driver}
        newest = self._ring.head if self._ring is not None else None
        if newest is not None:
            assert self._ring is not None
            status["version"] = newest.version
            status["versions"] = [_version(record) for record in self._ring.recent]
        if self._run is not None:
            pods = self._run.pods
            status["members"] = [_member(name, newest, pods.get(name)) for name in self._run.members]
        if self._progress is not None:
            status["progress"] = self._progress
        if self._checkpoint is not None:
            status["checkpoint"] = self._checkpoint_status(self._checkpoint)
        if self._outcome is not None:
            status["outcome"] = {
                "state": self._outcome.state,
                "reason": self._outcome.reason,
                "message": shortened(self._outcome.message),
            }
        return status

    def _checkpoint_status(self, info: CheckpointInfo) -> dict[str, Any]:
        # The folder's own name may be longer than this by whatever the claim is mounted at.
        path = "/".join((*self._run_dir.parts[-2:], "checkpoints", info.path.name))
        checkpoint = {"path": path, "iteration": info.iteration, "digest": info.digest}
        if self._run is not None and "resume" in self._run.environment:
            checkpoint["resume"] = self._run.environment["resume"]
        return checkpoint

    # -- the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._send_reports()
        except Exception as error:  # not seen by anybody else, and the run would wait for its outcome in vain
            self._say("".join(traceback.format_exception(error)))
            with self._changed:
                self._broken = error
                self._changed.notify_all()

    def _send_reports(self) -> None:
        while True:
            with self._changed:
                while not self._over and not self._due():
                    self._changed.wait(self._seconds_left())
                if self._over:
                    return
                telling, status = self._told, self._status()
                self._urgent = False
            try:
                self._client.apply_status(self._control.uid, status)
            except ApiProblem as problem:
                if not self._go_on_after(problem, telling):
                    return
            else:
                self._note_stored(telling)

    @property
    def _over(self) -> bool:
        return self._closed or self._control.superseded is not None

    def _due(self) -> bool:
        return self._seconds_left() == 0.0

    def _seconds_left(self) -> float | None:
        """Until there is something to send; None: for ever."""
        if self._told <= self._settled:
            return None
        spacing = 0.0 if self._outcome is not None else TRANSITION_SECONDS if self._urgent else self._seconds
        return max(0.0, max(self._sent_at + spacing, self._not_before) - time.monotonic())

    def _note_stored(self, telling: int) -> None:
        with self._changed:
            self._settled, self._sent_at = telling, time.monotonic()
            self._failures, said, self._said = 0, self._said, ""
            self._changed.notify_all()
        if said:
            self._say("reports reach the API server again")

    def _go_on_after(self, problem: ApiProblem, telling: int) -> bool:
        """What a report that was not stored leads to; False: nothing more may be sent."""
        if problem.code in (404, 409, 422):
            # Perhaps somebody else reports: a later attempt, or the group is gone or another one.
            try:
                self._control.look()
            except ApiProblem as blind:
                problem = problem if problem.passing else blind
            if self._control.superseded is not None:
                self._wake()
                return False
        if str(problem) != self._said:
            self._say(f"a report was not stored: {problem}" + ("; trying again" if problem.passing else ""))
        with self._changed:
            self._said = str(problem)
            if problem.passing:
                self._failures += 1
                self._not_before = time.monotonic() + backoff(self._failures, problem.retry_after)
                self._urgent = True
            else:
                # The same state would be refused again; a later one may not be.
                self._settled, self._sent_at = telling, time.monotonic()
                self._refused = telling, problem
            self._changed.notify_all()
        return True


def shortened(message: str, most: int = MAX_MESSAGE) -> str:
    """The first line and as much of the end as fits: where it happened, and what."""
    if len(message) <= most:
        return message
    head = message.split("\n", 1)[0][: most // 4]
    return f"{head}\n…\n{message[-(most - len(head) - 3) :]}"


def _version(record: VersionRecord) -> dict[str, Any]:
    status = {key: value for key, value in record.to_status().items() if value is not None}
    if "firstMismatch" in status:
        status["firstMismatch"] = status["firstMismatch"][:MAX_MISMATCH]
    return status


def _member(name: str, newest: VersionRecord | None, pod: str | None) -> dict[str, Any]:
    """A member as it proved itself last; version and digest only as far as they were measured."""
    role = "Train" if name.startswith("train") else "Eval"
    member: dict[str, Any] = {"name": name, "role": role, "state": "Ready"}
    if newest is not None and role == "Train":
        # A version is not published before every train member's live tensors were found to have the same digest.
        member |= {"state": "Published", "version": newest.version, "digest": newest.digest}
    elif newest is not None and name in newest.members:
        member |= _proved(newest, newest.members[name])
    if pod:
        member["pod"] = pod
    return member


def _proved(newest: VersionRecord, answer: MemberRecord) -> dict[str, Any]:
    proved: dict[str, Any] = {"state": answer.state}
    if answer.digest is not None:
        proved["digest"] = answer.digest
        if answer.state != "Superseded":  # which runs another version than it was asked for
            proved["version"] = newest.version
    return proved
