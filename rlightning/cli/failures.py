"""How errors reach the user, and what the process exits with."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from rlightning.errors import EnvironmentNotFound, ManifestError, RLightningError, UnsupportedSpace

SUCCEEDED, FAILED, BAD_MANIFEST, INTERRUPTED = 0, 1, 2, 130


def exit_code(error: BaseException) -> int:
    """2 if the manifest is to blame, else 1."""
    return BAD_MANIFEST if isinstance(error, ManifestError | EnvironmentNotFound | UnsupportedSpace) else FAILED


def print_error(error: BaseException, log: Path | None = None) -> None:
    """A sentence for an error of ours (a member's traceback is part of it); the traceback for any other.

    Args:
        log: the run.log that has all of it.
    """
    if isinstance(error, RLightningError):
        print(f"error: {error}", file=sys.stderr)
        return
    traceback.print_exception(error)
    print(f"error: unexpected {type(error).__name__}: {error}", file=sys.stderr)
    if log is not None:
        print(f"the run's log, with this traceback: {log}", file=sys.stderr)
