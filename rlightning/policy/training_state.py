"""Everything a learner must get back to go on as if it had never stopped."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from rlightning.errors import CheckpointError
from rlightning.runtime.rng import RngState
from rlightning.weights.digest import persistent_tensors


class TrainingStateMixin:
    """Saves and restores a policy's persistent tensors, optimizers, schedulers and RNGs. Mixed into a module."""

    def extra_training_state(self) -> dict[str, Any]:
        """State of a policy that lives elsewhere than in tensors, optimizers and schedulers.

        A tree of dicts, lists, tuples, None, bool, int, float, str, bytes, NumPy arrays and tensors.
        """
        return {}

    def load_extra_training_state(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`extra_training_state` gave."""

    def training_state(self) -> dict[str, Any]:
        """The whole state between two iterations; a tree that a checkpoint can hold.

        Call it as a member's method: the generators it reads are the member's own then.
        """
        return {
            "optimizers": {name: o.state_dict() for name, o in self._stateful(torch.optim.Optimizer).items()},
            "schedulers": {
                name: _plain(s.state_dict()) for name, s in self._stateful(torch.optim.lr_scheduler.LRScheduler).items()
            },
            "rng": RngState.capture().state_dict(),
            "extra": self.extra_training_state(),
        }

    def load_training_state(self, model: dict[str, Tensor], state: dict[str, Any]) -> None:
        """The inverse of :meth:`training_state`, with the persistent tensors beside it.

        Raises:
            CheckpointError: names of tensors or optimizers differ from this policy's.
        """
        assert isinstance(self, nn.Module)
        live = persistent_tensors(self)
        if live.keys() != model.keys():
            missing, unknown = sorted(live.keys() - model.keys()), sorted(model.keys() - live.keys())
            raise CheckpointError(
                f"the checkpoint is of another network: it lacks {missing or 'nothing'} and has {unknown or 'nothing'} "
                "that this policy does not; resume with the manifest that wrote it"
            )
        with torch.no_grad():
            for name, tensor in live.items():
                saved = model[name]
                if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
                    raise CheckpointError(
                        f"tensor {name} is {saved.dtype}{tuple(saved.shape)} in the checkpoint and "
                        f"{tensor.dtype}{tuple(tensor.shape)} in this policy"
                    )
                tensor.copy_(saved)
        for kind, cls in (("optimizers", torch.optim.Optimizer), ("schedulers", torch.optim.lr_scheduler.LRScheduler)):
            mine = self._stateful(cls)
            if mine.keys() != state[kind].keys():
                raise CheckpointError(
                    f"{kind} in the checkpoint: {sorted(state[kind])}; in this policy: {sorted(mine)}"
                )
            for name, thing in mine.items():
                # A copy: torch keeps the tensors it is given, and members of one process are given the same ones.
                thing.load_state_dict(copy.deepcopy(state[kind][name]))
        self.load_extra_training_state(copy.deepcopy(state["extra"]))
        RngState.from_state_dict(state["rng"]).restore()

    def _stateful(self, cls: type) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if isinstance(value, cls)}


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state without the callables that some keep in it (they come from the code again)."""
    return {k: v for k, v in state.items() if isinstance(v, (type(None), bool, int, float, str, list, tuple, dict))}
