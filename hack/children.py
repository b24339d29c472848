"""Child processes that do not outlive their parent."""

from __future__ import annotations

import ctypes
import signal

_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """For ``subprocess.Popen(preexec_fn=…)``: the kernel kills the child when its parent ends, however it ends."""
    _LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
