"""The proof that every member runs the learner's weights, made anew from what members and learner reported.

Each eval member computes the digest of the tensors that it runs; the learner that of what it published. They are
compared here: the driver's own counts (``verified``) are not used, so that they cannot be wrong without being noticed.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlightning.api.models import MemberStatus, PolicyGroupStatus, WeightsStatus
from rlightning_operator.reconcile.conditions import Status
from rlightning_operator.reconcile.snapshot import Note


@dataclass(frozen=True)
class Proof:
    """What the condition WeightsConsistent says, and ``status.weights``.

    Attributes:
        status: True, False or Unknown.
        reason, message: of the condition.
        weights: of the status; None as long as nothing was published.
        eval_replicas: eval members that reported.
        notes: about members that nobody asked for.
    """

    status: Status
    reason: str
    message: str
    weights: WeightsStatus | None
    eval_replicas: int | None
    notes: tuple[Note, ...] = ()


def proof(
    report: PolicyGroupStatus | None, train_replicas: int, eval_replicas: int, before: WeightsStatus | None
) -> Proof:
    """Compare the digests of one attempt's report.

    Args:
        report: of the current attempt; None while its driver has not reported.
        train_replicas: wanted train members. The first is the learner; one that reports a digest must agree.
        eval_replicas: wanted eval members. Each has to prove what it runs.
        before: ``status.weights`` as stored; versions that were proved stay proved.
    """
    evals = [f"eval-{i}" for i in range(eval_replicas)]
    trains = [f"train-{i}" for i in range(train_replicas)]
    ours, foreign = _sorted_out(report, evals, trains)
    notes = tuple(
        Note(
            "Warning",
            "ForeignMember",
            f"The report holds {'members' if len(foreign) > 1 else 'member'} {', '.join(foreign[:5])}, which this job "
            f"does not have (train-0 to train-{train_replicas - 1}, eval-0 to eval-{eval_replicas - 1}); ignored.",
        )
        for _ in foreign[:1]
    )
    reported = sum(name in ours for name in evals) if report is not None and ours else None
    learner: dict[int, str] = {v.version: v.learner_digest for v in report.versions} if report is not None else {}
    if report is None or report.version is None or report.version not in learner:
        # Nothing runs yet: which version was last and proved stays, how many members have it does not.
        kept = before.model_copy(update={"consistent_members": None}) if before is not None else None
        text = "No version of the weights was published yet in this attempt."
        return Proof("Unknown", "NothingPublished", text, kept, reported, notes)

    differing = [d for name in (*trains, *evals) if (d := _difference(ours.get(name), learner))]
    unproved = [name for name in evals if (m := ours.get(name)) is None or m.digest is None or m.version not in learner]
    digest = learner[report.version]
    # For this very version: an equal digest of another one proves nothing about what the member runs now.
    proved = (report.version, digest)
    same = sum((m := ours.get(name)) is not None and (m.version, m.digest) == proved for name in evals)
    verified = before.last_verified_version if before is not None else None
    if same == len(evals) and not differing:
        verified = report.version
    weights = WeightsStatus(
        version=report.version,
        digest=digest,
        consistent_members=f"{same}/{len(evals)}",
        last_verified_version=verified,
    )
    status: Status
    if differing:
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        status, reason, text = "False", "DigestsDiffer", f"{differing[0]}{more}."
    elif unproved:
        some = ", ".join(unproved[:5]) + (f" and {len(unproved) - 5} more" if len(unproved) > 5 else "")
        status, reason, text = "Unknown", "ProofsMissing", f"No digest was reported yet by {some}."
    else:
        # The version is in status.weights; here it would be a new sentence each time.
        status, reason = "True", "DigestsAgree"
        text = f"The live weights of all {len(evals)} eval members have the learner's digest."
    return Proof(status, reason, text, weights, reported, notes)


def _sorted_out(
    report: PolicyGroupStatus | None, evals: list[str], trains: list[str]
) -> tuple[dict[str, MemberStatus], list[str]]:
    """The job's members by name, and the names of others (one name twice, or in the wrong role, is another too)."""
    roles = dict.fromkeys(evals, "Eval") | dict.fromkeys(trains, "Train")
    ours: dict[str, MemberStatus] = {}
    foreign: list[str] = []
    for member in report.members if report is not None else ():
        if roles.get(member.name) == member.role and member.name not in ours:
            ours[member.name] = member
        else:
            foreign.append(member.name)
    return ours, sorted(set(foreign))


def _difference(member: MemberStatus | None, learner: dict[int, str]) -> str | None:
    if member is None or member.version is None or member.digest is None:
        return None
    expected = learner.get(member.version)
    if expected is None or expected == member.digest:
        return None
    return (
        f"Member {member.name} runs {member.digest} as version {member.version}, and the learner published {expected}"
    )
