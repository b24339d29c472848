from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlightning.errors import MemberDeadlineExceeded, WeightsError
from rlightning.weights.digest import digest_module, persistent_tensors
from rlightning.weights.payload import WeightPayload
from rlightning.weights.weight_buffer_mixin import WeightBufferMixin
from tests.unit.weights.policies import TinyPolicy, flip_bit

WAIT = 20.0


class SlowPolicy(TinyPolicy):
    """Applies a version when the test lets it, and fails when the test says so."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.fail: Exception | None = None

    def update_weights_from_buffer(self) -> None:
        self.entered.set()
        assert self.go_on.wait(WAIT)
        if self.fail is not None:
            raise self.fail
        super().update_weights_from_buffer()


class CopyingPolicy(TinyPolicy):
    """Applies versions by itself, as code written for load_state_dict does."""

    assign = False

    def update_weights_from_buffer(self) -> None:
        self.load_state_dict(dict(self.get_weight_buffer()), strict=False, assign=self.assign)


@contextmanager
def member(policy: TinyPolicy, strategy: str, name: str = "eval-0") -> Iterator[TinyPolicy]:
    slots = policy.open_weight_slots() if strategy == "Shared" else None
    policy.init_weight_buffer(strategy, slots, name)
    try:
        yield policy
    finally:
        policy.close_weight_buffer()


def stage(policy: TinyPolicy, payload: WeightPayload) -> None:
    if policy._weights.strategy == "Shared":
        policy.stage_weight_slot(policy.write_weight_slot(payload, WAIT))
    else:
        policy.stage_weights(payload)


def receive(policy: TinyPolicy, payload: WeightPayload) -> Any:
    if policy._weights.strategy == "Shared":
        return policy.receive_weight_slot(policy.write_weight_slot(payload, WAIT), WAIT)
    return policy.receive_weights(payload, WAIT)


def versions(count: int, first: int = 0) -> list[WeightPayload]:
    learner = TinyPolicy(seed=5)
    payloads = []
    for version in range(first, first + count):
        learner.learn(version + 1)
        payloads.append(learner.publish_weights(version, attempt=1))
    return payloads


ALL = pytest.mark.parametrize("strategy", ["None", "Double", "Shared"])
BUFFERED = pytest.mark.parametrize("strategy", ["Double", "Shared"])


def test_the_mixin_hides_no_method_of_a_module() -> None:
    own = {name for name in vars(WeightBufferMixin) if not name.startswith("__")}
    assert not own & set(dir(nn.Module))


def test_weight_state_stays_out_of_the_module_and_of_its_copies() -> None:
    plain = TinyPolicy()
    names = set(plain.state_dict())
    with member(TinyPolicy(), "Double") as policy:
        receive(policy, versions(1)[0])
        assert set(policy.state_dict()) == names
        clone = copy.deepcopy(policy)
        assert digest_module(clone) == digest_module(policy)
        with pytest.raises(WeightsError, match="not initialised"), clone.acting(0):
            pass


# --- publishing ---


def test_a_published_version_is_a_copy_with_the_digest_of_the_live_tensors() -> None:
    learner = TinyPolicy()
    payload = learner.publish_weights(3, attempt=2)
    assert (payload.version, payload.attempt, payload.digest) == (3, 2, digest_module(learner))
    learner.learn()
    assert torch.equal(payload.layout.views(payload.data)["mean"], learner.mean - 0.5)
    assert learner.live_digest() != payload.digest


def test_a_learner_publishes_rising_versions_and_one_state_per_version() -> None:
    learner = TinyPolicy()
    first = learner.publish_weights(4, attempt=1)
    assert learner.publish_weights(4, attempt=1).digest == first.digest  # to resynchronise
    learner.learn()
    with pytest.raises(WeightsError, match=r"version 4 of attempt 1 .* one state"):
        learner.publish_weights(4, attempt=1)
    with pytest.raises(WeightsError, match="version 3 of attempt 1"):
        learner.publish_weights(3, attempt=1)
    learner.publish_weights(2, attempt=2)


# --- applying ---


@ALL
def test_a_version_reaches_the_live_tensors_and_is_acknowledged_by_their_digest(strategy: str) -> None:
    with member(TinyPolicy(seed=1), strategy) as policy:
        parameter, buffer = policy.log_std, policy.mean
        for payload in versions(5):
            ack = receive(policy, payload)
            assert (ack.member, ack.version, ack.error) == ("eval-0", payload.version, None)
            assert ack.digest == payload.digest == digest_module(policy)
            assert policy.live_digest() == payload.digest
        assert policy.log_std is parameter  # the same objects: an optimizer or hook keeps its hold
        assert policy.mean is buffer
        assert policy.critic[0].weight is policy.actor[0].weight
        assert policy.wait_for_weight_update_done(0) is True


@ALL
def test_members_do_not_alias_the_learner_or_each_other(strategy: str) -> None:
    learner = TinyPolicy()
    with member(TinyPolicy(1), strategy, "eval-0") as one, member(TinyPolicy(2), strategy, "eval-1") as two:
        payload = learner.publish_weights(0, 1)
        for policy in (one, two):
            receive(policy, payload)
        learner.learn()
        if strategy != "Shared":
            flip_bit(one.log_std)
        assert two.live_digest() == payload.digest


@ALL
def test_weights_that_arrive_read_only_are_accepted(strategy: str) -> None:
    payload = versions(1)[0]
    payload.data.flags.writeable = False
    with member(TinyPolicy(), strategy) as policy:
        assert receive(policy, payload).digest == payload.digest


def test_shared_tensors_lie_inside_the_slot_and_alternate() -> None:
    with member(TinyPolicy(), "Shared") as policy:
        reader = policy._weights.reader
        assert reader is not None
        for slot, payload in zip([0, 1, 0], versions(3), strict=True):
            receive(policy, payload)
            start, end = reader.address_range(slot)
            for tensor in persistent_tensors(policy).values():
                assert start <= tensor.data_ptr() < tensor.data_ptr() + tensor.nbytes <= end
            assert not start <= policy.scratch.data_ptr() < end  # not persistent: private and writable
            policy.scratch.add_(1)
    for tensor in persistent_tensors(policy).values():
        assert not any(a <= tensor.data_ptr() < b for a, b in map(reader.address_range, (0, 1)))
    assert digest_module(policy) == payload.digest
    policy.learn()  # private again


def test_double_is_bound_by_pointer_into_two_slots_of_its_own() -> None:
    with member(TinyPolicy(), "Double") as policy:
        addresses = []
        for payload in versions(4):
            receive(policy, payload)
            addresses.append(policy.log_std.data_ptr())
        assert addresses[0] == addresses[2] != addresses[1] == addresses[3]


@ALL
def test_an_older_version_is_refused_and_a_new_attempt_may_count_from_lower(strategy: str) -> None:
    five, six = versions(2, first=5)
    with member(TinyPolicy(), strategy) as policy:
        receive(policy, six)
        with pytest.raises(WeightsError, match="version 5 of attempt 1 after version 6 of attempt 1"):
            receive(policy, five)
        assert policy.live_digest() == six.digest
        again = TinyPolicy().publish_weights(2, attempt=2)
        assert receive(policy, again).digest == again.digest


@ALL
def test_the_same_version_again_mends_a_changed_tensor(strategy: str) -> None:
    payload = versions(1)[0]
    with member(TinyPolicy(), strategy) as policy:
        receive(policy, payload)
        policy.log_std.data = policy.log_std.data + 1  # also detaches it from the slot
        assert policy.acknowledge(0, WAIT).digest != payload.digest
        assert receive(policy, payload).digest == payload.digest


@ALL
def test_other_tensors_are_a_failed_acknowledgement_that_names_one(strategy: str) -> None:
    payload = TinyPolicy(hidden=9).publish_weights(0, 1)
    with member(TinyPolicy(), strategy) as policy:
        if strategy == "Shared":
            with pytest.raises(WeightsError, match=r"'actor\.0\.bias'"):
                receive(policy, payload)
        else:
            ack = receive(policy, payload)
            assert ack.digest is None
            assert "'actor.0.bias' of member eval-0 is float32[8]; published is float32[9]" in ack.error
            with pytest.raises(WeightsError, match=r"could not apply version 0: .*'actor\.0\.bias'"), policy.acting(0):
                pass


# --- the daemon ---


def test_notification_without_news_changes_nothing() -> None:
    with member(TinyPolicy(), "Double") as policy:
        policy.notify_update_weights()
        assert policy.wait_for_weight_update_done(0) is True


@BUFFERED
def test_a_version_waits_for_the_safe_point(strategy: str) -> None:
    first, second = versions(2)
    with member(TinyPolicy(), strategy) as policy:
        receive(policy, first)
        with policy.acting(0):
            stage(policy, second)
            policy.notify_update_weights()
            assert policy.wait_for_weight_update_done(0.1) is False
            assert policy.live_digest() == first.digest
        assert policy.wait_for_weight_update_done(WAIT) is True
        assert policy.live_digest() == second.digest


def test_a_version_published_during_an_application_is_not_lost() -> None:
    first, second, third = versions(3)
    with member(SlowPolicy(), "Double") as policy:
        assert isinstance(policy, SlowPolicy)
        stage(policy, first)
        policy.notify_update_weights()
        assert policy.entered.wait(WAIT)
        stage(policy, second)  # while the first one is being applied
        policy.notify_update_weights()
        assert policy.wait_for_weight_update_done(0.05) is False
        policy.go_on.set()
        assert policy.wait_for_weight_update_done(WAIT) is True
        assert policy.live_digest() == second.digest
        assert receive(policy, third).digest == third.digest


def test_the_newest_of_several_waiting_versions_wins() -> None:
    payloads = versions(6)
    with member(TinyPolicy(), "Double") as policy:
        receive(policy, payloads[0])
        with policy.acting(0):
            for payload in payloads[1:]:
                stage(policy, payload)
                policy.notify_update_weights()
        assert policy.wait_for_weight_update_done(WAIT) is True
        assert policy.acknowledge(1, WAIT).version == 5
        assert policy.live_digest() == payloads[5].digest


def test_a_failed_application_is_a_failed_acknowledgement_and_raises_in_wait() -> None:
    first, second = versions(2)
    with member(SlowPolicy(), "Double") as policy:
        assert isinstance(policy, SlowPolicy)
        policy.go_on.set()
        policy.fail = ValueError("no room")
        ack = receive(policy, first)
        assert ack.digest is None
        assert ack.error is not None
        assert ack.error.startswith("ValueError: no room (")
        assert "in update_weights_from_buffer)" in ack.error
        for _ in range(2):  # until a later one succeeds
            with pytest.raises(WeightsError, match="eval-0 could not apply version 0: ValueError: no room") as caught:
                policy.wait_for_weight_update_done(WAIT)
            assert caught.value.__cause__ is policy.fail
        with pytest.raises(WeightsError, match="could not apply version 0"), policy.acting(0):
            pass
        policy.fail = None
        assert receive(policy, second).digest == second.digest
        assert policy.wait_for_weight_update_done(WAIT) is True
        policy.act(1)


def test_under_none_a_failed_application_raises_at_once() -> None:
    first, second = versions(2)
    with member(SlowPolicy(), "None") as policy:
        assert isinstance(policy, SlowPolicy)
        policy.go_on.set()
        policy.fail = ValueError("no room")
        with pytest.raises(WeightsError, match="could not apply version 0: ValueError: no room"):
            policy.stage_weights(first)
        ack = receive(policy, second)
        assert (ack.digest, ack.version) == (None, 1)


@pytest.mark.parametrize("strategy", ["None", "Double"])
def test_a_policy_that_copies_by_itself_works_and_keeps_its_own_memory(strategy: str) -> None:
    with member(CopyingPolicy(), strategy) as policy:
        address = policy.log_std.data_ptr()
        for payload in versions(3):
            assert receive(policy, payload).digest == payload.digest
        assert policy.log_std.data_ptr() == address


def test_a_policy_that_keeps_tensors_of_a_lent_buffer_is_told() -> None:
    policy = CopyingPolicy()
    policy.assign = True
    with member(policy, "None"):
        assert "keeps tensors of the buffer" in receive(policy, versions(1)[0]).error


@pytest.mark.parametrize("kind", [TinyPolicy, CopyingPolicy])
def test_hammer_no_notified_version_is_ever_lost(kind: type[TinyPolicy]) -> None:
    """Writers, actors and waiters at once; whoever waits after notifying version v finds at least v live."""
    payloads = versions(300)
    by_root = {payload.digest.root: payload.version for payload in payloads}
    errors: list[BaseException] = []
    acted: list[int] = []
    refused: list[str] = []
    done = threading.Event()

    def guarded(body: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                body()
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        return run

    with member(kind(), "Double") as policy:
        receive(policy, payloads[0])

        def act() -> None:
            while not done.is_set():
                version = policy.acknowledge(0, WAIT).version
                try:
                    with policy.acting(version):
                        before = digest_module(policy)
                        assert by_root[before.root] == version
                        policy(torch.ones(1, 4))
                        assert digest_module(policy) == before  # never changed while acting
                        acted.append(version)
                except WeightsError as error:
                    refused.append(str(error))  # a newer one came in between

        def publish() -> None:
            for payload in payloads[1:]:
                policy.stage_weights(payload)
                policy.notify_update_weights()
                if payload.version % 3 == 0:
                    assert policy.wait_for_weight_update_done(WAIT)
                    applied = policy._weights.applied
                    assert applied is not None
                    assert applied.key[1] >= payload.version
            assert policy.wait_for_weight_update_done(WAIT)

        threads = [threading.Thread(target=guarded(body)) for body in (act, act, publish)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert errors == []
        assert acted
        assert all("cannot act with version" in message for message in refused)
        assert policy.live_digest() == payloads[-1].digest


@BUFFERED
def test_the_daemon_ends_with_the_buffer(strategy: str) -> None:
    with member(TinyPolicy(), strategy) as policy:
        receive(policy, versions(1)[0])
        daemon = policy._weights.daemon
        assert daemon is not None
        assert daemon.daemon
        assert daemon.is_alive()
    assert not daemon.is_alive()
    policy.close_weight_buffer()  # again: harmless
    with pytest.raises(WeightsError, match="closed"), policy.acting(0):
        pass


def test_a_policy_that_nobody_closed_can_be_collected_with_its_daemon() -> None:
    policy = TinyPolicy()
    policy.init_weight_buffer("Double", member="eval-0")
    receive(policy, versions(1)[0])
    daemon, ref = policy._weights.daemon, weakref.ref(policy)
    assert daemon is not None
    del policy
    end = time.monotonic() + WAIT
    while (daemon.is_alive() or ref() is not None) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert ref() is None
    assert not daemon.is_alive()


def test_closing_wakes_a_waiter_and_does_not_wait_for_its_own_fragment() -> None:
    first, second = versions(2)
    with member(TinyPolicy(), "Double") as policy:
        receive(policy, first)
        with policy.acting(0):
            stage(policy, second)
            policy.notify_update_weights()
            threading.Timer(0.1, policy.close_weight_buffer).start()
            with pytest.raises(WeightsError, match="closed during a weight update"):
                policy.wait_for_weight_update_done(WAIT)
            policy.close_weight_buffer()


def test_a_buffer_can_be_set_up_anew_and_versions_still_never_fall() -> None:
    first, second, third = versions(3)
    policy = TinyPolicy()
    with member(policy, "Shared"):
        receive(policy, second)
        with member(policy, "Double", "eval-7"):
            with pytest.raises(WeightsError, match="no version yet"), policy.acting(1):
                pass
            with pytest.raises(WeightsError, match="after version 1"):
                receive(policy, first)
            assert receive(policy, third).member == "eval-7"


# --- acknowledging and acting ---


@ALL
def test_an_acknowledgement_that_does_not_come_names_the_member(strategy: str) -> None:
    late = pytest.raises(MemberDeadlineExceeded, match=r"version 1: no answer from eval-4 within 0.05 s")
    with member(TinyPolicy(), strategy, "eval-4") as policy, late:
        policy.acknowledge(1, 0.05)


@ALL
def test_a_member_that_acts_too_long_misses_the_deadline(strategy: str) -> None:
    first, second = versions(2)
    with member(TinyPolicy(), strategy) as policy:
        receive(policy, first)
        errors: list[BaseException] = []

        def publish() -> None:
            try:
                if strategy == "Shared":
                    policy.receive_weight_slot(policy.write_weight_slot(second, 1), 0.1)
                else:
                    policy.receive_weights(second, 0.1)
            except BaseException as error:
                errors.append(error)

        with policy.acting(0):
            thread = threading.Thread(target=publish)
            thread.start()
            thread.join(WAIT)
            assert policy.live_digest() == first.digest
        assert [type(error) for error in errors] == [MemberDeadlineExceeded]


@ALL
def test_a_member_acts_only_with_the_version_that_it_acknowledged(strategy: str) -> None:
    first, second = versions(2)
    policy = TinyPolicy()
    with pytest.raises(WeightsError, match="not initialised"), policy.acting(0):
        pass
    with member(policy, strategy):
        with pytest.raises(WeightsError, match="no version yet"), policy.acting(0):
            pass
        receive(policy, first)
        policy.act(0)
        with pytest.raises(WeightsError, match="cannot act with version 1: it runs version 0"), policy.acting(1):
            pass
        stage(policy, second)
        policy.notify_update_weights()
        policy.wait_for_weight_update_done(WAIT)
        with pytest.raises(WeightsError, match="before it has acknowledged it"), policy.acting(1):
            pass
        policy.acknowledge(1, WAIT)
        policy.act(1)
        with pytest.raises(WeightsError, match="cannot act with version 0"), policy.acting(0):
            pass


def test_acting_leases_the_slot_once_and_returns_it_after_an_error_too() -> None:
    with member(TinyPolicy(), "Shared", "eval-2") as policy:
        writer = policy._weights.writer
        assert writer is not None
        receive(policy, versions(1)[0])

        def leases() -> list[str]:
            return ["-".join(p.name.split("-")[4:]) for p in Path(writer.handle.directory).glob("lease-*")]

        with policy.acting(0), policy.acting(0):
            assert leases() == ["eval-2"]
        assert leases() == []
        with pytest.raises(ZeroDivisionError), policy.acting(0):
            1 / len([lease for lease in leases() if lease != "eval-2"])  # fails while the lease is held
        assert leases() == []
        policy.act(0)


def test_acting_in_one_thread_keeps_others_out() -> None:
    with member(TinyPolicy(), "Double") as policy:
        receive(policy, versions(1)[0])
        inside, order = threading.Event(), []

        def other() -> None:
            inside.wait(WAIT)
            with policy.acting(0):
                order.append("second")

        thread = threading.Thread(target=other)
        thread.start()
        with policy.acting(0):
            inside.set()
            time.sleep(0.05)
            order.append("first")
        thread.join(WAIT)
        assert order == ["first", "second"]


# --- who may use what ---


class Overrider(TinyPolicy):
    def recv_weights_local(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Of the original's interface."""


class Counting(TinyPolicy):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return super().forward(observation)


def test_shared_refuses_by_name_what_cannot_run_read_only() -> None:
    for policy, message in (
        (CopyingPolicy(), "CopyingPolicy overrides update_weights_from_buffer, .* Double"),
        (Overrider(), "Overrider overrides recv_weights_local"),
        (Counting(), "forward pass of Counting writes count, .* Double"),
    ):
        with pytest.raises(WeightsError, match=message), member(policy, "Shared"):
            pass
        policy.close_weight_buffer()
    with member(Counting(), "Double") as counting:
        receive(counting, versions(1)[0])
        counting.act(0)


def test_an_override_that_would_never_be_called_is_refused_under_every_strategy() -> None:
    for strategy in ("None", "Double"):
        with pytest.raises(WeightsError, match="recv_weights_local, which is never called"):
            Overrider().init_weight_buffer(strategy, member="eval-0")


def test_shared_needs_slots_and_a_probe() -> None:
    policy = TinyPolicy()
    with pytest.raises(WeightsError, match="needs the node's slots and a probe"):
        policy.init_weight_buffer("Shared", None, "eval-0")
    with pytest.raises(WeightsError, match="needs the node's slots and a probe"):
        WeightBufferMixin.init_weight_buffer(policy, "Shared", policy.open_weight_slots(), "eval-0")
    policy.close_weight_buffer()


def test_a_probe_that_raises_says_so() -> None:
    policy = TinyPolicy()
    with pytest.raises(WeightsError, match=r"probe forward of TinyPolicy.*ZeroDivisionError.*Double"):
        policy.init_weight_buffer("Shared", policy.open_weight_slots(), "eval-0", lambda _: 1 // 0)  # type: ignore[arg-type]
    policy.close_weight_buffer()


def test_unknown_strategies_are_refused() -> None:
    with pytest.raises(WeightsError, match="'Sharded' is not one of None, Double, Shared"):
        TinyPolicy().init_weight_buffer("Sharded")


def test_calls_of_another_strategy_are_refused() -> None:
    payload = versions(1)[0]
    with member(TinyPolicy(), "Shared") as shared, pytest.raises(WeightsError, match=r"is Shared: .* None or Double"):
        shared.receive_weights(payload, WAIT)
    policy = TinyPolicy()
    with pytest.raises(WeightsError, match="open_weight_slots comes first"):
        policy.write_weight_slot(payload, 0)
    with pytest.raises(WeightsError, match="inside update_weights_from_buffer only"):
        policy.get_weight_buffer()
