"""What the driver may do on the API server: watch its one PolicyGroup and report into that one's status."""

from __future__ import annotations

from rlightning.api.models import GROUP
from rlightning_operator.builders.names import Identity
from rlightning_operator.reconcile.snapshot import Object

_RBAC = "rbac.authorization.k8s.io"


def service_account(identity: Identity) -> Object:
    """Mounted into the head alone, which asks for it by name."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": identity.meta(identity.access),
        "automountServiceAccountToken": False,
    }


def role(identity: Identity) -> Object:
    """Nothing but the job's own PolicyGroup.

    ``list`` and ``watch`` with a resourceName are allowed to a client that selects ``metadata.name=<name>``.
    """
    only = {"apiGroups": [GROUP], "resourceNames": [identity.name]}
    rules = [
        {**only, "resources": ["policygroups"], "verbs": ["get", "list", "watch"]},
        {**only, "resources": ["policygroups/status"], "verbs": ["get", "patch"]},
    ]
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "Role",
        "metadata": identity.meta(identity.access, content=rules),
        "rules": rules,
    }


def role_binding(identity: Identity) -> Object:
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": identity.meta(identity.access),
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": identity.access},
        "subjects": [{"kind": "ServiceAccount", "name": identity.access, "namespace": identity.namespace}],
    }
