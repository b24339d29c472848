"""The form of every benchmark's results: rows of figures beside those of peers, and the machine they are from."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Spread:
    """Median and range of the runs of one contender."""

    median: float
    min: float
    max: float

    @staticmethod
    def of(figures: Sequence[float], digits: int = 0) -> Spread:
        """Of at least one figure, rounded."""
        return Spread(*(round(f, digits) for f in (median(figures), min(figures), max(figures))))


@dataclass(frozen=True)
class Row:
    """One measured case.

    Attributes:
        case: what was measured, in words.
        figure: RLightning's median.
        unit: of all figures in the row.
        peers: median of each peer, by name.
        ratio: RLightning to each peer, the median of the ratios of single rounds: what slows the machine down for a
            while slows all contenders of a round.
        runs: rounds; in each one every contender ran once, in turn.
        spread: median, least and greatest figure of each contender, RLightning's under ``rlightning``, and of each
            ratio under ``ratio to <peer>``.
    """

    case: str
    figure: float
    unit: str
    peers: dict[str, float]
    ratio: dict[str, float]
    runs: int
    spread: dict[str, Spread]

    @staticmethod
    def of_rounds(case: str, unit: str, rlightning: Sequence[float], peers: dict[str, Sequence[float]]) -> Row:
        """From one figure per round and contender, in the same order."""
        ratios = {
            peer: Spread.of([own / other for own, other in zip(rlightning, figures, strict=True)], 3)
            for peer, figures in peers.items()
        }
        own = Spread.of(rlightning)
        others = {peer: Spread.of(figures) for peer, figures in peers.items()}
        return Row(
            case=case,
            figure=own.median,
            unit=unit,
            peers={peer: spread.median for peer, spread in others.items()},
            ratio={peer: ratio.median for peer, ratio in ratios.items()},
            runs=len(rlightning),
            spread={"rlightning": own, **others, **{f"ratio to {peer}": ratio for peer, ratio in ratios.items()}},
        )


def machine(packages: Sequence[str] = ("torch", "numpy", "gymnasium")) -> dict[str, str | int]:
    """What figures depend on; nothing that names this very machine."""
    cpu = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].split(":", 1)[1].strip() if models else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def write(name: str, rows: Sequence[Row], packages: Sequence[str] = ("torch", "numpy", "gymnasium")) -> Path:
    """Write ``benchmarks/results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {"benchmark": name, "machine": machine(packages), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return path
