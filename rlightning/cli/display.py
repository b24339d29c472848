"""What a run shows while it runs: a live region on a terminal, few plain lines anywhere else.

Both say the same things: what runs and where, every evaluation and warning, how far it is, and how it ended.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rlightning.runtime.pace import Pace

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

    from rlightning.checkpoint.store import CheckpointInfo
    from rlightning.runtime.reporter import EvaluationReport, IterationReport, Outcome, RunInfo
    from rlightning.weights.ledger import VersionRecord


def open_display(
    stream: TextIO,
    *,
    quiet: bool = False,
    resume_command: str | None = None,
    output_lost: Callable[[str], None] = lambda reason: None,
) -> Display:
    """The display that suits ``stream``: live on a capable terminal, plain lines otherwise.

    Args:
        stream: usually ``sys.stdout``.
        quiet: only warnings and how it ended.
        resume_command: what to type to go on, if a run ends with a checkpoint and without success.
        output_lost: told once, with the reason, if the stream goes away (a closed pipe); the run itself goes on.
    """
    live = not quiet and stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    display = LiveDisplay(stream) if live else PlainDisplay(stream, progress=not quiet)
    display.resume_command, display.output_lost = resume_command, output_lost
    return display


class Display:
    """A Reporter that keeps the facts to be shown; subclasses decide how.

    Attributes:
        resume_command: shown at an end that can be resumed.
        output_lost: called once, with the reason, when the stream is gone.
        ended: how it ended was shown.
    """

    def __init__(self, stream: TextIO, *, progress: bool) -> None:
        self._stream, self._progress = stream, progress
        self.resume_command: str | None = None
        self.output_lost: Callable[[str], None] = lambda reason: None
        self.ended = False
        self._lost = False
        self._run: RunInfo | None = None
        self._pace: Pace | None = None
        self._last: IterationReport | None = None
        self._record: VersionRecord | None = None
        self._evaluation: EvaluationReport | None = None
        self._ascii = ascii_only(stream)

    # -- Reporter ------------------------------------------------------------------------------------------------

    def started(self, run: RunInfo) -> None:
        self._run = run
        self._pace = Pace(run.total_env_steps, run.start_env_steps)
        if self._progress:
            for line in header(run):
                self.say(line)

    def published(self, record: VersionRecord) -> None:
        self._record = record

    def iteration(self, report: IterationReport) -> None:
        self._last = report
        assert self._pace is not None, "iteration() before started()"
        self._pace.update(report.env_steps)

    def evaluated(self, report: EvaluationReport) -> None:
        self._evaluation = report
        if self._progress:
            self.say(self._evaluation_line(report))

    def checkpointed(self, info: CheckpointInfo) -> None:
        """Not shown: the run folder has it, and the end names the last one."""

    def warning(self, message: str) -> None:
        self.say(f"warning: {message}")

    def finished(self, outcome: Outcome) -> None:
        self.close()
        for line in self._summary(outcome):
            self.say(line)
        command = self.resume_command or outcome.resume_command
        if outcome.state != "Succeeded" and outcome.checkpoint is not None and command is not None:
            self.say(f"resume with: {command}", whole=True)
        self.ended = True

    # -- output --------------------------------------------------------------------------------------------------

    def say(self, line: str, *, whole: bool = False) -> None:
        """Print one line that stays. May be called from any thread.

        Args:
            whole: not to be wrapped at the terminal's width: something to copy.
        """
        self._write(line)

    def close(self) -> None:
        """Leave the terminal as it was. Harmless if called twice."""

    def _write(self, line: str) -> None:
        if self._lost:
            return
        try:
            print(printable(line, self._stream), file=self._stream, flush=True)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """The reader of the pipe, or the terminal, is gone: no reason to lose hours of training."""
        self._lost = True
        with contextlib.suppress(OSError, ValueError):  # a stream without a file
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # else Python fails once more, on the buffer, when it exits
            os.close(nowhere)
        self.output_lost(str(error))

    # -- sentences -----------------------------------------------------------------------------------------------

    def _evaluation_line(self, report: EvaluationReport) -> str:
        target = "" if report.target is None else f" (target {number(report.target)})"
        return (
            f"evaluation at iteration {report.iteration}: mean return {number(report.return_mean)} ± "
            f"{number(report.return_std)} over {report.episodes} episodes{target}"
        )

    def _weights(self) -> tuple[str, bool | None]:
        """``("weights v42 4/4 ✓", True)``; None: nothing was published yet."""
        if self._record is None:
            return "weights -", None
        same, total = consistent_members(self._record)
        mark = ("ok" if self._ascii else "✓") if same == total else ("DIFFER" if self._ascii else "✗")
        return f"weights v{self._record.version} {same}/{total} {mark}", same == total

    def _summary(self, outcome: Outcome) -> Iterable[str]:
        where = f"iteration {outcome.iteration}, {outcome.env_steps:,} steps, {duration(outcome.seconds)}"
        if outcome.state == "Succeeded":
            yield f"succeeded: {outcome.message} ({where})"
        elif outcome.state == "Stopped":
            yield f"stopped: {outcome.message.removeprefix('stopped ')} ({where})"
        else:
            yield f"{outcome.state.lower()}: {outcome.reason} ({where})"
        if outcome.digest is not None:
            weights = f"weights v{outcome.version} {outcome.digest}"
            if self._record is not None and self._record.version == outcome.version:
                same, total = consistent_members(self._record)
                weights += f" on {same}/{total} members"
            yield weights
        if outcome.checkpoint is not None:
            yield f"checkpoint {shown_path(outcome.checkpoint)}"


class PlainDisplay(Display):
    """Lines without control codes: about one for each tenth of the run, or one in 30 s if a tenth takes longer."""

    every_percent = 10.0
    every_seconds = 30.0

    def __init__(
        self,
        stream: TextIO,
        *,
        progress: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(stream, progress=progress)
        self._clock = clock
        self._said_at, self._said_tenth = clock(), 0

    def started(self, run: RunInfo) -> None:
        super().started(run)
        assert self._pace is not None
        self._said_at, self._said_tenth = self._clock(), int(self._pace.percent / self.every_percent)

    def iteration(self, report: IterationReport) -> None:
        super().iteration(report)
        assert self._pace is not None
        tenth = int(self._pace.percent / self.every_percent)
        if not self._progress or (tenth == self._said_tenth and self._clock() - self._said_at < self.every_seconds):
            return
        self._said_at, self._said_tenth = self._clock(), tenth
        self.say(
            f"iteration {report.iteration}  {self._pace.percent:.0f} %  return {number(report.episode_return_mean)}  "
            f"{report.steps_per_second:,.0f} steps/s  ETA {remaining(self._pace)}  {self._weights()[0]}"
        )


class LiveDisplay(Display):
    """A region of two to five lines at the bottom of the terminal; everything else that is printed appears above it.

    The region is removed at the end: the lines that stay are the same ones that the plain display prints.
    """

    refresh_per_second = 4

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream, progress=True)
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._live = Live(
            get_renderable=lambda: self,
            console=self._console,
            refresh_per_second=self.refresh_per_second,
            transient=True,
            redirect_stdout=False,  # rich's redirection wraps lines at the terminal's width; see Above
            redirect_stderr=False,
        )
        self._above: list[tuple[str, Above]] = []
        self._open = False

    def started(self, run: RunInfo) -> None:
        super().started(run)
        self._open = True
        for name in ("stdout", "stderr"):
            replaced = getattr(sys, name)
            if replaced is self._stream or replaced.isatty():  # `2> file` stays a file
                above = Above(self._console, replaced)
                self._above.append((name, above))
                setattr(sys, name, above)
        self._live.start()
        self._console.show_cursor(True)  # a driver that is killed must not leave a terminal without a cursor

    def say(self, line: str, *, whole: bool = False) -> None:
        if not whole:  # a narrow terminal would break words
            wrapper = textwrap.TextWrapper(
                self._console.width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
            line = "\n".join(wrapper.fill(part) for part in line.split("\n"))
        if not self._open:
            self._write(line)
            return
        try:
            self._console.out(printable(line, self._stream))
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._live.stop()
        for name, above in self._above:
            if getattr(sys, name) is above:
                setattr(sys, name, above.stream)
            above.drain()
        self._above.clear()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        width = max(10, options.max_width - 1)  # the last column stays free: some terminals wrap there at once
        yield self._bar(width)
        items: list[tuple[str, str]] = []
        if self._last is None:
            items.append(("starting the first iteration", ""))
        else:
            last = self._last
            items += [
                (f"iteration {last.iteration}", ""),
                (f"return {number(last.episode_return_mean)}", "bold"),
                (f"{short(last.steps_per_second)} steps/s", ""),
            ]
        weights, agree = self._weights()
        items.append((weights, {True: "green", False: "bold red", None: ""}[agree]))
        if self._evaluation is not None:
            items.append((f"evaluation {number(self._evaluation.return_mean)} at {self._evaluation.iteration}", "cyan"))
        line = Text()
        for text, style in items:
            if line and len(line) + 2 + len(text) > width:
                yield line
                line = Text()
            line.append("  " if line else "")
            line.append(text[:width], style)
        yield line

    def _bar(self, width: int) -> Text:
        from rich.text import Text

        assert self._run is not None
        assert self._pace is not None
        name = self._run.job.metadata.name
        right = f"{self._pace.percent:3.0f}%  ETA {remaining(self._pace)}"
        room = width - len(right) - 1
        left = f"{name} " if len(name) + 1 <= room - 10 else ""
        length = max(0, min(40, room - len(left)))
        full = int(length * self._pace.percent / 100)
        done, rest = ("#", "-") if self._ascii else ("━", "─")
        return Text.assemble((left, "bold"), (done * full, "green"), (rest * (length - full), "dim"), f" {right}")


class Above(io.TextIOBase):
    """Stands in for ``sys.stdout`` while the live region is up: whole lines are printed above it, as they are."""

    def __init__(self, console: Console, stream: TextIO) -> None:
        self._console, self.stream = console, stream
        self._pending = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._pending = (self._pending + text).split("\n")
            if "\r" in self._pending:  # a progress bar of the user's own: its last state is all there is to show
                head, _, tail = self._pending.rpartition("\r")
                self._pending = tail or head.rpartition("\r")[2] + "\r"
        for line in lines:
            self._console.out(line.rstrip("\r").rpartition("\r")[2])
        return len(text)

    def drain(self) -> None:
        """Hand an unfinished line on to the stream."""
        with self._lock:
            pending, self._pending = self._pending, ""
        if pending:
            self.stream.write(pending + "\n")
            self.stream.flush()

    def flush(self) -> None:
        """An unfinished line stays here until it ends: the region occupies the line that it would be on."""

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.stream.errors

    @property
    def buffer(self) -> object:
        return self.stream.buffer


def header(run: RunInfo) -> list[str]:
    """What runs, where and from which point."""
    spec = run.job.spec
    env = spec.environment
    train = sum(name.startswith("train") for name in run.members)
    members = f"{train} train + {len(run.members) - train} eval members"
    shards = "1 shard" if env.shards == 1 else f"{env.shards} shards"
    place = "in this process" if run.placement == "local" else "on Ray"
    lines = [f"{env.id}: {env.num_envs} environments in {shards}, {members} {place}, seed {spec.seed}"]
    if run.resumed_from is not None:
        lines.append(
            f"resumed from {shown_path(run.resumed_from)}: iteration {run.start_iteration}, "
            f"{run.start_env_steps:,} steps, attempt {run.attempt}"
        )
    return lines


def consistent_members(record: VersionRecord) -> tuple[int, int]:
    """Members whose own digest equals the learner's, and all members; counted anew, not taken from ``verified``."""
    return sum(m.digest == record.digest for m in record.members.values()), record.total


def shown_path(path: str | Path) -> str:
    """Relative to the working directory where that is shorter and does not climb."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def number(value: float | None) -> str:
    """Four digits or so; ``-`` for what was not measured."""
    if value is None:
        return "-"
    size = abs(value)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 10 else f"{value:.3g}"


def short(value: float) -> str:
    """``65.1k``."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """``12.4 s``, ``3:07``, ``2:03:07``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def remaining(pace: Pace) -> str:
    """``0:21``; ``-`` until the first iteration is done."""
    seconds = pace.remaining_seconds()
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def ascii_only(stream: TextIO) -> bool:
    """Whether the stream cannot take all characters (LANG=C and the like)."""
    encoding = getattr(stream, "encoding", None) or "utf-8"  # None: a stream in memory
    return not encoding.lower().replace("-", "").startswith("utf")


def printable(text: str, stream: TextIO) -> str:
    """The text, in characters that the stream takes."""
    if not ascii_only(stream):
        return text
    return text.translate(_TO_ASCII).encode("ascii", "replace").decode()


_TO_ASCII = str.maketrans({"±": "+-", "×": "x", "·": "-", "…": "...", "–": "-"})
