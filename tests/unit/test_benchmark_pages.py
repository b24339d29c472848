"""The page of benchmarks shows the results that are in the repository."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import pages
from benchmarks.report import RESULTS, Row

ROOT = Path(__file__).parents[2]


def test_the_committed_page_is_what_the_committed_results_make() -> None:
    assert pages.PAGE.read_text() == pages.page(), "run `python -m benchmarks.pages`"


def test_the_page_says_how_to_repeat_every_result_with_a_target_that_exists() -> None:
    targets = re.findall(r"^(bench-[a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"`make (bench-[a-z0-9-]+)`", pages.PAGE.read_text())
    assert named == [f"bench-{file.stem}" for file in sorted(RESULTS.glob("*.json"))]
    assert set(named) <= set(targets)


def test_a_row_shows_medians_ranges_and_ratios(tmp_path: Path) -> None:
    result = json.loads((RESULTS / "training.json").read_text())
    # Ratios of the rounds: 100/50, 300/100, 220/100 = 2, 3, 2.2.
    row = Row.of_rounds("a case", "steps/s", [100.0, 300.0, 220.0], {"a peer": [50.0, 100.0, 100.0]})
    result["rows"] = [asdict(row)]
    (tmp_path / "training.json").write_text(json.dumps(result))
    lines = pages.page(tmp_path).splitlines()
    assert "**a case** (3 rounds)" in lines
    assert "| RLightning | 220 | 100 – 300 | | |" in lines
    assert "| a peer | 100 | 50.0 – 100 | 2.20 | 2.00 – 3.00 |" in lines


def test_check_fails_on_a_stale_page_and_leaves_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / "benchmarks.md"
    stale.write_text(pages.page().replace("RLightning", "It"))
    before = stale.read_text()
    monkeypatch.setattr(pages, "PAGE", stale)
    monkeypatch.setattr(sys, "argv", ["pages", "--check"])
    with pytest.raises(SystemExit, match=r"python -m benchmarks\.pages"):
        pages.main()
    assert stale.read_text() == before
    stale.write_text(pages.page())
    pages.main()  # returns: nothing to complain of
