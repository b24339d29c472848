"""Using a trained policy outside of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlightning.api.models import RLJob
from rlightning.checkpoint.store import Snapshot, latest_checkpoint, load_checkpoint
from rlightning.env import check_environment
from rlightning.errors import CheckpointError
from rlightning.policy.base_policy import BasePolicy, PolicyRole
from rlightning.policy.loading import policy_class, policy_config
from rlightning.types import EnvMeta, EnvRet
from rlightning.weights.digest import persistent_tensors


class LoadedPolicy:
    """A trained policy that acts.

    Attributes:
        policy: the policy itself, in evaluation mode.
        job: the manifest it was trained with.
        iteration, version, digest: which weights these are.
    """

    def __init__(self, policy: BasePolicy, meta: EnvMeta, job: RLJob, snapshot: Snapshot) -> None:
        self.policy, self.meta, self.job = policy, meta, job
        self.iteration, self.version, self.digest = snapshot.iteration, snapshot.version, snapshot.digest.root

    def act(self, obs: Any, *, deterministic: bool = True) -> Any:
        """The action for an observation, as the environment's ``step`` takes it.

        Args:
            obs: one observation of the environment's space, or a batch of them ``(N, *obs)``.
            deterministic: take the most likely action; False samples from torch's global generator.

        Returns:
            One action (an int where actions are discrete), or an array of N. Box actions are clipped to the space.

        Raises:
            ValueError: ``obs`` has neither the space's shape nor one axis more.
        """
        space: Any = self.meta.observation_space
        action_space: Any = self.meta.action_space
        array = np.asarray(obs, dtype=space.dtype)
        batched = array.ndim == len(space.shape) + 1
        if array.shape[int(batched) :] != space.shape:
            raise ValueError(
                f"obs has shape {array.shape}; {self.meta.env_id} has observations of shape {space.shape} (give one, "
                "or a batch with one axis more)"
            )
        rows = torch.from_numpy(np.ascontiguousarray(array if batched else array[None]))
        with torch.inference_mode():
            none = np.zeros(len(rows), dtype=bool)
            answer = self.policy.rollout_step(
                EnvRet("act", rows, np.zeros(len(rows), dtype=np.float32), none, none),
                **({"deterministic": True} if deterministic else {}),
            )
        action = np.asarray(answer.action)
        if hasattr(action_space, "low"):
            action = np.clip(action, action_space.low, action_space.high)
        if batched:
            return action
        return int(action[0]) if action.ndim == 1 else action[0]


def load_policy(path: str | Path) -> LoadedPolicy:
    """The policy of a run's newest checkpoint, or of one checkpoint.

    Everything is verified first: the tensors' digests against the checkpoint's manifest.

    Args:
        path: a run folder (``runs/cartpole/1``) or a checkpoint in it.

    Raises:
        CheckpointError: there is none, or it is damaged (names the tensor or file).
    """
    found = find_checkpoint(Path(path))
    snapshot = load_checkpoint(found)
    job = RLJob.from_stored(snapshot.job)
    meta = check_environment(job.spec.environment)
    policy = policy_class(job.spec)(policy_config(job.spec), PolicyRole.EVAL)
    policy.init_eval(None, meta)
    live = persistent_tensors(policy)
    if live.keys() != snapshot.model.keys():
        different = sorted(live.keys() ^ snapshot.model.keys())
        raise CheckpointError(
            f"{found} holds another network than {type(policy).__name__} builds: {', '.join(different)}"
        )
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(snapshot.model[name])
    return LoadedPolicy(policy, meta, job, snapshot)


def find_checkpoint(path: Path, name: str | None = None) -> Path:
    """The checkpoint that ``path`` is, or the newest one (or the one called ``name``) of the run folder it is.

    Raises:
        CheckpointError: there is none; says what there is.
    """
    if (path / "manifest.json").exists():
        return path
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if name is not None:
        chosen = directory / name
        if (chosen / "manifest.json").exists():
            return chosen
        there = sorted(p.name for p in directory.glob("iter-*")) if directory.is_dir() else []
        raise CheckpointError(f"{directory} has no checkpoint {name!r}; there are: {', '.join(there) or 'none'}")
    latest = latest_checkpoint(directory) if directory.is_dir() else None
    if latest is None:
        raise CheckpointError(
            f"{path} has no checkpoint: it is neither a run folder with a checkpoint in it nor a checkpoint itself"
        )
    return latest
