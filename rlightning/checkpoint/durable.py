"""The only operations by which checkpoints change the disk.

The first group are the primitives: one system call each (``write`` repeats it until all is written). The second group
is made of primitives only. A test that replaces the primitives therefore sees every step of a save in order, and can
end the process at any of them.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

PRIMITIVES = (
    "make_directory",
    "create_file",
    "write",
    "sync_file",
    "sync_directory",
    "rename",
    "remove_file",
    "remove_directory",
)

# Small pieces are joined up to this size: thousands of small arrays must not become thousands of system calls.
_JOIN_BYTES = 1 << 20


def make_directory(path: Path) -> None:
    """Create ``path``; its parent must exist, itself must not."""
    os.mkdir(path)


def create_file(path: Path) -> int:
    """Create ``path``, which must not exist, and return a descriptor to write to."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of ``data`` (one call takes at most 2 GiB on Linux)."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync_file(descriptor: int) -> None:
    """Return once the file's bytes would survive a power cut."""
    os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    """Return once the names in ``path`` would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems have no such notion; there is nothing more that we could do there.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Give ``source`` the name ``target`` in one step."""
    os.rename(source, target)


def remove_file(path: Path) -> None:
    os.unlink(path)


def remove_directory(path: Path) -> None:
    """Remove the empty directory ``path``."""
    os.rmdir(path)


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Create ``path`` from ``pieces`` and make its bytes durable; its name is not, until its directory is synced."""
    descriptor = create_file(path)
    try:
        pending = bytearray()
        for piece in pieces:
            if len(piece) < _JOIN_BYTES:
                pending += piece
                if len(pending) < _JOIN_BYTES:
                    continue
                piece = b""
            if pending:
                write(descriptor, pending)
                pending = bytearray()
            if piece:
                write(descriptor, piece)
        if pending:
            write(descriptor, pending)
        sync_file(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Remove the directory ``path`` and all below it; links are removed, never followed."""
    with os.scandir(path) as entries:
        children = sorted(entries, key=lambda entry: entry.name)
    for child in children:
        if child.is_dir(follow_symlinks=False):
            remove_tree(Path(child.path))
        else:
            remove_file(Path(child.path))
    remove_directory(path)


def lock_directory(path: Path) -> int | None:
    """Take the lock of ``path`` for as long as the returned descriptor is open; None if it cannot be had.

    The kernel drops it when the process ends, however it ends: so a directory that can be locked has no living owner.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by somebody, or a file system without locks, where nobody can tell
        os.close(descriptor)
        return None
    return descriptor
