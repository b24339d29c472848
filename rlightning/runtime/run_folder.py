"""The folder of a run: everything that is known about it, in files that other programs can read while it runs.

::

    runs/<job>/<n>/
        job.yaml        the manifest as it ran, defaults and shards filled in
        status.json     RLJob.status, replaced atomically: at once for transitions, else at most once a second
        metrics.jsonl   one line per iteration and per evaluation
        tensorboard/    the same numbers as TensorBoard events, over environment steps
        ledger.jsonl    one line per published version of the weights
        checkpoints/    see rlightning.checkpoint
        run.log         what happened, with every warning and the full traceback of a failure
        lock            held by the driver while it lives

Lines are written unbuffered (one ``write`` each, well under a millisecond per iteration in all), so that a driver that
is killed leaves everything behind up to its last event. A resumed run continues the files: lines that an earlier
attempt wrote after the checkpoint stay, and every line carries its attempt.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import re
import shutil
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import yaml

from rlightning.api.models import Restart, RLJob, RLJobStatus
from rlightning.api.resolve import to_yaml
from rlightning.errors import RunFolderError, RunFolderInUse
from rlightning.runtime.pace import Pace
from rlightning.runtime.progress import finished_progress, iso, iteration_progress, now, started_progress
from rlightning.runtime.stages import in_words

if TYPE_CHECKING:
    from rlightning.checkpoint.store import CheckpointInfo
    from rlightning.runtime.events import ScalarEvents
    from rlightning.runtime.reporter import EvaluationReport, IterationReport, Outcome, RunInfo
    from rlightning.weights.ledger import Ledger, VersionRecord

STATUS_SECONDS = 1.0


class RunFolder:
    """A run's folder, open for one attempt of its driver; a Reporter.

    Made by :meth:`create` (a new run) or :meth:`resume` (a further attempt). Holds the folder's lock until
    :meth:`close`.

    Attributes:
        path: the folder.
        job: the resolved manifest, as in ``job.yaml``.
        attempt: of this driver, from 1.

    Raises:
        RunFolderError: from every method that writes, when the disk is full, read-only or the like; names the path
            and what to do. Nothing half-written stays in any file.
    """

    def __init__(self, path: Path, job: RLJob, attempt: int, previous: RLJobStatus | None, lock: int) -> None:
        self.path, self.job, self.attempt = path, job, attempt
        self._lock: int | None = lock
        self._conditions: dict[str, dict[str, Any]] = {}
        self._status: dict[str, Any] = {"attempt": attempt, "state": "Pending", "shards": job.spec.environment.shards}
        self._written_at = -math.inf
        self._pace: Pace | None = None
        self._env_steps = 0
        self._resume: str | None = None
        self._last_verified: int | None = None
        self._finished = False
        self._events: ScalarEvents | None = None
        self._ledger: Ledger | None = None
        if previous is not None:
            self._continue(previous)
        with self._explained(path):
            self._metrics = _Lines(path / "metrics.jsonl")
            self._log = _Lines(path / "run.log")
            (path / "ledger.jsonl").touch()  # a run that publishes nothing has an empty ledger, not none
        self._capture = _LogCapture(self.log)

    # -- opening -------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, runs: Path, job: RLJob) -> RunFolder:
        """A new folder ``runs/<job>/<n>`` with the lowest n above all that exist; safe against a rival.

        Args:
            runs: the parent of all jobs' folders; created if missing.
            job: resolved (``rlightning.api.resolve``).

        Raises:
            RunFolderError: it cannot be created or written.
        """
        parent = runs / job.metadata.name
        with _explain(parent, "choose another place with --run-dir"):
            parent.mkdir(parents=True, exist_ok=True)
            n = max((int(p.name) for p in parent.iterdir() if p.name.isdecimal()), default=0) + 1
            while True:
                path = parent / str(n)
                try:
                    path.mkdir()
                    break
                except FileExistsError:
                    n += 1
        try:
            lock = _take_lock(path)
            with _explain(path, "choose another place with --run-dir"):
                _replace(path / "job.yaml", job_yaml(job), durable=True)
                folder = cls(path, job, 1, None, lock)
                folder._write_status(durable=True)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)  # an empty run would only confuse; the cause is being raised
            raise
        folder.log("INFO", f"created for {job.metadata.name}, process {os.getpid()}")
        return folder

    @classmethod
    def resume(cls, path: Path, job: RLJob | None = None) -> RunFolder:
        """A further attempt in an existing folder.

        Args:
            path: the run's folder.
            job: a changed manifest, which replaces ``job.yaml``; the caller has checked that it may change so.

        Raises:
            RunFolderError: not a run folder; another driver holds it; it cannot be written.
        """
        recorded = read_job(path)
        previous = read_status(path)
        lock = _take_lock(path)
        try:
            with _explain(path, "copy the run folder to another place and resume the copy"):
                if job is not None and job != recorded:
                    _replace(path / "job.yaml", job_yaml(job), durable=True)
                attempt = 1 + _recorded_attempt(path, previous)
                folder = cls(path, job or recorded, attempt, previous, lock)
                # Recorded before anything else happens: an attempt that dies while it starts is counted too.
                folder._write_status(durable=True)
        except BaseException:
            os.close(lock)
            raise
        folder.log("INFO", f"attempt {attempt}, process {os.getpid()}")
        return folder

    @classmethod
    def open(
        cls,
        path: Path,
        job: RLJob,
        attempt: int,
        *,
        lock_seconds: float = 0.0,
        waiting: Callable[[str], None] = lambda holder: None,
    ) -> RunFolder:
        """An attempt that somebody else counts, in a folder that somebody else named: new, or there already.

        Args:
            path: the run's folder; made if it is missing. One without job.yaml is new: its maker died making it.
            job: resolved; replaces a ``job.yaml`` that differs, of which the caller knows that it may.
            attempt: of this driver.
            lock_seconds: how long to wait for an earlier driver that still holds the folder.
            waiting: told once whom it waits for.

        Raises:
            RunFolderInUse: another driver did not let go of it in time.
            RunFolderError: it cannot be read or written, or belongs to a later attempt.
        """
        remedy = "the volume must be writable for the user of the pods (their fsGroup, or the owner of the folder)"
        with _explain(path, remedy):
            path.mkdir(parents=True, exist_ok=True)
        lock = _take_lock(path, remedy, seconds=lock_seconds, waiting=waiting)
        try:
            previous, damaged = None, []
            with _explain(path, remedy):
                # Neither is needed, as the caller knows what is in them; and a node that lost its power may have left
                # an empty file where the rename had reached the disk and the content had not.
                try:
                    same = (path / "job.yaml").exists() and read_job(path) == job
                except RunFolderError as error:
                    same = False
                    damaged.append(str(error))
                if not same:
                    _replace(path / "job.yaml", job_yaml(job), durable=True)
                try:
                    previous = read_status(path)
                except RunFolderError as error:
                    damaged.append(str(error))
                last = _recorded_attempt(path, previous)
                if last > attempt:
                    raise RunFolderError(
                        f"{path} is at attempt {last} already, this driver is attempt {attempt}: two jobs use one "
                        "folder, or an old driver was started again"
                    )
                folder = cls(path, job, attempt, previous, lock)
                folder._write_status(durable=True)
        except BaseException:
            os.close(lock)
            raise
        folder.log("INFO", f"attempt {attempt} of {job.metadata.name}, process {os.getpid()}")
        for words in damaged:
            folder.log("WARNING", f"{words}; it was written anew")
        return folder

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- Reporter ------------------------------------------------------------------------------------------------

    def started(self, run: RunInfo) -> None:
        from rlightning.runtime.events import ScalarEvents
        from rlightning.weights.ledger import Ledger

        self._env_steps = run.start_env_steps
        self._pace = Pace(run.total_env_steps, run.start_env_steps)
        self._resume = run.environment.get("resume")
        with self._explained(self.path):
            if run.job != self.job:
                self.job = run.job
                _replace(self.path / "job.yaml", job_yaml(run.job), durable=True)
            self._ledger = Ledger(self.path / "ledger.jsonl")
            self._events = ScalarEvents(
                self.path / "tensorboard",
                attempt=run.attempt,
                purge_step=None if run.attempt == 1 else run.start_env_steps + 1,
            )
        self._status |= {
            "state": "Running",
            "startTime": self._status.get("startTime") or run.start_time,
            "shards": run.job.spec.environment.shards,
            "evalReplicas": sum(name.startswith("eval") for name in run.members),
        }
        self._status["progress"] = started_progress(run, self._pace)
        origin = "from the beginning" if run.resumed_from is None else f"from {run.resumed_from}"
        self._condition("Progressing", "True", "Training", f"attempt {run.attempt}, {origin}")
        self._condition("WeightsConsistent", "Unknown", "NothingPublished", "no version was published yet")
        self._condition("Finished", "False", "Training", "the run goes on")
        self._condition("Succeeded", "Unknown", "Training", "known when the run is finished")
        self._write_status(durable=True)
        self.log(
            "INFO",
            f"started attempt {run.attempt} {origin} at iteration {run.start_iteration}: placement {run.placement}, "
            f"members {', '.join(run.members)}, environment {run.environment}, numerics {run.numerics}",
        )
        if run.start_seconds:
            self.log("INFO", f"start took {in_words(run.start_seconds)}")

    def published(self, record: VersionRecord) -> None:
        assert self._ledger is not None, "published() before started()"
        self._ledger.append(record)
        same = sum(member.digest == record.digest for member in record.members.values())
        agree = same == record.total
        if agree:
            self._last_verified = record.version
        weights: dict[str, Any] = {
            "version": record.version,
            "digest": record.digest,
            "consistentMembers": f"{same}/{record.total}",
        }
        if self._last_verified is not None:
            weights["lastVerifiedVersion"] = self._last_verified
        self._status["weights"] = weights
        if agree:
            message = f"version {record.version}: the live weights of all {record.total} members have {record.digest}"
        else:
            message = f"version {record.version}: {same} of {record.total} members have the learner's digest"
            message += f"; first difference at {record.first_mismatch}" if record.first_mismatch else ""
            self.log("WARNING", message)
        reason = "DigestsAgree" if agree else "DigestsDiffer"
        changed = self._condition("WeightsConsistent", "True" if agree else "False", reason, message)
        self._write_status(only_if_due=not changed)

    def iteration(self, report: IterationReport) -> None:
        assert self._pace is not None, "iteration() before started()"
        self._env_steps = report.env_steps
        self._pace.update(report.env_steps)
        rollout = {
            "episode_return_mean": report.episode_return_mean,
            "episode_length_mean": report.episode_length_mean,
            "episodes": report.episodes,
        }
        timing = {"steps_per_second": report.steps_per_second, "iteration": report.iteration}
        timing |= {f"{stage}_seconds": seconds for stage, seconds in report.timings.items()}
        self._line(
            type="iteration",
            iteration=report.iteration,
            envSteps=report.env_steps,
            version=report.version,
            episodeReturnMean=report.episode_return_mean,
            episodeLengthMean=report.episode_length_mean,
            episodes=report.episodes,
            stepsPerSecond=report.steps_per_second,
            metrics=report.metrics,
            timings=report.timings,
        )
        self._scalars(
            {
                **_tagged("rollout", rollout),
                **_tagged("train", report.metrics),
                **_tagged("time", timing),
            }
        )
        self._status["progress"] = iteration_progress(report, self._pace)
        self._write_status(only_if_due=True)

    def evaluated(self, report: EvaluationReport) -> None:
        values = {
            "return_mean": report.return_mean,
            "return_std": report.return_std,
            "return_min": report.return_min,
            "return_max": report.return_max,
            "length_mean": report.length_mean,
        }
        self._line(
            type="evaluation",
            iteration=report.iteration,
            envSteps=self._env_steps,
            version=report.version,
            episodes=report.episodes,
            returnMean=report.return_mean,
            returnStd=report.return_std,
            returnMin=report.return_min,
            returnMax=report.return_max,
            lengthMean=report.length_mean,
            seconds=report.seconds,
            target=report.target,
        )
        self._scalars(_tagged("eval", values))
        self.log(
            "INFO",
            f"evaluation at iteration {report.iteration}, version {report.version}: mean return "
            f"{report.return_mean:g} ± {report.return_std:g} over {report.episodes} episodes",
        )

    def checkpointed(self, info: CheckpointInfo) -> None:
        checkpoint = {
            "path": self._relative(info.path),
            "iteration": info.iteration,
            "digest": info.digest,
        }
        if self._resume is not None:
            checkpoint["resume"] = self._resume
        self._status["checkpoint"] = checkpoint
        self._write_status()
        self.log("INFO", f"checkpoint {checkpoint['path']} of iteration {info.iteration}, {info.digest}")

    def warning(self, message: str) -> None:
        self.log("WARNING", message)

    def finished(self, outcome: Outcome) -> None:
        self._end(outcome.state, outcome.reason, outcome.message)
        self._status["progress"] = finished_progress(self._status.get("progress", {}), outcome, self._pace)
        self._write_status(durable=True)
        level = "ERROR" if outcome.state in ("Failed", "Lost") else "INFO"
        self.log(
            level,
            f"{outcome.state} ({outcome.reason}) at iteration {outcome.iteration}, {outcome.env_steps} steps, after "
            f"{outcome.seconds:.1f} s: {outcome.message}",
        )
        if "traceback" in outcome.extra:
            self.log("ERROR", str(outcome.extra["traceback"]).rstrip())
        if outcome.digest is not None:
            self.log("INFO", f"last weights: version {outcome.version}, {outcome.digest}")

    # -- besides -------------------------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """Write the full traceback into run.log, and Failed into the status unless the run's end is known already."""
        self.log("ERROR", "".join(traceback.format_exception(error)).rstrip())
        if not self._finished:
            reason = type(error).__name__ if re.fullmatch("[A-Z][A-Za-z0-9]{0,63}", type(error).__name__) else "Error"
            self._end("Failed", reason, str(error) or type(error).__name__)
            self._write_status(durable=True)

    def interrupted(self) -> None:
        """Write into the status that the run was stopped at once; it resumes from the last checkpoint."""
        self.log("WARNING", "interrupted before the iteration's end")
        if not self._finished:
            self._end("Stopped", "Interrupted", "stopped at once, before the iteration's end")
            self._write_status(durable=True)

    def log(self, level: str, message: str) -> None:
        """One entry in run.log."""
        with self._explained(self._log.path):
            self._log.append(f"{_now(milliseconds=True)} {level} {message}\n")

    def close(self) -> None:
        """Close all files and let go of the lock."""
        self._capture.close()
        self._metrics.close()
        self._log.close()
        if self._events is not None:
            self._events.close()
            self._events = None
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _continue(self, previous: RLJobStatus) -> None:
        """Take over what stays true in a further attempt, and note how the previous one ended."""
        stored = previous.to_dict()
        for key in ("startTime", "progress", "weights", "checkpoint", "evalReplicas"):
            if key in stored:
                self._status[key] = stored[key]
        if previous.weights is not None:
            self._last_verified = previous.weights.last_verified_version
        self._conditions = {c["type"]: c for c in stored.get("conditions", ())}
        if previous.attempt:
            progressing = self._conditions.get("Progressing")
            if progressing is None or progressing["status"] == "True" or progressing["reason"] == "Starting":
                reason, message, when = "DriverLost", "the driver ended without saying so", _now()
            else:
                reason, message = progressing["reason"], progressing["message"][:4096]
                when = progressing["lastTransitionTime"]
            restart = Restart(attempt=previous.attempt, time=when, reason=reason, message=message)
            self._status["restarts"] = [*stored.get("restarts", ()), restart.to_dict()][-10:]
        elif stored.get("restarts"):
            self._status["restarts"] = stored["restarts"]
        self._condition("Progressing", "False", "Starting", f"attempt {self.attempt} starts")
        self._condition("Finished", "False", "Starting", "the run goes on")
        self._condition("Succeeded", "Unknown", "Starting", "known when the run is finished")

    def _end(self, state: str, reason: str, message: str) -> None:
        self._finished = True
        self._status["state"] = state
        done = state not in ("Stopped", "Lost")  # those go on in a further attempt
        self._condition("Progressing", "False", reason, message)
        self._condition("Finished", "True" if done else "False", reason, message)
        succeeded = {"Succeeded": "True", "Failed": "False"}.get(state, "Unknown")
        self._condition("Succeeded", succeeded, reason, message)
        if done:
            self._status["completionTime"] = _now()

    def _condition(self, type_: str, status: str, reason: str, message: str) -> bool:
        """Set a condition; True if its status or reason changed (a transition, to be written at once)."""
        old = self._conditions.get(type_)
        moved = old is None or old["status"] != status
        self._conditions[type_] = {
            "type": type_,
            "status": status,
            "lastTransitionTime": _now() if moved or old is None else old["lastTransitionTime"],
            "reason": reason,
            "message": message[:32768],
        }
        return moved or (old is not None and old["reason"] != reason)

    def _write_status(self, *, only_if_due: bool = False, durable: bool = False) -> None:
        at = time.monotonic()
        if only_if_due and at - self._written_at < STATUS_SECONDS:
            return
        status = RLJobStatus.model_validate({**self._status, "conditions": list(self._conditions.values())})
        with self._explained(self.path / "status.json"):
            _replace(self.path / "status.json", json.dumps(status.to_dict(), indent=2) + "\n", durable=durable)
        self._written_at = at

    def _line(self, **values: Any) -> None:
        line = {"attempt": self.attempt, "time": _now(milliseconds=True), **values}
        with self._explained(self._metrics.path):
            self._metrics.append(json.dumps(_json_numbers(line), separators=(",", ":"), allow_nan=False) + "\n")

    def _scalars(self, scalars: dict[str, float]) -> None:
        assert self._events is not None
        with self._explained(self.path / "tensorboard"):
            self._events.add(scalars, self._env_steps)

    def _relative(self, path: str | Path) -> str:
        """Below the folder, as seen from it: the folder may be moved."""
        try:
            return str(Path(path).resolve().relative_to(self.path.resolve()))
        except ValueError:
            return str(path)

    def _explained(self, path: Path) -> contextlib.AbstractContextManager[None]:
        return _explain(path, "make room or let the path be written again, then resume: what was saved is intact")


# -- reading -----------------------------------------------------------------------------------------------------


def read_job(path: Path) -> RLJob:
    """The manifest of a run folder.

    Raises:
        RunFolderError: not a run folder (says which folders below or above it are), or its job.yaml is damaged.
    """
    file = path / "job.yaml"
    try:
        stored = yaml.safe_load(file.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise RunFolderError(f"{path} is not a run folder: it has no job.yaml{nearest_run(path)}") from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{file} cannot be read: {error}") from error
    try:
        return RLJob.from_stored(stored)
    except (ValueError, TypeError) as error:
        raise RunFolderError(f"{file} is damaged or was edited into something else: {error}") from error


def read_status(path: Path) -> RLJobStatus | None:
    """The status of a run folder; None if none was written.

    Raises:
        RunFolderError: it cannot be read or understood.
    """
    file = path / "status.json"
    try:
        return RLJobStatus.from_stored(json.loads(file.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise RunFolderError(
            f"{file} cannot be read: {error}; remove it: checkpoints and metrics are enough to resume"
        ) from error


def job_yaml(job: RLJob) -> str:
    """The manifest as a file: without status, defaults written out, readable by ``rlightning validate`` and ``run``."""
    return to_yaml(job.model_copy(update={"status": None}))


def nearest_run(path: Path) -> str:
    """The end of a sentence that says which run folder is near, below or above."""
    runs = sorted((p for p in path.glob("*/job.yaml")), key=lambda p: (len(p.parent.name), p.parent.name))
    if runs:
        return f"; did you mean {runs[-1].parent}?"
    for parent in path.parents:
        if (parent / "job.yaml").exists():
            return f"; did you mean {parent}?"
    return "" if path.exists() else " (nor does it exist)"


# -- writing -----------------------------------------------------------------------------------------------------


class _Lines:
    """A file of whole lines to append to. A line that a killed driver left unfinished is removed when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._fd).st_size
        while size > 0:
            start = max(0, size - 65536)
            found = os.pread(self._fd, size - start, start).rfind(b"\n")
            if found >= 0 or start == 0:
                whole = start + found + 1
                if whole < os.fstat(self._fd).st_size:
                    os.ftruncate(self._fd, whole)
                break
            size = start

    def append(self, line: str) -> None:
        from rlightning.runtime.events import write_whole

        if self._fd is not None:
            write_whole(self._fd, line.encode("utf-8", "backslashreplace"))

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class _LogCapture:
    """Copies Python's log records and warnings into run.log; they appear where they did before as well."""

    def __init__(self, log: Callable[[str, str], None]) -> None:
        self._root = logging.getLogger()
        self._handlers: list[logging.Handler] = [_Forward(log)]
        if not self._root.handlers and logging.lastResort is not None:
            # With any handler on the root logger, logging no longer shows unhandled warnings on stderr.
            self._handlers.append(logging.lastResort)
        for handler in self._handlers:
            self._root.addHandler(handler)
        self._showwarning = original = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if file is None:
                # A disk that is full is no reason to fail inside warnings.warn: the next event fails, by name.
                with contextlib.suppress(RunFolderError):
                    log("WARNING", f"{filename}:{lineno}: {category.__name__}: {message}")
            original(message, category, filename, lineno, file, line)

        self._show = show
        warnings.showwarning = show

    def close(self) -> None:
        for handler in self._handlers:
            self._root.removeHandler(handler)
        if warnings.showwarning is self._show:
            warnings.showwarning = self._showwarning


class _Forward(logging.Handler):
    def __init__(self, log: Callable[[str, str], None]) -> None:
        super().__init__()
        self._log_line = log
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._log_line(record.levelname, self.format(record))
        except Exception:  # logging's own way: told on stderr, never raised in the code that logs
            self.handleError(record)


def _replace(path: Path, text: str, *, durable: bool) -> None:
    """Give ``path`` new content in one step: a reader sees the old or the new, whole.

    Args:
        durable: and it survives a power cut once this returns.
    """
    temporary = path.with_name(f".{path.name}.new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        data = text.encode()
        while data:
            data = data[os.write(fd, data) :]
        if durable:
            os.fsync(fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)
    os.replace(temporary, path)
    if durable:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _take_lock(
    path: Path,
    remedy: str = "choose another place with --run-dir, or copy the run folder to one and resume the copy",
    *,
    seconds: float = 0.0,
    waiting: Callable[[str], None] = lambda holder: None,
) -> int:
    """Lock the folder for this process; the kernel lets go of it however the process ends."""
    file = path / "lock"
    with _explain(file, remedy):
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    end, told = time.monotonic() + seconds, False
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = os.pread(fd, 100, 0).decode("ascii", "replace").strip() or "unknown"
                if time.monotonic() >= end:
                    waited = f" (waited {seconds:g} s)" if seconds else ""
                    raise RunFolderInUse(
                        f"{path} is in use by another driver, process {holder}{waited}; wait for it to end or stop it, "
                        "then try again"
                    ) from None
                if not told:
                    waiting(holder)
                    told = True
                time.sleep(min(0.2, max(0.0, end - time.monotonic())))
    except RunFolderInUse:
        os.close(fd)
        raise
    except OSError as error:
        os.close(fd)
        raise RunFolderError(
            f"{file} cannot be locked: {error.strerror}; this file system has no locks, choose another place"
        ) from error
    try:
        with _explain(file, "make room or choose another place with --run-dir"):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()} on {os.uname().nodename}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def _explain(path: Path, remedy: str) -> Iterator[None]:
    """Turn an OSError into a sentence that names the path, the cause and the remedy."""
    try:
        yield
    except OSError as error:
        where = Path(os.fsdecode(error.filename)) if error.filename is not None else path
        match error.errno:
            case errno.EROFS:
                cause = "the file system is read-only"
            case errno.ENOSPC:
                cause = f"no space is left on the device ({_free(where)})"
            case errno.EDQUOT:
                cause = "the disk quota is used up"
            case errno.EACCES | errno.EPERM:
                cause = f"permission denied for user {os.geteuid()}"
            case errno.ENOTDIR | errno.EEXIST:
                cause = "a part of the path is a file, not a folder"
            case _:
                cause = error.strerror or str(error)
        raise RunFolderError(f"cannot write {where}: {cause}; {remedy}") from error


def _free(path: Path) -> str:
    for parent in (path, *path.parents):
        with contextlib.suppress(OSError):
            return f"{shutil.disk_usage(parent).free:,} bytes free"
    return "free space unknown"


def _recorded_attempt(path: Path, status: RLJobStatus | None) -> int:
    """The last attempt that left a trace in the folder; 0 if none did."""
    attempts = [_last_attempt(path / name) for name in ("metrics.jsonl", "ledger.jsonl")]
    return max(*attempts, (status.attempt or 0) if status else 0)


def _last_attempt(lines: Path) -> int:
    """The attempt in the last whole line; 0 if there is none. Counts when status.json is missing."""
    try:
        with lines.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 65536))
            whole = file.read().split(b"\n")[:-1]
        return int(json.loads(whole[-1])["attempt"]) if whole else 0
    except (FileNotFoundError, ValueError, KeyError):
        return 0


# -- values ------------------------------------------------------------------------------------------------------


def _tagged(group: str, values: dict[str, Any]) -> dict[str, float]:
    return {f"{group}/{name}": float(value) for name, value in values.items() if value is not None}


def _json_numbers(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become the strings that protobuf's JSON uses."""
    if isinstance(value, dict):
        return {key: _json_numbers(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _now(*, milliseconds: bool = False) -> str:
    return iso(now(), milliseconds=milliseconds)
