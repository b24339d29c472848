"""What a run shows: on real pseudo-terminals of several widths, and without a terminal."""

from __future__ import annotations

import functools
import io
import os
import re
import sys
import time
from pathlib import Path

import pytest

from rlightning.cli.display import PlainDisplay, duration, number, open_display, remaining, short
from rlightning.runtime.pace import Pace
from tests.unit.cli import samples
from tests.unit.cli.terminal import Screen, run_in_terminal

ROOT = Path(__file__).parents[3]

# Plays a run with prints of the user's own in between; sleeps so that the live region is really drawn in between.
SCRIPT = """
import sys, time, threading
from pathlib import Path
from rlightning.cli.display import LiveDisplay, open_display
from tests.unit.cli import samples
LiveDisplay.refresh_per_second = 20
path = Path("runs/cartpole/1")
display = open_display(sys.stdout, resume_command="rlightning run --resume runs/cartpole/1")
display.started(samples.run_info(path))
display.published(samples.shown_record(1))
time.sleep(0.12)
for n in range(1, 41):
    display.iteration(samples.iteration(n))
    display.published(samples.shown_record(n + 1, wrong="eval-1" if n == 30 else None))
    if n % 10 == 0:
        print(f"user line {n} " + "x" * 100 + " end")
        print("part one,", end=" ")
        time.sleep(0.12)
        print("part two", n)
        print("to stderr", n, file=sys.stderr)
        thread = threading.Thread(target=print, args=("from a thread", n))
        thread.start()
        thread.join()
    if n == 20:
        display.evaluated(samples.evaluation(20))
        display.warning("mind the gap")
time.sleep(0.12)
display.finished(samples.outcome(sys.argv[1], 40, path))
print("after the end")
"""


@functools.cache
def play(state: str, width: int, **environ: str) -> tuple[str, Screen]:
    env = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    env |= {"TERM": "xterm-256color", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", **environ}
    command = [sys.executable, "-c", SCRIPT, state]
    code, written = run_in_terminal(command, width=width, env=env, cwd=str(ROOT))
    assert code == 0, written
    return written, Screen(width).feed(written)


EXPECTED = [
    "CartPole-v1: 8 environments in 4 shards, 1 train + 4 eval members in this process, seed 7",
    *(
        line
        for n in (10, 20, 30, 40)
        for line in (
            f"user line {n} {'x' * 100} end",
            f"part one, part two {n}",
            f"to stderr {n}",
            f"from a thread {n}",
            *(
                [
                    "evaluation at iteration 20: mean return 480.2 ± 12.5 over 100 episodes (target 475.0)",
                    "warning: mind the gap",
                ]
                if n == 20
                else []
            ),
        )
    ),
    "succeeded: all 100,000 steps are done (iteration 40, 40,000 steps, 12.4 s)",
    f"weights v41 {samples.digest(41)} on 4/4 members",
    "checkpoint runs/cartpole/1/checkpoints/iter-00000040",
    "after the end",
]


def words(lines: list[str]) -> list[str]:
    """What our own lines say, wherever they were wrapped."""
    return " ".join(lines).split()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_on_a_terminal_all_lines_stay_whole_above_the_region_which_goes_at_the_end(width: int) -> None:
    written, screen = play("Succeeded", width)
    assert words(screen.lines) == words(EXPECTED)
    for n in (10, 20, 30, 40):  # what the user prints is never rewrapped
        first = screen.lines.index(f"user line {n} {'x' * 100} end")
        assert screen.lines[first + 1 : first + 4] == [
            f"part one, part two {n}",
            f"to stderr {n}",
            f"from a thread {n}",
        ]
    long = [line for line in screen.lines if len(line) > width and "x" * 100 not in line]
    assert all("xxh3-128:" in line or "checkpoints/" in line for line in long)  # words of more than 40 characters
    assert screen.cursor_shown
    assert "\x1b[1m" in written  # it has colours


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_region_never_leaves_its_width(width: int) -> None:
    written, _ = play("Succeeded", width)
    for line in re.split(r"[\r\n]|\x1b\[[0-9;?]*[A-HJKhl]", written):
        text = re.sub(r"\x1b\[[0-9;]*m", "", line)
        if "ETA" in text or "steps/s" in text or "weights v" in text:
            assert len(text) <= width, text


def test_the_region_shows_every_fact_at_40_columns() -> None:
    seen: list[list[str]] = []
    written, _ = play("Succeeded", 40)
    screen = Screen(40)
    for piece in re.split(r"(?=\r\x1b\[2K)", written):
        screen.feed(piece)
        seen.append(screen.lines)
    shown = "\n".join("\n".join(lines) for lines in seen)
    assert re.search(r"^cartpole ━+─+  40%  ETA \d:\d\d$", shown, re.MULTILINE)
    for fact in (
        "starting the first iteration",
        "iteration 30  return 50.0",
        "65.4k steps/s",
        "weights v41 4/4 ✓",
        "evaluation 480.2 at 20",
    ):
        assert fact in shown, fact


def test_a_mismatch_is_shown() -> None:
    written, _ = play("Succeeded", 80)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", written)
    assert "weights v31 3/4 ✗" in plain


def test_no_color_has_no_colours_and_still_a_live_region() -> None:
    written, screen = play("Succeeded", 80, NO_COLOR="1")
    assert words(screen.lines) == words(EXPECTED)
    assert "\x1b[2K" in written
    for sgr in re.findall(r"\x1b\[([0-9;]*)m", written):
        assert not [c for c in sgr.split(";") if c and int(c) >= 30], sgr  # 30 and above are colours


def test_a_dumb_terminal_gets_plain_lines() -> None:
    written, screen = play("Succeeded", 80, TERM="dumb")
    assert "\x1b" not in written
    assert [line for line in screen.lines if not line.startswith("iteration ")] == EXPECTED


def test_a_terminal_without_unicode_gets_ascii() -> None:
    written, screen = play("Succeeded", 80, LANG="C", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert written.isascii()
    assert "+- 12.5" in "\n".join(screen.lines)
    assert "4/4 ok" in written


def test_a_failure_and_a_stop_name_the_checkpoint_and_the_way_on() -> None:
    for state, word in (("Failed", "failed: NonFiniteLoss"), ("Stopped", "stopped: asked to stop")):
        _, screen = play(state, 80)
        assert screen.lines[-5:] == [
            f"{word} (iteration 40, 40,000 steps, 12.4 s)",
            f"weights v41 {samples.digest(41)} on 4/4 members",
            "checkpoint runs/cartpole/1/checkpoints/iter-00000040",
            "resume with: rlightning run --resume runs/cartpole/1",
            "after the end",
        ]


def test_stderr_that_is_redirected_stays_redirected(tmp_path: Path) -> None:
    quoted = f"exec {sys.executable} -c '{SCRIPT}' Succeeded 2> {tmp_path}/err"
    env = {**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8"}
    code, written = run_in_terminal(["sh", "-c", quoted], width=80, env=env, cwd=str(ROOT))
    assert code == 0, written
    assert (tmp_path / "err").read_text() == "".join(f"to stderr {n}\n" for n in (10, 20, 30, 40))
    assert words(Screen(80).feed(written).lines) == words([line for line in EXPECTED if "to stderr" not in line])


# -- without a terminal --------------------------------------------------------------------------------------------


def test_plain_output_has_about_a_line_per_tenth_and_no_control_codes() -> None:
    stream = io.StringIO()
    display = open_display(stream)
    samples.play(display, Path("runs/cartpole/1"), 1, 100)
    display.evaluated(samples.evaluation(100))
    display.finished(samples.outcome("Succeeded", 100, Path("runs/cartpole/1")))
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()
    progress = [line for line in lines if line.startswith("iteration ")]
    assert [line.split()[1] for line in progress] == [str(n) for n in range(10, 101, 10)]
    assert re.fullmatch(
        r"iteration 30  30 %  return 50\.0  65,432 steps/s  ETA \d:\d\d  weights v30 4/4 ✓", progress[2]
    )
    assert lines[-4].startswith("evaluation at iteration 100")
    assert lines[-3].startswith("succeeded")


def test_plain_output_shows_that_a_slow_run_lives() -> None:
    now = 0.0
    stream = io.StringIO()
    display = PlainDisplay(stream, clock=lambda: now)
    display.started(samples.run_info(Path("runs/cartpole/1")))
    for n in range(1, 6):  # 5 % in 50 s
        now += 10
        display.iteration(samples.iteration(n))
    assert [line.split()[1] for line in stream.getvalue().splitlines()[1:]] == ["3"]


def test_plain_output_counts_from_the_resumed_iteration() -> None:
    stream = io.StringIO()
    display = open_display(stream)
    samples.play(display, Path("runs/cartpole/1"), 51, 60, attempt=2)
    lines = stream.getvalue().splitlines()
    assert lines[1].startswith("resumed from runs/cartpole/1/checkpoints/iter-00000050: iteration 50, 50,000 steps")
    assert [line.split()[1] for line in lines[2:]] == ["60"]


def test_quiet_prints_warnings_and_the_result_only() -> None:
    stream = io.StringIO()
    display = open_display(stream, quiet=True)
    samples.play(display, Path("runs/cartpole/1"), 1, 20)
    display.evaluated(samples.evaluation(20))
    display.warning("mind the gap")
    display.finished(samples.outcome("Succeeded", 20, Path("runs/cartpole/1")))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "warning: mind the gap"
    assert [line.split()[0] for line in lines[1:]] == ["succeeded:", "weights", "checkpoint"]


def test_a_closed_pipe_is_told_once_and_does_not_stop_the_run() -> None:
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        lost: list[str] = []
        display = open_display(stream, output_lost=lost.append)
        display.started(samples.run_info(Path("runs/cartpole/1")))
        assert os.read(reader, 100)
        os.close(reader)
        for n in range(1, 101):
            display.iteration(samples.iteration(n))
        display.finished(samples.outcome("Succeeded", 100, Path("runs/cartpole/1")))
        assert lost == ["[Errno 32] Broken pipe"]


def test_what_was_not_measured_is_a_dash() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream)
    display.started(samples.run_info(Path("runs/cartpole/1")))
    display.iteration(samples.iteration(10, episode_return_mean=None))
    assert "return -  " in stream.getvalue()
    assert "weights -" in stream.getvalue()


# -- numbers -------------------------------------------------------------------------------------------------------


def test_numbers_are_short() -> None:
    assert [number(v) for v in (None, 0.0, 0.012345, -1.5, 21.25, 475.0, -1234.5, 9_876_543.0)] == [
        "-", "0", "0.0123", "-1.5", "21.2", "475.0", "-1,234", "9,876,543",
    ]  # fmt: skip
    assert [short(v) for v in (0.4, 950, 65_432, 1_250_000)] == ["0", "950", "65.4k", "1.2M"]
    assert [duration(v) for v in (0.04, 12.4, 187, 7387)] == ["0.0 s", "12.4 s", "3:07", "2:03:07"]


def test_the_estimate_follows_the_last_minute() -> None:
    now = 0.0
    pace = Pace(total=1000, done=0, clock=lambda: now)
    assert pace.remaining_seconds() is None
    assert remaining(pace) == "-"
    for _ in range(10):  # 10 steps/s for 10 s
        now += 1
        pace.update(pace.done + 10)
    assert pace.remaining_seconds() == pytest.approx(900 / 10)
    assert remaining(pace) == "1:30"
    for _ in range(100):  # then 1 step/s for 100 s: the first ten seconds are forgotten
        now += 1
        pace.update(pace.done + 1)
    assert pace.remaining_seconds() == pytest.approx(800 / 1)
    pace.update(1200)
    assert (pace.percent, pace.remaining_seconds()) == (100.0, 0.0)


def test_the_estimate_of_a_resumed_run_counts_its_own_steps() -> None:
    now = 0.0
    pace = Pace(total=1000, done=500, clock=lambda: now)
    now = 10.0
    pace.update(600)
    assert pace.percent == 60.0
    assert pace.remaining_seconds() == pytest.approx(40.0)


def test_showing_an_iteration_costs_little() -> None:
    display = PlainDisplay(io.StringIO())
    display.started(samples.run_info(Path("runs/cartpole/1")))
    reports = [samples.iteration(n % 90 + 1) for n in range(1000)]
    start = time.process_time()
    for report in reports:
        display.iteration(report)
    assert (time.process_time() - start) / 1000 < 0.0003
