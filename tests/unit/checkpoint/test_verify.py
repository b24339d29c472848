"""Every damaged byte is found, and put down to the tensor or the file that it belongs to."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from rlightning.checkpoint.manifest import Manifest
from rlightning.checkpoint.store import CheckpointStore, load_checkpoint
from rlightning.checkpoint.verify import verify_checkpoint
from rlightning.errors import CheckpointError
from tests.unit.checkpoint.samples import make_snapshot


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return CheckpointStore(tmp_path, keep=1).save(make_snapshot(shards=2)).path


def change(path: Path, offset: int, mask: int = 1) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= mask
    path.write_bytes(raw)


def tensor_offset(path: Path, name: str) -> int:
    """Where a tensor's bytes start, by the format's definition: 8 bytes of length, the header, then the data."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return 8 + length + int(json.loads(raw[8 : 8 + length])[name]["data_offsets"][0])


def test_an_intact_checkpoint_has_no_problems(checkpoint: Path) -> None:
    assert verify_checkpoint(checkpoint) == []


def test_each_tensor_of_the_model_is_named_when_one_byte_of_it_changes(checkpoint: Path) -> None:
    model = checkpoint / "model.safetensors"
    with safe_open(model, "pt") as file:
        names = [name for name in file.keys() if file.get_tensor(name).nbytes]  # noqa: SIM118 (it is no mapping)
    assert {"actor.0.weight", "count", "table"} < set(names)
    for name in names:
        change(model, tensor_offset(model, name))
        problems = verify_checkpoint(checkpoint)
        assert len(problems) == 1
        assert f"model.safetensors: tensor '{name}' was changed" in problems[0]
        change(model, tensor_offset(model, name))
    assert verify_checkpoint(checkpoint) == []


def test_a_section_s_array_is_named_by_its_path(checkpoint: Path) -> None:
    file = checkpoint / "learner.safetensors"
    change(file, tensor_offset(file, "optimizer/state/0/exp_avg") + 5)
    (problem,) = verify_checkpoint(checkpoint)
    assert "learner.safetensors: tensor 'optimizer/state/0/exp_avg' was changed" in problem


def test_a_changed_json_file_is_named(checkpoint: Path) -> None:
    change(checkpoint / "engine.json", 5)
    (problem,) = verify_checkpoint(checkpoint)
    assert problem.startswith(f"{checkpoint}: engine.json was changed")


def test_a_changed_manifest_is_named(checkpoint: Path) -> None:
    manifest = checkpoint / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"envSteps": 10240', b'"envSteps": 10241'))
    (problem,) = verify_checkpoint(checkpoint)
    assert "manifest.json was changed" in problem


@pytest.mark.parametrize("name", ["model.safetensors", "learner.json", "shards.safetensors", "manifest.json"])
def test_a_missing_file_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    (problem,) = verify_checkpoint(checkpoint)
    assert f"{name} is missing" in problem


@pytest.mark.parametrize("name", ["model.safetensors", "learner.safetensors", "engine.json", "manifest.json"])
def test_a_truncated_file_is_named_at_any_length(checkpoint: Path, name: str) -> None:
    content = (checkpoint / name).read_bytes()
    for length in {0, 1, 7, 8, 9, len(content) // 2, len(content) - 1}:
        (checkpoint / name).write_bytes(content[:length])
        problems = verify_checkpoint(checkpoint)
        assert problems
        assert all(name in problem for problem in problems)
    (checkpoint / name).write_bytes(content + b"x")
    assert len(verify_checkpoint(checkpoint)) == 1


def test_a_tensor_behind_the_end_of_a_truncated_file_is_named(checkpoint: Path) -> None:
    model = checkpoint / "model.safetensors"
    os.truncate(model, tensor_offset(model, "actor.2.weight") + 10)
    problems = "\n".join(verify_checkpoint(checkpoint))
    assert "model.safetensors is cut off" in problems
    assert "tensor 'actor.2.weight' is cut off" in problems
    assert "'actor.0.bias'" not in problems  # lies before


def test_a_renamed_tensor_is_missing_under_its_old_name(checkpoint: Path) -> None:
    model = checkpoint / "model.safetensors"
    model.write_bytes(model.read_bytes().replace(b'"actor.0.weight"', b'"actor.0.veight"'))
    problems = "\n".join(verify_checkpoint(checkpoint))
    assert "tensor 'actor.0.weight' is missing" in problems
    assert "tensor 'actor.0.veight' was not saved here" in problems


def test_files_that_the_manifest_does_not_list_are_ignored(checkpoint: Path) -> None:
    (checkpoint / "notes.txt").write_text("mine")
    assert verify_checkpoint(checkpoint) == []


def test_a_link_in_place_of_a_file_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    model = checkpoint / "model.safetensors"
    model.rename(tmp_path / "elsewhere")
    model.symlink_to(tmp_path / "elsewhere")
    assert "model.safetensors is a link" in verify_checkpoint(checkpoint)[0]


def test_a_pipe_in_place_of_a_file_does_not_hang(checkpoint: Path) -> None:
    (checkpoint / "engine.json").unlink()
    os.mkfifo(checkpoint / "engine.json")
    assert "engine.json is a special file" in verify_checkpoint(checkpoint)[0]


def rewrite_manifest(checkpoint: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Forge a manifest whose own digest fits: what somebody would do who wants to mislead us."""
    document = json.loads((checkpoint / "manifest.json").read_bytes())
    del document["selfDigest"]
    edit(document)
    rest = json.dumps(document).removeprefix("{").encode()
    digest = xxhash.xxh3_128_hexdigest(rest)
    (checkpoint / "manifest.json").write_bytes(f'{{\n "selfDigest": "xxh3-128:{digest}",\n'.encode() + rest)


def test_a_forged_manifest_is_first_of_all_possible(checkpoint: Path) -> None:
    rewrite_manifest(checkpoint, lambda document: document.update(envSteps=1))
    assert verify_checkpoint(checkpoint) == []
    assert load_checkpoint(checkpoint).env_steps == 1


@pytest.mark.parametrize(
    "name",
    ["../../../etc/passwd", "/etc/passwd", "a/b.json", "..json", ".json", "x.txt", "", "manifest.json", "a\0.json"],
)
def test_file_names_that_lead_elsewhere_are_refused(checkpoint: Path, name: str) -> None:
    rewrite_manifest(checkpoint, lambda document: document["files"].update({name: {"bytes": 1, "xxh3": "0" * 32}}))
    (problem,) = verify_checkpoint(checkpoint)
    assert f"{name!r} cannot be the name of a file in a checkpoint" in problem
    with pytest.raises(CheckpointError, match="cannot be the name"):
        load_checkpoint(checkpoint)


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d.update(format=2),
        lambda d: d.update(iteration=-1),
        lambda d: d.update(iteration="1"),
        lambda d: d.update(iteration=True),
        lambda d: d.pop("files"),
        lambda d: d.update(files=[]),
        lambda d: d.update(job=[]),
        lambda d: d.update(job={"$array": "x"}),
        lambda d: d.update(ledgerHead=3),
        lambda d: d["files"].pop("model.safetensors"),
        lambda d: d["files"]["engine.json"].update(xxh3="0"),
        lambda d: d["files"]["engine.json"].pop("bytes"),
        lambda d: d["tensors"].pop("count"),
        lambda d: d["tensors"].update(more="0" * 32),
        lambda d: d["tensors"].update(count=3),
        lambda d: d.update(stateDigest="xxh3-128:" + "0" * 32),
        lambda d: d["files"].pop("learner.safetensors"),
    ],
)
def test_a_forged_manifest_never_crashes_the_reader(checkpoint: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    rewrite_manifest(checkpoint, edit)
    with pytest.raises(CheckpointError):
        load_checkpoint(checkpoint)
    assert all(isinstance(problem, str) for problem in verify_checkpoint(checkpoint))


def test_a_newer_format_is_named(checkpoint: Path) -> None:
    rewrite_manifest(checkpoint, lambda document: document.update(format=2))
    assert "has format 2, this release of rlightning reads format 1" in verify_checkpoint(checkpoint)[0]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_free = make_snapshot(hidden=4, shards=1)
    return CheckpointStore(tmp_path_factory.mktemp("pristine"), keep=1).save(model_free).path


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_changed_byte_in_any_file_is_reported_and_nothing_is_loaded(pristine: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(file.name for file in pristine.iterdir())), label="file")
    offset = data.draw(st.integers(0, (pristine / name).stat().st_size - 1), label="offset")
    mask = data.draw(st.integers(1, 255), label="mask")
    change(pristine / name, offset, mask)
    try:
        problems = verify_checkpoint(pristine)
        assert problems
        assert all(name in problem for problem in problems)
        with pytest.raises(CheckpointError):
            load_checkpoint(pristine)
    finally:
        change(pristine / name, offset, mask)


def test_every_single_byte_of_a_manifest_matters(pristine: Path) -> None:
    content = bytearray((pristine / "manifest.json").read_bytes())
    for offset in range(len(content)):
        for mask in (0x20, 0x2A):  # letters to the other case, spaces to NUL; spaces to line breaks
            content[offset] ^= mask
            with pytest.raises(CheckpointError):
                Manifest.from_bytes(bytes(content))
            content[offset] ^= mask
    Manifest.from_bytes(bytes(content))


@given(content=st.binary(max_size=200), name=st.sampled_from(["manifest.json", "model.safetensors", "engine.json"]))
def test_any_content_in_place_of_a_file_is_reported(
    tmp_path_factory: pytest.TempPathFactory, pristine: Path, content: bytes, name: str
) -> None:
    copy = tmp_path_factory.mktemp("copy") / "iter-00000010"
    shutil.copytree(pristine, copy)
    (copy / name).write_bytes(content)
    assert verify_checkpoint(copy)


def test_the_loaded_model_is_what_the_reference_reader_finds(checkpoint: Path) -> None:
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        for name, tensor in load_checkpoint(checkpoint).model.items():
            assert torch.equal(tensor, file.get_tensor(name))
