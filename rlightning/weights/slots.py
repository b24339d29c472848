"""Two weight slots in ``/dev/shm`` for all members of one node (strategy ``Shared``).

While members run version v out of one slot, v+1 is written to the other. Members map the slots read-only; the *writer*
(the first member of the node) owns the files and writes them by file descriptor, so that no process holds a pointer
through which it could change weights that another one runs.

Before a slot is written again nobody may be acting from it. A member that starts a fragment puts a *lease* beside the
slots (an empty file whose name says slot, process, start time and member), then checks that the slot is not promised
to a newer version. The writer first promises the slot, then looks for leases. Whichever comes first in the directory,
one of the two sees the other. Leases of dead processes are removed; a live one is waited for, up to the deadline.
``generation`` counts the writings of a slot and is checked again when a fragment ends, so that a reader which was
overtaken nevertheless finds out.

Files: ``/dev/shm/rlightning-<uid>-<pid namespace>-<pid>-<start time>-<random>/{owner,slot-0,slot-1,lease-…}``. A folder
whose owner died, and that no live process leases, is swept whenever a member sets up its weight buffer.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import shutil
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np
from torch import Tensor

from rlightning.errors import WeightsError
from rlightning.weights.layout import ByteArray, StateLayout
from rlightning.weights.payload import WeightPayload

SHM = Path("/dev/shm")
SLOTS = 2
HEADER_BYTES = 4096  # one page: the data behind it starts on a page of its own
_FORMAT = 1
_MAGIC = b"RLWSLOT1"
_FIXED = struct.Struct("<8sQQ")  # magic, format, data bytes
_GENERATION, _PROMISED, _ATTEMPT, _VERSION = 64, 72, 80, 88  # byte offsets of 8-byte words, little-endian
_WORD = struct.Struct("<q")


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, told apart from a later one with the same pid.

    Attributes:
        pid: process id.
        start: clock ticks from boot to its start.
    """

    pid: int
    start: int

    @staticmethod
    def own() -> ProcessIdentity:
        """The calling process."""
        pid = os.getpid()
        start = _start_time(pid)
        if start is None:
            raise WeightsError("weight slots need Linux (/proc): use spec.weights.strategy Double")
        return ProcessIdentity(pid, start)

    def alive(self) -> bool:
        """True if that very process runs (a zombie does not)."""
        return _start_time(self.pid) == self.start


def _start_time(pid: int) -> int | None:
    """Field 22 of /proc/<pid>/stat, or None if there is no such process or it has exited."""
    try:
        content = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = content[content.rindex(b")") + 2 :].split()  # the command name before may contain anything
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


@dataclass(frozen=True)
class SlotsHandle:
    """Where a node's slots are; picklable.

    Attributes:
        directory: the folder in /dev/shm.
        layout: of the weights that the slots hold.
    """

    directory: str
    layout: StateLayout

    @property
    def nbytes(self) -> int:
        """Size of one slot file."""
        return HEADER_BYTES + self.layout.nbytes


@dataclass(frozen=True)
class SlotVersion:
    """A version that lies in a slot, ready to be bound; picklable.

    Attributes:
        slot: 0 or 1.
        generation: of the slot when this version was written.
    """

    attempt: int
    version: int
    slot: int
    generation: int


class SlotWriter:
    """Owns the slots of one node.

    Args:
        layout: of the weights; fixed for the life of the slots.
        directory: where to make the folder; a test's.

    Raises:
        WeightsError: no shared memory here, or not enough of it.
    """

    def __init__(self, layout: StateLayout, directory: Path = SHM) -> None:
        sweep(directory)
        owner = ProcessIdentity.own()
        name = f"{_prefix()}{_pid_namespace()}-{owner.pid}-{owner.start}-{secrets.token_hex(4)}"
        self._path = directory / name
        self._current = 1  # the first version goes to slot 0
        self._fds: list[int] = []
        self.handle = SlotsHandle(str(self._path), layout)
        try:
            os.mkdir(self._path, 0o700)
        except OSError as error:
            raise WeightsError(
                f"no weight slots can be made in {directory}: {error.strerror}; use spec.weights.strategy Double"
            ) from error
        try:
            # Held for life and released by the kernel: how the sweep of another pid namespace (a restarted container
            # with the same /dev/shm) knows that the owner is gone.
            self._fds.append(os.open(self._path / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            fcntl.flock(self._fds[0], fcntl.LOCK_EX)
            for slot in range(SLOTS):
                self._create(slot, directory)
        except BaseException:
            self.close()
            raise

    def _create(self, slot: int, directory: Path) -> None:
        fd = os.open(self._path / f"slot-{slot}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._fds.append(fd)
        try:
            # Pages are taken now: a full /dev/shm found while writing or reading later would be a SIGBUS.
            os.posix_fallocate(fd, 0, self.handle.nbytes)
        except OSError as error:
            free = shutil.disk_usage(directory).free
            raise WeightsError(
                f"{directory} cannot hold two weight slots of {self.handle.nbytes} bytes ({error.strerror}, {free} "
                "bytes free): enlarge it, or use spec.weights.strategy Double or None"
            ) from error
        os.pwrite(fd, _FIXED.pack(_MAGIC, _FORMAT, self.handle.layout.nbytes), 0)

    def write(self, payload: WeightPayload, lease_seconds: float) -> SlotVersion:
        """Put a version into the slot that members do not run.

        Args:
            payload: has the slots' layout.
            lease_seconds: how long to wait for members that still act from that slot.

        Raises:
            WeightsError: another layout; or a lease outlived the deadline (names the holders; the slot keeps its
                version).
        """
        self.handle.layout.require(payload.layout, f"published version {payload.version}")
        slot = 1 - self._current
        fd = self._fds[1 + slot]
        generation = abs(_word(os.pread(fd, 8, _GENERATION)))  # negative: an earlier writing broke off
        self._set(fd, _PROMISED, generation + 1)  # from here on no lease is granted
        holders = self._wait_for_leases(slot, lease_seconds)
        if holders:
            self._set(fd, _PROMISED, generation)
            raise WeightsError(
                f"version {payload.version} cannot be stored: weight slot {slot} is still leased by "
                f"{', '.join(holders)} after {lease_seconds:g} s (spec.deadlines.leaseSeconds); a fragment outlived "
                "two versions"
            )
        self._set(fd, _GENERATION, -(generation + 1))  # negative: being written
        self._set(fd, _ATTEMPT, payload.attempt)
        self._set(fd, _VERSION, payload.version)
        _write_all(fd, payload.data, HEADER_BYTES)
        self._set(fd, _GENERATION, generation + 1)
        self._current = slot
        return SlotVersion(payload.attempt, payload.version, slot, generation + 1)

    @staticmethod
    def _set(fd: int, offset: int, value: int) -> None:
        os.pwrite(fd, _WORD.pack(value), offset)

    def _wait_for_leases(self, slot: int, seconds: float) -> list[str]:
        """Who still leases the slot when the deadline is over; usually nobody, at once."""
        end = time.monotonic() + seconds
        pause = 0.0005
        while holders := _live_leases(self._path, slot):
            left = end - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.02)
        return holders

    def close(self) -> None:
        """Remove the files. Members that have mapped a slot keep its memory."""
        shutil.rmtree(self._path, ignore_errors=True)
        while self._fds:
            os.close(self._fds.pop())


class SlotReader:
    """One member's read-only view of its node's slots.

    Args:
        handle: the writer's.
        member: its name, for the lease.

    Raises:
        WeightsError: the slots are gone or not what the handle says.
    """

    def __init__(self, handle: SlotsHandle, member: str) -> None:
        self._path = Path(handle.directory)
        self._member = member
        process = ProcessIdentity.own()
        self._lease_suffix = f"{process.pid}-{process.start}-{quote(member, safe='')}"
        self._maps: list[mmap.mmap] = []
        self._views: list[dict[str, Tensor]] = []
        for slot in range(SLOTS):
            memory = self._map(slot, handle)
            data: ByteArray = np.frombuffer(memory, np.uint8)[HEADER_BYTES:]
            self._maps.append(memory)
            self._views.append(handle.layout.views(data))

    def _map(self, slot: int, handle: SlotsHandle) -> mmap.mmap:
        path = self._path / f"slot-{slot}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise WeightsError(f"weight slot {path} cannot be opened: {error.strerror}; its writer is gone") from error
        try:
            size = os.fstat(fd).st_size
            if size != handle.nbytes:
                raise WeightsError(f"weight slot {path} has {size} bytes instead of {handle.nbytes}")
            memory = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)
        found = _FIXED.unpack_from(memory)
        if found != (_MAGIC, _FORMAT, handle.layout.nbytes):
            raise WeightsError(f"weight slot {path} starts with {found}: it was written by another release")
        return memory

    def views(self, version: SlotVersion) -> dict[str, Tensor]:
        """Tensors in the slot, by name, read-only: a write kills the process. The same objects at each call.

        Raises:
            WeightsError: the slot holds another version by now.
        """
        self.check(version)
        return self._views[version.slot]

    def address_range(self, slot: int) -> tuple[int, int]:
        """First address of a slot's mapping and the first one behind it."""
        data = np.frombuffer(self._maps[slot], np.uint8)
        return data.ctypes.data, data.ctypes.data + data.nbytes

    def check(self, version: SlotVersion) -> None:
        """Nothing if the slot still holds that version.

        Raises:
            WeightsError: it was written again; what was read from it meanwhile cannot be trusted.
        """
        generation = _word(self._maps[version.slot], _GENERATION)
        if generation != version.generation:
            raise WeightsError(
                f"weight slot {version.slot} was written again (generation {abs(generation)}) while member "
                f"{self._member} ran version {version.version} from generation {version.generation}"
            )

    @contextlib.contextmanager
    def leased(self, version: SlotVersion) -> Iterator[None]:
        """Keep the slot from being written meanwhile.

        Raises:
            WeightsError: the slot is promised to a newer version already; or, at the end, it was written all the same.
        """
        path = self._path / f"lease-{version.slot}-{self._lease_suffix}"
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            raise WeightsError(
                f"two members of this process are called {self._member!r}: each needs a name of its own"
            ) from None
        except OSError as error:
            raise WeightsError(
                f"weight slot {version.slot} in {self._path} grants no lease: {error.strerror}; its writer is gone"
            ) from error
        try:
            memory = self._maps[version.slot]
            if (_word(memory, _PROMISED), _word(memory, _GENERATION)) != (version.generation, version.generation):
                raise WeightsError(
                    f"member {self._member} cannot act with version {version.version}: weight slot {version.slot} is "
                    "being given to a newer one, which this member has not bound"
                )
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):  # the writer closed and removed the folder
                os.unlink(path)
        self.check(version)


def sweep(directory: Path = SHM) -> list[Path]:
    """Remove this user's slots whose owner is dead and that no live process leases; what was removed."""
    removed: list[Path] = []
    try:
        entries = sorted(directory.glob(f"{_prefix()}*"))
    except OSError:
        return removed
    for path in entries:
        if _abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _abandoned(path: Path) -> bool:
    try:
        info = path.lstat()
        namespace, pid, start = (int(part) for part in path.name.removeprefix(_prefix()).split("-")[:3])
    except (OSError, ValueError):  # gone meanwhile, or not ours
        return False
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        return False
    if namespace == _pid_namespace():
        return not ProcessIdentity(pid, start).alive() and not any(_live_leases(path, slot) for slot in range(SLOTS))
    # Another container's process ids mean nothing here; its lock does. Young folders may not have taken theirs yet.
    if time.time() - info.st_mtime < 60:
        return False
    try:
        fd = os.open(path / "owner", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _live_leases(path: Path, slot: int) -> list[str]:
    """``eval-1 (pid 17)`` for each live process that leases a slot; leases of dead ones are removed."""
    holders: list[str] = []
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return holders
    for name in names:
        if not name.startswith(f"lease-{slot}-"):
            continue
        _, _, pid, start, member = name.split("-", 4)
        if ProcessIdentity(int(pid), int(start)).alive():
            holders.append(f"{unquote(member)} (pid {pid})")
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path / name)
    return sorted(holders)


def _prefix() -> str:
    return f"rlightning-{os.getuid()}-"


def _word(buffer: bytes | mmap.mmap, offset: int = 0) -> int:
    value: int = _WORD.unpack_from(buffer, offset)[0]
    return value


def _write_all(fd: int, data: ByteArray, offset: int) -> None:
    view = data.data
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
