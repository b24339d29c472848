"""The whole state of a MuJoCo simulation.

``mjSTATE_INTEGRATION`` is all that the next ``mj_step`` needs, but tasks read what the last one left behind (body
positions, contact forces, velocities of centres of mass), so every array that MjData holds itself is saved too. The
arrays of contacts and constraints live in its arena and are made anew in every step.
"""

from __future__ import annotations

import hashlib
from typing import Any

import mujoco  # type: ignore[import-untyped, unused-ignore]
import numpy as np

from rlightning.errors import CheckpointError


class MujocoState:
    """Captures and restores ``data``, for the tasks of Gymnasium and for the ``state_dict`` of one's own.

    Args:
        model, data: of one simulation; both must stay the environment's for good.
    """

    def __init__(self, model: mujoco.MjModel, data: mujoco.MjData) -> None:
        self._model, self._data = model, data
        self._size = mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION)
        names = _own_arrays(model)
        self._arrays: dict[str, list[np.ndarray]] = {}
        for name in names:
            array = getattr(data, name).reshape(-1)
            self._arrays.setdefault(array.dtype.name, []).append(array)
        layout = "\n".join(f"{name} {getattr(data, name).dtype} {getattr(data, name).shape}" for name in names)
        self._layout = hashlib.blake2b(layout.encode(), digest_size=8).hexdigest()

    def capture(self) -> dict[str, Any]:
        """A tree of four arrays or so, 10 to 40 KB for Gymnasium's tasks."""
        integration = np.empty(self._size)
        mujoco.mj_getState(self._model, self._data, integration, mujoco.mjtState.mjSTATE_INTEGRATION)
        return {
            "integration": integration,
            "arrays": {dtype: np.concatenate(arrays) for dtype, arrays in self._arrays.items()},
            "layout": self._layout,
            "mujoco": mujoco.__version__,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Set the simulation to a captured state.

        Raises:
            CheckpointError: the state is of another model, or of a MuJoCo that keeps other arrays.
        """
        if state["layout"] != self._layout:
            raise CheckpointError(
                f"the saved simulation (MuJoCo {state['mujoco']}) has other arrays than this one (MuJoCo "
                f"{mujoco.__version__}); resume with the MuJoCo and the model of the run"
            )
        mujoco.mj_setState(self._model, self._data, state["integration"], mujoco.mjtState.mjSTATE_INTEGRATION)
        for dtype, arrays in self._arrays.items():
            saved, offset = state["arrays"][dtype], 0
            for array in arrays:
                array[...] = saved[offset : offset + array.size]
                offset += array.size


def _own_arrays(model: mujoco.MjModel) -> list[str]:
    """Names of the non-empty arrays that lie in MjData's own buffer: their memory never moves."""
    fresh = mujoco.MjData(model)  # in one that never stepped, arrays of the arena are empty or stand-ins without a base
    return [
        name
        for name in sorted(dir(fresh))
        if not name.startswith("_")
        and isinstance(array := getattr(fresh, name), np.ndarray)
        and array.size
        and array.base is not None
    ]
