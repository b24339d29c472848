"""The snapshot, read: typed, and with the job's own objects told from those of others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from pydantic import ValidationError

from rlightning.api import rules
from rlightning.api.models import (
    Condition,
    ObjectMeta,
    PolicyGroupSpec,
    PolicyGroupStatus,
    RLJob,
    RLJobSpec,
    RLJobStatus,
)
from rlightning.api.resolve import training_spec
from rlightning_operator.builders import names
from rlightning_operator.builders.names import Identity
from rlightning_operator.reconcile.objects import (
    is_deleted,
    is_owned_by,
    is_true,
    labels_of,
    name_of,
    newest,
    uid_of,
)
from rlightning_operator.reconcile.snapshot import Object, Snapshot


class InvalidSpec(Exception):
    """The stored spec cannot be used; the text says which field, its value, and what to do."""


@dataclass(frozen=True)
class Observed:
    """One job, as the snapshot shows it.

    Attributes:
        snapshot: it was read from.
        identity: name, namespace and uid of the job.
        spec: what the user wants.
        stored: the status that the operator wrote last.
        group: the job's PolicyGroup, raw; None where there is none, or it is somebody else's.
        group_spec: its spec; None too where it cannot be read.
        group_status: its status, whichever attempt wrote it.
        unreadable: why the group's status was not understood; it is ignored then.
    """

    snapshot: Snapshot
    identity: Identity
    spec: RLJobSpec
    stored: RLJobStatus
    group: Object | None = None
    group_spec: PolicyGroupSpec | None = None
    group_status: PolicyGroupStatus | None = None
    unreadable: str | None = None

    @staticmethod
    def of(snapshot: Snapshot, stored: RLJobStatus) -> Observed:
        """Read the snapshot. Raises InvalidSpec."""
        identity = Identity.of(snapshot.job)
        spec = _read_spec(snapshot.job, stored)
        group = snapshot.group if snapshot.group and is_owned_by(snapshot.group, identity.uid) else None
        group_spec, group_status, unreadable = None, None, None
        if group is not None:
            try:
                group_spec = PolicyGroupSpec.from_stored(group["spec"])
            except ValidationError:
                group_spec = None  # of a future operator's; attempts go on from the raw number, see spec_attempt
            try:
                if group.get("status"):
                    group_status = PolicyGroupStatus.from_stored(group["status"])
            except ValidationError as error:
                unreadable = _first_error(error, "status")
        return Observed(snapshot, identity, spec, stored, group, group_spec, group_status, unreadable)

    # ------------------------------------------------------------------------------------------------------ attempts

    @property
    def spec_attempt(self) -> int:
        """The attempt that drivers are told; 0 without a PolicyGroup."""
        return int(self.group["spec"].get("attempt") or 0) if self.group is not None else 0

    def report(self, attempt: int | None) -> PolicyGroupStatus | None:
        """What the driver of this attempt says. Reports of any other are ignored."""
        status = self.group_status
        return status if status is not None and attempt is not None and status.attempt == attempt else None

    def shards(self) -> int:
        """As resolved at the first start; before that, what they would be now."""
        if self.stored.shards is not None:
            return self.stored.shards
        frozen = self.group_spec.training.environment.shards if self.group_spec is not None else None
        return frozen or self.spec.environment.shards or self.spec.policy_group.eval.replicas

    def default_image(self) -> tuple[str, str]:
        """Image and Ray's version of a job that begins now."""
        config = self.snapshot.config
        return self.spec.image or config.trainer_image, config.ray_version

    def image(self) -> tuple[str | None, str | None]:
        """Image and Ray's version of the attempts so far: a job that goes on goes on with them, whatever the default.

        From the RayCluster where the status does not say: an older operator had not that field.
        """
        if self.stored.image is not None:
            return self.stored.image, self.stored.ray_version
        cluster = self.cluster(self.stored.ray_cluster)
        if cluster is None:
            return None, None
        (container,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][:1]
        return container["image"], cluster["spec"]["rayVersion"]

    @property
    def untrained(self) -> bool:
        """Whether nothing was trained yet that another image could not go on with."""
        return self.stored.progress is None and self.stored.checkpoint is None

    @cached_property
    def training(self) -> RLJobSpec:
        """What the user's spec means for a driver. Raises InvalidSpec."""
        try:
            return training_spec(self.spec, self.shards())
        except ValidationError as error:
            raise InvalidSpec(_first_error(error, "spec")) from None

    @cached_property
    def forbidden_changes(self) -> list[rules.Violation]:
        """Changes against the frozen spec that may not happen after the start, and that the API server let pass.

        It compares free-form maps by value, but not always by key.
        """
        if self.group_spec is None or self.training == self.group_spec.training:
            return []
        started = RLJobStatus(start_time="2000-01-01T00:00:00Z")
        meta = ObjectMeta(name=self.identity.name)
        before, after = (
            RLJob.model_construct(metadata=meta, spec=spec, status=started)
            for spec in (self.group_spec.training, self.training)
        )
        return rules.update_violations(rules.JOB_RULES, before, after)

    # ------------------------------------------------------------------------------------------------------- objects

    @cached_property
    def clusters(self) -> tuple[Object, ...]:
        """The job's RayClusters that nobody has deleted."""
        return tuple(c for c in self.snapshot.clusters if self.owns(c) and not is_deleted(c))

    def cluster(self, name: str | None) -> Object | None:
        return next((c for c in self.clusters if name_of(c) == name), None)

    def existed(self, cluster: str) -> bool:
        """Whether a RayCluster of the name was there at some time: it left traces, or is being deleted."""
        return (
            any(self.owns(c) and name_of(c) == cluster for c in self.snapshot.clusters)
            or any(name_of(job).rpartition("-")[0] == cluster for job in self.submitters)
            or any(labels_of(pod).get("ray.io/cluster") == cluster for pod in self.snapshot.pods)
        )

    def next_cluster(self) -> str:
        """A name that no cluster of the job had, nor one of an earlier job whose uid begins alike."""
        names_ = [name_of(c) for c in self.snapshot.clusters]
        names_ += [name_of(job).rpartition("-")[0] for job in self.snapshot.submitters]
        names_ += [self.stored.ray_cluster] if self.stored.ray_cluster else []
        return self.identity.cluster(1 + max((self.identity.cluster_number(n) or 0 for n in names_), default=0))

    @cached_property
    def submitters(self) -> tuple[Object, ...]:
        return tuple(job for job in self.snapshot.submitters if self.owns(job))

    def submitter(self, cluster: str | None, attempt: int | None) -> Object | None:
        if cluster is None or attempt is None:
            return None
        name = names.submitter(cluster, attempt)
        return next((job for job in self.submitters if name_of(job) == name), None)

    def submitter_pods(self, job: Object) -> list[Object]:
        return [pod for pod in self.snapshot.pods if is_owned_by(pod, uid_of(job))]

    def condition(self, type_: str) -> Condition | None:
        """As it is stored."""
        return next((c for c in self.stored.conditions if c.type == type_), None)

    def ray_pods(self, cluster: Object | None) -> list[Object]:
        """Of head and workers, those that are being deleted too."""
        if cluster is None:
            return []
        return [pod for pod in self.snapshot.pods if is_owned_by(pod, uid_of(cluster))]

    def heads(self, cluster: Object | None) -> list[Object]:
        return [pod for pod in self.ray_pods(cluster) if labels_of(pod).get("ray.io/node-type") == "head"]

    def head(self, cluster: Object | None) -> Object | None:
        """The newest head that is not being deleted."""
        return newest(pod for pod in self.heads(cluster) if not is_deleted(pod))

    def head_is_ready(self, cluster: Object | None) -> bool:
        head = self.head(cluster)
        return head is not None and is_true(head, "Ready")

    def owns(self, obj: Object) -> bool:
        return is_owned_by(obj, self.identity.uid)


def read_status(job: Object) -> RLJobStatus:
    """The stored status. The API server has checked it, so that an unreadable one is a bug, and raises."""
    return RLJobStatus.from_stored(job.get("status") or {})


def _read_spec(job: Object, stored: RLJobStatus) -> RLJobSpec:
    try:
        spec = RLJobSpec.from_stored(job.get("spec") or {})
    except ValidationError as error:
        raise InvalidSpec(_first_error(error, "spec")) from None
    whole = RLJob.model_construct(metadata=ObjectMeta(name=job["metadata"]["name"]), spec=spec, status=stored)
    for violation in rules.violations(rules.JOB_RULES, whole):
        raise InvalidSpec(_said(violation))
    return spec


def _first_error(error: ValidationError, root: str) -> str:
    """The first of pydantic's errors as: field, what is wrong, value, remedy."""
    first = error.errors()[0]
    at = ".".join(_path(root, first["loc"]))
    context = first.get("ctx") or {}
    for violation in context.get("violations") or ():
        return _said(violation, prefix=at)
    value = repr(first["input"])
    shown = f" (value {value})" if len(value) <= 200 else ""
    return f"{at}: {first['msg']}{shown}. Correct it with `kubectl edit`, or apply the job anew."


def _said(violation: rules.Violation, prefix: str = "") -> str:
    at = ".".join(part for part in (prefix, violation.path) if part)
    return f"{at}: {violation.message} (value {violation.value!r}); {violation.remedy}."


def _path(root: str, loc: tuple[int | str, ...]) -> Iterator[str]:
    text = root
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            yield text
            text = part
    yield text
