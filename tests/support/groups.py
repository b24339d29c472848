"""PolicyGroups on a real API server, as the operator makes them, and records of versions to report."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlightning.api.models import API_VERSION, RLJob
from rlightning.api.resolve import training_spec

if TYPE_CHECKING:
    from rlightning.weights.ledger import VersionRecord


@dataclass
class Group:
    """One PolicyGroup, and what its operator does to it.

    Attributes:
        kube: the tests' API server (``Kube`` of tests/integration/conftest.py).
        name: of it, and of its job.
        job_uid: of the RLJob that it is said to belong to.
    """

    kube: Any
    name: str
    job_uid: str

    @property
    def live(self) -> dict[str, Any]:
        found: dict[str, Any] = self.kube.json("get", "policygroup", self.name)
        return found

    @property
    def status(self) -> dict[str, Any]:
        """Without the empty lists that the CRD's defaults put in."""
        return {key: value for key, value in self.live.get("status", {}).items() if value != []}

    def patch(self, **spec: Any) -> None:
        self.kube.ok("patch", "policygroup", self.name, "--type=merge", "--patch", json.dumps({"spec": spec}))

    def delete(self) -> None:
        self.kube.ok("delete", "policygroup", self.name, "--wait=true")


def make_group(kube: Any, of: RLJob, *, attempt: int = 1, name: str | None = None, state: str = "Running") -> Group:
    """Create the PolicyGroup of a job."""
    group = Group(kube, name or f"job-{secrets.token_hex(4)}", f"uid-{secrets.token_hex(4)}")
    spec = training_spec(of.spec)
    manifest = {
        "apiVersion": API_VERSION,
        "kind": "PolicyGroup",
        "metadata": {"name": group.name, "labels": {"rlightning.io/job-uid": group.job_uid}},
        "spec": {
            "job": group.name,
            "state": state,
            "attempt": attempt,
            "trainReplicas": spec.policy_group.train.replicas,
            "evalReplicas": spec.policy_group.eval.replicas,
            "training": spec.to_dict(),
        },
    }
    kube.ok("apply", "--server-side", "--filename", "-", stdin=json.dumps(manifest))
    return group


def digest(version: int) -> str:
    return f"xxh3-128:{version:032x}"


def record(
    version: int, members: tuple[str, ...] = ("eval-0", "eval-1"), *, attempt: int = 1, wrong: str | None = None
) -> VersionRecord:
    """A published version; the member ``wrong`` runs other weights."""
    from rlightning.weights.ledger import MemberRecord, VersionRecord

    answers = {
        name: MemberRecord(
            "Mismatch" if name == wrong else "Acknowledged", digest(version + 7 if name == wrong else version), 0.001
        )
        for name in members
    }
    return VersionRecord(
        version=version,
        attempt=attempt,
        digest=digest(version),
        parent_digest=digest(version - 1) if version else None,
        members=answers,
        verified=len(members) - (wrong is not None),
        total=len(members),
        first_mismatch=f"{wrong}: {'actor.' * 60}weight" if wrong else None,
        time=1_772_366_400.0,
    )
