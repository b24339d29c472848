"""The commands, as a shell calls them; those that train use the real driver on a small CartPole job."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlightning import __version__
from rlightning.cli.app import main
from rlightning.cli.run import stop_on_signal, unused_fields
from rlightning.cli.threads import set_threads
from rlightning.runtime.run_folder import RunFolder, read_job, read_status
from tests.unit.cli import samples
from tests.unit.cli.terminal import Screen, run_in_terminal

ROOT = Path(__file__).parents[3]


@dataclass
class Result:
    code: int
    out: str
    err: str


def cli(*args: str | Path) -> Result:
    """Call the entry point in this process."""
    out, err = io.StringIO(), io.StringIO()
    argv, path, environ = sys.argv, list(sys.path), dict(os.environ)
    sys.argv = ["rlightning", *map(str, args)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv, sys.path[:] = argv, path
        os.environ.clear()
        os.environ.update(environ)
    return Result(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def shell(*args: str | Path, locale: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Call the entry point in a process of its own."""
    command = [sys.executable, "-m", "rlightning.cli", *map(str, args)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **(locale or {})}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, **options)


def manifest(path: Path, **spec: Any) -> Path:
    """A job of 6 iterations of 512 steps, with a checkpoint every second."""
    stored = {
        "apiVersion": "rlightning.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "seed": 3,
            "environment": {"id": "CartPole-v1", "numEnvs": 8, "shards": 2},
            "policy": {"simplePPO": {"hiddenSizes": [16], "epochs": 2, "minibatchSize": 128}},
            "training": {"totalEnvSteps": 2800, "rolloutSteps": 64},
            "evaluation": {"everyIterations": 3, "episodes": 4},
            "policyGroup": {"eval": {"replicas": 2}},
            "checkpoints": {"everyIterations": 2, "keep": 2},
            **spec,
        },
    }
    path.write_text(yaml.safe_dump(stored))
    return path


# -- without training ----------------------------------------------------------------------------------------------


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, rlightning.cli.app as cli\n"
        "try: cli.app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'ray', 'gymnasium', 'numpy', 'yaml', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    took = time.monotonic() - start
    for command in ("validate", "run", "verify", "evaluate"):
        assert re.search(rf"^  {command} ", done.stdout, re.MULTILINE)
    assert took < 1.5, took  # the limit is 0.5 s


def test_validate_is_quick_and_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, rlightning.cli.app as cli\n"
        "try: cli.app(['validate', sys.argv[1]])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'ray', 'gymnasium', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    file = manifest(tmp_path / "job.yaml")
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, str(file)], cwd=ROOT, capture_output=True, text=True, check=True)
    took = time.monotonic() - start
    assert done.stdout == f"{file}: valid\n"
    assert took < 3, took  # the limit is 1 s


@pytest.mark.parametrize("command", ["validate", "run", "verify", "evaluate"])
def test_every_command_has_help_with_examples_and_exit_status(command: str) -> None:
    result = cli(command, "--help")
    assert result.code == 0
    assert "Examples:\n    rlightning " in result.out
    assert "Exit status:" in result.out


def test_the_version_is_printed() -> None:
    assert cli("--version").out == f"rlightning {__version__}\n"


def test_validate_names_file_line_field_and_remedy_and_counts(tmp_path: Path) -> None:
    good = manifest(tmp_path / "good.yaml")
    bad = manifest(tmp_path / "bad.yaml", environment={"id": "CartPole-v1", "numEnv": 8})
    result = cli("validate", good, bad)
    assert result.code == 1
    lines = result.out.splitlines()
    assert lines[0] == f"{good}: valid"
    assert re.match(rf"{re.escape(str(bad))}:\d+:\d+: spec\.environment\.numEnv: .*numEnvs", lines[1])
    assert lines[-1] == f"{len(lines) - 2} problem{'s' if len(lines) > 3 else ''}"


def test_validate_speaks_json(tmp_path: Path) -> None:
    good = manifest(tmp_path / "good.yaml")
    bad = manifest(tmp_path / "bad.yaml", environment={"id": "CartPole-v1", "numEnv": 8})
    result = cli("validate", "--output", "json", good, bad)
    assert result.code == 1
    read = json.loads(result.out)
    assert read["valid"] is False
    assert read["files"] == [{"file": str(good), "valid": True}, {"file": str(bad), "valid": False}]
    problem = read["problems"][0]
    assert (problem["file"], problem["path"]) == (str(bad), "spec.environment.numEnv")
    assert problem.keys() >= {"line", "column", "message", "value", "remedy", "severity"}


def test_validate_reads_standard_input(tmp_path: Path) -> None:
    text = manifest(tmp_path / "job.yaml").read_text()
    assert shell("validate", "-", input=text).stdout == "-: valid\n"
    done = shell("validate", "-", input=text.replace("seed: 3", "seed: many"))
    assert done.returncode == 1
    assert "spec.seed" in done.stdout


def test_validate_prints_in_any_locale(tmp_path: Path) -> None:
    pools = [{"name": "one"}]
    roles = {"train": {"pool": "one"}, "eval": {"replicas": 2, "pool": "one"}}
    bad = manifest(tmp_path / "bad.yaml", pools=pools, policyGroup=roles)  # its message has a multiplication sign
    done = shell("validate", bad, locale={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    assert done.returncode == 1
    assert "(replicas x membersPerReplica)" in done.stdout


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    result = cli("validate", tmp_path / "missing.yaml")
    assert result.code == 2
    assert result.err.startswith(f"error: {tmp_path}/missing.yaml: cannot be read: No such file")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run"], "give a MANIFEST, or a run to go on with: --resume RUN"),
        (["run", "--resume", "runs/a/1", "--seed", "3"], "--run-dir and --seed are those of the run"),
        (["run", "--resume", "runs/a/1", "--run-dir", "x"], "--run-dir and --seed are those of the run"),
        (["run", "job.yaml", "--placement", "moon"], "'moon' is not one of 'local', 'ray'"),
        (["run", "job.yaml", "--seed", "-1"], "--seed"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(args: list[str], words: str) -> None:
    result = cli(*args)
    assert result.code == 2
    assert words in " ".join(result.err.split())


def test_a_bad_manifest_is_refused_before_a_run_folder_is_made(tmp_path: Path) -> None:
    bad = manifest(tmp_path / "bad.yaml", policy={"simplePPO": {"learningRat": 3e-4}})
    result = cli("run", bad, "--run-dir", tmp_path / "runs")
    assert result.code == 2
    assert result.err.startswith(f"error: {bad}:")
    assert "learningRate" in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "runs").exists()


def test_resuming_what_is_no_run_is_an_error(tmp_path: Path) -> None:
    result = cli("run", "--resume", tmp_path / "nowhere")
    assert result.code == 1
    assert result.err == (f"error: {tmp_path}/nowhere is not a run folder: it has no job.yaml (nor does it exist)\n")


def test_a_run_that_another_driver_holds_is_refused(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, samples.job()) as folder:
        result = cli("run", "--resume", folder.path)
    assert result.code == 1
    assert f"in use by another driver, process {os.getpid()} on" in result.err


def test_fields_that_a_local_run_does_not_use_are_named() -> None:
    pooled = samples.job(
        pools=[{"name": "all", "replicas": 5}],
        policyGroup={"train": {"pool": "all"}, "eval": {"replicas": 4, "pool": "all"}},
    )
    assert unused_fields(pooled, "local") == ["spec.pools", "spec.policyGroup.train.pool", "spec.policyGroup.eval.pool"]
    assert unused_fields(pooled, "ray") == []
    assert unused_fields(samples.job(), "local") == []


def test_threads_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "16")
    set_threads(2)
    assert [os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")] == ["2", "2"]


# -- with training -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A finished run of the tiny job, and what it printed."""
    base = tmp_path_factory.mktemp("finished")
    result = cli("run", manifest(base / "job.yaml"), "--run-dir", base / "runs")
    assert result.code == 0, result.err
    return base / "runs" / "tiny" / "1", result


@pytest.fixture
def copy(finished: tuple[Path, Result], tmp_path: Path) -> Path:
    """A copy of the finished run, to be spoilt."""
    return shutil.copytree(finished[0], tmp_path / "1")


def test_a_run_says_what_it_does_and_how_to_verify_it(finished: tuple[Path, Result]) -> None:
    path, result = finished
    lines = result.out.splitlines()
    assert lines[0] == f"tiny: run folder {path}"
    assert lines[1].startswith("CartPole-v1: 8 environments in 2 shards, 1 train + 2 eval members in this process")
    assert [line.split(":")[0] for line in lines if line.startswith("evaluation at")] == [
        "evaluation at iteration 3",
        "evaluation at iteration 6",
    ]
    assert lines[-4].startswith("succeeded: ")
    assert re.fullmatch(r"weights v6 xxh3-128:[0-9a-f]{32} on 2/2 members", lines[-3])
    assert lines[-1] == f"verify with: rlightning verify {path}"
    assert "\x1b" not in result.out
    assert result.err == ""


def test_the_run_folder_is_complete(finished: tuple[Path, Result]) -> None:
    path, _ = finished
    assert {p.name for p in path.iterdir()} >= {
        "job.yaml", "status.json", "metrics.jsonl", "tensorboard", "ledger.jsonl", "checkpoints", "run.log", "lock",
    }  # fmt: skip
    status = read_status(path)
    assert status is not None
    assert status.state == "Succeeded"
    assert status.weights is not None
    assert status.weights.consistent_members == "2/2"
    assert status.checkpoint is not None
    assert (path / status.checkpoint.path / "manifest.json").exists()
    assert status.checkpoint.digest == status.weights.digest
    assert [p.name for p in sorted((path / "checkpoints").iterdir())] == ["iter-00000004", "iter-00000006"]


def test_verify_says_what_was_checked(finished: tuple[Path, Result]) -> None:
    result = cli("verify", finished[0])
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [
        "checkpoints: 2 (iter-00000004, iter-00000006)",
        "versions: 7 (the learner's digest on all 2 members: 7)",
        "verified",
    ]
    assert cli("verify", finished[0] / "checkpoints" / "iter-00000004").code == 0


def test_verify_names_the_tensor_with_a_changed_byte(copy: Path) -> None:
    file = copy / "checkpoints" / "iter-00000006" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    for target in (copy, copy / "checkpoints" / "iter-00000006"):
        result = cli("verify", target)
        assert result.code == 1
        assert re.search(r"problem: .*iter-00000006.*(weight|bias)", result.err)
        assert "verified\n" not in result.out


def test_verify_refuses_what_is_neither(copy: Path) -> None:
    result = cli("verify", copy / "tensorboard")
    assert result.code == 1
    assert result.err == (f"error: {copy}/tensorboard is neither a run folder nor a checkpoint; did you mean {copy}?\n")


def test_evaluate_repeats_the_runs_own_evaluation(finished: tuple[Path, Result]) -> None:
    path, run = finished
    last = next(line for line in run.out.splitlines() if line.startswith("evaluation at iteration 6"))
    text = cli("evaluate", path)
    assert text.code == 0, text.err
    value = json.loads(cli("evaluate", path, "--output", "json").out)
    shown = re.search(r"mean return (\S+) ± (\S+)", last)
    assert shown is not None
    assert f"mean return {shown[1]} ± {shown[2]} " in text.out
    assert value["returnMean"] == pytest.approx(float(shown[1]), abs=0.06)
    assert (value["iteration"], value["version"], value["episodes"]) == (6, 6, 4)


def test_evaluate_takes_episodes_seed_and_checkpoint(finished: tuple[Path, Result]) -> None:
    args = ("--episodes", "3", "--seed", "11", "--checkpoint", "iter-00000004", "-o", "json")
    value = json.loads(cli("evaluate", finished[0], *args).out)
    assert (value["iteration"], value["episodes"]) == (4, 3)


def test_evaluate_of_an_unknown_checkpoint_is_an_error(finished: tuple[Path, Result]) -> None:
    result = cli("evaluate", finished[0], "--checkpoint", "iter-00000005")
    assert result.code == 1
    assert "iter-00000004, iter-00000006" in result.err
    assert "Traceback" not in result.err


def test_resuming_a_finished_run_says_so(finished: tuple[Path, Result]) -> None:
    result = cli("run", "--resume", finished[0])
    assert (result.code, result.err) == (0, "")
    assert f"{finished[0]} is finished: " in result.out
    assert "at iteration 6" in result.out


def test_a_finished_run_goes_on_with_a_larger_total(copy: Path) -> None:
    longer = manifest(copy.parent / "longer.yaml", training={"totalEnvSteps": 3700, "rolloutSteps": 64})
    result = cli("run", longer, "--resume", copy)
    assert result.code == 0, result.err
    assert "iteration 6, " in result.out
    assert read_job(copy).spec.training.total_env_steps == 3700
    status = read_status(copy)
    assert status is not None
    assert status.attempt == 2
    assert status.progress is not None
    assert status.progress.iteration == 8
    assert cli("verify", copy).code == 0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 4}, "spec.seed"),
        ({"training": {"totalEnvSteps": 2800, "rolloutSteps": 32}}, "spec.training.rolloutSteps"),
        ({"policy": {"simplePPO": {"gamma": 0.5}}}, "spec.policy"),
        ({"environment": {"id": "Acrobot-v1", "numEnvs": 8}}, "spec.environment"),
    ],
)
def test_a_manifest_that_changes_the_frozen_is_refused_by_field(
    copy: Path, changes: dict[str, Any], field: str
) -> None:
    result = cli("run", manifest(copy.parent / "other.yaml", **changes), "--resume", copy)
    assert result.code == 2
    assert f"other.yaml does not fit the run {copy}" in result.err
    assert f"  {field}: cannot change" in result.err
    status = read_status(copy)
    assert status is not None
    assert status.attempt == 1


def test_another_jobs_manifest_is_refused(copy: Path) -> None:
    other = manifest(copy.parent / "other.yaml")
    other.write_text(other.read_text().replace("name: tiny", "name: large"))
    result = cli("run", other, "--resume", copy)
    assert result.code == 2
    assert "metadata.name is 'large'" in result.err


def test_the_seed_option_is_recorded(tmp_path: Path) -> None:
    file = manifest(tmp_path / "job.yaml", training={"totalEnvSteps": 500, "rolloutSteps": 64})
    assert cli("run", file, "--run-dir", tmp_path / "runs", "--seed", "11", "--quiet").code == 0
    assert read_job(tmp_path / "runs" / "tiny" / "1").spec.seed == 11


def test_quiet_prints_the_result_only(tmp_path: Path) -> None:
    file = manifest(tmp_path / "job.yaml", training={"totalEnvSteps": 500, "rolloutSteps": 64})
    result = cli("run", file, "--run-dir", tmp_path / "runs", "-q")
    assert [line.split()[0] for line in result.out.splitlines()] == ["succeeded:", "weights", "checkpoint"]


def test_an_unknown_environment_is_a_bad_manifest(tmp_path: Path) -> None:
    file = manifest(tmp_path / "job.yaml", environment={"id": "CartPol-v1", "numEnvs": 8})
    result = cli("run", file, "--run-dir", tmp_path / "runs")
    assert result.code == 2
    assert re.search(r"^error: .*CartPol-v1.*CartPole-v1", result.err, re.MULTILINE | re.DOTALL)
    assert "Traceback" not in result.err
    status = read_status(tmp_path / "runs" / "tiny" / "1")
    assert status is not None
    assert status.state == "Failed"


FAULTY_POLICY = """
from rlightning.policy.simple_ppo_policy import SimplePPOPolicy

class Faulty(SimplePPOPolicy):
    def train(self, *args, **kwargs):
        raise ZeroDivisionError("on purpose")
"""


def test_a_class_beside_the_manifest_is_found_and_its_traceback_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty_policy.py").write_text(FAULTY_POLICY)
    manifest(tmp_path / "job.yaml", policy={"custom": {"class": "faulty_policy:Faulty", "config": {}}})
    monkeypatch.chdir(tmp_path)
    result = cli("run", "job.yaml")
    assert result.code == 1
    assert "error: member train-0 raised in" in result.err
    assert "ZeroDivisionError: on purpose" in result.err
    assert "faulty_policy.py" in result.err
    assert "rlightning/cli" not in result.err
    assert "ZeroDivisionError: on purpose" in (tmp_path / "runs" / "tiny" / "1" / "run.log").read_text()


def test_a_read_only_run_dir_is_refused_with_path_and_remedy(tmp_path: Path) -> None:
    target = tmp_path / "readonly"
    target.mkdir()
    if subprocess.run(["mount", "--bind", target, target], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", target], check=True)
        result = cli("run", manifest(tmp_path / "job.yaml"), "--run-dir", target)
    finally:
        subprocess.run(["umount", target], check=True)
    assert result.code == 1
    assert result.err == (
        f"error: cannot write {target}/tiny: the file system is read-only; choose another place with --run-dir\n"
    )


# -- Ctrl-C --------------------------------------------------------------------------------------------------------

LONG = {"training": {"totalEnvSteps": 10_000_000, "rolloutSteps": 64}, "evaluation": {}}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_ask_first_and_insist_then(signum: signal.Signals) -> None:
    before = signal.getsignal(signum)
    said: list[str] = []
    with stop_on_signal(said.append) as stop:
        assert not stop.requested
        os.kill(os.getpid(), signum)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signum)
    assert said == ["stopping after this iteration; Ctrl-C again stops at once"]
    assert signal.getsignal(signum) is before


def test_the_first_ctrl_c_checkpoints_and_prints_the_command_that_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest(tmp_path / "job.yaml", **LONG)
    sent = False

    def interrupt(output: str, process: subprocess.Popen[bytes]) -> None:
        nonlocal sent
        if not sent and re.search(r"iteration \d", output):
            sent = True
            process.send_signal(signal.SIGINT)

    command = [sys.executable, "-m", "rlightning.cli", "run", "job.yaml"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "LC_ALL": "C.UTF-8", "NO_COLOR": "1"}
    code, written = run_in_terminal(command, width=120, env=env, cwd=str(tmp_path), on_output=interrupt)
    lines = Screen(120).feed(written).lines
    assert code == 130, written
    assert "stopping after this iteration; Ctrl-C again stops at once" in lines
    assert re.match(r"stopped: .* \(iteration \d+, [\d,]+ steps, ", lines[-4])
    assert re.fullmatch(r"checkpoint runs/tiny/1/checkpoints/iter-\d{8}", lines[-2])
    assert lines[-1] == "resume with: rlightning run --resume runs/tiny/1"
    run = tmp_path / "runs" / "tiny" / "1"
    status = read_status(run)
    assert status is not None
    assert status.state == "Stopped"
    assert status.progress is not None

    # The command that was printed, with a total that ends it after two further iterations of at most 512 steps.
    at, steps = status.progress.iteration, status.progress.env_steps
    assert lines[-2].endswith(f"{at:08d}")
    manifest(tmp_path / "job.yaml", **{**LONG, "training": {"totalEnvSteps": steps + 600, "rolloutSteps": 64}})
    monkeypatch.chdir(tmp_path)
    result = cli("run", "job.yaml", *lines[-1].split()[4:])
    assert result.code == 0, result.err
    assert f"iteration {at}, {steps:,} steps, attempt 2" in result.out
    assert f"(iteration {at + 2}, " in result.out
    assert cli("verify", run).code == 0


SLOW_POLICY = """
import time
from rlightning.policy.simple_ppo_policy import SimplePPOPolicy

class Slow(SimplePPOPolicy):
    def train(self, *args, **kwargs):
        print("training", flush=True)
        time.sleep(60)
"""


def test_the_second_signal_stops_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SLOW_POLICY)
    manifest(tmp_path / "job.yaml", policy={"custom": {"class": "mine:Slow", "config": {}}})
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "rlightning.cli", "run", "job.yaml"],
        cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line == "training\n":
            break
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline().startswith("stopping after this iteration")
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - start < 10
    assert process.returncode == 130
    assert out.splitlines()[0] == "stopped at once, before the iteration's end"
    assert "no checkpoint was saved; rlightning run --resume runs/tiny/1 starts again" in out
    assert "Traceback" not in err
    status = read_status(tmp_path / "runs" / "tiny" / "1")
    assert status is not None
    assert status.state == "Stopped"
