"""The base class of every policy: what a policy must define, and what it gets."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rlightning.errors import NonFiniteLoss, RLightningError
from rlightning.policy.fragment_rollout import FragmentRolloutMixin
from rlightning.policy.gradients import Reduction, reduce_gradients
from rlightning.policy.train_group import TrainGroupMixin
from rlightning.policy.training_state import TrainingStateMixin
from rlightning.runtime.member import explained
from rlightning.runtime.numerics import prepare_process
from rlightning.runtime.rng import RngState, Stream
from rlightning.types import EnvMeta, EnvRet, Fragment, PolicyResponse
from rlightning.utils.config.config import Config, PolicyConfig, TrainConfig
from rlightning.utils.ray.remote_class import RayActorMixin
from rlightning.weights.slots import SlotsHandle
from rlightning.weights.weight_buffer_mixin import WeightBufferMixin

if TYPE_CHECKING:
    from tensordict import TensorDict


class PolicyRole(StrEnum):
    """What a member does: learn, or act."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True)
class TrainingProgress:
    """Where training stands when a batch arrives.

    Attributes:
        iteration: 1 for the first.
        env_steps: valid steps before this batch.
        total_env_steps: where the run ends.
    """

    iteration: int
    env_steps: int
    total_env_steps: int

    @property
    def remaining(self) -> float:
        """1 at the start, 0 at the end; what linear schedules multiply with."""
        return max(0.0, 1.0 - self.env_steps / self.total_env_steps)


class BasePolicy(
    nn.Module, RayActorMixin, FragmentRolloutMixin, TrainingStateMixin, TrainGroupMixin, WeightBufferMixin, ABC
):
    """A policy that learns (role ``train``) or acts (role ``eval``), in this process or as a Ray actor.

    A subclass defines the network, the optimizer, one acting step and one training step. All state that must survive
    a crash lives in parameters, persistent buffers, optimizers and learning-rate schedulers held as attributes (found
    by themselves), or in :meth:`extra_training_state`.

    ``train()`` is a training step here, not ``nn.Module.train(mode)``: modes are set with :meth:`eval` and
    :meth:`training_mode`.

    Args:
        config: settings; ``config.policy_kwargs`` holds the policy's own.
        role_type: what this member does.
    """

    def __init__(self, config: PolicyConfig, role_type: PolicyRole) -> None:
        super().__init__()
        self.config = config
        self.role_type = PolicyRole(role_type)
        self.member_name = str(self.role_type)
        self.env_meta: EnvMeta | None = None
        self.train_config: TrainConfig | None = None
        self.reduction: Reduction | None = None
        self.progress = TrainingProgress(iteration=1, env_steps=0, total_env_steps=1)
        self._initialized = False
        self._timings: dict[str, tuple[int, float]] = {}

    # --- what a policy defines -------------------------------------------------------------------------------------

    @abstractmethod
    def construct_network(self, env_meta: EnvMeta, *args: Any, **kwargs: Any) -> None:
        """Create the modules, as attributes of ``self``."""

    @abstractmethod
    def setup_optimizer(self, optim_cfg: Config | None) -> None:
        """Create the optimizer (train members only)."""

    @abstractmethod
    def rollout_step(self, env_ret: EnvRet, **kwargs: Any) -> PolicyResponse:
        """Act once for all environments of a shard; called under ``torch.inference_mode``.

        Args:
            env_ret: ``observation`` is a tensor ``(N, *obs)``.
            kwargs: ``deterministic=True`` in evaluation: take the most likely action, draw nothing.

        Returns:
            ``action`` ``(N,)`` or ``(N, A)``; in training also ``log_prob`` ``(N,)``, and ``value`` ``(N,)`` unless
            the learner computes values itself. Further ``(N, …)`` tensors are carried to :meth:`update_dataset`.
        """

    @abstractmethod
    def update_dataset(self, data: TensorDict) -> None:
        """Take one iteration's data, the same on every train member.

        Args:
            data: batch size ``[T, N]``, all shards side by side in shard order, with ``observation``,
                ``next_observation`` (where an episode ended: its final observation), ``action``, ``log_prob``,
                ``value`` (if the policy gave it), ``reward``, ``terminated``, ``truncated``, ``valid`` (False on the
                dummy step that follows an episode's last one) and whatever else ``rollout_step`` returned.
        """

    @abstractmethod
    def train(self, *args: Any, **kwargs: Any) -> dict[str, float]:  # type: ignore[override]
        """Learn from the data of :meth:`update_dataset`; between ``backward`` and ``step`` call
        :meth:`reduce_gradients`. Returns named metrics; one that is not finite and named like a loss stops the run.
        """

    @abstractmethod
    def get_trainable_parameters(self) -> dict[str, dict[str, Tensor]]:
        """State dicts of the trainable modules, by module name."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Load what :meth:`get_trainable_parameters` returned."""

    # --- as a member of a group -------------------------------------------------------------------------------------

    def setup_member(self, name: str, seed: int, stream: int, index: int, threads: int) -> tuple[str, str]:
        """First call into a policy that has a process of its own (a Ray actor).

        Args:
            name: the member's.
            seed, stream, index: of its random state (:class:`~rlightning.runtime.rng.Stream`).
            threads: of numerical libraries.

        Returns:
            Id of the Ray node, which members with the same ``/dev/shm`` share; name of the pod, empty outside
            Kubernetes.

        Raises:
            RLightningError: the process was started with another number of threads.
        """
        import ray

        if os.environ.get("OMP_NUM_THREADS") != str(threads):  # libraries read it once, when they are imported
            raise RLightningError(
                f"member {name} was started with OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}, and "
                f"spec.training.threads is {threads}; the pods of a Ray cluster must have it in their environment"
            )
        prepare_process(threads)
        if self.role_type is PolicyRole.TRAIN:
            # Seconds that the first batch would wait for; until it comes there is nothing else to do here.
            threading.Thread(target=importlib.import_module, args=("tensordict",), daemon=True).start()
        self.member_name = name
        self._rng = RngState.seeded(seed, Stream(stream), index)
        self._pod = os.environ.get("RAY_CLOUD_INSTANCE_ID", "")  # by KubeRay; a host name may be a shortened one
        return str(ray.get_runtime_context().get_node_id()), self._pod

    def member_call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method under this member's random state, as :class:`~rlightning.runtime.local.LocalMember` does:
        nothing else in the process can draw from it between two calls.
        """
        rng: RngState | None = self.__dict__.get("_rng")
        try:
            with rng.swapped() if rng is not None else contextlib.nullcontext():
                return getattr(self, method)(*args, **kwargs)
        except Exception as error:
            # Explained here, where the traceback is; the cause stays behind, it may not survive pickling.
            raise explained(self.member_name, method, error, self.__dict__.get("_pod", "")) from None

    # --- what it gets ----------------------------------------------------------------------------------------------

    def eval(self) -> BasePolicy:
        """Evaluation mode for every module of the policy. ``nn.Module.eval`` would call :meth:`train`."""
        return self._set_mode(training=False)

    def training_mode(self) -> BasePolicy:
        """Training mode for every module of the policy."""
        return self._set_mode(training=True)

    def _set_mode(self, training: bool) -> BasePolicy:
        self.training = training
        for child in self.children():
            child.train(training)
        return self

    def init_train(self, train_config: TrainConfig, env_meta: EnvMeta | None = None) -> None:
        """Build network and optimizer for learning.

        With several train members gradients are reduced by :meth:`reduce_gradients`; DDP is not used, because it
        reduces nothing, silently, around a policy whose loss does not go through its ``forward``.
        """
        self.train_config, self.env_meta = train_config, env_meta
        self.construct_network(env_meta)  # type: ignore[arg-type]
        self.training_mode()
        self.setup_optimizer(self.config.optim_cfg)
        self._initialized = True

    def init_eval(self, eval_config: Any | None = None, env_meta: EnvMeta | None = None) -> None:
        """Build the network for acting; its weights are whatever is published next."""
        self.env_meta = env_meta
        self.construct_network(env_meta)  # type: ignore[arg-type]
        self.eval()
        self._initialized = True

    def init_weight_buffer(
        self,
        strategy: str,
        slots: SlotsHandle | None = None,
        member: str = "",
        probe: Callable[[nn.Module], None] | None = None,
    ) -> None:
        """As :meth:`WeightBufferMixin.init_weight_buffer`; the probe is one :meth:`rollout_step` unless another is
        given.
        """
        super().init_weight_buffer(strategy, slots, member, probe or _probe_forward)

    def is_initialized(self) -> bool:
        """True after ``init_train`` or ``init_eval``."""
        return self._initialized

    def reduce_gradients(self, extra: Tensor | None = None) -> Tensor | None:
        """Sum gradients (and ``extra``) over the train members, in rank order; nothing to do with one.

        Call it after ``backward`` and before clipping and ``step``. The loss must be this rank's *share* of the sum
        (divide by the global count, not the rank's).

        Args:
            extra: ``(K,)`` float32 of sums to take along.

        Returns:
            ``extra`` summed over ranks.
        """
        if self.reduction is None or self.reduction.world_size == 1:
            return extra
        return reduce_gradients(self.named_parameters(), self.reduction, extra)

    @property
    def rank(self) -> int:
        """Index among the train members."""
        return 0 if self.reduction is None else self.reduction.rank

    @property
    def world_size(self) -> int:
        """Number of train members."""
        return 1 if self.reduction is None else self.reduction.world_size

    def receive_fragments(self, fragments: list[Fragment], progress: TrainingProgress) -> None:
        """Turn fragments (in shard order) into the data of :meth:`update_dataset`."""
        started = time.perf_counter()
        self.progress = progress
        self.update_dataset(fragments_to_tensordict(fragments))
        self._time("update_dataset", started)

    def train_iteration(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """One call of :meth:`train`, then proof that what it left behind is finite.

        Raises:
            NonFiniteLoss: a loss or a parameter is not finite; names the iteration and the tensor.
        """
        started = time.perf_counter()
        metrics = dict(self.train(*args, **kwargs) or {})
        for name, value in metrics.items():
            if "loss" in name.lower() and not torch.isfinite(torch.as_tensor(value)).all():
                raise NonFiniteLoss(self.progress.iteration, f"{name} is {float(value)}")
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                # A sum is finite unless an element is not (or it overflows, which the exact check then refutes).
                if not torch.isfinite(parameter.sum()) and not torch.isfinite(parameter).all():
                    raise NonFiniteLoss(self.progress.iteration, f"parameter {name} is not finite after train()")
        self._time("train", started)
        return metrics

    def save_checkpoint(self, path: str) -> None:
        """Write the weights (not the training state) to ``path`` as safetensors; override for another format."""
        from safetensors.torch import save_file

        from rlightning.weights.digest import persistent_tensors

        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_file({name: t.detach().cpu().contiguous().clone() for name, t in persistent_tensors(self).items()}, path)

    def print_timing_summary(self, reset: bool = False) -> None:
        """Print calls, total and mean seconds of this member's stages."""
        for stage, (calls, seconds) in sorted(self._timings.items()):
            print(f"{self.member_name}: {stage}: {calls} calls, {seconds:.3f} s, {1e3 * seconds / calls:.2f} ms each")
        if reset:
            self._timings.clear()

    def _time(self, stage: str, started: float) -> None:
        calls, seconds = self._timings.get(stage, (0, 0.0))
        self._timings[stage] = (calls + 1, seconds + time.perf_counter() - started)


def _probe_forward(policy: nn.Module) -> None:
    """Act once, and once greedily, on two observations drawn from the space; on a copy of a policy."""
    assert isinstance(policy, BasePolicy) and policy.env_meta is not None
    space: Any = copy.deepcopy(policy.env_meta.observation_space)
    space.seed(0)
    rows = torch.from_numpy(np.stack([np.asarray(space.sample()) for _ in range(2)]))
    none = np.zeros(2, dtype=bool)
    with torch.no_grad():
        for options in ({}, {"deterministic": True}):
            policy.rollout_step(EnvRet("probe", rows, np.zeros(2, dtype=np.float32), none, none), **options)


def fragments_to_tensordict(fragments: list[Fragment]) -> TensorDict:
    """All shards side by side: batch size ``[T, N of all shards]``; copies, as fragments may be read-only."""
    # Imported when first needed: it brings torch._dynamo with it, seconds that members which only act need not spend.
    from tensordict import TensorDict

    if not fragments:
        raise RLightningError("no fragments to train on")

    def joined(arrays: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays, axis=1))

    observation = joined([f.observation for f in fragments])
    names = ["action", "log_prob", "value", "reward", "terminated", "truncated", "valid"]
    data = {n: joined([getattr(f, n) for f in fragments]) for n in names if getattr(fragments[0], n) is not None}
    data |= {n: joined([f.extra[n] for f in fragments]) for n in fragments[0].extra}
    steps, envs = data["reward"].shape
    return TensorDict(
        {"observation": observation[:-1], "next_observation": observation[1:], **data}, batch_size=[steps, envs]
    )
