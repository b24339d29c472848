"""A small terminal: what a program's output looks like on a screen of a given width."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Callable, Sequence

_TOKEN = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|.", re.DOTALL)


class Screen:
    """Understands text, CR, LF, and the control sequences that move the cursor and erase; wraps at the width.

    Attributes:
        rows: every row there was, the scrolled ones too; ``wrapped[i]``: row i continues row i − 1.
        cursor_shown: whether the cursor is visible.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows: list[list[str]] = [[]]
        self.wrapped = [False]
        self.row = self.column = 0
        self.cursor_shown = True

    def feed(self, text: str) -> Screen:
        for match in _TOKEN.finditer(text):
            token, arguments, final = match.group(0), match.group(1), match.group(2)
            if final is not None:
                self._control(arguments, final)
            elif token == "\r":
                self.column = 0
            elif token == "\n":
                self._down()
            elif token >= " ":
                if self.column == self.width:
                    self._down(wrapped=True)
                    self.column = 0
                line = self.rows[self.row]
                line.extend(" " * (self.column - len(line)))
                line[self.column : self.column + 1] = [token]
                self.column += 1
        return self

    def _down(self, wrapped: bool = False) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append([])
            self.wrapped.append(wrapped)
        self.wrapped[self.row] = wrapped

    def _control(self, arguments: str, final: str) -> None:
        count = int(arguments or 1) if (arguments or "1").isdigit() else 1
        line = self.rows[self.row]
        if final == "A":
            self.row = max(0, self.row - count)
        elif final == "B":
            for _ in range(count):
                self._down()
        elif final == "G":
            self.column = count - 1
        elif final == "K":
            if arguments in ("", "0"):
                del line[self.column :]
            elif arguments == "2":
                line.clear()
        elif final == "J":
            del line[self.column :]
            del self.rows[self.row + 1 :], self.wrapped[self.row + 1 :]
        elif final in "hl" and arguments == "?25":
            self.cursor_shown = final == "h"
        elif final != "m":
            raise AssertionError(f"the display uses a sequence that this terminal does not know: {arguments}{final}")

    @property
    def lines(self) -> list[str]:
        """Lines as they were printed, joined where the terminal wrapped them; without empty ones at the end."""
        found: list[str] = []
        for row, wrapped in zip(self.rows, self.wrapped, strict=True):
            text = "".join(row)
            if wrapped:
                found[-1] += text
            else:
                found.append(text)
        while found and not found[-1].strip():
            found.pop()
        return [line.rstrip() for line in found]


def run_in_terminal(
    command: Sequence[str],
    *,
    width: int,
    env: dict[str, str],
    cwd: str,
    on_output: Callable[[str, subprocess.Popen[bytes]], None] = lambda output, process: None,
) -> tuple[int, str]:
    """Run a command on a pseudo-terminal of the given width; its exit status and all it wrote.

    Args:
        on_output: called with everything written so far, after each piece.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, width, 0, 0))
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=cwd, start_new_session=True
    )
    os.close(theirs)
    written = b""
    try:
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux: EIO when the last process on it has ended
                break
            if not piece:
                break
            written += piece
            on_output(written.decode("utf-8", "replace"), process)
        return process.wait(), written.decode()
    finally:
        process.kill()  # a test that times out leaves nothing running
        process.wait()
        os.close(ours)
