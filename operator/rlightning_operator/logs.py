"""One line per record, as text or JSON; kopf's own lines fewer."""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime

FIELDS = ("job", "failures", "retry_seconds")
QUIET_SECONDS = 30.0


class Lines(logging.Formatter):
    """``2026-11-29T18:31:49.123Z INFO    default/cartpole: state Pending -> Running``; tracebacks follow below."""

    def format(self, record: logging.LogRecord) -> str:
        """See the class."""
        fields = {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        job = fields.pop("job", None)
        text = " ".join(record.getMessage().splitlines())
        more = "".join(f" {name}={value}" for name, value in fields.items())
        line = f"{_time(record)} {record.levelname:<7} {f'{job}: ' if job else ''}{text}{more}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """An object a line: time, level, message, logger; job, failures, retry_seconds, traceback where there are any."""

    def format(self, record: logging.LogRecord) -> str:
        """See the class."""
        content: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            "logger": record.name,
        }
        content |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return json.dumps(content)


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
    """Send everything to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else Lines())
    handler.addFilter(FewerRetries())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    if level != "debug":  # kopf tells of each handler that was called; these are three lines long
        for name in ("kopf", "asyncio", "aiohttp"):
            logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
