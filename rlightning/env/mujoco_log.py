"""MuJoCo's warnings, sent to Python's logging.

Left alone, MuJoCo prints each of them to the terminal and appends it to MUJOCO_LOG.TXT in the working folder, once per
environment.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re

_logger = logging.getLogger("rlightning.env.mujoco")
_seen: set[str] = set()


@functools.cache
def log_warnings() -> None:
    """Send this process's MuJoCo warnings to the logger ``rlightning.env.mujoco``, unless somebody handles them."""
    if importlib.util.find_spec("mujoco") is None:
        return  # gymnasium.make says how to install it
    import mujoco  # type: ignore[import-untyped, unused-ignore]

    if mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(_log)


def _log(message: str) -> None:
    kind = re.sub(r"\d+(\.\d+)?", "#", message)
    if kind in _seen:
        return  # of messages that differ in a time or an index only, one is enough
    _seen.add(kind)
    # What is deprecated is the model's own XML, usually Gymnasium's: nothing a user could mend.
    _logger.log(logging.DEBUG if "deprecated" in message else logging.WARNING, "MuJoCo: %s", message)
