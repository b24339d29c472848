"""PolicyGroup's reference API on members of this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlightning.api.resolve import resolve
from rlightning.env import check_environment
from rlightning.errors import RLightningError, WeightsError
from rlightning.policy import PolicyGroup
from rlightning.policy.loading import policy_config
from rlightning.runtime.placement import open_group
from tests.support.jobs import job

SPEC = resolve(job(policyGroup={"train": {"replicas": 1}, "eval": {"replicas": 2}}).spec)


@pytest.fixture
def group() -> Iterator[PolicyGroup]:
    with open_group(SPEC, check_environment(SPEC.environment), "local") as made:
        made.start_versions(0, 1)
        yield made


def test_lists_return_what_was_given(group: PolicyGroup) -> None:
    assert [type(p).__name__ for p in group.train_list] == ["SimplePPOPolicy"]
    assert len(group.eval_list) == 2
    assert all(p.is_initialized() for p in (*group.train_list, *group.eval_list))
    assert group.placement_info == {"local": {"train": ["train-0"], "eval": ["eval-0", "eval-1"]}}


def test_members_differ_until_weights_are_synchronised_and_agree_afterwards(group: PolicyGroup) -> None:
    learner, actor = group.train_list[0], group.eval_list[1]
    assert learner.live_digest().root != actor.live_digest().root
    record = group.sync_weights()
    assert (record.version, record.verified, record.total, record.first_mismatch) == (0, 2, 2, None)
    assert learner.live_digest().root == actor.live_digest().root == record.digest
    assert group.verify_eval_weight_consistency()


def test_versions_count_up_and_name_their_parent(group: PolicyGroup) -> None:
    first = group.sync_weights()
    with torch.no_grad():
        group.train_list[0].get_parameter("actor.0.weight").add_(0.5)
    second = group.sync_weights()
    assert (first.version, second.version) == (0, 1)
    assert first.parent_digest is None and second.parent_digest == first.digest != second.digest


def test_a_sign_flip_passes_the_norms_and_not_the_digests(group: PolicyGroup) -> None:
    group.sync_weights()
    actor = group.eval_list[0]
    weight = actor.get_parameter("actor.0.weight")
    weight.data = -weight.detach()
    assert group.verify_eval_weight_consistency(), "L2 norms cannot see a sign"
    assert group.verify_weights().first_mismatch == "eval-0: actor.0.weight"


def test_a_member_that_has_not_acknowledged_a_version_does_not_act(group: PolicyGroup) -> None:
    group.host_shards(SPEC.environment, 4, 2, SPEC.seed)
    with pytest.raises(WeightsError):
        group.eval_list[0].rollout_fragment(0, 0, 4)
    group.sync_weights()
    assert group.eval_list[0].rollout_fragment(0, 0, 4).steps > 0
    with pytest.raises(WeightsError):
        group.eval_list[0].rollout_fragment(0, 1, 4)


def test_saved_weights_are_the_learners(group: PolicyGroup, tmp_path: Path) -> None:
    group.save_checkpoint(str(tmp_path / "weights.safetensors"))
    saved = load_file(tmp_path / "weights.safetensors")
    for name, parameter in group.train_list[0].named_parameters():
        assert torch.equal(saved[name], parameter)


def test_nccl_without_a_gpu_says_gloo(group: PolicyGroup) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(RLightningError, match="gloo"):
        group.init_comm_group()


def test_sharing_processes_between_roles_is_refused(group: PolicyGroup) -> None:
    with pytest.raises(RLightningError, match="is_colocated=True is not supported"):
        group.init_placement_info(is_colocated=True)


def test_data_for_another_number_of_policies_is_refused(group: PolicyGroup) -> None:
    with pytest.raises(RLightningError, match="2 entries for 1 train policies"):
        group.update_dataset([[], []])


def test_a_group_needs_both_roles(group: PolicyGroup) -> None:
    with pytest.raises(RLightningError, match="at least one eval policy"):
        PolicyGroup(group.train_list, [], policy_config(SPEC))


def test_timings_are_printed_per_member(group: PolicyGroup, capsys: pytest.CaptureFixture[str]) -> None:
    group.train_list[0]._time("train", 0.0)
    group.print_timing_summary(reset=True)
    assert "train-0: train: 1 calls" in capsys.readouterr().out
    group.print_timing_summary()
    assert capsys.readouterr().out == ""
