"""Our files are safetensors files: the reference implementation reads what we write, and we read what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from rlightning.checkpoint import tensor_file
from rlightning.errors import CheckpointError

DTYPES = [getattr(torch, name) for name in tensor_file.DTYPES.values()]


def sample() -> dict[str, torch.Tensor]:
    """One tensor of every dtype, and the shapes that are easily got wrong."""
    tensors = {f"of.{dtype}": torch.ones(3, 1).to(dtype) for dtype in DTYPES}
    return tensors | {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 7),
        "größe": torch.arange(5),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
    }


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    stored = {name: tensor_file.store_tensor(name, tensor) for name, tensor in tensors.items()}
    path.write_bytes(b"".join(tensor_file.pieces(stored)))
    return path


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        raw = found[name].contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(raw, tensor.contiguous().reshape(-1).view(torch.uint8)), name


def test_the_reference_implementation_reads_what_we_write(tmp_path: Path) -> None:
    assert_equal(safetensors.torch.load_file(write(tmp_path / "x.safetensors", sample())), sample())


def test_we_read_what_the_reference_implementation_writes(tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in sample().items()}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    with (tmp_path / "x.safetensors").open("rb") as file:
        assert_equal(tensor_file.read_tensors(file), tensors)


def test_arrays_come_back_as_arrays(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "b": np.array(True),
        "c": np.empty((0, 2), np.complex64),
    }
    stored = {name: tensor_file.store_array(array) for name, array in arrays.items()}
    (tmp_path / "x").write_bytes(b"".join(tensor_file.pieces(stored)))
    with (tmp_path / "x").open("rb") as file:
        found = tensor_file.read_arrays(file)
    assert {n: (x.dtype, x.shape, x.tobytes()) for n, x in found.items()} == {
        n: (x.dtype, x.shape, x.tobytes()) for n, x in arrays.items()
    }
    assert all(x.flags.writeable and x.flags.owndata for x in found.values())
    assert safetensors.numpy.load_file(tmp_path / "x").keys() == arrays.keys()


def test_every_tensor_is_aligned_in_the_file(tmp_path: Path) -> None:
    with write(tmp_path / "x", sample()).open("rb") as file:
        for entry in tensor_file.read_header(file):
            itemsize = getattr(torch, tensor_file.DTYPES[entry.dtype]).itemsize
            assert entry.start % itemsize == 0, entry


def test_tensors_are_written_from_their_own_memory() -> None:
    tensor = torch.zeros(1000)
    data = tensor_file.pieces({"x": tensor_file.store_tensor("x", tensor)})[1]
    tensor[0] = 1.0
    assert bytes(data[:4]) == np.float32(1.0).tobytes()


@pytest.mark.parametrize(
    "tensor", [torch.zeros(1, dtype=torch.complex128), torch.zeros(2, 2).to_sparse(), torch.zeros(1, device="meta")]
)
def test_what_the_format_cannot_hold_is_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match=r"actor\.0"):
        tensor_file.store_tensor("actor.0", tensor)


def test_the_reserved_name_is_refused() -> None:
    with pytest.raises(CheckpointError, match="__metadata__"):
        tensor_file.pieces({"__metadata__": tensor_file.store_array(np.zeros(1))})


def header(document: object, data: bytes = b"") -> bytes:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\2",
        (1 << 62).to_bytes(8, "little") + b"{}",
        header(b"{"),
        header(b"[" * 100_000),
        header([]),
        header({"a": 1}),
        header({"a": entry(dtype="F31")}, bytes(8)),
        header({"a": entry(shape=[3])}, bytes(8)),
        header({"a": entry(shape=[-2], offsets=[0, -8])}, bytes(8)),
        header({"a": entry(shape=[2.0])}, bytes(8)),
        header({"a": entry(offsets=[4, 12])}, bytes(12)),
        header({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)),
        header({"a": entry(shape=[1 << 60], offsets=[0, 1 << 62])}, bytes(8)),
        header({"a": entry()}, bytes(7)),
    ],
)
def test_damaged_files_are_refused_without_reading_on(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with (tmp_path / "x").open("rb") as file, pytest.raises(CheckpointError):
        tensor_file.read_tensors(file)


def test_chunks_end_where_asked_or_where_the_file_does(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(range(10)))
    with (tmp_path / "x").open("rb") as file:
        assert list(tensor_file.chunks(file, 2, 9, 3)) == [b"\2\3\4", b"\5\6\7", b"\10"]
        assert list(tensor_file.chunks(file, 8, 20, 3)) == [b"\10\11"]
