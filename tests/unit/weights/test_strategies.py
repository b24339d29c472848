from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlightning.errors import MemberDeadlineExceeded, MemberLost, WeightMismatch, WeightsError
from rlightning.runtime.member import Done, Future
from rlightning.weights.digest import digest_module, persistent_tensors
from rlightning.weights.ledger import VersionRecord
from rlightning.weights.slots import HEADER_BYTES, SHM
from rlightning.weights.strategies import WeightStrategy, build_strategy
from tests.unit.weights.policies import LocalMember, TinyPolicy, flip_bit

ALL = pytest.mark.parametrize("name", ["None", "Double", "Shared"])


@contextmanager
def group(name: str, policies: list[TinyPolicy], nodes: list[str] | None = None) -> Iterator[WeightStrategy]:
    strategy = build_strategy(name, lease_seconds=0.2)
    nodes = nodes or ["local"] * len(policies)
    strategy.prepare([LocalMember(f"eval-{i}", p, n) for i, (p, n) in enumerate(zip(policies, nodes, strict=True))])
    try:
        yield strategy
    finally:
        strategy.close()


@ALL
def test_every_member_acknowledges_every_version_with_the_learners_digest(name: str) -> None:
    before = set(SHM.iterdir())
    learner, policies = TinyPolicy(), [TinyPolicy(seed) for seed in (1, 2, 3)]
    with group(name, policies) as strategy:
        for version in range(6):
            learner.learn()
            payload = learner.publish_weights(version, attempt=1)
            acks = strategy.publish(payload, 10)
            assert [ack.member for ack in acks] == ["eval-0", "eval-1", "eval-2"]
            record = VersionRecord.build(payload, acks, None)
            assert (record.verified, record.total, record.first_mismatch) == (3, 3, None)
            assert all(digest_module(policy) == payload.digest for policy in policies)
            want = learner(torch.ones(1, 4))
            assert all(torch.equal(policy.act(version), want) for policy in policies)
    assert {p for p in set(SHM.iterdir()) - before if f"-{os.getpid()}-" in p.name} == set()


@ALL
def test_a_flipped_bit_of_a_live_tensor_is_named_by_the_next_verification(name: str) -> None:
    learner, policies = TinyPolicy(), [TinyPolicy(seed) for seed in (1, 2)]
    with group(name, policies) as strategy:
        payload = learner.publish_weights(0, attempt=1)
        strategy.publish(payload, 10)
        for tensor in persistent_tensors(learner):
            flipped = flip_live(policies[1], tensor)
            acks = [policy.acknowledge(0, 10) for policy in policies]
            record = VersionRecord.build(payload, acks, None)
            first = 0 if name == "Shared" else 1  # members that share a slot share the damage
            assert record.first_mismatch == f"eval-{first}: {tensor}"
            assert record.verified == first
            with pytest.raises(WeightMismatch, match=tensor.replace(".", r"\.")):
                record.require_consistent()
            again = strategy.publish(payload, 10)  # resynchronises
            assert VersionRecord.build(payload, again, None).consistent
            del flipped


def flip_live(policy: TinyPolicy, name: str) -> Any:
    """Flip a bit of what the forward pass reads; in a slot, through a writable mapping of its own."""
    tensor = persistent_tensors(policy)[name]
    reader, applied = policy._weights.reader, policy._weights.applied
    if reader is None or applied is None or applied.slot is None:
        return flip_bit(tensor)
    start, _ = reader.address_range(applied.slot.slot)
    path = next(p for p in slots_of(policy) if p.name == f"slot-{applied.slot.slot}")
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[tensor.data_ptr() - start] ^= 1
    return None


def slots_of(policy: TinyPolicy) -> list[Path]:
    reader = policy._weights.reader
    assert reader is not None
    return list(reader._path.glob("slot-*"))


def test_members_of_one_node_share_a_slot_and_other_nodes_have_their_own() -> None:
    learner, policies = TinyPolicy(), [TinyPolicy(seed) for seed in range(3)]
    with group("Shared", policies, ["a", "b", "a"]) as strategy:
        strategy.publish(learner.publish_weights(0, 1), 10)
        folders = [slots_of(policy)[0].parent for policy in policies]
        assert folders[0] == folders[2] != folders[1]
        for policy in policies:
            reader = policy._weights.reader
            assert reader is not None
            start, end = reader.address_range(0)
            assert all(start + HEADER_BYTES <= t.data_ptr() < end for t in persistent_tensors(policy).values())
        assert not any(start <= t.data_ptr() < end for t in persistent_tensors(learner).values())


def test_shared_publishing_waits_for_a_lease_and_names_the_holder() -> None:
    learner, policies = TinyPolicy(), [TinyPolicy(seed) for seed in (1, 2)]
    with group("Shared", policies) as strategy:
        strategy.publish(learner.publish_weights(0, 1), 10)
        acting, over = threading.Event(), threading.Event()

        def fragment() -> None:
            with policies[1].acting(0):
                acting.set()
                over.wait(20)

        thread = threading.Thread(target=fragment)
        thread.start()
        acting.wait(20)
        with pytest.raises(MemberDeadlineExceeded, match="eval-1"):
            strategy.publish(learner.publish_weights(1, 1), 1)  # stored in the free slot; eval-1 cannot bind it yet
        assert policies[0].act(1) is not None
        with pytest.raises(WeightsError, match=rf"leased by eval-1 \(pid {os.getpid()}\)"):
            strategy.publish(learner.publish_weights(2, 1), 1)
        over.set()
        thread.join(20)
        payload = learner.publish_weights(3, 1)
        assert VersionRecord.build(payload, strategy.publish(payload, 10), None).consistent


@ALL
def test_members_that_act_all_the_time_act_with_whole_versions_only(name: str) -> None:
    learner, policies = TinyPolicy(), [TinyPolicy(seed) for seed in (1, 2)]
    published: dict[int, str] = {}
    errors: list[BaseException] = []
    acted = [0, 0]
    done = threading.Event()

    def act(index: int) -> None:
        try:
            while not done.is_set():
                version = len(published) - 1
                try:
                    with policies[index].acting(version):
                        assert digest_module(policies[index]).root == published[version]
                        policies[index](torch.ones(1, 4))
                        assert digest_module(policies[index]).root == published[version]
                        acted[index] += 1
                except WeightsError as error:
                    if "cannot act with version" not in str(error):  # a newer one came in between
                        raise
        except BaseException as error:
            errors.append(error)

    with group(name, policies) as strategy:
        threads = [threading.Thread(target=act, args=(index,)) for index in range(2)]
        for version in range(80):
            learner.learn()
            payload = learner.publish_weights(version, 1)
            published[version] = payload.digest.root
            assert VersionRecord.build(payload, strategy.publish(payload, 20), None).consistent
            if version == 0:
                for thread in threads:
                    thread.start()
        done.set()
        for thread in threads:
            thread.join(20)
    assert errors == []
    assert min(acted) > 0


@ALL
def test_versions_never_fall(name: str) -> None:
    learner = TinyPolicy()
    with group(name, [TinyPolicy(1)]) as strategy:
        old = learner.publish_weights(0, 1)
        strategy.publish(learner.publish_weights(1, 1), 10)
        with pytest.raises(WeightsError, match="version 0 of attempt 1 cannot be published after version 1"):
            strategy.publish(old, 10)
        strategy.publish(learner.publish_weights(0, 2), 10)


@pytest.mark.parametrize("name", ["None", "Double"])
def test_a_member_with_other_tensors_is_named(name: str) -> None:
    wider = TinyPolicy(1)
    wider.register_buffer("zeta", torch.zeros(1))
    with group(name, [TinyPolicy(1), wider]) as strategy:
        payload = TinyPolicy().publish_weights(0, 1)
        record = VersionRecord.build(payload, strategy.publish(payload, 10), None)
        assert (record.verified, record.total) == (1, 2)
        with pytest.raises(WeightsError, match=r"member eval-1 .*'zeta'"):
            record.require_consistent()


def test_shared_refuses_a_member_with_other_tensors_when_it_is_set_up() -> None:
    wider = TinyPolicy(1)
    wider.register_buffer("zeta", torch.zeros(1))
    with pytest.raises(WeightsError, match="member eval-1 has tensor 'zeta'"), group("Shared", [TinyPolicy(1), wider]):
        pass


class Never:
    """A future that nobody answers."""

    def result(self, timeout: float | None = None) -> Any:
        raise TimeoutError

    def done(self) -> bool:
        return False


class Silent(LocalMember):
    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return Never() if method.startswith("receive") else super().call(method, *args, **kwargs)


class Gone(LocalMember):
    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        if method.startswith(("receive", "close")):
            self.policy.close_weight_buffer()
            return Done(error=MemberLost(self.name, method, "killed"))
        return super().call(method, *args, **kwargs)


@ALL
def test_silent_members_are_named_and_lost_ones_reported(name: str) -> None:
    for kind, error, message in (
        (Silent, MemberDeadlineExceeded, "version 0: no answer from eval-1 within 5 s .*acknowledgementSeconds"),
        (Gone, MemberLost, "member eval-1 was lost"),
    ):
        strategy = build_strategy(name, 1)
        strategy.prepare([LocalMember("eval-0", TinyPolicy(1)), kind("eval-1", TinyPolicy(2))])
        with pytest.raises(error, match=message):
            strategy.publish(TinyPolicy().publish_weights(0, 1), 5)
        strategy.close()


@ALL
def test_members_can_be_replaced_between_versions(name: str) -> None:
    learner, old, new = TinyPolicy(), TinyPolicy(1), TinyPolicy(2)
    with group(name, [old]) as strategy:
        strategy.publish(learner.publish_weights(0, 1), 10)
        old.close_weight_buffer()
        strategy.prepare([LocalMember("eval-0", new)])
        payload = learner.publish_weights(1, 1)
        assert VersionRecord.build(payload, strategy.publish(payload, 10), None).consistent


def test_unknown_strategies_are_refused() -> None:
    with pytest.raises(WeightsError, match="'Sharded' is not one of None, Double, Shared"):
        build_strategy("Sharded", 1)


@pytest.mark.ray
def test_every_strategy_works_over_ray_actors() -> None:
    import ray

    from rlightning.runtime.ray_members import RayMember

    environment = {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}}

    class Actor(TinyPolicy):
        def member_call(self, method: str, *args: Any, **kwargs: Any) -> Any:
            return getattr(self, method)(*args, **kwargs)

        def inside_slot(self) -> bool:
            reader = self._weights.reader
            assert reader is not None
            spans = [reader.address_range(slot) for slot in (0, 1)]
            return all(any(a <= t.data_ptr() < b for a, b in spans) for t in persistent_tensors(self).values())

    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING, runtime_env=environment
    )
    try:
        handles = [ray.remote(num_cpus=0)(Actor).remote(seed) for seed in (1, 2)]
        members = [RayMember(f"eval-{i}", "eval", handle, node="one") for i, handle in enumerate(handles)]
        learner, version = TinyPolicy(), 0
        for name in ("None", "Double", "Shared"):
            strategy = build_strategy(name, 5)
            strategy.prepare(members)
            for _ in range(3):
                learner.learn()
                payload = learner.publish_weights(version, 1)
                record = VersionRecord.build(payload, strategy.publish(payload, 60), None)
                assert (record.verified, record.total, record.first_mismatch) == (2, 2, None)
                want = learner(torch.ones(1, 4))
                assert all(torch.equal(m.call("act", version).result(60), want) for m in members)
                version += 1
            if name == "Shared":
                assert all(member.call("inside_slot").result(60) for member in members)
            method = "write_weight_slot" if name == "Shared" else "receive_weights"
            with pytest.raises(WeightsError, match="versions never fall"):
                members[0].call(method, TinyPolicy().publish_weights(0, 1), 1.0).result(60)
            strategy.close()
        assert not [p for p in SHM.glob("rlightning-*") if any(str(pid) in p.name.split("-") for pid in pids(members))]
    finally:
        ray.shutdown()


def pids(members: list[Any]) -> list[int]:
    import ray

    return ray.get([member.handle.__ray_call__.remote(lambda _: os.getpid()) for member in members])
