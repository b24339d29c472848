"""Every error that RLightning raises on purpose.

Each carries a sentence for the user: what is wrong, with which value, where, and what to do. They cross process
boundaries (Ray), so each can be rebuilt from its ``args``.
"""

from __future__ import annotations

from collections.abc import Sequence


class RLightningError(Exception):
    """Base of all errors that are explained to the user; anything else is a bug or the user's own exception."""


class ManifestError(RLightningError):
    """The manifest cannot be used; the message lists every problem."""


class EnvironmentNotFound(RLightningError):
    """No environment of that id is registered."""


class UnsupportedSpace(RLightningError):
    """The policy cannot act in this observation or action space."""


class EnvironmentFault(RLightningError):
    """An environment returned something that cannot be learned from (NaN, wrong shape) or raised."""


class CheckpointError(RLightningError):
    """A checkpoint cannot be written, read or trusted."""


class RunFolderError(RLightningError):
    """The run folder cannot be created, written or locked."""


class RunFolderInUse(RunFolderError):
    """Another driver holds the run folder."""


class WeightsError(RLightningError):
    """The weight plane refused or failed: buffer strategy, slot, lease or layout."""


class WeightMismatch(RLightningError):
    """A member's live tensors differ from the learner's.

    Args:
        version: the published version.
        first_mismatch: ``"<member>: <tensor>"`` of the first difference.
    """

    def __init__(self, version: int, first_mismatch: str) -> None:
        super().__init__(version, first_mismatch)
        self.version, self.first_mismatch = version, first_mismatch

    def __str__(self) -> str:
        return f"version {self.version}: the live weights of {self.first_mismatch} differ from the learner's"


class NonFiniteLoss(RLightningError):
    """The loss or a gradient stopped being finite; the last good checkpoint is untouched."""

    def __init__(self, iteration: int, what: str) -> None:
        super().__init__(iteration, what)
        self.iteration, self.what = iteration, what

    def __str__(self) -> str:
        return f"iteration {self.iteration}: {self.what}"


class Superseded(RLightningError):
    """A newer attempt has taken over, or the job is gone: this driver ends at once and writes nothing more."""


class StoppedEarly(RLightningError):
    """Asked to stop before training began."""


class RayUnavailable(RLightningError):
    """Ray cannot be reached, or what it offered a moment ago is gone."""


class MemberDeadlineExceeded(RLightningError):
    """Members did not answer in time.

    Args:
        what: what they were asked to do.
        late: names of the members that had not answered.
        seconds: the deadline.
        field: the manifest field that sets it.
        detail: a further sentence: what else is known.
    """

    def __init__(self, what: str, late: Sequence[str], seconds: float, field: str, detail: str = "") -> None:
        super().__init__(what, tuple(late), seconds, field, detail)
        self.what, self.late, self.seconds, self.field, self.detail = what, tuple(late), seconds, field, detail

    def __str__(self) -> str:
        return (
            f"{self.what}: no answer from {', '.join(self.late)} within {self.seconds:g} s ({self.field}). "
            f"Its log says what it was doing; raise the deadline if the work is that slow. {self.detail}".rstrip()
        )


class MemberLost(RLightningError):
    """A member's process is gone; ``pod`` is the Kubernetes pod that it was in, if any."""

    def __init__(self, member: str, what: str, cause: str, pod: str = "") -> None:
        super().__init__(member, what, cause, pod)
        self.member, self.what, self.cause, self.pod = member, what, cause, pod

    def __str__(self) -> str:
        return f"member {self.member}{_in_pod(self.pod)} was lost during {self.what}: {self.cause}"


class MemberError(RLightningError):
    """A member raised: the user's code or ours, with the traceback from where it happened."""

    def __init__(self, member: str, what: str, error: str, remote_traceback: str, pod: str = "") -> None:
        super().__init__(member, what, error, remote_traceback, pod)
        self.member, self.what, self.error, self.pod = member, what, error, pod
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        who = f"member {self.member}{_in_pod(self.pod)}"
        return f"{who} raised in {self.what}: {self.error}\n{self.remote_traceback.rstrip()}"


def _in_pod(pod: str) -> str:
    return f" (pod {pod})" if pod else ""
