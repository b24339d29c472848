"""The driver in a cluster: a Ray job in the head pod, one for each attempt of a job.

``python -m rlightning.runtime.cluster.driver --namespace NS --group NAME --job-uid UID --attempt N --run-dir DIR``

Reads its PolicyGroup, trains what that says, reports into its status, and exits only after the outcome is stored
there. Exit status: 0 succeeded, stopped as asked, or superseded by a later attempt; 1 the job failed, by its own
fault; 3 the attempt is lost: what it ran on failed, or its end could not be reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

# What is imported here is light. Torch and Ray take seconds and come when the API server has been told of the start.
from rlightning.api.models import API_VERSION, RLJob
from rlightning.cli.display import PlainDisplay
from rlightning.cli.threads import set_threads
from rlightning.errors import (
    CheckpointError,
    ManifestError,
    RLightningError,
    RunFolderError,
    RunFolderInUse,
    Superseded,
)
from rlightning.runtime.cluster.control import GRACE_SECONDS, WATCH_SECONDS, Control, first_look
from rlightning.runtime.cluster.group_client import GroupClient
from rlightning.runtime.cluster.group_reporter import GroupReporter, ReportFailed
from rlightning.runtime.cluster.pools import JobCluster
from rlightning.runtime.progress import iso, now
from rlightning.runtime.reporter import Outcome, Reporters, RunInfo
from rlightning.runtime.run_folder import RunFolder
from rlightning.runtime.stages import Stages, in_words

DONE, FAILED, LOST = 0, 1, 3
EXIT_STATUS = {"Succeeded": DONE, "Stopped": DONE, "Failed": FAILED, "Lost": LOST}

GROUP_SECONDS = 60.0
"""For the API server to be there and the PolicyGroup to name this attempt."""
LOCK_SECONDS = WATCH_SECONDS + GRACE_SECONDS + 50.0
"""For the driver of an earlier attempt, which may still be dying, to let go of the run folder: longer than it may take
to notice that it is superseded, which is a watch's time, ten seconds for a new connection, and its grace.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Drive one attempt; returns the exit status."""
    options = _options(arguments)
    stages = Stages()
    faulthandler.enable()
    driver = {
        "pod": os.environ.get("RLIGHTNING_POD_NAME") or socket.gethostname(),
        "podUID": os.environ.get("RLIGHTNING_POD_UID", ""),
        "startTime": iso(now()),
    }
    try:
        return _drive(options, driver, stages)
    except Superseded as reason:
        say(f"{reason}: nothing is left to do for attempt {options.attempt}")
        return DONE
    except RLightningError as error:  # nothing to report to, or nothing that could be reported
        say(f"error: {error}")
        return LOST


def say(line: str) -> None:
    """Into the Ray job's log, which the submitter prints."""
    print(line, flush=True)


def _drive(options: argparse.Namespace, driver: dict[str, str], stages: Stages) -> int:
    client = GroupClient(options.namespace, options.group)
    group = first_look(client, job_uid=options.job_uid, attempt=options.attempt, seconds=GROUP_SECONDS, say=say)
    before = _driven_before(group, options.attempt)
    if before is not None:
        return before
    control = Control(client, group, job_uid=options.job_uid, attempt=options.attempt, say=say)
    reporter = GroupReporter(
        client,
        control,
        attempt=options.attempt,
        driver=driver,
        run_dir=options.run_dir,
        seconds=options.report_seconds,
        say=say,
    )
    control.start()
    try:
        # Stored before anything else happens: an attempt that trains is known, and is never started a second time.
        reporter.start()
        stages.done("API server")
        return _report_end(reporter, lambda: _train(group, options, control, reporter, stages))
    finally:
        control.close()
        reporter.close()


def _report_end(reporter: GroupReporter, train: Callable[[], Outcome]) -> int:
    """Train, and see to it that the API server learns how it ended, whatever happened."""
    try:
        outcome = train()
    except (Superseded, ReportFailed):
        raise
    except Exception as error:
        if reporter.outcome is None:
            reporter.finished(_early_outcome(error))
        elif not reporter.stored:  # another reporter's failure was raised, and hides that this one failed, too
            reporter.finished(reporter.outcome)
        assert reporter.outcome is not None
        outcome = reporter.outcome
    if outcome.state in ("Failed", "Lost"):
        say(f"error: {outcome.message}")  # last, so that a traceback's end is the log's end
    return EXIT_STATUS[outcome.state]


def _train(
    group: dict[str, Any], options: argparse.Namespace, control: Control, reporter: GroupReporter, stages: Stages
) -> Outcome:
    job = _job(group, options)
    set_threads(job.spec.training.threads)  # before the first import of torch or numpy
    with RunFolder.open(
        options.run_dir,
        job,
        options.attempt,
        lock_seconds=LOCK_SECONDS,
        waiting=lambda holder: say(f"waiting for the run folder, which an earlier driver holds: process {holder}"),
    ) as folder:
        say(f"{job.metadata.name}: attempt {options.attempt}, run folder {folder.path}")
        stages.done("run folder")
        try:
            from rlightning.runtime.driver import run_job

            stages.done("imports")
            checkpoint = _newest_whole(folder.path / "checkpoints", folder.warning)
            if checkpoint is not None:
                reporter.resuming(checkpoint)
            return run_job(
                job,
                run_dir=folder.path,
                placement="ray",
                reporter=Reporters(folder, _Lines(sys.stdout), reporter),
                stop=control,
                resume=checkpoint.path if checkpoint else None,
                attempt=options.attempt,
                cluster=JobCluster(job.spec, control, say),
                stages=stages,
            )
        except (Superseded, ReportFailed):
            raise
        except Exception as error:
            try:
                folder.failed(error)
            except RunFolderError as also:
                say(f"warning: {also}")
            raise


class _Lines(PlainDisplay):
    """A line at least every ten seconds. Nobody types a command to resume: the operator starts a further attempt."""

    every_seconds = 10.0

    def started(self, run: RunInfo) -> None:
        super().started(run)
        self.say(f"ready to train after {in_words(run.start_seconds)}")

    def finished(self, outcome: Outcome) -> None:
        super().finished(dataclasses.replace(outcome, resume_command=None))


def _driven_before(group: dict[str, Any], attempt: int) -> int | None:
    """The exit status if this attempt had a driver already: an attempt is one life, its versions never fall."""
    status = group.get("status", {})
    if status.get("attempt") != attempt or "driver" not in status:
        return None
    who = f"attempt {attempt} was driven by pod {status['driver']['pod']} from {status['driver']['startTime']} on"
    if "outcome" in status:
        outcome = status["outcome"]
        say(f"{who} and ended {outcome['state']} ({outcome['reason']}): {outcome.get('message', '')}")
        return EXIT_STATUS.get(outcome["state"], LOST)
    say(f"error: {who}, and that driver is gone; a further attempt has to go on from its last checkpoint")
    return LOST


def _job(group: dict[str, Any], options: argparse.Namespace) -> RLJob:
    metadata = {"name": group["spec"]["job"], "namespace": options.namespace, "uid": options.job_uid}
    stored = {"apiVersion": API_VERSION, "kind": "RLJob", "metadata": metadata, "spec": group["spec"]["training"]}
    try:
        return RLJob.from_stored(stored)
    except ValidationError as error:
        raise ManifestError(f"spec.training of the PolicyGroup cannot be used by this image: {error}") from error


def _newest_whole(checkpoints: Path, warn: Callable[[str], None]) -> Any:
    """The newest checkpoint that is what it says, as a CheckpointInfo; None if there is no checkpoint at all.

    Raises:
        CheckpointError: there are some, and all are damaged.
    """
    from rlightning.checkpoint.manifest import read_manifest
    from rlightning.checkpoint.store import CheckpointInfo, list_checkpoints
    from rlightning.checkpoint.verify import verify_checkpoint

    found = list_checkpoints(checkpoints)
    problem = ""
    for path in reversed(found):
        problems = verify_checkpoint(path)
        if not problems:
            manifest = read_manifest(path)
            return CheckpointInfo(path, manifest.iteration, manifest.state_digest)
        problem = problem or f"{path.name}: {problems[0]}"
        warn(f"{path.name} is damaged and passed over: {'; '.join(map(str, problems))}")
        say(f"warning: {path.name} is damaged and passed over: {problems[0]}")
    if found:
        raise CheckpointError(f"all {len(found)} checkpoints in {checkpoints} are damaged; {problem}")
    return None


def _early_outcome(error: Exception) -> Outcome:
    """Of a run that ended before, or outside of, training."""
    state: Literal["Failed", "Lost"] = "Lost" if isinstance(error, RunFolderInUse) else "Failed"
    kinds: tuple[tuple[type[Exception], str], ...] = (
        (RunFolderInUse, "RunFolderInUse"),
        (RunFolderError, "RunFolderFailed"),
        (CheckpointError, "CheckpointFailed"),
        (ManifestError, "InvalidManifest"),
        (RLightningError, "Failed"),
    )
    reason = next((reason for kind, reason in kinds if isinstance(error, kind)), "Unexpected")
    message = str(error) if isinstance(error, RLightningError) else "".join(traceback.format_exception(error))
    return Outcome(state, reason, message, iteration=0, env_steps=0, version=None, digest=None, checkpoint=None)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("rlightning.runtime.cluster.driver", description="Drive one attempt of a job.")
    parser.add_argument("--namespace", required=True, help="of the PolicyGroup")
    parser.add_argument("--group", required=True, help="name of the PolicyGroup")
    parser.add_argument("--job-uid", required=True, help="uid of the RLJob: one of the same name may come later")
    parser.add_argument("--attempt", required=True, type=int, help="which the PolicyGroup has to name")
    parser.add_argument("--run-dir", required=True, type=Path, help="the run's folder: .../<namespace>/<job>-<uid>")
    parser.add_argument("--report-seconds", type=float, default=10.0, help="between reports of progress")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
