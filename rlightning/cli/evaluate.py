"""``rlightning evaluate``: greedy episodes with a checkpoint's weights."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Literal

from rlightning.cli.display import duration, number, printable
from rlightning.cli.failures import SUCCEEDED, exit_code, print_error
from rlightning.cli.threads import set_threads
from rlightning.runtime.run_folder import read_job


def evaluate_checkpoint(
    run: Path,
    *,
    episodes: int | None,
    seed: int | None,
    checkpoint: str | None,
    output: Literal["text", "json"],
) -> int:
    """Evaluate and print; returns the exit status."""
    set_threads(read_job(run).spec.training.threads)  # before the first import of torch or numpy
    sys.path.append(os.getcwd())  # classes named by the manifest, as for `run`
    from rlightning.runtime.evaluation import evaluate_run

    try:
        report = evaluate_run(run, episodes=episodes, seed=seed, checkpoint=checkpoint)
    except Exception as error:
        print_error(error)
        return exit_code(error)
    if output == "json":
        names = {field.name: _camel(field.name) for field in dataclasses.fields(report)}
        print(json.dumps({alias: getattr(report, name) for name, alias in names.items()}, indent=2))
        return SUCCEEDED
    text = (
        f"{run}, iteration {report.iteration}, weights v{report.version}: mean return {number(report.return_mean)} ± "
        f"{number(report.return_std)} (from {number(report.return_min)} to {number(report.return_max)}), mean length "
        f"{number(report.length_mean)}, over {report.episodes} episodes in {duration(report.seconds)}"
    )
    print(printable(text, sys.stdout))
    if report.target is not None:
        reached = "reached" if report.return_mean >= report.target else "not reached"
        print(f"target {number(report.target)} (evaluation.stopAtReturn): {reached}")
    return SUCCEEDED


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
