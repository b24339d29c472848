"""The submitter: starts an attempt's driver as a Ray job, prints its log, and ends as it ended.

``python -m rlightning.runtime.cluster.submitter --address URL --submission-id ID --entrypoint COMMAND``

It may be killed and started again at any time: the job is looked for by its ID before it is submitted, and goes on
without a submitter. Exit status: 0 the driver succeeded; 1 it failed; 3 it is lost (killed, or gone with its head).
The end of the log, with the end of a traceback, becomes the container's termination message.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rlightning.errors import RLightningError
from rlightning.runtime.cluster.ray_jobs import JobsRefused, JobsUnreachable, RayJob, RayJobs

DONE, FAILED, LOST = 0, 1, 3
POLL_SECONDS = 2.0
SAY_SECONDS = 10.0
UNREACHABLE_SECONDS = 120.0
LONG_LOG = 8 * 1024 * 1024
"""Bytes. A longer one is not fetched whole: the submitter has little memory."""
STREAM_SECONDS = 5.0
"""After the job's end, for the rest of a long log to come by itself."""
TERMINATION_BYTES = 4096
KEPT = 64 * 1024
TRACEBACK = "Traceback (most recent call last)"


class Lost(RLightningError):
    """There is no telling how the driver ended: it counts as lost."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Submit or attach, follow to the end; returns the exit status."""
    options = _options(arguments)
    # The first process of a container gets no signal that it has no handler for. The driver goes on without us.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
    log = Log(sys.stdout)
    jobs = RayJobs(options.address, options.submission_id, os.environ.get("RAY_AUTH_TOKEN", ""))
    environment = dict(pair.split("=", 1) for pair in options.entrypoint_env)
    try:
        job = asyncio.run(follow_job(jobs, options.entrypoint, environment, log, options.unreachable_seconds))
        status = exit_status(job)
        reason = f"the driver ended with {_ended(job)}"
    except RLightningError as error:
        status, reason = LOST, str(error)
    if status != DONE:
        log.say(f"submitter: {reason}")
        write_termination_message(options.termination_log, termination_message(reason, log.tail))
    return status


async def follow_job(
    jobs: RayJobs, entrypoint: str, environment: dict[str, str], log: Log, unreachable_seconds: float
) -> RayJob:
    """Start the job unless it is there, print its log, and return it once it has ended.

    Raises:
        Lost: it is gone, or out of reach for so many seconds.
        JobsRefused: Ray does not let us.
    """
    async with jobs:
        await _submit_or_attach(jobs, entrypoint, environment, log)
        printing = asyncio.create_task(_print_log(jobs, log))
        try:
            job = await _wait_for_end(jobs, log, unreachable_seconds)
            with contextlib.suppress(JobsUnreachable, JobsRefused):  # the end is known; its log may go with the head
                rest = await jobs.log(LONG_LOG)
                if rest is None:
                    await asyncio.wait({printing}, timeout=STREAM_SECONDS)
                else:
                    log.from_the_beginning(rest)
        finally:
            printing.cancel()
        return job


def exit_status(job: RayJob) -> int:
    """0 and 1 are the driver's own verdicts; what else ended it (a signal, Ray, its own 3) is not its fault."""
    if job.status == "SUCCEEDED":
        return DONE
    return FAILED if job.status == "FAILED" and job.exit_code == 1 else LOST


async def _submit_or_attach(jobs: RayJobs, entrypoint: str, environment: dict[str, str], log: Log) -> None:
    """However long it takes for Ray to be there: the operator has the deadline."""
    say_at, submitted = time.monotonic() + 1.0, False
    while True:
        try:
            job = await jobs.get()
            if job is not None:
                log.say(f"submitter: following {jobs.submission_id} ({job.status})")
                return
            if submitted:
                raise Lost(f"{jobs.submission_id} was submitted, and Ray does not know it any more")
            try:
                await jobs.submit(entrypoint, environment)
                submitted = True
            except JobsRefused:
                # Another submitter may have come first, or our own request that seemed to fail.
                if await jobs.get() is None:
                    raise
        except JobsUnreachable as error:
            if time.monotonic() >= say_at:
                log.say(f"submitter: waiting for Ray's head: {error}")
                say_at = time.monotonic() + SAY_SECONDS
            await asyncio.sleep(0.5)


async def _wait_for_end(jobs: RayJobs, log: Log, unreachable_seconds: float) -> RayJob:
    reached, said = time.monotonic(), False
    while True:
        try:
            job = await jobs.get()
        except JobsUnreachable as error:
            away = time.monotonic() - reached
            if away >= unreachable_seconds:
                raise Lost(f"Ray's head was out of reach for {away:.0f} s: {error}") from None
            if not said:
                log.say(f"submitter: {error}; trying for {unreachable_seconds:g} s")
                said = True
        else:
            if job is None:
                raise Lost(f"Ray does not know {jobs.submission_id} any more: its head was started anew")
            if job.ended:
                return job
            if said:
                log.say("submitter: Ray's head answers again")
            reached, said = time.monotonic(), False
        await asyncio.sleep(POLL_SECONDS)


async def _print_log(jobs: RayJobs, log: Log) -> None:
    """Print the log as it is written; where streams break at once (a proxy on the way), fetch it now and then."""
    broken = 0
    while True:
        started = time.monotonic()
        log.rewind()
        try:
            async for text in jobs.follow():
                log.write(text)
            broken = 0
        except JobsUnreachable:
            broken = broken + 1 if time.monotonic() - started < 10 else 1
        if broken >= 3:
            with contextlib.suppress(JobsUnreachable, JobsRefused):
                log.from_the_beginning(await jobs.log(LONG_LOG) or "")
        await asyncio.sleep(POLL_SECONDS if broken < 3 else 10.0)


class Log:
    """Prints a text that is read from its beginning again and again, each character once.

    Attributes:
        tail: the last of what was printed.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._printed, self._position = 0, 0
        self._line_open = False
        self.tail = ""

    def rewind(self) -> None:
        """What comes next is the text from its beginning."""
        self._position = 0

    def write(self, text: str) -> None:
        """The next piece of the text."""
        new = text[max(0, self._printed - self._position) :]
        self._position += len(text)
        if new:
            self._printed = self._position
            self._put(new)

    def from_the_beginning(self, text: str) -> None:
        """All of the text, as far as there is any."""
        self.rewind()
        self.write(text)

    def say(self, line: str) -> None:
        """A line of our own."""
        self._put(f"{chr(10) if self._line_open else ''}{line}\n", keep=False)

    def _put(self, text: str, *, keep: bool = True) -> None:
        self._stream.write(text)
        self._stream.flush()
        self._line_open = not text.endswith("\n")
        if keep:
            self.tail = (self.tail + text)[-KEPT:]


def termination_message(reason: str, tail: str) -> str:
    """What happened, and the last traceback of the log from its beginning, or its last lines; cut at the front."""
    at = tail.rfind(TRACEBACK)
    shown = tail[tail.rfind("\n", 0, at) + 1 :] if at >= 0 else "\n".join(tail.splitlines()[-20:])
    shown = shown.strip("\n")
    room = TERMINATION_BYTES - len(reason.encode()) - 1
    end = shown.encode()[-room:].decode("utf-8", "ignore") if room > 0 else ""
    return f"{reason}\n{end}".strip().encode()[:TERMINATION_BYTES].decode("utf-8", "ignore")


def write_termination_message(path: Path, message: str) -> None:
    """Where the kubelet reads it. Outside a pod there is no such file, and nobody to read it."""
    if path.exists():
        with contextlib.suppress(OSError):
            path.write_text(message, "utf-8")


def _ended(job: RayJob) -> str:
    if job.exit_code is not None:
        number = -job.exit_code if job.exit_code < 0 else job.exit_code - 128  # the latter is a shell's way to say it
        return f"exit status {job.exit_code}" + (f" (signal {number})" if 0 < number < 65 else "")
    return f"{job.status}: {job.message}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("rlightning.runtime.cluster.submitter", description="Start a driver, follow it.")
    parser.add_argument("--address", required=True, help="of Ray's Jobs API: http://HOST:8265")
    parser.add_argument("--submission-id", required=True, help="one for each attempt of a job")
    parser.add_argument("--entrypoint", required=True, help="the driver's command line")
    parser.add_argument("--entrypoint-env", action="append", default=[], metavar="K=V", help="for the driver")
    parser.add_argument("--unreachable-seconds", type=float, default=UNREACHABLE_SECONDS, help="then it is lost")
    parser.add_argument("--termination-log", type=Path, default=Path("/dev/termination-log"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for pair in options.entrypoint_env:
        if "=" not in pair:
            parser.error(f"--entrypoint-env {shlex.quote(pair)} is not K=V")
    return options


if __name__ == "__main__":
    sys.exit(main())
