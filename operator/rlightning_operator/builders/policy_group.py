"""The PolicyGroup: what the operator wants of the driver. The driver answers in its status."""

from __future__ import annotations

from typing import Any, Literal

from rlightning.api.models import API_VERSION, PolicyGroupSpec, RLJobSpec
from rlightning_operator.builders.names import Identity
from rlightning_operator.reconcile.snapshot import Object


def policy_group(identity: Identity, spec: dict[str, Any]) -> Object:
    return {
        "apiVersion": API_VERSION,
        "kind": "PolicyGroup",
        "metadata": identity.meta(identity.name),
        "spec": spec,
    }


def policy_group_spec(
    identity: Identity, training: RLJobSpec, attempt: int, state: Literal["Running", "Stopped"]
) -> dict[str, Any]:
    """The spec of one attempt.

    Args:
        identity: of the job.
        training: as :func:`rlightning.api.resolve.training_spec` gives it; frozen for the attempt.
        attempt: from the job's status.
        state: Stopped asks the driver to save at the next iteration's end and to leave.
    """
    return PolicyGroupSpec(
        job=identity.name,
        state=state,
        attempt=attempt,
        train_replicas=training.policy_group.train.replicas,
        eval_replicas=training.policy_group.eval.replicas,
        training=training,
    ).to_dict()
