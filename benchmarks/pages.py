"""Writes docs/benchmarks.md from the committed results.

    python -m benchmarks.pages [--check]

``results/<name>.json`` (see :mod:`benchmarks.report`) becomes a section, which begins with the docstring of
``benchmarks/<name>/bench.py``: it says how the figures came about.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/benchmarks.md"
INTRODUCTION = """\
# Benchmarks

<!-- Written by `python -m benchmarks.pages` from benchmarks/results; change those, not this page. -->

Figures are medians over rounds, with their range. A ratio is the median of the ratios of single rounds: what slows the
machine down for a while slows all contenders of a round.
"""


def page(results: Path = RESULTS) -> str:
    """The page, one section per results file, in order of their names."""
    sections = [_section(json.loads(file.read_text())) for file in sorted(results.glob("*.json"))]
    return "\n".join([INTRODUCTION, *sections])


def _section(result: dict[str, Any]) -> str:
    name = result["benchmark"]
    lines = [f"## {name.capitalize()}", "", *_method(HERE / name / "bench.py")]
    for row in result["rows"]:
        lines += [*_table(row), ""]
    lines += [f"{_machine(dict(result['machine']))}. `make bench-{name}` repeats it.", ""]
    return "\n".join(lines)


def _method(module: Path) -> Iterator[str]:
    """Paragraphs of the module's docstring, without how to call it."""
    docstring = ast.get_docstring(ast.parse(module.read_text())) or ""
    for paragraph in docstring.split("\n\n"):
        if not paragraph.startswith(" "):
            yield from (paragraph, "")


def _table(row: dict[str, Any]) -> Iterator[str]:
    spread = row["spread"]
    rounds = "1 round" if row["runs"] == 1 else f"{row['runs']} rounds"
    yield f"**{row['case']}** ({rounds})"
    yield ""
    yield f"| | {row['unit']} | range | RLightning ÷ this | range |"
    yield "|---|---:|---:|---:|---:|"
    yield f"| RLightning | {_number(row['figure'])} | {_range(spread['rlightning'])} | | |"
    for peer, figure in row["peers"].items():
        ratio = f"{_number(row['ratio'][peer])} | {_range(spread[f'ratio to {peer}'])}"
        yield f"| {peer} | {_number(figure)} | {_range(spread[peer])} | {ratio} |"


def _range(spread: dict[str, float]) -> str:
    return f"{_number(spread['min'])} – {_number(spread['max'])}"


def _number(value: float) -> str:
    """Three digits at least: ``29,255``, ``1.33``."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def _machine(machine: dict[str, str | int]) -> str:
    cpu, cores, memory, system = (machine.pop(key) for key in ("cpu", "cores", "memory_gib", "system"))
    packages = ", ".join(f"{package} {version}" for package, version in machine.items())
    return f"{cpu}, {cores} cores, {memory} GiB, {system}; {packages}"


def main() -> None:
    """Write the page, or check that it is what would be written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not up to date")
    shown = f"{PAGE.parent.name}/{PAGE.name}"
    if not parser.parse_args().check:
        PAGE.write_text(page())
        print(f"written to {shown}")
    elif not PAGE.exists() or PAGE.read_text() != page():
        sys.exit(f"{shown} does not show benchmarks/results; run `python -m benchmarks.pages`")


if __name__ == "__main__":
    main()
