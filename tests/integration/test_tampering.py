"""What was changed by hand in a run's folder is found, and a manifest that was changed is not resumed with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from tests.support.command import rlightning
from tests.support.jobs import CARTPOLE, job


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 10 iterations with checkpoints 9 and 10."""
    folder = tmp_path_factory.mktemp("tampering")
    of = job(CARTPOLE, name="tampered", checkpoints={"everyIterations": 3, "keep": 2})
    (folder / "job.yaml").write_text(yaml.safe_dump(of.to_dict()))
    done = rlightning("run", folder / "job.yaml", "--run-dir", folder)
    assert done.returncode == 0, done.output
    return folder / "tampered" / "1"


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    run_dir = tmp_path / "tampered" / "1"
    shutil.copytree(finished, run_dir)
    return run_dir


def test_an_untouched_copy_verifies(copy: Path) -> None:
    verified = rlightning("verify", copy)
    assert verified.returncode == 0, verified.output


def test_a_changed_byte_is_put_down_to_its_tensor(copy: Path) -> None:
    file = copy / "checkpoints" / "iter-00000010" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    verified = rlightning("verify", copy)
    assert verified.returncode == 1
    assert "iter-00000010" in verified.output and "tensor 'critic.4.weight' was changed" in verified.output


def test_a_ledger_that_lost_its_end_is_found(copy: Path) -> None:
    ledger = copy / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    verified = rlightning("verify", copy)
    assert verified.returncode == 1
    assert "the run ended with version 10" in verified.output


def test_a_checkpoint_under_another_name_is_found(copy: Path) -> None:
    shutil.copytree(copy / "checkpoints" / "iter-00000009", copy / "checkpoints" / "iter-00000099")
    verified = rlightning("verify", copy)
    assert verified.returncode == 1
    assert "iter-00000099 is of iteration 9" in verified.output


def test_a_missing_last_checkpoint_is_found(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints" / "iter-00000010")
    verified = rlightning("verify", copy)
    assert verified.returncode == 1
    assert "checkpoint iter-00000010, which the run ended with, is gone" in verified.output


def test_a_run_is_not_resumed_with_an_edited_manifest(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints" / "iter-00000010")
    (copy / "status.json").unlink()  # as if it had not ended
    recorded = yaml.safe_load((copy / "job.yaml").read_text())
    recorded["spec"]["policy"]["simplePPO"]["learningRate"] = 0.5
    (copy / "job.yaml").write_text(yaml.safe_dump(recorded))
    resumed = rlightning("run", "--resume", copy)
    assert resumed.returncode != 0
    assert "spec.policy" in resumed.output and "does not fit the checkpoint of iteration 9" in resumed.output
