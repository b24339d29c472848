"""What the submitter prints, ends with and leaves for the kubelet; the rest of it is tested with a real Ray."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from rlightning.runtime.cluster.ray_jobs import RayJob
from rlightning.runtime.cluster.submitter import TERMINATION_BYTES, Log, exit_status, termination_message

TRACEBACK = "Traceback (most recent call last):\n"


def test_a_text_that_is_read_again_from_its_beginning_is_printed_once() -> None:
    out = io.StringIO()
    log = Log(out)
    log.write("one\ntw")
    log.write("o\n")
    log.rewind()
    log.write("one\n")  # cut otherwise than before
    log.write("two\nthr")
    log.rewind()
    log.write("one\ntwo\nthree\n")
    log.from_the_beginning("one\ntwo\n")  # a log that was read a moment earlier
    assert out.getvalue() == "one\ntwo\nthree\n"
    log.from_the_beginning("one\ntwo\nthree\nfour\n")
    assert out.getvalue() == "one\ntwo\nthree\nfour\n"


def test_a_line_of_its_own_never_continues_one_of_the_drivers() -> None:
    out = io.StringIO()
    log = Log(out)
    log.write("half a li")
    log.say("submitter: here")
    assert out.getvalue() == "half a li\nsubmitter: here\n"
    assert log.tail == "half a li", "what becomes the termination message is the driver's log"


@pytest.mark.parametrize(
    ("job", "status"),
    [
        (RayJob("SUCCEEDED", exit_code=0), 0),
        (RayJob("FAILED", exit_code=1), 1),
        (RayJob("FAILED", exit_code=3), 3),
        (RayJob("FAILED", exit_code=-9), 3),
        (RayJob("FAILED", exit_code=137), 3),
        (RayJob("FAILED", "the supervisor could not be started"), 3),
        (RayJob("STOPPED"), 3),
    ],
)
def test_only_the_drivers_own_verdicts_are_verdicts(job: RayJob, status: int) -> None:
    assert exit_status(job) == status


def test_the_termination_message_is_the_last_traceback_with_its_end() -> None:
    first = TRACEBACK + "  File one\nValueError: handled\n"
    last = "error: member train-0 raised\n" + TRACEBACK + "  File two\nKeyError: 'x'\n"
    message = termination_message("the driver ended with exit status 1", "starting\n" + first + last)
    assert message.startswith("the driver ended with exit status 1\nTraceback")
    assert message.endswith("KeyError: 'x'") and "File two" in message and "handled" not in message


def test_a_long_traceback_keeps_its_end_within_what_the_kubelet_takes() -> None:
    tail = TRACEBACK + "".join(f"  File ü{n}\n" for n in range(2000)) + "RecursionError: too deep\n"
    message = termination_message("exit status 1", tail)
    assert len(message.encode()) <= TERMINATION_BYTES
    assert message.startswith("exit status 1\n") and message.endswith("RecursionError: too deep")


def test_without_a_traceback_the_last_lines_are_kept() -> None:
    message = termination_message("lost", "".join(f"line {n}\n" for n in range(100)))
    assert message.splitlines()[0] == "lost"
    assert message.splitlines()[1] == "line 80" and message.splitlines()[-1] == "line 99"


def test_a_submitter_imports_neither_ray_nor_torch() -> None:
    code = "import json, sys, rlightning.runtime.cluster.submitter; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert not {"ray", "torch", "numpy", "kubernetes", "pydantic"} & set(loaded)
