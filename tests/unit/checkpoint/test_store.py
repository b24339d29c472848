"""Saving, loading, pruning and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlightning.checkpoint import durable
from rlightning.checkpoint.store import CheckpointStore, latest_checkpoint, list_checkpoints, load_checkpoint
from rlightning.checkpoint.verify import verify_checkpoint
from rlightning.errors import CheckpointError
from rlightning.weights.digest import digest_tensors
from tests.unit.checkpoint.samples import make_snapshot
from tests.unit.checkpoint.test_tree import same


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_snapshot_comes_back_exactly(tmp_path: Path) -> None:
    snapshot = make_snapshot()
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=3)
    info = store.save(snapshot)
    assert info.path == tmp_path / "run" / "checkpoints" / "iter-00000010"
    assert (info.iteration, info.digest) == (10, snapshot.digest.root)
    assert verify_checkpoint(info.path) == []
    loaded = store.load(info.path)
    for field in dataclasses.fields(snapshot):
        assert same(getattr(loaded, field.name), getattr(snapshot, field.name)) or field.name in ("model", "digest")
    assert digest_tensors(loaded.model) == loaded.digest == snapshot.digest
    assert all(same(loaded.model[name], tensor) for name, tensor in snapshot.model.items())


def test_equal_state_gives_equal_bytes(tmp_path: Path) -> None:
    paths = [CheckpointStore(tmp_path / name, keep=1).save(make_snapshot()).path for name in "ab"]
    contents = [{file.name: file.read_bytes() for file in path.iterdir()} for path in paths]
    assert contents[0] == contents[1]


def test_the_manifest_can_be_read_by_anybody(tmp_path: Path) -> None:
    info = CheckpointStore(tmp_path, keep=1).save(make_snapshot())
    manifest = json.loads((info.path / "manifest.json").read_bytes())
    assert manifest["format"] == 1
    assert (manifest["iteration"], manifest["envSteps"], manifest["version"], manifest["attempt"]) == (10, 10240, 10, 1)
    assert manifest["stateDigest"] == info.digest
    assert manifest["job"]["spec"] == {"seed": 7}
    assert manifest["aliases"] == {"critic.tied.weight": "actor.0.weight"}
    sizes = {file.name: file.stat().st_size for file in info.path.iterdir() if file.name != "manifest.json"}
    assert {name: file["bytes"] for name, file in manifest["files"].items()} == sizes
    assert set(sizes) == {
        "model.safetensors", "learner.json", "learner.safetensors", "shards.json", "shards.safetensors", "engine.json"
    }  # fmt: skip


def test_loaded_state_is_independent_of_the_file_and_of_other_loads(tmp_path: Path) -> None:
    info = CheckpointStore(tmp_path, keep=1).save(make_snapshot())
    first, second = load_checkpoint(info.path), load_checkpoint(info.path)
    first.model["actor.0.weight"].zero_()
    first.sections["shards"][0]["observation"][:] = 0
    assert second.model["actor.0.weight"].abs().sum() > 0
    assert np.abs(second.sections["shards"][0]["observation"]).sum() > 0
    assert verify_checkpoint(info.path) == []


def test_nan_weights_are_saved_as_they_are(tmp_path: Path) -> None:
    model = {"w": torch.tensor([float("nan"), float("inf"), -0.0])}
    info = CheckpointStore(tmp_path, keep=1).save(make_snapshot(model=model, digest=digest_tensors(model)))
    assert same(dict(load_checkpoint(info.path).model), model)


def test_non_finite_numbers_and_large_ints_in_the_job_survive(tmp_path: Path) -> None:
    job = {"config": {"limit": float("inf"), "key": 2**70, "pair": [1, 2], "$ref": None}}
    info = CheckpointStore(tmp_path, keep=1).save(make_snapshot(job=job))
    assert load_checkpoint(info.path).job == job


def test_a_tensor_of_several_chunks_verifies(tmp_path: Path) -> None:
    model = {"big": torch.arange(2_500_000, dtype=torch.float32)}  # 10 MB: three chunks of 4 MiB
    info = CheckpointStore(tmp_path, keep=1).save(make_snapshot(model=model, digest=digest_tensors(model)))
    assert verify_checkpoint(info.path) == []
    assert torch.equal(load_checkpoint(info.path).model["big"], model["big"])


def test_the_oldest_go_and_the_newest_stays(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for iteration in (10, 20, 30, 40):
        store.save(make_snapshot(iteration, shards=1))
    assert names(tmp_path) == ["iter-00000030", "iter-00000040"]
    assert store.latest() == tmp_path / "iter-00000040"


def test_the_one_just_saved_is_never_pruned(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, keep=2).save(make_snapshot(30, shards=1))
    CheckpointStore(tmp_path, keep=2).save(make_snapshot(40, shards=1))
    info = CheckpointStore(tmp_path, keep=1).save(make_snapshot(5, shards=1))
    assert names(tmp_path) == [info.path.name]


def test_an_iteration_saved_again_replaces_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    first, second = store.save(make_snapshot(10)), store.save(make_snapshot(10, attempt=2))
    assert [first.path.name, second.path.name] == ["iter-00000010", "iter-00000010-2"]
    for _ in range(9):
        last = CheckpointStore(tmp_path, keep=20).save(make_snapshot(10))
    assert last.path.name == "iter-00000010-11"
    assert latest_checkpoint(tmp_path) == last.path
    assert load_checkpoint(second.path).attempt == 2


def test_iterations_are_ordered_by_number(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    for iteration in (100_000_000, 99_999_999):
        store.save(make_snapshot(iteration, shards=1))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["iter-99999999", "iter-100000000"]


def test_incomplete_and_foreign_directories_are_no_checkpoints(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "missing") is None
    info = CheckpointStore(tmp_path, keep=1).save(make_snapshot())
    (tmp_path / "iter-00000099").mkdir()
    (tmp_path / "iter-00000098").write_text("a file")
    (tmp_path / "iter-00000097.bak").mkdir()
    (tmp_path / ".tmp-iter-00000096-1-abcd").mkdir()
    (tmp_path / ".tmp-iter-00000096-1-abcd" / "manifest.json").write_text("{}")
    assert latest_checkpoint(tmp_path) == info.path


def test_leftovers_of_dead_processes_are_swept_and_others_are_not(tmp_path: Path) -> None:
    dead, alive, foreign = (
        tmp_path / ".tmp-iter-00000001-1-aa",
        tmp_path / ".tmp-iter-00000002-1-bb",
        tmp_path / "notes",
    )
    for directory in (dead, alive, foreign):
        (directory / "deep").mkdir(parents=True)
        (directory / "deep" / "file").write_text("x")
    (dead / "link").symlink_to(foreign)
    lock = durable.lock_directory(alive)
    assert lock is not None
    CheckpointStore(tmp_path, keep=1)
    assert names(tmp_path) == [".tmp-iter-00000002-1-bb", "notes"]
    assert (foreign / "deep" / "file").exists()
    os.close(lock)
    CheckpointStore(tmp_path, keep=1)
    assert names(tmp_path) == ["notes"]


def test_a_store_reads_nothing_into_being(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "iter-00000001")
    assert names(tmp_path) == []


def test_a_damaged_checkpoint_is_not_loaded_and_the_way_back_is_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    store.save(make_snapshot(10))
    info = store.save(make_snapshot(20))
    raw = bytearray((info.path / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (info.path / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError) as error:
        store.load(store.latest() or tmp_path)
    assert "iter-00000020" in str(error.value)
    assert "tensor 'mask'" in str(error.value) or "tensor" in str(error.value)
    assert "go back to iter-00000010, move iter-00000020 out" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sections": {"learner": {"x": {1, 2}}}}, r"section 'learner': x: a builtins.set"),
        ({"sections": {"../evil": {}}}, r"'\.\./evil\.json' cannot be the name"),
        ({"sections": {"model": {}}}, r"a section cannot be called 'model'"),
        ({"sections": {"manifest": {}}}, r"'manifest\.json' cannot be the name"),
        ({"numerics": {"x": np.zeros(3)}}, r"numerics: holds arrays \(x\)"),
        ({"digest": digest_tensors({"w": torch.zeros(1)})}, r"take both at the same moment"),
        ({"model": {"w": torch.zeros(2, dtype=torch.complex128)}}, r"tensor 'w' has dtype torch.complex128"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    info = store.save(make_snapshot(1))
    with pytest.raises(CheckpointError, match=message):
        store.save(make_snapshot(2, **changes))
    assert names(tmp_path) == [info.path.name]
    assert verify_checkpoint(info.path) == []


def test_keeping_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"spec\.checkpoints\.keep"):
        CheckpointStore(tmp_path, keep=0)


def test_a_file_where_the_directory_should_be_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match=str(tmp_path / "checkpoints")):
        CheckpointStore(tmp_path / "checkpoints", keep=1)


def test_all_bytes_are_synced_before_the_name_appears_and_the_name_before_the_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that a power cut cannot break, written out by hand."""
    store = CheckpointStore(tmp_path, keep=1)
    store.save(make_snapshot(1, shards=1, sections={}))
    calls: list[str] = []
    opened: dict[int, str] = {}
    originals = {name: getattr(durable, name) for name in durable.PRIMITIVES}

    def traced(name: str) -> object:
        def call(*args: object) -> object:
            result = originals[name](*args)
            if name == "create_file":
                opened[result] = Path(str(args[0])).name
            target = opened[args[0]] if isinstance(args[0], int) else Path(str(args[0])).name.split("-")[0]
            if name == "rename":
                target = " to ".join(Path(str(a)).name.split("-")[0] for a in args)
            calls.append(f"{name} {target}")
            return result

        return call

    for name in durable.PRIMITIVES:
        monkeypatch.setattr(durable, name, traced(name))
    store.save(make_snapshot(2, shards=1, sections={"engine": {"n": 1}}))
    here = tmp_path.name.split("-")[0]
    assert calls == [
        "make_directory .tmp",
        "create_file model.safetensors",
        "write model.safetensors",
        "sync_file model.safetensors",
        "create_file engine.json",
        "write engine.json",
        "sync_file engine.json",
        "create_file manifest.json",
        "write manifest.json",
        "sync_file manifest.json",
        "sync_directory .tmp",
        "rename .tmp to iter",
        f"sync_directory {here}",
        "rename iter to .tmp",
        f"sync_directory {here}",
        "remove_file manifest.json",
        "remove_file model.safetensors",
        "remove_directory .tmp",
    ]


def test_a_small_state_is_saved_in_milliseconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The aim is 10 ms apart from fsync (5 ms when the machine is quiet); the test allows three times as much."""
    monkeypatch.setattr(durable, "sync_file", lambda descriptor: None)
    monkeypatch.setattr(durable, "sync_directory", lambda path: None)
    store, snapshot = CheckpointStore(tmp_path, keep=3), make_snapshot()
    assert sum(tensor.numel() for tensor in snapshot.model.values()) > 9_000
    seconds = []
    for _ in range(20):
        started = time.process_time()
        store.save(snapshot)
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.030
