"""What the service answers with. Statuses are the manifests' own models, so that numbers are the stored ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from rlightning.api.models import (
    Manifest,
    MemberStatus,
    PolicyGroupStatus,
    RLJobStatus,
    VersionStatus,
)

Status = TypeVar("Status", RLJobStatus, PolicyGroupStatus)
UNREADABLE = "Parts of the stored status that this version of the service cannot read, and left out."


class SpecView(Manifest):
    """The spec in short. The whole of it is for `kubectl get`."""

    environment: str | None = Field(default=None, description="environment.id")
    num_envs: int | None = Field(default=None, description="environment.numEnvs")
    policy: str | None = Field(default=None, description="Which policy: the one member of spec.policy.")
    seed: int | None = None
    total_env_steps: int | None = Field(default=None, description="training.totalEnvSteps")
    train_replicas: int | None = Field(default=None, description="Wanted train members.")
    eval_replicas: int | None = Field(default=None, description="Wanted eval members.")
    suspend: bool | None = None


class JobView(Manifest):
    """One RLJob."""

    name: str
    namespace: str
    uid: str
    resource_version: str = Field(description="Changes with every change of the object.")
    generation: int | None = Field(default=None, description="Compare with status.observedGeneration.")
    creation_timestamp: str
    deletion_timestamp: str | None = None
    spec: SpecView
    status: RLJobStatus = Field(description="As the operator wrote it. What was not measured yet is absent.")
    unreadable: list[str] = Field(default=[], description=UNREADABLE)

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> JobView:
        """From the object as the API server holds it."""
        metadata, spec = stored["metadata"], stored.get("spec") or {}
        status, unreadable = readable(RLJobStatus, stored.get("status") or {})
        environment, roles = spec.get("environment") or {}, spec.get("policyGroup") or {}
        return cls(
            name=metadata["name"],
            namespace=metadata["namespace"],
            uid=metadata["uid"],
            resource_version=metadata["resourceVersion"],
            generation=metadata.get("generation"),
            creation_timestamp=metadata["creationTimestamp"],
            deletion_timestamp=metadata.get("deletionTimestamp"),
            spec=SpecView(
                environment=environment.get("id"),
                num_envs=environment.get("numEnvs"),
                policy=next(iter(spec.get("policy") or ()), None),
                seed=spec.get("seed"),
                total_env_steps=(spec.get("training") or {}).get("totalEnvSteps"),
                train_replicas=(roles.get("train") or {}).get("replicas"),
                eval_replicas=(roles.get("eval") or {}).get("replicas"),
                suspend=spec.get("suspend"),
            ),
            status=status,
            unreadable=unreadable,
        )


class JobsView(Manifest):
    """A page of RLJobs, in the order of their namespaces and names."""

    items: list[JobView]
    continue_: str | None = Field(
        default=None,
        serialization_alias="continue",
        description="Hand it back as the parameter `continue` for the next page.",
    )
    remaining_item_count: int | None = Field(
        default=None, description="How many follow, where the API server says so: an estimate."
    )


class MemberView(MemberStatus):
    """One policy actor, and what its proof is worth."""

    agrees: bool | None = Field(
        default=None,
        description="Whether the digest is the learner's at the member's version, compared by this service. Absent "
        "when the member has proved nothing yet, or its version is no longer among the reported ones.",
    )


class MembersView(Manifest):
    """The members of a job's PolicyGroup, as its driver reported them last."""

    job: str
    attempt: int | None = Field(default=None, description="That reported. Absent: nothing was reported yet.")
    version: int | None = Field(default=None, description="The last published one.")
    last_report_time: str | None = None
    items: list[MemberView]
    unreadable: list[str] = Field(default=[], description=UNREADABLE)

    @classmethod
    def of(cls, job: str, stored: Mapping[str, Any] | None) -> MembersView:
        """From the PolicyGroup, if there is one."""
        if not (stored and stored.get("status")):
            return cls(job=job, items=[], unreadable=[])
        status, unreadable = readable(PolicyGroupStatus, stored["status"], attempt=0)
        learner = {version.version: version.learner_digest for version in status.versions}
        return cls(
            job=job,
            attempt=status.attempt,
            version=status.version,
            last_report_time=status.progress.last_report_time if status.progress else None,
            items=[
                MemberView(**{**member.model_dump(exclude_unset=True), "agrees": _agrees(member, learner)})
                for member in status.members
            ],
            unreadable=unreadable,
        )


def _agrees(member: MemberStatus, learner: Mapping[int, str]) -> bool | None:
    if member.version is None or member.digest is None or member.version not in learner:
        return None
    return member.digest == learner[member.version]


class VersionsView(Manifest):
    """The last versions of the weights, oldest first, as the driver reported them."""

    job: str
    attempt: int | None = Field(default=None, description="That reported. Absent: nothing was reported yet.")
    items: list[VersionStatus]
    unreadable: list[str] = Field(default=[], description=UNREADABLE)

    @classmethod
    def of(cls, job: str, stored: Mapping[str, Any] | None) -> VersionsView:
        """From the PolicyGroup, if there is one."""
        if not (stored and stored.get("status")):
            return cls(job=job, items=[], unreadable=[])
        status, unreadable = readable(PolicyGroupStatus, stored["status"], attempt=0)
        return cls(job=job, attempt=status.attempt, items=status.versions, unreadable=unreadable)


def readable(model: type[Status], stored: Mapping[str, Any], **required: Any) -> tuple[Status, list[str]]:
    """A stored status, without the fields that do not fit the model: a newer operator may have written them.

    One field that cannot be read must not hide the rest, nor the other jobs of a list. ``required`` fills in for such
    fields where the model cannot do without.
    """
    try:
        return model.from_stored(stored), []
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        bad = {str(e["loc"][0]) for e in errors if e["loc"]}
        rest = {key: value for key, value in stored.items() if key not in bad}
        words = [f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in errors]
        return model.from_stored({**required, **rest}), words
