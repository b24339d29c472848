"""What :func:`~rlightning_operator.reconcile.plan.reconcile` is given, and what it answers with.

A snapshot holds everything that was observed of one job at one moment, as the API server holds it (plain dicts, only
``metadata.managedFields`` taken out). The answer is a wish: the status that the job should have, and the writes that
bring the other objects nearer to what they should be. Nothing here does I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

Object = dict[str, Any]


@dataclass(frozen=True)
class OperatorConfig:
    """What an administrator decides for all jobs.

    Attributes:
        trainer_image: the image of jobs that name none.
        image_pull_policy: of jobs that name none.
        ray_version: of the trainer image. KubeRay chooses probes and the authentication mode by it.
        network_policies: make NetworkPolicies for each job.
        api_server_endpoints: (IP, port) at which the API server really listens: policies see the address after the
            service's has been translated. Without any, heads may connect to every address on ports 443 and 6443.
        scrape_namespaces: namespaces whose pods may read the metrics port of a job's Ray pods.
        head_return_seconds: a lost head that is not Ready again after so long costs the whole RayCluster.
        kuberay_seconds: a RayCluster without status and pods for so long means that KubeRay does not work.
        outcome_seconds: how long the outcome of an attempt may arrive after its submitter has finished: the two come
            through different watches.
        farewell_seconds: how long a cluster that is not needed any more stays for the submitter of a driver that has
            said how it ended: for the last lines of its log.
        report_seconds: how long drivers may need, once the API server answers again, to report how far they are by now.
        leftover_seconds: a submitter whose attempt is over ends by itself within this time, or is deleted.
    """

    trainer_image: str = "rlightning-trainer:dev"
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    ray_version: str = "2.60.0"
    network_policies: bool = False
    api_server_endpoints: tuple[tuple[str, int], ...] = ()
    scrape_namespaces: tuple[str, ...] = ()
    head_return_seconds: int = 120
    kuberay_seconds: int = 15
    outcome_seconds: int = 5
    farewell_seconds: int = 20
    report_seconds: int = 60
    leftover_seconds: int = 180


@dataclass(frozen=True)
class KubeRay:
    """Whether the API server serves ``rayclusters.ray.io``.

    Attributes:
        installed: it does.
        message: where it does not, what was seen instead: "the CustomResourceDefinition is not established", …
    """

    installed: bool
    message: str = ""


@dataclass(frozen=True)
class Snapshot:
    """All that was observed of one job.

    Objects of an earlier job of the same name are part of it: the reconciler tells them apart by the uid in their
    ownerReferences, and waits until they are gone. So select by namespace and label ``rlightning.io/job=<name>`` (not
    by uid), and the PolicyGroup by its name whatever its labels.

    Attributes:
        job: the RLJob.
        group: the PolicyGroup of the job's name.
        clusters: RayClusters.
        submitters: Jobs.
        pods: heads, workers and submitters.
        others: ServiceAccounts, Roles, RoleBindings and NetworkPolicies.
        claim: the PersistentVolumeClaim that ``spec.checkpoints.claimName`` names; None if it is not there, or no
            claim is named.
        nodes: of the cluster; None without the right to read them.
        kuberay: see there.
        refused: which write the API server did not take when the job was last worked on, and why; None if it took all.
        config: see there.
        answers_since: when the API server last did not answer, or the operator began; None: it always has.
        now: aware, UTC.
    """

    job: Object
    now: datetime
    group: Object | None = None
    clusters: tuple[Object, ...] = ()
    submitters: tuple[Object, ...] = ()
    pods: tuple[Object, ...] = ()
    others: tuple[Object, ...] = ()
    claim: Object | None = None
    nodes: tuple[Object, ...] | None = None
    kuberay: KubeRay = KubeRay(installed=True)
    refused: str | None = None
    config: OperatorConfig = OperatorConfig()
    answers_since: datetime | None = None


@dataclass(frozen=True)
class Create:
    """POST the object, namespace included. "Already exists" is fine: the next snapshot shows what is there."""

    obj: Object


@dataclass(frozen=True)
class Patch:
    """PATCH a namespaced object. "Not found" is fine. ``uid`` is for the reader: the patch itself tests it."""

    kind: str
    name: str
    patch: Object | list[Object]
    type: Literal["merge", "json"]
    uid: str | None = None


@dataclass(frozen=True)
class Delete:
    """DELETE a namespaced object with the precondition ``uid``. "Not found", and another uid, are fine."""

    kind: str
    name: str
    uid: str
    propagation: Literal["Background"] = "Background"


Action = Create | Patch | Delete


@dataclass(frozen=True)
class Note:
    """A Kubernetes Event on the RLJob. The same note may be in many plans: it is news only once."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """What should be done now.

    The order matters: first ``status`` is stored, if it differs from the job's, with the snapshot's resourceVersion
    as precondition; then the actions, one after the other. After the first error nothing further of the plan is done,
    and the job is reconciled again. Attempts rely on this: a driver must not start before the new attempt is stored.

    Attributes:
        status: the RLJob's whole status, camelCase.
        actions: writes of other objects; and, for a job past its time to live, the deletion of the job itself.
        notes: events.
        requeue_after: seconds after which time alone may change the plan; None: only an event can.
    """

    status: Object
    actions: tuple[Action, ...] = ()
    notes: tuple[Note, ...] = ()
    requeue_after: float | None = field(default=None)


__all__ = [
    "Action",
    "Create",
    "Delete",
    "KubeRay",
    "Note",
    "Object",
    "OperatorConfig",
    "Patch",
    "Plan",
    "Snapshot",
]
