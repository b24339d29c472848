"""The weight plane inside a policy: publish on the learner; stage, apply and acknowledge on eval members."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from rlightning.errors import WeightsError
from rlightning.weights.digest import StateDigest, digest_module, digest_tensors, persistent_state
from rlightning.weights.fingerprint import compare_fingerprints, param_fingerprint
from rlightning.weights.layout import StateLayout, layout_of
from rlightning.weights.member_state import Deadline, Failure, Key, MemberState, Staged
from rlightning.weights.payload import Acknowledgement, WeightPayload
from rlightning.weights.private_slots import PrivateSlots
from rlightning.weights.probe import written_tensors
from rlightning.weights.slots import SlotReader, SlotsHandle, SlotVersion, SlotWriter, sweep

__all__ = ["WeightBufferMixin", "compare_fingerprints"]

STRATEGIES = ("None", "Double", "Shared")


class WeightBufferMixin:
    """Versioned weights for a policy, which is a :class:`torch.nn.Module`.

    All state is made on first use and lies outside the module's parameters, buffers and ``state_dict``; a deep copy
    starts afresh. Methods may be called from any thread.

    An eval member is told :meth:`init_weight_buffer` once, :meth:`receive_weights` (or, under ``Shared``,
    :meth:`receive_weight_slot`) for each version, and acts inside ``with policy.acting(version):``.
    """

    @property
    def _weights(self) -> MemberState:
        state = self.__dict__.get("_weight_state")
        if state is None:
            state = self.__dict__.setdefault("_weight_state", MemberState())  # atomic: two threads get one
        return cast(MemberState, state)

    @property
    def _act_lock(self) -> threading.RLock:
        """Held while the policy acts; weights change only under it."""
        return self._weights.act_lock

    # --- learner ---

    def publish_weights(self, version: int, attempt: int) -> WeightPayload:
        """Copy this policy's persistent tensors out as one version, with the digest of the live ones.

        Raises:
            WeightsError: the version is lower than the last one, or it is the same one with other tensors.
        """
        state = self._weights
        key = (attempt, version)
        with state.act_lock:
            live = persistent_state(_module(self))
            digest = digest_tensors(live.tensors)
            if state.published is not None and (
                key < state.published[0] or (key == state.published[0] and digest.root != state.published[1])
            ):
                (last_attempt, last_version), last_digest = state.published
                raise WeightsError(
                    f"version {version} of attempt {attempt} ({digest.root}) cannot follow version {last_version} of "
                    f"attempt {last_attempt} ({last_digest}): a version names one state and never falls"
                )
            layout = layout_of(live)
            data = layout.pack_tensors(live.tensors)
            state.published = (key, digest.root)
        return WeightPayload(attempt, version, layout, data, digest)

    # --- eval member: setting up and taking down ---

    def init_weight_buffer(
        self,
        strategy: str,
        slots: SlotsHandle | None = None,
        member: str = "",
        probe: Callable[[nn.Module], None] | None = None,
    ) -> None:
        """Choose how versions are stored and applied here. Called again, it starts over; versions still never fall.

        Args:
            strategy: ``None`` (copied into the live tensors on arrival), ``Double`` (two slots of its own) or
                ``Shared`` (two read-only slots for all members of the node).
            slots: the node's slots, for ``Shared``.
            member: this member's name, for errors and leases.
            probe: runs one forward pass of the module that it is given, for ``Shared``.

        Raises:
            WeightsError: this policy cannot use the strategy; says why and which one it can.
        """
        if strategy not in STRATEGIES:
            raise WeightsError(f"weight strategy {strategy!r} is not one of {', '.join(STRATEGIES)}")
        sweep()
        self._refuse_overrides(strategy)
        self.close_weight_buffer(keep_writer=strategy == "Shared")
        module, old = _module(self), self._weights
        state = MemberState()
        state.act_lock = old.act_lock
        state.highest, state.published, state.writer = old.highest, old.published, old.writer
        state.strategy, state.member = strategy, member or old.member
        if strategy == "Shared":
            if slots is None or probe is None:
                raise WeightsError(
                    "weight strategy Shared needs the node's slots and a probe forward (init_weight_buffer(slots=…, "
                    "probe=…)): without it a policy that writes its own weights would die of SIGSEGV"
                )
            slots.layout.require(StateLayout.of(module), f"member {state.member}")
            self._refuse_writers(probe)
            state.reader = SlotReader(slots, state.member)
        elif strategy == "Double":
            state.private = PrivateSlots(StateLayout.of(module))
        self.__dict__["_weight_state"] = state

    def _refuse_overrides(self, strategy: str) -> None:
        kind = _own_class(self)
        for name in dir(kind):
            if name.startswith("recv_weights") and callable(getattr(kind, name)):
                raise WeightsError(
                    f"{kind.__name__} overrides {name}, which is never called: under spec.weights.strategy None or "
                    "Double do it in update_weights_from_buffer instead"
                )
        if strategy == "Shared" and self._applies_itself:
            raise WeightsError(
                f"{kind.__name__} overrides update_weights_from_buffer, so it cannot run out of read-only shared "
                "weights: use spec.weights.strategy Double"
            )

    def _refuse_writers(self, probe: Callable[[nn.Module], None]) -> None:
        kind = _own_class(self).__name__
        try:
            written = written_tensors(_module(self), probe)
        except Exception as cause:
            raise WeightsError(
                f"the probe forward of {kind}, which weight strategy Shared needs, failed: {cause!r}; use "
                "spec.weights.strategy Double if it cannot work"
            ) from cause
        if written:
            raise WeightsError(
                f"the forward pass of {kind} writes {', '.join(written[:5])}{' …' if len(written) > 5 else ''}, which "
                "is published and read-only under weight strategy Shared: use spec.weights.strategy Double, or "
                "register such buffers with persistent=False"
            )

    @property
    def _applies_itself(self) -> bool:
        return _own_class(self).update_weights_from_buffer is not WeightBufferMixin.update_weights_from_buffer

    def close_weight_buffer(self, *, keep_writer: bool = False) -> None:
        """Stop the daemon, leave the slots and keep the present weights in private memory. Harmless if repeated."""
        state = self._weights
        state.close()
        owns_act_lock = state.act_lock._is_owned()  # type: ignore[attr-defined]  # then the daemon may wait for us
        if state.daemon is not None and state.daemon is not threading.current_thread() and not owns_act_lock:
            state.daemon.join()
        with state.act_lock:
            if state.reader is not None:
                if state.applied is not None:
                    for tensor in persistent_state(_module(self)).tensors.values():
                        tensor.data = tensor.data.clone()
                state.reader = None
            if state.writer is not None and not keep_writer:
                state.writer.close()
                state.writer = None

    # --- eval member: a version arrives ---

    def receive_weights(self, payload: WeightPayload, timeout: float | None) -> Acknowledgement:
        """Stage a version, have it applied and acknowledge it (``None`` and ``Double``).

        Returns:
            What this member runs now; a version that could not be applied is a failed acknowledgement with its cause.

        Raises:
            WeightsError: the version is older than one that came before.
            MemberDeadlineExceeded: it was not applied in time.
        """
        state, deadline = self._weights, Deadline(timeout)
        state.require_strategy("None", "Double")
        state.refuse_older((payload.attempt, payload.version))
        with contextlib.suppress(WeightsError):  # recorded as this version's failure, which acknowledge reports
            self._stage_weights(payload, deadline)
        self.notify_update_weights()
        return self._acknowledge(payload.version, deadline)

    def receive_weight_slot(self, version: SlotVersion, timeout: float | None) -> Acknowledgement:
        """:meth:`receive_weights` for a version that lies in the node's slot (``Shared``)."""
        state, deadline = self._weights, Deadline(timeout)
        state.require_strategy("Shared")
        state.refuse_older((version.attempt, version.version))
        with contextlib.suppress(WeightsError):
            self.stage_weight_slot(version)
        self.notify_update_weights()
        return self._acknowledge(version.version, deadline)

    def stage_weights(self, payload: WeightPayload, timeout: float | None = None) -> None:
        """Take a version in. ``Double`` applies it after :meth:`notify_update_weights`, ``None`` at once.

        Raises:
            WeightsError: an older version than before; tensors that differ in name, dtype or shape from this
                policy's; under ``None``, a failed application.
            MemberDeadlineExceeded: the member acted, or applied another version, for longer than ``timeout``.
        """
        self._stage_weights(payload, Deadline(timeout))

    def _stage_weights(self, payload: WeightPayload, deadline: Deadline) -> None:
        state = self._weights
        state.require_strategy("None", "Double")
        with state.holding(state.stage_lock, payload.version, deadline):
            key = (payload.attempt, payload.version)
            number = state.arrival(key)
            arrived = time.monotonic()
            try:
                layout = layout_of(persistent_state(_module(self)))
                payload.layout.require(layout, f"member {state.member}")
                if state.private is None:
                    views: Mapping[str, Tensor] = payload.layout.views(payload.data)
                    staged = Staged(number, key, arrived, views, bind=False)
                else:
                    slot = state.free_private_slot(deadline)
                    views = state.private.write(slot, payload.data)
                    staged = Staged(number, key, arrived, views, bind=True, private=slot)
            except Exception as cause:
                state.fail(Failure(number, key, cause))
                raise
            state.put(staged)
            if state.strategy == "None":
                with state.holding(state.act_lock, payload.version, deadline):
                    state.start_applying()
                    self._apply_version(state, staged)
                failure = state.open_failure
                if failure is not None:
                    raise failure.error(state.member) from failure.cause

    def stage_weight_slot(self, version: SlotVersion) -> None:
        """Take in a version that lies in the node's slot (``Shared``); applied after :meth:`notify_update_weights`.

        Raises:
            WeightsError: an older version than before, or the slot holds another one by now.
        """
        state = self._weights
        state.require_strategy("Shared")
        assert state.reader is not None
        with state.stage_lock:
            key = (version.attempt, version.version)
            number = state.arrival(key)
            try:
                views = state.reader.views(version)
            except WeightsError as cause:
                state.fail(Failure(number, key, cause))
                raise
            state.put(Staged(number, key, time.monotonic(), views, bind=True, slot=version))

    # --- eval member: it is applied ---

    def notify_update_weights(self) -> None:
        """Signal that the newest staged version is to be applied. Nothing to do under ``None``."""
        state = self._weights
        with state.changed:
            if state.closed or state.strategy not in ("Double", "Shared"):
                return
            state.notified = state.staged_number
            if state.daemon is None:
                # The thread holds the policy weakly between versions: one that nobody closed can still be collected.
                policy = weakref.ref(self, state.close)
                name = f"update-weights-{state.member}"
                state.daemon = threading.Thread(target=_update_weights, args=(policy, state), name=name, daemon=True)
                state.daemon.start()
            state.changed.notify_all()

    def update_weights(self) -> None:
        """Apply versions as they are notified, until :meth:`close_weight_buffer`; what the daemon thread does."""
        _update_weights(weakref.ref(self), self._weights)

    def update_weights_from_buffer(self) -> None:
        """Make the version in :meth:`get_weight_buffer` live; called under the act lock and ``no_grad``.

        A policy may override this (not under ``Shared``), to convert tensors, say. What it raises fails the version.
        It must not keep tensors of the buffer other than by calling this implementation.
        """
        staged = self._weights.applying
        if staged is None:
            raise WeightsError("update_weights_from_buffer is called by the weight plane, when a version arrives")
        for name, tensor in persistent_state(_module(self)).tensors.items():
            if not staged.bind:
                tensor.copy_(staged.views[name])
            elif tensor.is_cpu:
                tensor.data = staged.views[name]
            else:
                raise WeightsError(f"tensor {name!r} is on {tensor.device}: this weight strategy works in CPU memory")

    def get_weight_buffer(self) -> Mapping[str, Tensor]:
        """The tensors being applied, by full name (inside :meth:`update_weights_from_buffer`); copy, don't keep them.

        Raises:
            WeightsError: nothing is being applied.
        """
        staged = self._weights.applying
        if staged is None:
            raise WeightsError("the weight buffer can be read inside update_weights_from_buffer only")
        return staged.views

    def _apply_version(self, state: MemberState, staged: Staged) -> None:
        """Apply what :meth:`MemberState.start_applying` gave, and record how it went. The caller holds the act lock."""
        failure: Failure | None = None
        bound = staged.private
        try:
            if staged.slot is not None:
                assert state.reader is not None
                state.reader.check(staged.slot)
            with torch.no_grad():
                self.update_weights_from_buffer()
            if self._applies_itself:
                bound = self._kept_slot(state, staged)
        except BaseException as cause:
            failure = Failure(staged.number, staged.key, cause)
            if not isinstance(cause, Exception):  # Ctrl-C: recorded as a failure, and not held up
                raise
        finally:
            state.end_applying(staged, failure, bound)

    def _kept_slot(self, state: MemberState, staged: Staged) -> int | None:
        """The private slot that live tensors lie in after a policy applied the version itself."""
        live = persistent_state(_module(self)).tensors
        if state.private is not None:
            slots = state.private.slots_of(live)
            kept_wrongly = bool(slots - {staged.private})
        else:
            slots = set()
            lent = {view.data_ptr() for view in staged.views.values() if view.nbytes}
            kept_wrongly = any(tensor.data_ptr() in lent for tensor in live.values())
        if kept_wrongly:
            raise WeightsError(
                f"{_own_class(self).__name__}.update_weights_from_buffer keeps tensors of the buffer as its own, whose "
                "memory is written again later: copy them (load_state_dict without assign=True)"
            )
        return staged.private if slots else None

    def wait_for_weight_update_done(self, timeout: float | None = None) -> bool:
        """Wait until a version at least as new as the one notified before this call is applied.

        Returns:
            True if it is; False if ``timeout`` seconds did not suffice. True at once under ``None``.

        Raises:
            WeightsError: applying it failed (the cause is chained), or the buffer was closed meanwhile.
        """
        state = self._weights
        with state.changed:
            target = state.notified

            def failed() -> Failure | None:
                failure = state.open_failure
                return failure if failure is not None and failure.number >= target else None

            state.changed.wait_for(lambda: state.applied_number >= target or failed() or state.closed, timeout)
            if state.applied_number >= target:
                return True
            failure = failed()
            if failure is not None:
                raise failure.error(state.member) from failure.cause
            if state.closed:
                raise WeightsError(f"the weight buffer of member {state.member} was closed during a weight update")
            return False

    # --- eval member: it is proved and used ---

    def acknowledge(self, version: int, timeout: float | None) -> Acknowledgement:
        """Wait until ``version`` (or a newer one) is live, and say so with the digest of the live tensors.

        Called again for the same version it takes the digest anew.

        Returns:
            A failed acknowledgement, with its cause and without a digest, if the version could not be applied.

        Raises:
            MemberDeadlineExceeded: it was not live after ``timeout`` seconds.
            WeightsError: there is no buffer, or the slot was written again under this member.
        """
        return self._acknowledge(version, Deadline(timeout))

    def _acknowledge(self, version: int, deadline: Deadline) -> Acknowledgement:
        state = self._weights
        state.require_strategy(*STRATEGIES)
        called = time.monotonic()
        with state.changed:
            key: Key = (state.highest[0], version)
            target = state.notified

            def failed() -> Failure | None:
                failure = state.open_failure
                return failure if failure is not None and failure.key >= key else None

            def live() -> bool:
                return state.applied is not None and state.applied.key >= key and state.applied.number >= target

            if not state.changed.wait_for(lambda: failed() or live() or state.closed, deadline.left):
                raise state.late(version, deadline)
            state.require_strategy(*STRATEGIES)  # closed meanwhile?
            failure = failed()
            if failure is not None:
                seconds = time.monotonic() - called
                return Acknowledgement(state.member, failure.key[1], None, seconds, str(failure))
        with state.holding(state.act_lock, version, deadline):
            applied = state.applied
            assert applied is not None
            digest = self.live_digest()
            since = called if state.acknowledged == applied.number else applied.arrived
            state.acknowledged = applied.number
        return Acknowledgement(state.member, applied.key[1], digest, time.monotonic() - since)

    def live_digest(self) -> StateDigest:
        """Digest of the tensors that this policy runs right now.

        Raises:
            WeightsError: they lie in a slot that was written again meanwhile.
        """
        state = self._weights
        with state.act_lock:
            digest = digest_module(_module(self))
            if state.reader is not None and state.applied is not None and state.applied.slot is not None:
                state.reader.check(state.applied.slot)
            return digest

    @contextlib.contextmanager
    def acting(self, version: int) -> Iterator[None]:
        """Hold ``version`` fixed for one fragment. Waits while another thread acts or a version is being applied.

        Raises:
            WeightsError: this member runs another version, has not acknowledged it, or failed to apply a newer one;
                or its slot was written during the fragment (which must be thrown away then).
        """
        state = self._weights
        with state.act_lock:
            state.require_strategy(*STRATEGIES)
            failure = state.open_failure
            if failure is not None:
                raise failure.error(state.member) from failure.cause
            applied = state.applied
            if applied is None or applied.key[1] != version:
                runs = "no version yet" if applied is None else f"version {applied.key[1]}"
                raise WeightsError(f"member {state.member} cannot act with version {version}: it runs {runs}")
            if state.acknowledged != applied.number:
                raise WeightsError(
                    f"member {state.member} cannot act with version {version} before it has acknowledged it"
                )
            lease: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if state.reader is not None and applied.slot is not None and state.acting_depth == 0:
                lease = state.reader.leased(applied.slot)
            with lease:
                state.acting_depth += 1
                try:
                    yield
                finally:
                    state.acting_depth -= 1

    def get_param_fingerprint(self) -> dict[str, float]:
        """The float32 L2 norm of each parameter by ``<module>.<param>`` (a quick look; the digest is the proof)."""
        with self._act_lock:
            return param_fingerprint(_module(self))

    # --- the first member of a node, under Shared ---

    def open_weight_slots(self) -> SlotsHandle:
        """Make the node's two slots, owned by this member until :meth:`close_weight_buffer`.

        Raises:
            WeightsError: no shared memory here, or not enough of it.
        """
        state = self._weights
        with state.stage_lock:
            if state.writer is not None:
                state.writer.close()
                state.writer = None
            state.writer = SlotWriter(StateLayout.of(_module(self)))
            return state.writer.handle

    def write_weight_slot(self, payload: WeightPayload, lease_seconds: float) -> SlotVersion:
        """Write a version into the node's slot that members do not run (:meth:`SlotWriter.write`)."""
        state = self._weights
        with state.stage_lock:
            if state.writer is None:
                raise WeightsError(f"member {state.member} has no weight slots: open_weight_slots comes first")
            state.refuse_older((payload.attempt, payload.version))
            return state.writer.write(payload, lease_seconds)


def _update_weights(policy: weakref.ref[WeightBufferMixin], state: MemberState) -> None:
    while True:
        with state.changed:
            state.changed.wait_for(lambda: state.closed or state.pending)
            if state.closed:
                return
        with state.act_lock:  # the safe point: no fragment runs
            live = policy()
            if live is None:
                return
            staged = state.start_applying()  # the newest by now; None while a newer one is being copied in
            if staged is not None:
                live._apply_version(state, staged)
        del live


def _own_class(policy: WeightBufferMixin) -> type[WeightBufferMixin]:
    """The class as it was written: Ray makes a subclass of an actor's, in which every method is wrapped."""
    kind: type[WeightBufferMixin] = getattr(type(policy), "__ray_actor_class__", type(policy))
    return kind


def _module(policy: WeightBufferMixin) -> nn.Module:
    """The policy as what it also is."""
    return cast(nn.Module, policy)
