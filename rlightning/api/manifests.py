"""Reading manifests: YAML or JSON, from files or stdin, with the position of every field.

Scalars get the value that kubectl stores (its YAML reader resolves them differently from Python's: ``3e-4`` is a
number, ``1e6`` an integer). Forms that people read otherwise (``010`` is 8 there, ``1_000`` is 1000, ``on`` and ``y``
are true) are problems that say: quote it. So are repeated keys, of which kubectl silently takes the last.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from rlightning.errors import ManifestError

MAX_BYTES = 1 << 20  # etcd refuses objects beyond 1.5 MiB
MAX_DEPTH = 64
MAX_NODES = 50_000  # after aliases are expanded

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is what kubectl's reader was ported from

Path_ = tuple[str | int, ...]


@dataclass(frozen=True)
class Position:
    """Where something begins; both count from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class Problem:
    """What is wrong with a manifest.

    Attributes:
        file: as it was given; ``-`` is stdin.
        line, column: from 1.
        path: dotted, ``spec.pools[0].name``; empty for the whole document.
        message: what is wrong.
        value: what stands there, as it would be written; None when nothing does.
        remedy: what to do.
        severity: a warning does not make the manifest unusable.
    """

    file: str
    line: int
    column: int
    path: str
    message: str
    value: str | None
    remedy: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}: "
        what = f"{self.path}: {self.message}" if self.path else self.message
        kind = "warning: " if self.severity == "warning" else ""
        value = "" if self.value is None else f"value {self.value}"
        extra = "; ".join(part for part in (value, self.remedy) if part)
        return f"{where}{kind}{what}" + (f" ({extra})" if extra else "")


@dataclass
class LoadedManifest:
    """One document.

    Attributes:
        file: as it was given.
        start: where the document begins.
        value: what kubectl would send, or None when it cannot be read.
        problems: found while reading.
        keys: position of the key of each mapping entry.
        values: position of each value.
    """

    file: str
    start: Position
    value: Any = None
    problems: list[Problem] = field(default_factory=list)
    keys: dict[Path_, Position] = field(default_factory=dict)
    values: dict[Path_, Position] = field(default_factory=dict)

    def problem(
        self,
        path: Path_,
        message: str,
        value: Any,
        remedy: str,
        at_key: bool = False,
        severity: Literal["error", "warning"] = "error",
    ) -> Problem:
        """A problem at ``path``: at its value, or its key, or the nearest parent that is there."""
        position = None if at_key else self.values.get(path)
        for end in range(len(path), -1, -1):
            position = position or self.keys.get(path[:end]) or self.values.get(path[:end])
        position = position or self.start
        shown = None if value is None else show(value)
        return Problem(self.file, position.line, position.column, dotted(path), message, shown, remedy, severity)


def dotted(path: Path_) -> str:
    """``("spec", "pools", 0)`` as ``spec.pools[0]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def show(value: Any) -> str:
    """A value as it would be written, cut to a readable length, without control characters."""
    text = value if isinstance(value, Raw) else json.dumps(value, ensure_ascii=False, default=str)
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return text if len(text) <= 80 else f"{text[:77]}…"


class Raw(str):
    """Source text to be shown as it stands, without quotes."""


def load_manifests(source: str | Path) -> list[LoadedManifest]:
    """Read all documents of a file (``-``: stdin).

    Never raises for what is in the file: what cannot be read becomes a document with problems. Empty documents are
    left out. Raises ManifestError when there is no such file or it cannot be opened.
    """
    name = str(source)
    try:
        raw = sys.stdin.buffer.read(MAX_BYTES + 1) if name == "-" else _read(Path(source))
    except OSError as error:
        raise ManifestError(
            f"{name}: cannot be read: {error.strerror}. Give the path of a manifest, or - for stdin."
        ) from error
    return load_text(raw, name)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def load_text(raw: bytes | str, name: str = "-") -> list[LoadedManifest]:
    """Like :func:`load_manifests`, from memory; ``name`` is what problems call it."""

    def refuse(message: str, remedy: str, line: int = 1, column: int = 1) -> list[LoadedManifest]:
        broken = LoadedManifest(name, Position(line, column))
        broken.problems.append(broken.problem((), message, None, remedy))
        return [broken]

    if len(raw) > MAX_BYTES:
        return refuse(f"is larger than {MAX_BYTES >> 20} MiB", "the API server takes no larger objects; split the file")
    if isinstance(raw, bytes):
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            return refuse(f"is not UTF-8 (byte {raw[error.start]:#04x})", "save it as UTF-8", line)
    else:
        text = raw.removeprefix("\ufeff")
    return list(_documents(_as_yaml(text), name))


_ESCAPED_PAIR = re.compile(r"(?<!\\)((?:\\\\)*)\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")


def _as_yaml(text: str) -> str:
    """JSON is YAML but for tabs between tokens, and for characters escaped as surrogate pairs."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text
    pair = lambda m: m[1] + bytes.fromhex(m[2] + m[3]).decode("utf-16-be")  # noqa: E731
    return _ESCAPED_PAIR.sub(pair, text.replace("\t", " "))


# ---------------------------------------------------------------------------------------------------------- documents


@dataclass(eq=False)
class _Node:
    """A node before its value is known. ``items``: pairs of a mapping or elements of a sequence."""

    kind: Literal["scalar", "mapping", "sequence"]
    start: Position
    tag: str | None = None
    plain: bool = False
    text: str = ""
    items: list[Any] = field(default_factory=list)


def _documents(text: str, name: str) -> Iterator[LoadedManifest]:
    events = yaml.parse(text, Loader=_LOADER)
    document: LoadedManifest | None = None
    found = False
    try:
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                document = LoadedManifest(name, _position(event.start_mark))
                root = _compose(events)
                if root.kind == "scalar" and root.plain and resolve_plain(root.text).value is None:
                    continue
                document.start = root.start
                found = True
                reader = _Reader(document)
                document.value = reader.read(root, ())
                yield document
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        broken = LoadedManifest(name, _position(mark) if mark else Position(1, 1))
        what = " ".join(part for part in (error.context, error.problem) if part)
        broken.problems.append(broken.problem((), f"is not YAML: {what}", None, "check indentation and quotes here"))
        yield broken
        found = True
    except yaml.YAMLError as error:  # a character that YAML does not allow
        broken = LoadedManifest(name, Position(1, 1))
        broken.problems.append(broken.problem((), f"is not YAML: {' '.join(str(error).split())}", None, "remove it"))
        yield broken
        found = True
    except _Refused as refused:
        broken = document or LoadedManifest(name, Position(1, 1))
        broken.value = None
        at = Position(refused.position.line, refused.position.column)
        broken.problems = [Problem(name, at.line, at.column, "", refused.message, None, refused.remedy)]
        yield broken
        found = True
    if not found:
        empty = LoadedManifest(name, Position(1, 1))
        empty.problems.append(empty.problem((), "holds no manifest", None, "write an RLJob into it"))
        yield empty


def _position(mark: Any) -> Position:
    return Position(mark.line + 1, mark.column + 1)


class _Refused(Exception):
    def __init__(self, position: Position, message: str, remedy: str) -> None:
        self.position, self.message, self.remedy = position, message, remedy


def _compose(events: Iterator[Any]) -> _Node:
    """The node tree of one document; aliases share the node they name. Not recursive: depth is the input's."""
    anchors: dict[str, _Node] = {}
    stack: list[_Node] = []
    root: _Node | None = None
    for event in events:
        if isinstance(event, yaml.DocumentEndEvent):
            break
        if isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            stack.pop()
            continue
        start = _position(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                raise _Refused(start, f"the alias *{event.anchor} names no anchor", f"define &{event.anchor} before it")
            node = anchors[event.anchor]
            if node in stack:
                raise _Refused(start, f"the alias *{event.anchor} contains itself", "write the value out")
        else:
            node = _node(event, start)
            if event.anchor:
                anchors[event.anchor] = node
        if stack:
            stack[-1].items.append((node, start))
        elif root is None:
            root = node
        if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            stack.append(node)
            if len(stack) > MAX_DEPTH:
                raise _Refused(start, f"is nested deeper than {MAX_DEPTH} levels", "flatten it")
    return root or _Node("scalar", Position(1, 1), plain=True)


def _node(event: Any, start: Position) -> _Node:
    if isinstance(event, yaml.ScalarEvent):
        plain = event.implicit[0] and event.tag in (None, "!")
        return _Node("scalar", start, event.tag, plain, event.value)
    return _Node("mapping" if isinstance(event, yaml.MappingStartEvent) else "sequence", start, event.tag)


class _Reader:
    """Turns nodes into values, and notes positions and problems in the document."""

    def __init__(self, document: LoadedManifest) -> None:
        self.document = document
        self.nodes = 0

    def read(self, node: _Node, path: Path_, at: Position | None = None) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise _Refused(
                at or node.start, f"has more than {MAX_NODES} values, aliases expanded", "write less into it"
            )
        self.document.values.setdefault(path, at or node.start)
        if node.kind == "scalar":
            return self._scalar(node, path)
        if node.tag not in (None, "!", f"tag:yaml.org,2002:{'seq' if node.kind == 'sequence' else 'map'}"):
            raise _Refused(node.start, f"the YAML tag {node.tag} is not supported", "write the plain value")
        if node.kind == "sequence":
            return [self.read(item, (*path, i), where) for i, (item, where) in enumerate(node.items)]
        return self._mapping(node, path)

    def _mapping(self, node: _Node, path: Path_) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for (key_node, key_at), (value_node, value_at) in zip(node.items[::2], node.items[1::2], strict=True):
            if key_node.kind != "scalar":
                raise _Refused(key_at, "a key must be text", "write it as text")
            if key_node.plain and key_node.text == "<<":
                if own or merged:
                    # kubectl lets what is merged win over the keys before it, most YAML readers do not.
                    raise _Refused(key_at, "<< stands after other keys, where YAML readers disagree", "put << first")
                merged = self._merge(value_node, path, value_at)
                continue
            key = self._key(key_node, path, key_at)
            here = (*path, key)
            if key in own:
                first = self.document.keys[here]
                self.document.problems.append(
                    Problem(
                        self.document.file,
                        key_at.line,
                        key_at.column,
                        dotted(here),
                        f"is set twice, first in line {first.line}",
                        None,
                        "remove one of the two",
                    )
                )
            if key in merged:
                self._forget(here)
            self.document.keys[here] = key_at
            own[key] = self.read(value_node, here, value_at)
        return {**merged, **own}

    def _merge(self, node: _Node, path: Path_, at: Position) -> dict[str, Any]:
        parts = [node] if node.kind == "mapping" else [item for item, _ in node.items]
        if node.kind == "scalar" or any(part.kind != "mapping" for part in parts):
            raise _Refused(at, "<< takes a mapping or a list of mappings", "name one with an alias")
        merged: dict[str, Any] = {}
        for part in reversed(parts):  # earlier ones take precedence
            value = self._mapping(part, path)
            merged.update(value)
        return merged

    def _forget(self, path: Path_) -> None:
        for table in (self.document.keys, self.document.values):
            for known in [p for p in table if p[: len(path)] == path]:
                del table[known]

    def _key(self, node: _Node, path: Path_, at: Position) -> str:
        value = resolve_plain(node.text).value if node.plain else node.text
        if not isinstance(value, str):
            self.document.problems.append(
                Problem(
                    self.document.file,
                    at.line,
                    at.column,
                    dotted((*path, node.text)),
                    f"the key {node.text} is not text in YAML but {show(value)}",
                    None,
                    f'quote it: "{node.text}"',
                )
            )
        return node.text

    def _scalar(self, node: _Node, path: Path_) -> Any:
        if node.tag == "tag:yaml.org,2002:str" or (not node.plain and node.tag in (None, "!")):
            return node.text
        if not node.plain:
            raise _Refused(node.start, f"the YAML tag {node.tag} is not supported", "write the plain value")
        scalar = resolve_plain(node.text)
        if scalar.misread:
            read = "no number that JSON can carry" if scalar.value is None else show(scalar.value)
            remedy = f'quote it, "{node.text}", if it is text' + (
                "" if scalar.value is None else f", or write {show(scalar.value)}"
            )
            self.document.problems.append(
                self.document.problem(path, f"{node.text} is read as {read} by kubectl", Raw(node.text), remedy)
            )
        return scalar.value


# ------------------------------------------------------------------------------------------------------------ scalars


@dataclass(frozen=True)
class Scalar:
    """What kubectl makes of a plain scalar; ``misread`` if people are likely to expect something else."""

    value: Any
    misread: bool = False


_WORDS: dict[str, Scalar] = {
    **{w: Scalar(None) for w in ("", "~", "null", "Null", "NULL")},
    **{w: Scalar(True) for w in ("true", "True", "TRUE")},
    **{w: Scalar(False) for w in ("false", "False", "FALSE")},
    **{w: Scalar(True, misread=True) for w in ("y", "Y", "yes", "Yes", "YES", "on", "On", "ON")},
    **{w: Scalar(False, misread=True) for w in ("n", "N", "no", "No", "NO", "off", "Off", "OFF")},
    # Not a number in JSON: kubectl fails on them.
    **{sign + w: Scalar(None, misread=True) for sign in ("", "+", "-") for w in (".inf", ".Inf", ".INF")},
    **{w: Scalar(None, misread=True) for w in (".nan", ".NaN", ".NAN")},
}
_INTEGER = re.compile(r"([-+]?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO]?[0-7]+|0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_POINT = re.compile(r"\.[0-9]+(_[0-9]+)*([eE][-+]?[0-9]+(_[0-9]+)*)?")  # go-yaml takes _ here only between digits
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]")


def resolve_plain(text: str) -> Scalar:
    """The value of an unquoted scalar, by the rules of go-yaml v2 (``resolve.go``), which kubectl uses."""
    if text in _WORDS:
        return _WORDS[text]
    if not text or text[0] not in "+-.0123456789":
        return Scalar(text)
    if text[0] == "." and not _POINT.fullmatch(text):
        return Scalar(text)
    plain = text.replace("_", "")
    misread = plain != text or bool(_LEADING_ZERO.match(plain))
    if match := _INTEGER.fullmatch(plain):
        digits = match[2].lower()
        number = int(digits, 8 if digits.isdigit() and digits[0] == "0" else 0) * (-1 if match[1] == "-" else 1)
        if -(2**63) <= number < 2**63:
            return Scalar(number, misread)
        misread = True  # stored as the nearest double
    if match or _FLOAT.fullmatch(plain):
        value = float(int(plain, 0)) if match and not plain.lstrip("+-").isdigit() else float(plain)
        if value in (float("inf"), float("-inf")):
            return Scalar(text, misread=True)  # go-yaml leaves it a string
        return Scalar(int(value) if value.is_integer() and abs(value) < 2**63 else value, misread)
    return Scalar(text)
