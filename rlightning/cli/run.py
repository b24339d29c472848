"""``rlightning run``: a manifest, or a run to go on with, to the end in this process."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

from pydantic.alias_generators import to_camel

from rlightning.api.models import RLJob
from rlightning.cli.display import open_display, shown_path
from rlightning.cli.failures import BAD_MANIFEST, FAILED, INTERRUPTED, SUCCEEDED, exit_code, print_error
from rlightning.cli.threads import set_threads
from rlightning.errors import ManifestError, RunFolderError
from rlightning.runtime.reporter import Reporters
from rlightning.runtime.run_folder import RunFolder, read_job, read_status

if TYPE_CHECKING:
    from rlightning.api.models import RLJobStatus

# Outcomes that a manifest is to blame for, which only the start shows.
MANIFEST_REASONS = ("InvalidManifest", "EnvironmentNotFound", "UnsupportedSpace")

Placement = Literal["local", "ray"]


def run_manifest(
    manifest: Path | None,
    *,
    placement: Placement,
    run_dir: Path | None,
    seed: int | None,
    resume: Path | None,
    quiet: bool,
) -> int:
    """Everything behind ``rlightning run``; returns the exit status."""
    if resume is not None:
        recorded, status = read_job(resume), read_status(resume)
        job = recorded if manifest is None else changed_job(resume, recorded, manifest)
        if job == recorded and status is not None and status.state == "Succeeded":
            print(finished_line(resume, status))
            return SUCCEEDED
    else:
        assert manifest is not None, "the command line demands one of the two"
        job = resolved_job(manifest, seed)

    set_threads(job.spec.training.threads)  # before the first import of torch or numpy
    # A console script's path begins with its own folder: classes named by the manifest are found here as well, as
    # with `python -m`. Last, so that a file here never hides an installed module.
    sys.path.append(os.getcwd())
    folder = RunFolder.create(run_dir or Path("runs"), job) if resume is None else RunFolder.resume(resume, job)
    with folder:
        return _drive(folder, placement, fresh=resume is None, quiet=quiet)


def _drive(folder: RunFolder, placement: Placement, *, fresh: bool, quiet: bool) -> int:
    again = resume_command(folder.path, placement)
    display = open_display(
        sys.stdout,
        quiet=quiet,
        resume_command=again,
        output_lost=lambda why: folder.warning(f"nothing is printed any more, the output is gone ({why})"),
    )
    if not quiet:
        # Said before torch is imported, which takes seconds.
        display.say(f"{folder.job.metadata.name}: run folder {shown_path(folder.path)}")
        unused = unused_fields(folder.job, placement)
        if unused:
            display.say(f"not used on this machine: {', '.join(unused)}")
    with contextlib.suppress(io.UnsupportedOperation):  # a stderr without a file (tests)
        if not faulthandler.is_enabled():
            faulthandler.enable()
    try:
        with stop_on_signal(display.say) as stop:
            from rlightning.checkpoint.store import latest_checkpoint
            from rlightning.runtime.driver import run_job

            checkpoint = None if fresh else latest_checkpoint(folder.path / "checkpoints")
            if not fresh and checkpoint is None:
                display.warning("the run has no checkpoint yet: it starts again from the beginning")
                folder.warning("no checkpoint: starting from the beginning")
            outcome = run_job(
                folder.job,
                run_dir=folder.path,
                placement=placement,
                reporter=Reporters(folder, display),
                resume=checkpoint,
                stop=stop,
                attempt=folder.attempt,
            )
    except KeyboardInterrupt:
        display.close()
        _note_end(folder.interrupted)
        print("stopped at once, before the iteration's end")
        print(_way_on(folder, again))
        return INTERRUPTED
    except Exception as error:
        display.close()
        _note_end(folder.failed, error)
        print_error(error, folder.path / "run.log")
        if not display.ended:
            print(_way_on(folder, again), file=sys.stderr)
        return exit_code(error)
    finally:
        display.close()
    if outcome.state == "Failed":
        print(f"error: {outcome.message}", file=sys.stderr)
        return BAD_MANIFEST if outcome.reason in MANIFEST_REASONS else FAILED
    if not quiet and outcome.state == "Succeeded":
        print(f"verify with: rlightning verify {shlex.quote(shown_path(folder.path))}")
    return SUCCEEDED if outcome.state == "Succeeded" else INTERRUPTED


class Stop:
    """The driver looks at ``requested`` after every iteration."""

    requested = False


@contextlib.contextmanager
def stop_on_signal(say: Callable[[str], None]) -> Iterator[Stop]:
    """The first SIGINT or SIGTERM asks for a stop, the second raises KeyboardInterrupt, the third ends the process."""
    stop, count = Stop(), 0

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count == 1:
            stop.requested = True
            # A handler runs between any two instructions of the main thread, which may be in the middle of a print.
            notice = "stopping after this iteration; Ctrl-C again stops at once"
            threading.Thread(target=say, args=(notice,), daemon=True).start()
        elif count == 2:
            raise KeyboardInterrupt
        else:
            os._exit(INTERRUPTED)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield stop
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def resolved_job(manifest: Path, seed: int | None) -> RLJob:
    """The one RLJob of a manifest, with shards filled in and the seed replaced if one is given.

    Raises:
        ManifestError: lists every problem.
    """
    from rlightning.api.resolve import resolve
    from rlightning.api.validate import load_job

    job = load_job(manifest)
    spec = job.spec if seed is None else job.spec.model_copy(update={"seed": seed})
    return job.model_copy(update={"spec": resolve(spec), "status": None})


def changed_job(run: Path, recorded: RLJob, manifest: Path) -> RLJob:
    """The manifest that a run goes on with, if it differs only where it may.

    Raises:
        ManifestError: names each field that may not change.
    """
    from rlightning.api.changes import refused_changes
    from rlightning.api.resolve import resolve
    from rlightning.api.validate import load_job

    wanted = load_job(manifest)
    if wanted.metadata.name != recorded.metadata.name:
        raise ManifestError(
            f"{manifest}: metadata.name is {wanted.metadata.name!r}, and {run} is a run of "
            f"{recorded.metadata.name!r}; give that job's manifest, or none"
        )
    if wanted.spec.environment.shards is None:  # resolved at the first start, and fixed since
        environment = wanted.spec.environment.model_copy(update={"shards": recorded.spec.environment.shards})
        wanted = wanted.model_copy(update={"spec": wanted.spec.model_copy(update={"environment": environment})})
    wanted = wanted.model_copy(update={"spec": resolve(wanted.spec), "metadata": recorded.metadata, "status": None})
    refused = refused_changes(recorded, wanted)
    if refused:
        raise ManifestError("\n  ".join([f"{manifest} does not fit the run {run}:", *refused]))
    return wanted


def unused_fields(job: RLJob, placement: Placement) -> list[str]:
    """Fields that are set and mean nothing where the run takes place."""
    spec, defaults = job.spec, type(job.spec).model_fields
    roles, checkpoints = spec.policy_group, spec.checkpoints
    one_process = placement == "local"
    fields = {
        "spec.pools": one_process and bool(spec.pools),
        "spec.policyGroup.train.pool": one_process and roles.train.pool is not None,
        "spec.policyGroup.eval.pool": one_process and roles.eval.pool is not None,
        # What only the operator acts on.
        "spec.head": spec.head != defaults["head"].get_default(call_default_factory=True),
        "spec.image": spec.image is not None,
        "spec.imagePullPolicy": spec.image_pull_policy is not None,
        "spec.imagePullSecrets": bool(spec.image_pull_secrets),
        "spec.checkpoints.claimName": checkpoints.claim_name is not None,
        "spec.checkpoints.drainSeconds": checkpoints.drain_seconds
        != type(checkpoints).model_fields["drain_seconds"].default,
        "spec.runPolicy": spec.run_policy != defaults["run_policy"].get_default(call_default_factory=True),
        "spec.suspend": spec.suspend,
    }
    for i, pool in enumerate(spec.pools):
        parts = pool.model_fields_set - {"name", "replicas", "members_per_replica"}
        fields[f"spec.pools[{i}].{'|'.join(sorted(map(to_camel, parts)))}"] = not one_process and bool(parts)
    return [field for field, given in fields.items() if given]


def resume_command(run: Path, placement: Placement) -> str:
    """What to type to go on with a run."""
    return f"rlightning run --resume {shlex.quote(shown_path(run))}{' --placement ray' if placement == 'ray' else ''}"


def finished_line(run: Path, status: RLJobStatus) -> str:
    """Why there is nothing to resume."""
    message = next((c.message for c in status.conditions if c.type == "Succeeded"), "")
    at = f" at iteration {status.progress.iteration}" if status.progress else ""
    return f"{run} is finished: {message}{at}; to train on, raise training.totalEnvSteps and give the manifest as well"


def _way_on(folder: RunFolder, command: str) -> str:
    from rlightning.checkpoint.store import latest_checkpoint

    checkpoint = latest_checkpoint(folder.path / "checkpoints")
    if checkpoint is None:
        return f"no checkpoint was saved; {command} starts again from the beginning"
    return f"last checkpoint {shown_path(checkpoint)}\nresume with: {command}"


def _note_end(note: Callable[..., None], *args: BaseException) -> None:
    """Write the end into the run folder; if that fails too (a full disk), say so and keep the first error."""
    try:
        note(*args)
    except RunFolderError as error:
        print(f"error: the end of the run could not be recorded: {error}", file=sys.stderr)
