"""Joining the group of train members."""

from __future__ import annotations

import subprocess
import sys

ALONE = """
from torch.distributed import TCPStore
from rlightning.errors import MemberLost
from rlightning.policy.train_group import TrainGroupMixin

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
member = TrainGroupMixin()
try:
    member.join_process_group(0, 2, "127.0.0.1", store.port, 1, "gloo", 1.0)
except MemberLost as lost:
    print("lost:", lost)
"""


def test_a_member_that_does_not_join_is_lost_and_no_error_of_the_others() -> None:
    # In a process of its own: torch keeps one default group per process, and a half-made one would stay.
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120, check=True)
    assert "lost: member train-1 was lost during joining the train group: train-0 did not meet them" in done.stdout
    assert "(spec.deadlines.collectiveSeconds)" in done.stdout
