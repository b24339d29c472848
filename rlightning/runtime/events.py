"""TensorBoard event files, written without TensorFlow and without torch.

The format is TensorBoard's own protobuf records in TFRecord framing (tensorflow/core/lib/io/record_writer.cc). Its
Python writer is not used: importing it takes a second and looks for TensorFlow, which a user may have installed.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_CRC32C = _crc_table()


def masked_crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), rotated and offset as TFRecord stores it."""
    crc, table = 0xFFFFFFFF, _CRC32C
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class ScalarEvents:
    """One event file; each record is on disk (in the page cache) when :meth:`add` returns.

    Args:
        directory: created if missing.
        attempt: part of the file's name, so that files sort in the order in which they were written.
        purge_step: the first step that will be written again: TensorBoard then drops what an earlier attempt wrote at
            that step and after. None for a first attempt.

    Raises:
        OSError: the file cannot be created or written.
    """

    def __init__(self, directory: Path, *, attempt: int = 1, purge_step: int | None = None) -> None:
        directory.mkdir(exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{attempt:04d}.{socket.gethostname()}.{os.getpid()}"
        self._fd = os.open(directory / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._write(
            Event(
                wall_time=now,
                file_version="brain.Event:2",
                source_metadata=SourceMetadata(writer="rlightning"),
            )
        )
        if purge_step is not None:
            self._write(
                Event(wall_time=now, step=purge_step, session_log=SessionLog(status=SessionLog.SessionStatus.START))
            )

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Write scalars by tag, all at one step."""
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()])
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, event: Event) -> None:
        data: bytes = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        record = b"".join(
            (length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data)))
        )
        write_whole(self._fd, record)


def write_whole(fd: int, record: bytes) -> None:
    """Append a record; a write that fails half-way (a full disk) leaves none of it behind.

    Raises:
        OSError: from the write; the file then ends with its last whole record.
    """
    done = 0
    try:
        while done < len(record):
            done += os.write(fd, record[done:])
    except OSError:
        if done:
            os.ftruncate(fd, os.lseek(fd, 0, os.SEEK_END) - done)
        raise
