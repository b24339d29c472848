# /// script
# dependencies = ["pyte", "rich"]
# ///
"""Makes docs/images/run.svg: the screen of a terminal in the middle of a real ``rlightning run``.

    .venv/bin/uv run hack/docs/run_picture.py

The run happens in a folder that is removed again, and is killed once the picture is taken.
"""

from __future__ import annotations

import codecs
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from itertools import groupby
from pathlib import Path
from typing import Any

import pyte  # type: ignore[import-not-found, import-untyped, unused-ignore]
from rich.console import Console
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/images/run.svg"
COLUMNS, LINES = 92, 24
COMMAND = "rlightning run manifests/cartpole.yaml"
MOMENT = re.compile(r"\ncartpole [━─]+ .*ETA \d.*\niteration 9\d  return .*  evaluation .*")


class Screen(pyte.Screen):
    """pyte's screen; it has no notion of dim text, which is kept as a colour of that name."""

    def select_graphic_rendition(self, *attributes: int, **options: Any) -> None:
        super().select_graphic_rendition(*attributes, **options)
        if 2 in attributes:
            self.cursor.attrs = self.cursor.attrs._replace(fg="dim")


def screen_in_mid_run() -> Screen:
    """Run the command on a terminal until the screen shows what the picture is to show."""
    screen = Screen(COLUMNS, LINES)
    stream, decoder = pyte.Stream(screen), codecs.getincrementaldecoder("utf-8")()
    stream.feed(f"$ {COMMAND}\r\n")
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "manifests").symlink_to(ROOT / "manifests")
        run = subprocess.Popen(COMMAND.split(), stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=folder)
        try:
            while not MOMENT.search("\n".join(line.rstrip() for line in screen.display)):
                if run.poll() is not None:
                    sys.exit(f"the run ended before its picture was taken, with exit status {run.returncode}")
                stream.feed(decoder.decode(os.read(ours, 65536)))
        finally:
            run.kill()
            run.wait()
    return screen


def svg(screen: Screen) -> str:
    """The screen down to its last line of text, as rich draws a terminal, in fonts that the reader has."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    height = max(y for y, line in enumerate(screen.display) if line.strip()) + 1
    for y in range(height):
        cells = groupby((screen.buffer[y][x] for x in range(COLUMNS)), key=style)
        line = Text.assemble(*(("".join(cell.data for cell in run), look) for look, run in cells))
        line.rstrip()
        console.print(line)
    drawn = console.export_svg(title="rlightning run", unique_id="run")
    drawn = re.sub(r"@font-face {.*?}\n", "", drawn, flags=re.DOTALL)
    drawn = drawn.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace")
    drawn = drawn.replace('<g class="run-matrix">', '<g class="run-matrix" xml:space="preserve">')
    return "\n".join(line.rstrip() for line in drawn.splitlines() if line.strip()) + "\n"


def style(cell: Any) -> Style:
    """How rich draws a cell of pyte's."""
    colour = None if cell.fg in ("default", "dim") else cell.fg
    return Style(color=colour, bold=cell.bold, dim=cell.fg == "dim")


if __name__ == "__main__":
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(svg(screen_in_mid_run()))
    print(f"written to {PICTURE.relative_to(ROOT)}")
