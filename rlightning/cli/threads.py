"""Numerical threads, which libraries read once, when they are imported."""

from __future__ import annotations

import os


def set_threads(threads: int) -> None:
    """Give every numerical library of this process, and of those it starts, so many threads.

    Overrides the environment: ``training.threads`` is part of what makes results repeatable. Call it before anything
    imports numpy or torch.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
