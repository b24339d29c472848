"""A run that is stopped or killed anywhere goes on to the digest that it would have had."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlightning.weights.ledger import Ledger
from tests.support import command
from tests.support.command import Completed
from tests.support.jobs import CARTPOLE, HALF_CHEETAH, Flag, Recorder, job, merged, run

TASKS = {"cartpole": CARTPOLE, "halfcheetah": HALF_CHEETAH}
POLICY = {"custom": {"class": "tests.support.policies:SignalsItsDriver"}}


def manifest(path: Path, base: dict[str, Any]) -> Path:
    """The same job with a policy that can signal its driver; its settings are the built-in policy's."""
    settings = base["policy"]["simplePPO"]
    spec = merged(base, {"checkpoints": {"everyIterations": 3, "keep": 2}})
    spec["policy"] = merged(POLICY, {"custom": {"config": settings}})
    document = job(spec, name="resumed").to_dict()
    path.write_text(yaml.safe_dump(document))
    return path


def rlightning(*arguments: str | Path, signal_at: str = "") -> Completed:
    return command.rlightning(*arguments, environment={"RLIGHTNING_TEST_SIGNAL": signal_at})


def final_digest(run_dir: Path) -> str:
    digest: str = json.loads((run_dir / "status.json").read_text())["weights"]["digest"]
    return digest


@pytest.fixture(scope="module", params=TASKS)
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int]:
    """Manifest, digest and iterations of a run that nothing disturbs (and whose folder shows one attempt)."""
    folder = tmp_path_factory.mktemp(request.param)
    file = manifest(folder / "job.yaml", TASKS[request.param])
    done = rlightning("run", file, "--run-dir", folder / "runs")
    assert done.returncode == 0, done.output
    run_dir = folder / "runs" / "resumed" / "1"
    records = Ledger.read(run_dir / "ledger.jsonl")
    assert {r.attempt for r in records} == {1}
    return file, final_digest(run_dir), records[-1].version


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill-9"])
@pytest.mark.parametrize("where", ["early", "late"])
def test_a_disturbed_run_resumes_to_the_undisturbed_digest(
    undisturbed: tuple[Path, str, int], number: signal.Signals, where: str, tmp_path: Path
) -> None:
    file, digest, iterations = undisturbed
    at = 2 if where == "early" else iterations - 2
    disturbed = rlightning("run", file, "--run-dir", tmp_path, signal_at=f"{int(number)}@{at}")
    run_dir = tmp_path / "resumed" / "1"
    assert disturbed.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), disturbed.output
    last = Ledger.read(run_dir / "ledger.jsonl")[-1].version
    # Ctrl-C finishes the iteration and saves; a kill leaves the version that the iteration began with.
    assert last == (at if number == signal.SIGINT else at - 1)
    saved = run_dir / "checkpoints" / f"iter-{at:08d}"
    if number == signal.SIGINT:
        assert saved.is_dir()
        assert f"rlightning run --resume {run_dir}" in disturbed.output
    else:
        assert not saved.is_dir()
    resumed = rlightning("run", "--resume", run_dir)
    assert resumed.returncode == 0, resumed.output
    assert final_digest(run_dir) == digest
    attempts = [r.attempt for r in Ledger.read(run_dir / "ledger.jsonl")]
    assert set(attempts) == {1, 2} and attempts == sorted(attempts)
    verified = rlightning("verify", run_dir)
    assert verified.returncode == 0, verified.output
    # Ctrl-C: only the checkpoint's own version is published again. Kill: those since the checkpoint before, too.
    repeated = 1 if number == signal.SIGINT else at - 1 - 3 * ((at - 1) // 3) + 1
    if number == signal.SIGKILL and at <= 3:
        repeated = at  # nothing was saved yet: versions 0 … at − 1 come again
    assert f"repeated after a resume: {repeated}, with equal digests" in verified.output


def test_a_run_killed_twice_resumes_twice(undisturbed: tuple[Path, str, int], tmp_path: Path) -> None:
    file, digest, _ = undisturbed
    run_dir = tmp_path / "resumed" / "1"
    kill = int(signal.SIGKILL)
    assert rlightning("run", file, "--run-dir", tmp_path, signal_at=f"{kill}@5").returncode == -kill
    assert rlightning("run", "--resume", run_dir, signal_at=f"{kill}@8").returncode == -kill
    assert rlightning("run", "--resume", run_dir).returncode == 0
    assert final_digest(run_dir) == digest
    assert {r.attempt for r in Ledger.read(run_dir / "ledger.jsonl")} == {1, 2, 3}


@pytest.mark.parametrize("members", [(1, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize("task", TASKS)
def test_every_checkpoint_of_a_run_leads_to_its_digest(task: str, members: tuple[int, int], tmp_path: Path) -> None:
    train, evals = members
    of = job(
        TASKS[task],
        policyGroup={"train": {"replicas": train}, "eval": {"replicas": evals}},
        checkpoints={"everyIterations": 3, "keep": 100},
    )
    outcome, recorder = run(of, tmp_path / "whole")
    by_version = {r.version: r for r in recorder.versions}
    assert len(recorder.checkpoints) >= 4
    for info in recorder.checkpoints[:-1]:
        again, resumed = run(of, tmp_path / f"from-{info.iteration}", resume=info.path, attempt=2)
        assert again.digest == outcome.digest
        assert again.env_steps == outcome.env_steps
        assert [r.digest for r in resumed.versions] == [
            by_version[v].digest for v in range(info.iteration, outcome.iteration + 1)
        ]
        assert resumed.iterations[-1].episode_return_mean == recorder.iterations[-1].episode_return_mean
        first = resumed.versions[0]
        assert (first.attempt, first.parent_digest) == (2, by_version[info.iteration].parent_digest)


def test_a_run_resumed_with_other_eval_members_has_the_same_digest(tmp_path: Path) -> None:
    four = job(CARTPOLE, policyGroup={"eval": {"replicas": 4}})
    stop = Flag()
    half, _ = run(four, tmp_path / "a", recorder=Recorder({5: stop.set}), stop=stop)
    assert (half.state, half.reason, half.iteration) == ("Stopped", "Interrupted", 5)
    assert half.checkpoint is not None
    one = job(CARTPOLE, policyGroup={"eval": {"replicas": 1}})
    resumed, _ = run(one, tmp_path / "b", resume=Path(half.checkpoint), attempt=2)
    whole, _ = run(four, tmp_path / "c")
    assert resumed.digest == whole.digest
