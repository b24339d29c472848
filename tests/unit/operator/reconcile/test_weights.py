"""WeightsConsistent: made from the members' digests, never from the driver's count."""

from __future__ import annotations

from typing import Any

import pytest

from rlightning.api.models import PolicyGroupStatus, WeightsStatus
from rlightning_operator.reconcile.weights import Proof, proof

A, B = (f"xxh3-128:{letter * 32}" for letter in "ab")


def member(name: str, version: int | None = 5, digest: str | None = A) -> dict[str, Any]:
    role = "Train" if name.startswith("train") else "Eval"
    return {"name": name, "role": role, "state": "Ready", "version": version, "digest": digest}


def of(members: list[dict[str, Any]], evals: int = 2, before: WeightsStatus | None = None, **status: Any) -> Proof:
    versions = [
        {"version": 4, "learnerDigest": B, "verified": 0, "total": 0},
        {"version": 5, "learnerDigest": A, "verified": evals, "total": evals},
    ]
    stored = {"attempt": 1, "version": 5, "versions": versions, "members": members, **status}
    return proof(PolicyGroupStatus.from_stored(stored), 1, evals, before)


def test_all_agree() -> None:
    result = of([member("train-0", None, None), member("eval-0"), member("eval-1")])
    assert (result.status, result.reason) == ("True", "DigestsAgree")
    assert result.weights == WeightsStatus(version=5, digest=A, consistent_members="2/2", last_verified_version=5)
    assert result.eval_replicas == 2
    assert result.notes == ()


def test_one_wrong_digest_although_the_driver_says_that_all_are_verified() -> None:
    result = of([member("eval-0"), member("eval-1", digest=B)])
    assert (result.status, result.reason) == ("False", "DigestsDiffer")
    assert result.message == f"Member eval-1 runs {B} as version 5, and the learner published {A}."
    assert result.weights is not None
    assert result.weights.consistent_members == "1/2"
    assert result.weights.last_verified_version is None


def test_agreement_although_the_driver_counted_none() -> None:
    versions = [{"version": 5, "learnerDigest": A, "verified": 0, "total": 2, "firstMismatch": "eval-0: w"}]
    assert of([member("eval-0"), member("eval-1")], versions=versions).status == "True"


def test_a_train_member_that_reports_other_weights() -> None:
    result = of([member("train-0", digest=B), member("eval-0"), member("eval-1")])
    assert (result.status, result.message[:14]) == ("False", "Member train-0")
    assert result.weights is not None
    assert result.weights.consistent_members == "2/2"
    assert result.weights.last_verified_version is None


def test_a_member_that_is_a_version_behind_agrees_with_that_one_but_is_not_counted() -> None:
    before = WeightsStatus(version=4, digest=B, consistent_members="2/2", last_verified_version=4)
    result = of([member("eval-0"), member("eval-1", version=4, digest=B)], before=before)
    assert result.status == "True"
    assert result.weights is not None
    assert (result.weights.consistent_members, result.weights.last_verified_version) == ("1/2", 4)


@pytest.mark.parametrize("version", [None, 3, 4])
def test_the_right_digest_of_another_version_is_not_counted(version: int | None) -> None:
    before = WeightsStatus(version=4, digest=B, consistent_members="2/2", last_verified_version=4)
    result = of([member("eval-0"), member("eval-1", version=version)], before=before)
    assert result.status != "True"
    assert result.weights is not None
    assert (result.weights.consistent_members, result.weights.last_verified_version) == ("1/2", 4)


@pytest.mark.parametrize("late", [[], [member("eval-1", None, None)], [member("eval-1", version=3)]])
def test_a_member_without_proof_leaves_it_open(late: list[dict[str, Any]]) -> None:
    result = of([member("eval-0"), *late])
    assert (result.status, result.reason) == ("Unknown", "ProofsMissing")
    assert result.message == "No digest was reported yet by eval-1."


def test_a_wrong_digest_is_told_before_a_missing_one() -> None:
    assert of([member("eval-0", digest=B)]).reason == "DigestsDiffer"


def test_nothing_published_keeps_what_was_known_but_not_who_runs_it() -> None:
    before = WeightsStatus(version=4, digest=B, consistent_members="2/2", last_verified_version=4)
    for result in (proof(None, 1, 2, before), of([], before=before, version=None, versions=[])):
        assert (result.status, result.reason) == ("Unknown", "NothingPublished")
        assert result.weights == WeightsStatus(version=4, digest=B, last_verified_version=4)
        assert result.eval_replicas is None
    assert proof(None, 1, 2, None).weights is None


@pytest.mark.parametrize(
    "foreign",
    [
        member("eval-2"),
        member("someone"),
        {**member("eval-1"), "name": "train-7"},
        {**member("train-0"), "role": "Eval"},
        member("eval-0", digest=B),  # a second one of the name
    ],
)
def test_members_that_the_job_does_not_have_are_ignored_with_a_note(foreign: dict[str, Any]) -> None:
    result = of([member("eval-0"), member("eval-1"), foreign])
    assert (result.status, result.eval_replicas) == ("True", 2)
    (note,) = result.notes
    assert (note.type, note.reason) == ("Warning", "ForeignMember")
    assert f"holds member {foreign['name']}, which this job does not have" in note.message
