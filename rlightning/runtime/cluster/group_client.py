"""The driver's three requests to the API server: read its PolicyGroup, watch it, and apply its status.

Through Kubernetes' own client, which knows service account tokens (and reads them anew when they rotate) and
kubeconfigs. Importing it takes half a second, beside the ten of torch.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from typing import Any

from rlightning.api.models import API_VERSION, GROUP, VERSION
from rlightning.errors import RLightningError

PLURAL = "policygroups"
FIELD_MANAGER = "rlightning-driver"
CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 15.0


class ApiProblem(RLightningError):
    """The API server refused a request, or did not answer it.

    Args:
        message: its own words, or what happened to the connection.
        code: HTTP status; None if there was no answer.
        retry_after: seconds that the server asks to wait.
    """

    def __init__(self, message: str, code: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(message, code, retry_after)
        self.message, self.code, self.retry_after = message, code, retry_after

    def __str__(self) -> str:
        return self.message if self.code is None else f"{self.message} (HTTP {self.code})"

    @property
    def gone(self) -> bool:
        """There is no such object. A 404 without its name: the server does not serve the kind, or not yet."""
        return self.code == 404 and self.message.endswith('" not found')

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed later. 401: a token is read again when it rotates. 403: an API server
        that has just started knows no rights yet, and a RoleBinding that was deleted comes back.
        """
        return self.code is None or self.code in (401, 403, 404, 409, 429) or self.code >= 500


class GroupClient:
    """One PolicyGroup on the API server.

    Args:
        namespace, name: of it.

    Raises:
        ApiProblem: from every method.
        RLightningError: neither a service account is mounted nor a kubeconfig is there.
    """

    def __init__(self, namespace: str, name: str) -> None:
        from kubernetes.client import ApiClient, CustomObjectsApi

        configuration = _configuration()
        # Retries are the callers': they know what else to do meanwhile, and until when.
        configuration.retries = 0
        self.namespace, self.name = namespace, name
        self._api = CustomObjectsApi(ApiClient(configuration))
        self._where = {"group": GROUP, "version": VERSION, "namespace": namespace, "plural": PLURAL}

    def __str__(self) -> str:
        return f"PolicyGroup {self.namespace}/{self.name}"

    def get(self) -> dict[str, Any]:
        """The object as it is now."""
        return self._ask(self._api.get_namespaced_custom_object, name=self.name)

    def apply_status(self, uid: str, status: dict[str, Any]) -> dict[str, Any]:
        """Make ``status`` the whole of what this driver says; what it said before and leaves out now goes.

        Args:
            uid: of the object that is meant: one of the same name that came later is left alone (409).
            status: camelCase, without nulls.

        Returns:
            The object as stored.
        """
        metadata = {"name": self.name, "namespace": self.namespace, "uid": uid}
        return self._ask(
            self._api.patch_namespaced_custom_object_status,
            name=self.name,
            body={"apiVersion": API_VERSION, "kind": "PolicyGroup", "metadata": metadata, "status": status},
            field_manager=FIELD_MANAGER,
            force=True,
            _content_type="application/apply-patch+yaml",
        )

    def watch(self, resource_version: str, seconds: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """(type, object) of every change after ``resource_version``, for so many seconds at most.

        The server ends it; a connection that has died is noticed a little later.
        """
        from kubernetes.watch import Watch

        events = Watch().stream(
            self._api.list_namespaced_custom_object,
            **self._where,
            field_selector=f"metadata.name={self.name}",
            resource_version=resource_version,
            timeout_seconds=int(seconds),
            _request_timeout=(CONNECT_SECONDS, seconds + 10),
        )
        while True:
            try:
                event = next(events)
            except StopIteration:
                return
            except Exception as error:
                raise _explained(error) from error
            yield event["type"], event["raw_object"]

    def _ask(self, call: Any, **arguments: Any) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = call(
                **self._where, **arguments, _request_timeout=(CONNECT_SECONDS, REQUEST_SECONDS)
            )
        except Exception as error:
            raise _explained(error) from error
        return answer


def backoff(failures: int, retry_after: float | None = None, *, most: float = 10.0) -> float:
    """Seconds to wait after so many failures in a row: doubling from a quarter, up to ``most``, half of it by chance
    (many drivers may have lost the same server), and never less than the server asks for.
    """
    ceiling = min(most, 0.25 * 2.0 ** min(failures - 1, 10))
    return max(ceiling * random.uniform(0.5, 1.0), min(retry_after or 0.0, 60.0))


def _configuration() -> Any:
    from kubernetes.client import Configuration
    from kubernetes.config import ConfigException, load_incluster_config, load_kube_config

    configuration = Configuration()
    try:
        if "KUBECONFIG" not in os.environ and os.environ.get("KUBERNETES_SERVICE_HOST"):
            load_incluster_config(client_configuration=configuration)
        else:  # None: the one in the home folder
            load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=configuration)
    except ConfigException as error:
        raise RLightningError(
            f"there is no way to the API server: {error}. In a pod its service account's token has to be mounted; "
            "elsewhere KUBECONFIG names a kubeconfig"
        ) from error
    return configuration


def _explained(error: Exception) -> ApiProblem:
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError, MaxRetryError

    if isinstance(error, ApiException):
        after = (error.headers or {}).get("Retry-After", "")
        return ApiProblem(_words(error), error.status or None, float(after) if after.isdecimal() else None)
    if isinstance(error, MaxRetryError) and error.reason is not None:
        error = error.reason
    if isinstance(error, HTTPError | OSError):
        return ApiProblem(f"the API server does not answer: {error}")
    return ApiProblem(f"the API server's answer cannot be used: {type(error).__name__}: {error}")


def _words(error: Any) -> str:
    """The message of the Status that the server answered with, else its reason."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason or "no reason given")
