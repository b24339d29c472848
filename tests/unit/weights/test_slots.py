from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rlightning.errors import WeightsError
from rlightning.weights.digest import digest_module, digest_tensors
from rlightning.weights.layout import LayoutEntry, StateLayout
from rlightning.weights.payload import WeightPayload
from rlightning.weights.slots import SHM, ProcessIdentity, SlotReader, SlotWriter, sweep
from tests.unit.weights.policies import TinyPolicy

ROOT = Path(__file__).parents[3]


@pytest.fixture
def learner() -> TinyPolicy:
    return TinyPolicy()


@pytest.fixture
def writer(learner: TinyPolicy) -> Iterator[SlotWriter]:
    writer = SlotWriter(StateLayout.of(learner))
    yield writer
    writer.close()


def version(learner: TinyPolicy, number: int) -> WeightPayload:
    learner.learn()
    return learner.publish_weights(number, attempt=1)


def test_versions_alternate_between_two_slots_and_the_older_one_stays_whole(
    learner: TinyPolicy, writer: SlotWriter
) -> None:
    reader = SlotReader(writer.handle, "eval-0")
    payloads = [version(learner, v) for v in range(4)]
    written = [writer.write(payloads[0], 0)]
    for v in range(1, 4):
        written.append(writer.write(payloads[v], 0))
        for old in (v - 1, v):
            assert digest_tensors(reader.views(written[old])) == payloads[old].digest
    assert [(w.slot, w.generation) for w in written] == [(0, 1), (1, 1), (0, 2), (1, 2)]


def test_a_slot_written_again_is_noticed_by_its_generation(learner: TinyPolicy, writer: SlotWriter) -> None:
    reader = SlotReader(writer.handle, "eval-0")
    first = writer.write(version(learner, 0), 0)
    for v in (1, 2):
        writer.write(version(learner, v), 0)
    with pytest.raises(WeightsError, match=r"slot 0 was written again .* ran version 0"):
        reader.check(first)
    with pytest.raises(WeightsError, match="slot 0 was written again"):
        reader.views(first)
    with pytest.raises(WeightsError, match="cannot act with version 0"), reader.leased(first):
        pytest.fail("a stale version was leased")
    assert not list(Path(writer.handle.directory).glob("lease-*"))


def test_publishing_waits_for_a_lease_and_then_names_its_holder(learner: TinyPolicy, writer: SlotWriter) -> None:
    reader = SlotReader(writer.handle, "eval-3")
    payload = version(learner, 0)
    first = writer.write(payload, 0)
    with reader.leased(first):
        writer.write(version(learner, 1), 0)
        late, started = version(learner, 2), time.monotonic()
        with pytest.raises(WeightsError, match=rf"version 2 .* leased by eval-3 \(pid {os.getpid()}\) after 0.2 s"):
            writer.write(late, 0.2)
        assert time.monotonic() - started >= 0.2
        assert digest_tensors(reader.views(first)) == payload.digest  # untouched
    with reader.leased(first):  # the promise was taken back with the error
        pass
    assert writer.write(late, 0).generation == 2


def test_publishing_goes_on_as_soon_as_the_lease_is_returned(learner: TinyPolicy, writer: SlotWriter) -> None:
    reader = SlotReader(writer.handle, "eval-3")
    first = writer.write(version(learner, 0), 0)
    writer.write(version(learner, 1), 0)
    leased, over = threading.Event(), threading.Event()

    def fragment() -> None:
        with reader.leased(first):
            leased.set()
            over.wait(10)

    thread = threading.Thread(target=fragment)
    thread.start()
    leased.wait(10)
    threading.Timer(0.1, over.set).start()
    writer.write(version(learner, 2), 10)
    assert over.is_set()
    thread.join()


def test_no_lease_is_granted_on_a_slot_that_is_promised(learner: TinyPolicy, writer: SlotWriter) -> None:
    holder, second = SlotReader(writer.handle, "eval-0"), SlotReader(writer.handle, "eval-1")
    first = writer.write(version(learner, 0), 0)
    writer.write(version(learner, 1), 0)
    payload = version(learner, 2)
    with holder.leased(first):
        thread = threading.Thread(target=writer.write, args=(payload, 10))
        thread.start()
        end = time.monotonic() + 10
        refused = False
        while not refused and time.monotonic() < end:
            try:
                with second.leased(first):
                    pass
            except WeightsError as error:
                refused = "being given to a newer one" in str(error)
        assert refused
    thread.join(10)
    assert not thread.is_alive()


def test_a_reader_overtaken_in_spite_of_its_lease_finds_out(learner: TinyPolicy, writer: SlotWriter) -> None:
    reader = SlotReader(writer.handle, "eval-0")
    first = writer.write(version(learner, 0), 0)
    writer.write(version(learner, 1), 0)

    def fragment() -> None:
        with reader.leased(first):
            for lease in Path(writer.handle.directory).glob("lease-*"):
                lease.unlink()  # somebody tidied up
            writer.write(version(learner, 2), 0)

    with pytest.raises(WeightsError, match="written again"):
        fragment()


def test_leases_of_dead_processes_are_removed(learner: TinyPolicy, writer: SlotWriter) -> None:
    writer.write(version(learner, 0), 0)
    writer.write(version(learner, 1), 0)
    child = subprocess.Popen(["sleep", "60"])
    start = int(Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    (Path(writer.handle.directory) / f"lease-0-{child.pid}-{start}-eval-9").touch()
    with pytest.raises(WeightsError, match="eval-9"):
        writer.write(version(learner, 2), 0)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped: a zombie
    writer.write(version(learner, 3), 0)
    child.wait()
    assert not list(Path(writer.handle.directory).glob("lease-*"))


def test_a_reused_pid_is_not_the_same_process() -> None:
    own = ProcessIdentity.own()
    assert own.alive()
    assert not ProcessIdentity(own.pid, own.start + 1).alive()


def test_two_members_of_one_process_need_different_names(learner: TinyPolicy, writer: SlotWriter) -> None:
    one, two = SlotReader(writer.handle, "eval-0"), SlotReader(writer.handle, "eval-0")
    first = writer.write(version(learner, 0), 0)
    with one.leased(first), pytest.raises(WeightsError, match="'eval-0'"), two.leased(first):
        pytest.fail("leased twice")


def test_closing_removes_the_files_and_leaves_mapped_tensors_readable(learner: TinyPolicy) -> None:
    writer = SlotWriter(StateLayout.of(learner))
    payload = version(learner, 0)
    first = writer.write(payload, 0)
    views = SlotReader(writer.handle, "eval-0").views(first)
    writer.close()
    assert not Path(writer.handle.directory).exists()
    assert digest_tensors(views) == payload.digest
    with pytest.raises(WeightsError, match="writer is gone"):
        SlotReader(writer.handle, "eval-0")


def test_slots_live_in_shm_under_a_name_with_owner_and_are_closed_to_others(writer: SlotWriter) -> None:
    path, own = Path(writer.handle.directory), ProcessIdentity.own()
    assert path.parent == SHM
    assert path.name.startswith(f"rlightning-{os.getuid()}-")
    assert f"-{own.pid}-{own.start}-" in path.name
    assert path.stat().st_mode & 0o777 == 0o700
    assert sorted(p.name for p in path.iterdir()) == ["owner", "slot-0", "slot-1"]


def test_another_layout_is_refused_by_tensor(learner: TinyPolicy, writer: SlotWriter) -> None:
    with pytest.raises(WeightsError, match=r"'actor\.0\.bias'"):
        writer.write(TinyPolicy(hidden=9).publish_weights(0, 1), 0)


def test_a_shm_that_is_too_small_is_an_error_with_a_remedy() -> None:
    before = set(SHM.iterdir())
    huge = StateLayout((LayoutEntry("w", "uint8", (1 << 46,), 0, 1 << 46),), 1 << 46)
    with pytest.raises(WeightsError, match=r"cannot hold two weight slots of \d+ bytes .* Double"):
        SlotWriter(huge)
    assert set(SHM.iterdir()) == before


DOOMED = """
import faulthandler, sys, torch
from tests.unit.weights.policies import TinyPolicy

def bound():
    member = TinyPolicy(seed=1)
    slots = member.open_weight_slots()
    member.init_weight_buffer("Shared", slots, "eval-0")
    member.receive_weight_slot(member.write_weight_slot(TinyPolicy().publish_weights(0, 1), 0), 10)
    return member, slots.directory

faulthandler.disable()
member, _ = bound()
member.close_weight_buffer()
with torch.no_grad():
    member.get_parameter("actor.0.weight").add_(1)
print("written after closing", flush=True)
member, directory = bound()
print(directory, flush=True)
sys.stdin.readline()
with torch.no_grad():
    member.get_parameter("actor.0.weight").add_(1)
print("written while bound", flush=True)
"""


def test_writing_a_bound_tensor_kills_the_process_and_its_slots_are_swept_then_and_not_before(
    learner: TinyPolicy,
) -> None:
    command = [sys.executable, "-c", DOOMED]
    doomed = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert doomed.stdout is not None
    assert doomed.stdout.readline() == "written after closing\n"
    theirs = Path(doomed.stdout.readline().strip())
    assert theirs not in sweep()
    assert theirs.exists()  # the owner lives
    output, _ = doomed.communicate("go\n", timeout=60)
    assert (doomed.returncode, output) == (-signal.SIGSEGV, "")
    own = ProcessIdentity.own()
    lease = theirs / f"lease-1-{own.pid}-{own.start}-eval-7"
    lease.touch()
    assert theirs not in sweep()  # a live member still acts from them
    lease.unlink()
    learner.init_weight_buffer("None")  # every start sweeps
    learner.close_weight_buffer()
    assert not theirs.exists()


def test_folders_of_another_form_are_left_alone(tmp_path: Path) -> None:
    for name in (f"rlightning-{os.getuid()}-notes", f"rlightning-{os.getuid()}-1-x-2", "rlightning-other"):
        (tmp_path / name).mkdir()
    assert sweep(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3


def test_slots_of_another_pid_namespace_are_judged_by_their_lock(learner: TinyPolicy, tmp_path: Path) -> None:
    writer = SlotWriter(StateLayout.of(learner), tmp_path)
    path = Path(writer.handle.directory)
    parts = path.name.split("-")
    foreign = path.with_name("-".join([*parts[:2], "1", "999999", *parts[4:]]))  # a container that is gone, or not
    path.rename(foreign)
    assert sweep(tmp_path) == []  # too young to judge
    os.utime(foreign, (0, 0))
    assert sweep(tmp_path) == []  # locked: alive
    writer.close()
    assert foreign.exists()
    os.utime(foreign, (0, 0))
    assert sweep(tmp_path) == [foreign]


def test_large_weights_are_written_whole(tmp_path: Path) -> None:
    layer = torch.nn.Linear(1200, 1200)  # 5.8 MB: more than one chunk of the digest, more than one page
    layout = StateLayout.of(layer)
    writer = SlotWriter(layout)
    payload = WeightPayload(1, 0, layout, layout.pack(layer), digest_module(layer))
    written = writer.write(payload, 0)
    assert digest_tensors(SlotReader(writer.handle, "eval-0").views(written)) == payload.digest
    writer.close()


def test_payloads_that_arrive_read_only_can_be_written(learner: TinyPolicy, writer: SlotWriter) -> None:
    payload = version(learner, 0)
    frozen: np.ndarray = payload.data.copy()
    frozen.flags.writeable = False
    written = writer.write(WeightPayload(1, 0, payload.layout, frozen, payload.digest), 0)
    assert digest_tensors(SlotReader(writer.handle, "eval-0").views(written)) == payload.digest
