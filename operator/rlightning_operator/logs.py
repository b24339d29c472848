"""What operator and status service log: an event a line, whatever users or callers put into it; kopf's own lines fewer.

A record's ``extra`` may have ``job`` (namespace/name) and ``fields``, further names and values; those that are None are
left out.
"""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from typing import Any

QUIET_SECONDS = 30.0


class Lines(logging.Formatter):
    """``2026-11-29T18:31:49.123Z INFO    default/cartpole: state Pending -> Running``; tracebacks follow below."""

    def format(self, record: logging.LogRecord) -> str:
        """See the class."""
        job = getattr(record, "job", None)
        more = "".join(f" {name}={_plain(str(value))}" for name, value in _fields(record).items())
        start = f"{_time(record)} {record.levelname:<7} {f'{job}: ' if job else ''}"
        line = f"{start}{_plain(' '.join(record.getMessage().splitlines()))}{more}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """An object a line: time, level, message, logger; job, the fields and traceback where there are any."""

    def format(self, record: logging.LogRecord) -> str:
        """See the class."""
        content: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            "logger": record.name,
        }
        if hasattr(record, "job"):
            content["job"] = record.job
        content |= _fields(record)
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return json.dumps(content, default=str)  # ASCII, control characters escaped


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in getattr(record, "fields", {}).items() if value is not None}


def _plain(text: str) -> str:
    """Without line breaks and what else could forge a line or steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class FewerRetries(logging.Filter):
    """kopf writes an ERROR for each try of each watch while the API server is away: one in 30 s is enough."""

    def __init__(self) -> None:
        super().__init__()
        self._last = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        """Let all through but repeated retries."""
        if not (record.name.startswith("kopf") and record.getMessage().startswith("Request attempt")):
            return True
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        now = time.monotonic()
        if now - self._last < QUIET_SECONDS:
            return False
        self._last = now
        return True


def configure(level: str, form: str) -> None:
    """Send everything to stderr, warnings too."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else Lines())
    handler.addFilter(FewerRetries())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    if level != "debug":  # kopf tells of each handler that was called; these are three lines long
        for name in ("kopf", "asyncio", "aiohttp"):
            logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
