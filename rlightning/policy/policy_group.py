"""The group: train members learn together, eval members act, and all run one version of the weights."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlightning.errors import MemberLost, RLightningError, WeightMismatch
from rlightning.policy.gradients import Baton, BatonReduction
from rlightning.policy.train_group import check_backend
from rlightning.runtime.local import LocalMember
from rlightning.runtime.member import Member, Shared, gather
from rlightning.types import EnvMeta, Fragment
from rlightning.weights.digest import StateDigest, first_difference
from rlightning.weights.ledger import VersionRecord
from rlightning.weights.payload import Acknowledgement, WeightPayload
from rlightning.weights.strategies import build_strategy
from rlightning.weights.weight_buffer_mixin import compare_fingerprints

if TYPE_CHECKING:
    from rlightning.api.models import DeadlinesSpec, EnvironmentSpec
    from rlightning.policy.base_policy import TrainingProgress
    from rlightning.utils.config.config import PolicyConfig, TrainConfig

SLOTS_PER_FORWARD = 8
"""Evaluation slots that share one forward pass. Fixed: batch shape decides the last bits of a result."""
MAX_EVALUATION_SLOTS = 16
SHUTDOWN_SECONDS = 10.0
"""For all members to leave in order; what is left then goes with their processes."""
NOT_COLOCATED = "is_colocated=True is not supported: train and eval members have processes of their own"


class PolicyGroup:
    """Train and eval policies, local objects or Ray actor handles, used alike.

    Args:
        train_policy_list: at least one.
        eval_policy_list: at least one.
        config: the policies' configuration; ``config.weight_buffer`` picks the strategy.
        deadlines: ``spec.deadlines``; None takes its defaults.
        seed: of the members' random state.
        members: the same policies, already wrapped (by a placement that knows their nodes); None wraps them here.
    """

    def __init__(
        self,
        train_policy_list: list[Any],
        eval_policy_list: list[Any],
        config: PolicyConfig,
        *,
        deadlines: DeadlinesSpec | None = None,
        seed: int = 0,
        members: tuple[list[Member], list[Member]] | None = None,
    ) -> None:
        from rlightning.api.models import DeadlinesSpec

        for role, policies in (("train", train_policy_list), ("eval", eval_policy_list)):
            if not policies:
                raise RLightningError(f"a PolicyGroup needs at least one {role} policy; got none")
        self.config = config
        self.deadlines = deadlines or DeadlinesSpec()
        self._train_policies, self._eval_policies = list(train_policy_list), list(eval_policy_list)
        self.train_members, self.eval_members = members or (
            [wrap(p, f"train-{i}", "train", seed, i) for i, p in enumerate(train_policy_list)],
            [wrap(p, f"eval-{i}", "eval", seed, i) for i, p in enumerate(eval_policy_list)],
        )
        self.placement_info: dict[str, dict[str, list[str]]] = {}
        self.attempt = 1
        self.version = -1
        self.published: WeightPayload | None = None
        self._parent_digest: str | None = None
        self._strategy = build_strategy(config.weight_buffer.buffer_strategy, self.deadlines.lease_seconds)
        self._baton: Baton | None = None
        self._store: Any = None
        self._epoch = 0
        self._shards: tuple[EnvironmentSpec, int, int, int] | None = None

    # --- members ---------------------------------------------------------------------------------------------------

    @property
    def train_list(self) -> list[Any]:
        """The policies for training, as they were given."""
        return list(self._train_policies)

    @property
    def eval_list(self) -> list[Any]:
        """The policies for evaluation, as they were given."""
        return list(self._eval_policies)

    @property
    def member_names(self) -> tuple[str, ...]:
        """All members, train first."""
        return tuple(m.name for m in (*self.train_members, *self.eval_members))

    @property
    def pods(self) -> dict[str, str]:
        """The Kubernetes pod of each member that is in one."""
        return {m.name: m.pod for m in (*self.train_members, *self.eval_members) if m.pod}

    def _all(
        self, members: Sequence[Member], method: str, *args: Any, what: str, seconds: float, field: str, **kwargs: Any
    ) -> dict[str, Any]:
        """Call every member at once and wait for all; the first cause wins over what it caused in others."""
        futures = {m.name: m.call(method, *args, **kwargs) for m in members}
        try:
            return gather(futures, what=what, seconds=seconds, field=f"spec.deadlines.{field}")
        except MemberLost as lost:
            # One member's error breaks the collective of the others; they report a loss, but it is not the cause.
            for future in futures.values():
                if future.done():
                    try:
                        future.result(0)
                    except MemberLost:
                        continue
                    except Exception as cause:
                        raise cause from lost
            raise

    def init(self, train_config: TrainConfig, env_meta: EnvMeta | None = None, eval_config: Any | None = None) -> None:
        """Initialize both training and evaluation policies."""
        self.init_train(train_config, env_meta)
        self.init_eval(eval_config, env_meta)

    def init_train(self, train_config: Any, env_meta: EnvMeta | None = None) -> list[Any]:
        """Build network and optimizer of every train policy."""
        return list(self._start(self.train_members, "init_train", train_config, env_meta).values())

    def init_eval(self, eval_config: Any | None = None, env_meta: EnvMeta | None = None) -> list[Any]:
        """Build the network of every eval policy."""
        return list(self._start(self.eval_members, "init_eval", eval_config, env_meta).values())

    def _start(self, members: Sequence[Member], method: str, *args: Any) -> dict[str, Any]:
        seconds = self.deadlines.member_start_seconds
        return self._all(members, method, *args, what=method, seconds=seconds, field="memberStartSeconds")

    def init_placement_info(self, is_colocated: bool = False) -> None:
        """Fill ``placement_info``: Ray node id → names of its train and eval members.

        Args:
            is_colocated: accepted values: False. Sharing a GPU between roles is not part of this version.
        """
        if is_colocated:
            raise RLightningError(
                "is_colocated=True is not supported: train and eval members have processes of their own"
            )
        info: dict[str, dict[str, list[str]]] = {}
        for member in (*self.train_members, *self.eval_members):
            info.setdefault(member.node, {"train": [], "eval": []})[member.role].append(member.name)
        self.placement_info = info

    def init_comm_group(self, backend: str = "nccl", is_colocated: bool = False) -> None:
        """Let the train members sum gradients; nothing to do with one.

        Members of this process take turns; Ray actors join a torch process group whose rendezvous store lives here.

        Args:
            backend: ``gloo``, or ``nccl`` where train members have GPUs.
            is_colocated: as for :meth:`init_placement_info`.
        """
        check_backend(backend)
        if is_colocated:
            raise RLightningError(
                "is_colocated=True is not supported: train and eval members have processes of their own"
            )
        world = len(self.train_members)
        if world == 1:
            return
        seconds = float(self.deadlines.collective_seconds)
        local = [m for m in self.train_members if isinstance(m, LocalMember)]
        if len(local) == world:
            self._baton = Baton(world, seconds)
            for rank, member in enumerate(local):
                member.call("join_baton", BatonReduction(self._baton, rank)).result()
                member.baton = (self._baton, rank)
            return
        import ray
        from torch.distributed import TCPStore

        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._epoch += 1
        futures = {
            m.name: m.call("join_process_group", rank, world, host, self._store.port, self._epoch, backend, seconds)
            for rank, m in enumerate(self.train_members)
        }
        gather(futures, what="joining the train group", seconds=seconds + 30, field="spec.deadlines.collectiveSeconds")

    def print_timing_summary(self, reset: bool = False) -> None:
        """Have every member print its stages' timings."""
        self._start([*self.train_members, *self.eval_members], "print_timing_summary", reset)

    def shutdown(self) -> None:
        """Release buffers, slots, environments and the train group. Members that are gone are passed over."""
        self._strategy.close()
        end = time.monotonic() + SHUTDOWN_SECONDS
        leaving = [m.call("close_shards") for m in self.eval_members]
        leaving += [m.call("leave_process_group") for m in self.train_members]
        for future in leaving:
            # A clean-up must not hide the error which ended the run: a lost member has nothing to clean.
            with contextlib.suppress(RLightningError, TimeoutError):
                future.result(max(0.0, end - time.monotonic()))
        self._store = None

    # --- weights ---------------------------------------------------------------------------------------------------

    def init_weight_buffer(self) -> None:
        """Prepare every eval member for the configured strategy."""
        self._strategy.prepare(self.eval_members)

    def start_versions(self, version: int, attempt: int, parent_digest: str | None = None) -> None:
        """Say that the next publication is ``version`` of ``attempt`` (a resumed run goes on counting)."""
        self.version, self.attempt, self._parent_digest = version - 1, attempt, parent_digest

    def sync_weights(self) -> VersionRecord:
        """Publish the learner's weights as the next version and return once every eval member runs them.

        Every member's acknowledgement carries the digest of the tensors that its forward pass uses; the record says
        which of them equal the learner's. With several train members, those must be equal too.

        Raises:
            MemberDeadlineExceeded: names the members that had not acknowledged in time.
            WeightMismatch: train members differ among themselves (a lost or partial gradient reduction).
        """
        if self.published is not None:
            self._parent_digest = self.published.digest.root
        return self._publish(self.version + 1)

    def republish_weights(self) -> VersionRecord:
        """Publish the current version once more, from the learner's tensors, to bring every member back to it."""
        return self._publish(self.version)

    def _publish(self, version: int) -> VersionRecord:
        seconds = float(self.deadlines.acknowledgement_seconds)
        learner = self.train_members[0]
        payload: WeightPayload = gather(
            {learner.name: learner.call("publish_weights", version, self.attempt)},
            what=f"publishing version {version}",
            seconds=seconds,
            field="spec.deadlines.acknowledgementSeconds",
        )[learner.name]
        for name, digest in self._live_digests(self.train_members[1:]).items():
            difference = first_difference(payload.digest, digest)
            if difference is not None:
                raise WeightMismatch(version, f"{name}: {difference}")
        acknowledgements = self._strategy.publish(payload, seconds)
        self.version, self.published = version, payload
        return self._record(acknowledgements)

    def verify_weights(self) -> VersionRecord:
        """Digest every eval member's live tensors again and compare with what was published."""
        assert self.published is not None, "verify_weights comes after sync_weights"
        started = time.perf_counter()
        digests = self._live_digests(self.eval_members)
        seconds = time.perf_counter() - started
        return self._record([Acknowledgement(n, self.version, d, seconds) for n, d in digests.items()])

    def _live_digests(self, members: Sequence[Member]) -> dict[str, StateDigest]:
        if not members:
            return {}
        seconds = self.deadlines.acknowledgement_seconds
        return self._all(
            members, "live_digest", what="digest of live weights", seconds=seconds, field="acknowledgementSeconds"
        )

    def _record(self, acknowledgements: Sequence[Acknowledgement]) -> VersionRecord:
        assert self.published is not None
        return VersionRecord.build(self.published, acknowledgements, self._parent_digest)

    def notify_update_weights(self) -> None:
        """Signal all eval policies that new weights are available."""
        seconds = self.deadlines.acknowledgement_seconds
        self._all(
            self.eval_members,
            "notify_update_weights",
            what="notification",
            seconds=seconds,
            field="acknowledgementSeconds",
        )

    def wait_for_eval_weight_update(self, timeout: float = 60.0) -> None:
        """Block until every eval policy runs the newest weights it was notified of.

        Raises:
            RLightningError: names the members that do not after ``timeout`` seconds.
        """
        done = self._all(
            self.eval_members,
            "wait_for_weight_update_done",
            timeout,
            what="weight update",
            seconds=timeout + 5,
            field="acknowledgementSeconds",
        )
        late = [name for name, updated in done.items() if not updated]
        if late:
            raise RLightningError(f"weight update: {', '.join(late)} did not apply it within {timeout:g} s")

    def verify_eval_weight_consistency(self, rtol: float = 1e-3) -> bool:
        """Compare per-parameter L2 norms of every eval policy with the first train policy's.

        A mismatch is ``|train − eval| / max(|train|, 1e-8) > rtol``, a norm that is not finite, or a name that only
        one side has. Norms miss sign flips and permutations: :meth:`verify_weights` is the exact test.
        """
        self.wait_for_eval_weight_update()
        seconds = self.deadlines.acknowledgement_seconds
        norms = self._all(
            [self.train_members[0], *self.eval_members],
            "get_param_fingerprint",
            what="fingerprint",
            seconds=seconds,
            field="acknowledgementSeconds",
        )
        learner = norms.pop(self.train_members[0].name)
        return all(compare_fingerprints(learner, theirs, rtol) is None for theirs in norms.values())

    def save_checkpoint(self, path: str) -> None:
        """Save the weights of the first train policy."""
        self._start(self.train_members[:1], "save_checkpoint", path)

    # --- acting ----------------------------------------------------------------------------------------------------

    def host_shards(
        self,
        environment: EnvironmentSpec,
        shards: int,
        envs_per_shard: int,
        seed: int,
        states: Mapping[int, dict[str, Any]] | None = None,
    ) -> dict[str, str]:
        """Spread whole shards over the eval members: shard s lives in member s modulo their number.

        Returns:
            How environments were resolved: ``vectorization``, and ``resume`` exact or approximate.
        """
        self._shards = (environment, shards, envs_per_shard, seed)
        return self._host(self.eval_members, states)

    def _host(self, members: Sequence[Member], states: Mapping[int, dict[str, Any]] | None) -> dict[str, str]:
        assert self._shards is not None
        environment, _, envs_per_shard, seed = self._shards
        futures = {}
        for member in members:
            mine = self._shards_of(member)
            theirs = None if states is None else {s: states[s] for s in mine}
            futures[member.name] = member.call("host_shards", environment, mine, envs_per_shard, seed, theirs)
        seconds = self.deadlines.member_start_seconds
        resolved = gather(
            futures, what="creating environments", seconds=seconds, field="spec.deadlines.memberStartSeconds"
        )
        return next(r for r in resolved.values() if r)

    def _shards_of(self, member: Member) -> list[int]:
        assert self._shards is not None
        index = self.eval_members.index(member)
        return list(range(index, self._shards[1], len(self.eval_members)))

    def shard_states(self) -> dict[int, dict[str, Any]]:
        """The state of every shard between fragments."""
        seconds = self.deadlines.fragment_seconds
        answers = self._all(
            self.eval_members, "shard_states", what="shard states", seconds=seconds, field="fragmentSeconds"
        )
        return {shard: state for states in answers.values() for shard, state in states.items()}

    def rollout(self, steps: int) -> list[Fragment]:
        """One fragment of every shard with the current version, in shard order."""
        return self._rollout(self.eval_members, steps)

    def _rollout(self, members: Sequence[Member], steps: int) -> list[Fragment]:
        futures = {
            f"{m.name} (shard {s})": m.call("rollout_fragment", s, self.version, steps)
            for m in members
            for s in self._shards_of(m)
        }
        fragments = gather(
            futures,
            what=f"rollout with version {self.version}",
            seconds=self.deadlines.fragment_seconds,
            field="spec.deadlines.fragmentSeconds",
        )
        return sorted(fragments.values(), key=lambda f: f.shard)

    def redo_rollout(
        self, names: Sequence[str], states: Mapping[int, dict[str, Any]], fragments: Sequence[Fragment], steps: int
    ) -> list[Fragment]:
        """Roll the shards of some members out again, from the states before (after :meth:`republish_weights`).

        Args:
            names: members whose weights were found changed.
            states: of every shard before the fragments were made.
            fragments: all fragments, the tainted ones among them.
        """
        tainted = [m for m in self.eval_members if m.name in names]
        self._host(tainted, states)
        redone = {f.shard: f for f in self._rollout(tainted, steps)}
        return [redone.get(f.shard, f) for f in fragments]

    def evaluate(self, environment: EnvironmentSpec, seed: int, episodes: int) -> list[tuple[float, int]]:
        """Greedy episodes with the current version, in episode order: (return, length).

        Slots are cut into groups of fixed size and groups are dealt to members, so neither the number of members nor
        which of them plays a group changes a result.
        """
        slots = min(episodes, MAX_EVALUATION_SLOTS)
        futures = {}
        for i, first in enumerate(range(0, slots, SLOTS_PER_FORWARD)):
            member = self.eval_members[i % len(self.eval_members)]
            group = list(range(first, min(first + SLOTS_PER_FORWARD, slots)))
            futures[f"{member.name} (slots {group[0]}–{group[-1]})"] = member.call(
                "evaluate_slots", environment, seed, self.version, group, slots, episodes
            )
        played = gather(
            futures,
            what=f"evaluation of version {self.version}",
            seconds=self.deadlines.fragment_seconds,
            field="spec.deadlines.fragmentSeconds",
        )
        return [(r, n) for _, r, n in sorted(e for group in played.values() for e in group)]

    # --- learning --------------------------------------------------------------------------------------------------

    def update_dataset(self, sample_data: list[Any], progress: TrainingProgress | None = None) -> list[Any]:
        """Give each train policy its data.

        Args:
            sample_data: one entry per train policy: a list of fragments (in shard order), or what the policy's own
                ``update_dataset`` takes.
            progress: where training stands, with fragments.
        """
        if len(sample_data) != len(self.train_members):
            raise RLightningError(
                f"update_dataset got {len(sample_data)} entries for {len(self.train_members)} train policies; "
                "give one each"
            )
        shared: dict[int, Shared[Any]] = {}
        futures = {}
        for member, data in zip(self.train_members, sample_data, strict=True):
            argument = shared.setdefault(id(data), Shared(data))
            if isinstance(data, list) and data and isinstance(data[0], Fragment):
                futures[member.name] = member.call("receive_fragments", argument, progress)
            else:
                futures[member.name] = member.call("update_dataset", argument)
        seconds = self.deadlines.fragment_seconds
        answers = gather(futures, what="taking data", seconds=seconds, field="spec.deadlines.fragmentSeconds")
        return list(answers.values())

    def train(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """One training step on every train policy, called with these arguments; metrics of the first."""
        if self._baton is not None:
            self._baton.start()
        answers = self._all(
            self.train_members,
            "train_iteration",
            *args,
            what="training step",
            seconds=self.deadlines.fragment_seconds,
            field="fragmentSeconds",
            **kwargs,
        )
        return answers[self.train_members[0].name]

    def training_state(self) -> dict[str, Any]:
        """Everything but the weights that the first train policy needs to go on (equal on all of them)."""
        return self._start(self.train_members[:1], "training_state")[self.train_members[0].name]

    def load_training_state(self, model: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Put every train policy into a saved state."""
        self._start(self.train_members, "load_training_state", Shared(dict(model)), Shared(dict(state)))


def wrap(policy: Any, name: str, role: str, seed: int, index: int) -> Member:
    """A policy object or a Ray actor handle as a member."""
    if hasattr(policy, "_actor_id"):
        from rlightning.runtime.ray_members import RayMember

        return RayMember(name, role, policy)
    from rlightning.runtime.rng import Stream

    # All train members draw the same numbers: they pick the same global minibatches and start from the same weights.
    if role == "train":
        return LocalMember(name, role, policy, seed, Stream.LEARNER)
    return LocalMember(name, role, policy, seed, Stream.MEMBER, index)
