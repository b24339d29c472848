"""RLightning's training speed beside a plain PyTorch loop and stable-baselines3, measured in one run.

Rounds are interleaved: each contender runs once per round, in a process of its own, so that a slower minute of the
machine touches all three. Every contender runs the same number of iterations of the same job on one thread; the speed
is that of the iterations after the first few, so start-up does not count. RLightning runs as a user runs it: the
command line, with weights published and verified every iteration, the ledger, metrics, TensorBoard events, status and
checkpoints at their default interval.

    python -m benchmarks.training.bench [--rounds 5] [--profile]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import report

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MANIFEST = HERE / "cartpole.yaml"
CASE = "CartPole-v1, 64 environments × 128 steps, 4 epochs × minibatch 2048, 2×64 tanh, 1 thread"
ITERATIONS = 40
WARM_UP = 5
PLAIN, SB3 = "plain PyTorch loop", "stable-baselines3"

Log = tuple[list[float], list[float]]
"""Valid environment steps so far and seconds on some clock, at the end of each iteration."""


def run(command: list[str]) -> str:
    """Standard output of a contender; one that fails ends the benchmark with its error."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed with exit status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def rlightning_command(runs: Path, seed: int) -> list[str]:
    """What a user types, on this interpreter."""
    return [sys.executable, "-m", "rlightning.cli", "run", str(MANIFEST), "--run-dir", str(runs), "--seed", str(seed)]


def iteration_lines(runs: Path) -> list[dict[str, Any]]:
    """The iterations of the one run below a folder, from its metrics."""
    (metrics,) = runs.glob("*/*/metrics.jsonl")
    return [line for line in map(json.loads, metrics.read_text().splitlines()) if line["type"] == "iteration"]


def instant(line: dict[str, Any]) -> float:
    """When a line of metrics was written, in seconds."""
    return datetime.fromisoformat(line["time"]).timestamp()


def rlightning(seed: int) -> Log:
    """The product, by its command line; times are those it wrote into its metrics."""
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix=".bench-") as runs:
        run(rlightning_command(Path(runs), seed))
        lines = iteration_lines(Path(runs))
    return [line["envSteps"] for line in lines], [instant(line) for line in lines]


def script(python: Path, name: str) -> Callable[[int], Log]:
    """A contender that is a file in this folder and prints its log."""

    def contender(seed: int) -> Log:
        out = run([str(python), str(HERE / name), "--seed", str(seed), "--iterations", str(ITERATIONS)])
        log = json.loads(out.splitlines()[-1])
        return log["steps"], log["seconds"]

    return contender


CONTENDERS: dict[str, Callable[[int], Log]] = {
    "rlightning": rlightning,
    PLAIN: script(Path(sys.executable), "plain_loop.py"),
    SB3: script(ROOT / ".venv-sb3/bin/python", "sb3_loop.py"),
}


def speed(log: Log) -> float:
    """Steps per second from the end of the warm-up to the end of the last common iteration."""
    steps, seconds = log
    first, last = WARM_UP - 1, ITERATIONS - 1
    return (steps[last] - steps[first]) / (seconds[last] - seconds[first])


def measure(rounds: int) -> report.Row:
    """All contenders, ``rounds`` times in turn; who begins moves on by one each round."""
    figures: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    names = list(CONTENDERS)
    print(f"{CASE}\n{'round':>5}  " + "  ".join(f"{name:>20}" for name in names) + "   steps/s", flush=True)
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            figures[name].append(speed(CONTENDERS[name](1 + index)))
        print(f"{index + 1:>5}  " + "  ".join(f"{figures[name][-1]:>20,.0f}" for name in names), flush=True)
    own = figures.pop("rlightning")
    return report.Row.of_rounds(CASE, "steps/s", own, dict(figures))


def main() -> None:
    """Measure, or profile, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="say where RLightning's time goes instead")
    arguments = parser.parse_args()
    if arguments.profile:
        from benchmarks.training.where_time_goes import profile

        print(f"\nwritten to {profile().relative_to(ROOT)}")
        return
    row = measure(arguments.rounds)
    path = report.write("training", [row])
    print()
    for name, spread in row.spread.items():
        form = ",.3f" if name.startswith("ratio") else ",.0f"
        print(f"{name:>28}  median {spread.median:{form}}  min {spread.min:{form}}  max {spread.max:{form}}")
    print(f"\nwritten to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
