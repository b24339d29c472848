"""Where RLightning's time goes on the benchmark's job: its own stage timings, then a sampling profile by function."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median

from benchmarks import report
from benchmarks.training.bench import CASE, ROOT, WARM_UP, instant, iteration_lines, rlightning_command, run

STAGES = ("SyncRLEngine._iterate (", "SyncRLEngine._checkpoint (")
SAMPLES_PER_SECOND = 200


def profile() -> Path:
    """Run the job twice, once as it is and once under py-spy; print both views and write them to the results."""
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix=".bench-") as folder:
        runs = Path(folder)
        run(rlightning_command(runs / "plain", 1))
        text = [f"Where RLightning's time goes. {CASE}.", "", *by_stage(runs / "plain")]
        sampler = [str(Path(sys.executable).with_name("py-spy")), "record", "--format", "raw", "--nolineno"]
        sampler += ["--rate", str(SAMPLES_PER_SECOND), "--output", str(runs / "samples"), "--"]
        run([*sampler, *rlightning_command(runs / "sampled", 1)])
        text += ["", *by_function(runs / "samples")]
    report.RESULTS.mkdir(exist_ok=True)
    path = report.RESULTS / "training-profile.txt"
    path.write_text("\n".join(text) + "\n")
    print("\n".join(text))
    return path


def by_stage(runs: Path) -> list[str]:
    """The engine's timings against the time from one line of metrics to the next."""
    lines = iteration_lines(runs)[WARM_UP - 1 :]
    wall = [instant(after) - instant(before) for before, after in itertools.pairwise(lines)]
    stages = {stage: sum(line["timings"][stage] for line in lines[1:]) for stage in lines[0]["timings"]}
    stages["everything else: reports, run folder, checkpoints"] = sum(wall) - sum(stages.values())
    mean, middle = sum(wall) / len(wall) * 1e3, median(wall) * 1e3
    return [
        f"By stage, as the engine times them ({len(wall)} iterations after the first {WARM_UP}, {mean:.1f} ms each, "
        f"median {middle:.1f} ms):",
        *(f"  {1e3 * s / len(wall):7.2f} ms {s / sum(wall):6.1%}  {stage}" for stage, s in stages.items()),
    ]


def by_function(samples: Path) -> list[str]:
    """py-spy's raw stacks, ``frame;frame;… count`` a line, inside iterations and checkpoints; imports left out."""
    own: Counter[str] = Counter()
    inside: Counter[str] = Counter()
    for line in samples.read_text().splitlines():
        stack, count = line.rsplit(" ", 1)
        frames = list(itertools.dropwhile(lambda frame: not frame.startswith(STAGES), stack.split(";")))
        if not frames or "_find_and_load (" in stack:
            continue
        own[frames[-1]] += int(count)
        inside.update(dict.fromkeys(frames, int(count)))
    total = sum(own.values())
    if total == 0:
        raise SystemExit(f"no sample lies inside {' or '.join(STAGES)}: has the engine been renamed?")
    ours = [(frame, n) for frame, n in inside.most_common() if "(rlightning/" in frame]
    return [
        f"By function that was running ({total} samples inside iterations and checkpoints):",
        *(f"  {n / total:6.1%}  {frame}" for frame, n in own.most_common(25)),
        "",
        "RLightning's functions, with all that they called:",
        *(f"  {n / total:6.1%}  {frame}" for frame, n in ours if n / total >= 0.005),
    ]
