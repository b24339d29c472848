"""One published version of the weights, as it travels to members."""

from __future__ import annotations

from dataclasses import dataclass

from rlightning.weights.digest import StateDigest
from rlightning.weights.layout import ByteArray, StateLayout


@dataclass(frozen=True, eq=False)
class WeightPayload:
    """All persistent tensors of the learner at one version.

    Picklable; the bytes travel out of band and without a copy through Ray, and arrive read-only there.

    Attributes:
        attempt: which life of the driver published it; versions are compared within and ordered across attempts.
        version: counts up from publication to publication.
        layout: where each tensor lies in ``data``.
        data: uint8 ``(layout.nbytes,)``; never written after publication.
        digest: of the learner's live tensors, taken when it published (not of ``data``).
    """

    attempt: int
    version: int
    layout: StateLayout
    data: ByteArray
    digest: StateDigest


@dataclass(frozen=True)
class Acknowledgement:
    """What a member runs, by its own account.

    Attributes:
        member: its name.
        version: the version whose tensors it runs (the one asked for, or a newer one).
        digest: of its live tensors, or None if it could not apply the version.
        seconds: from the arrival of the version at the member to this answer.
        error: why it could not apply the version, else None.
    """

    member: str
    version: int
    digest: StateDigest | None
    seconds: float
    error: str | None = None
