"""``manifest.json``: what a checkpoint consists of, written last; a directory without one is not a checkpoint.

Every file is listed with its size and the xxh3-128 of its bytes, every tensor of the model with its digest (v1), and
the first line is a digest of the rest of the manifest: no byte of a checkpoint can change unnoticed. These digests
find accidents, they are no signature: whoever can write the files can write fitting digests too.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from rlightning.checkpoint import tree
from rlightning.errors import CheckpointError

FORMAT = 1
NAME = "manifest.json"
MODEL = "model.safetensors"

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*\.(json|safetensors)")
_HEX = re.compile(r"[0-9a-f]{32}")
_BEGIN, _BREAK = b'{\n "selfDigest": "xxh3-128:', b'",\n'


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and xxh3-128 (32 hex digits) of one file."""

    nbytes: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """See :class:`rlightning.checkpoint.store.Snapshot` for what is not about files.

    Attributes:
        state_digest: root of digest v1 over the model, ``xxh3-128:`` and 32 hex digits.
        tensors: digest of every tensor of the model, 32 hex digits.
        files: every file of the checkpoint but this one.
    """

    iteration: int
    env_steps: int
    version: int
    attempt: int
    state_digest: str
    tensors: dict[str, str]
    aliases: dict[str, str]
    numerics: dict[str, Any]
    ledger_head: dict[str, Any] | None
    job: dict[str, Any]
    files: dict[str, FileEntry]

    @property
    def sections(self) -> list[str]:
        """Names of the sections, in the order they were given in."""
        return [name.removesuffix(".json") for name in self.files if name.endswith(".json")]

    def to_bytes(self) -> bytes:
        """The file's content.

        Raises:
            CheckpointError: ``numerics``, ``ledger_head`` or ``job`` hold something that JSON cannot; names it.
        """
        document = {
            "format": FORMAT,
            "iteration": self.iteration,
            "envSteps": self.env_steps,
            "version": self.version,
            "attempt": self.attempt,
            "stateDigest": self.state_digest,
            "tensors": self.tensors,
            "aliases": self.aliases,
            "numerics": _plain("numerics", self.numerics),
            "ledgerHead": _plain("ledger_head", self.ledger_head),
            "job": _plain("job", self.job),
            "files": {name: {"bytes": file.nbytes, "xxh3": file.xxh3} for name, file in self.files.items()},
        }
        rest = json.dumps(document, indent=1, allow_nan=False).removeprefix("{\n").encode() + b"\n"
        return _BEGIN + xxhash.xxh3_128_hexdigest(rest).encode() + _BREAK + rest

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Parse and check.

        Raises:
            CheckpointError: damaged, of another format, or naming files that no checkpoint has.
        """
        digest = content[len(_BEGIN) : len(_BEGIN) + 32]
        rest = content[len(_BEGIN) + 32 + len(_BREAK) :]
        if content != _BEGIN + digest + _BREAK + rest or digest != xxhash.xxh3_128_hexdigest(rest).encode():
            raise CheckpointError(f"{NAME} was changed or cut off: its content does not fit its own digest")
        try:
            document = json.loads(content)
            if document["format"] != FORMAT:
                raise CheckpointError(
                    f"{NAME} has format {document['format']!r}, this release of rlightning reads format {FORMAT}; "
                    "use the release that wrote it"
                )
            ledger_head = tree.decode(document["ledgerHead"], {})
            manifest = cls(
                iteration=_number(document, "iteration"),
                env_steps=_number(document, "envSteps"),
                version=_number(document, "version"),
                attempt=_number(document, "attempt"),
                state_digest=_text(document["stateDigest"]),
                tensors={name: _text(value) for name, value in document["tensors"].items()},
                aliases={name: _text(value) for name, value in document["aliases"].items()},
                numerics=_mapping(tree.decode(document["numerics"], {})),
                ledger_head=None if ledger_head is None else _mapping(ledger_head),
                job=_mapping(tree.decode(document["job"], {})),
                files={
                    check_file_name(name): FileEntry(_number(file, "bytes"), _hex(file["xxh3"]))
                    for name, file in document["files"].items()
                },
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{NAME} cannot be understood: {type(error).__name__}: {error}") from error
        if MODEL not in manifest.files:
            raise CheckpointError(f"{NAME} lists no {MODEL}")
        return manifest


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: missing or not usable; names the file's path.
    """
    try:
        with open_regular(directory / NAME) as file:
            return Manifest.from_bytes(file.read())
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from error


def open_regular(path: Path) -> BinaryIO:
    """Open a file of a checkpoint for reading.

    Raises:
        CheckpointError: missing, unreadable, or not a regular file (a link could lead anywhere, a pipe never ends);
            begins with the file's name, without its directory.
    """
    try:
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode):
            kind = "link" if stat.S_ISLNK(mode) else "directory" if stat.S_ISDIR(mode) else "special file"
            raise CheckpointError(f"{path.name} is a {kind}, not a file")
        return path.open("rb")
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error


def check_file_name(name: str) -> str:
    """``name`` itself.

    Raises:
        CheckpointError: it could lead out of the checkpoint's directory, or is none of ours.
    """
    if not _FILE_NAME.fullmatch(name) or name == NAME:
        raise CheckpointError(f"{name!r} cannot be the name of a file in a checkpoint")
    return name


def _plain(field: str, value: Mapping[str, Any] | None) -> Any:
    encoded, arrays = tree.encode(value)
    if arrays:
        raise CheckpointError(f"{field}: holds arrays ({', '.join(arrays)}); it goes into JSON, use lists")
    return encoded


def _number(fields: dict[str, Any], key: str) -> int:
    value = fields[key]
    if type(value) is not int or value < 0:
        raise ValueError(f"{key} is {value!r}, not a whole number from 0")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value


def _hex(value: Any) -> str:
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise ValueError(f"{value!r} is not a digest of 32 hex digits")
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a mapping")
    return value
