"""The API server without kubectl: a request takes milliseconds instead of a process each."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from rlightning_operator.kube import kinds
from rlightning_operator.kube.kinds import Kind, Object

MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"


class Refused(Exception):
    """The server said no, in its own words."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


@dataclass(frozen=True)
class Api:
    """A server and a token, from a kubeconfig as hack.apiserver writes it."""

    host: str
    port: int
    token: str
    tls: ssl.SSLContext

    @classmethod
    def of(cls, kubeconfig: Path) -> Api:
        """The current (and only) context of it."""
        content = json.loads(kubeconfig.read_text())
        cluster, user = content["clusters"][0]["cluster"], content["users"][0]["user"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        server = urlsplit(cluster["server"])
        tls = ssl.create_default_context(cadata=authority)
        return cls(server.hostname or "", server.port or 443, user["token"], tls)

    def request(
        self,
        method: str,
        path: str,
        body: Object | str | None = None,
        *,
        query: dict[str, str] | None = None,
        content: str = "application/json",
    ) -> Any:
        """One request, on a connection of its own. Raises Refused."""
        connection = http.client.HTTPSConnection(self.host, self.port, timeout=30, context=self.tls)
        try:
            data = body if isinstance(body, str) or body is None else json.dumps(body)
            headers = {"Authorization": f"Bearer {self.token}", "Content-Type": content}
            target = f"{path}?{urlencode(query)}" if query else path
            connection.request(method, target, data.encode() if data is not None else None, headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status >= 400:
            try:
                raise Refused(answer.status, json.loads(text)["message"])
            except (ValueError, KeyError):
                raise Refused(answer.status, text) from None
        return json.loads(text)

    def serves(self, kind: Kind) -> bool:
        """Whether the kind can be listed."""
        try:
            self.request("GET", kind.path())
        except Refused:
            return False
        return True

    def install(self, kind: Kind, crd: str) -> None:
        """Apply a kind's CustomResourceDefinition (YAML); it is served a moment later."""
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{kind.plural}.{kind.group}"
        self.request("PATCH", path, crd, query={"fieldManager": "tests", "force": "true"}, content=APPLY)


@dataclass(frozen=True)
class Space:
    """One namespace."""

    api: Api
    namespace: str

    @classmethod
    def make(cls, api: Api, namespace: str) -> Space:
        """A new one."""
        api.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
        return cls(api, namespace)

    def create(self, kind: Kind, obj: Object) -> Object:
        """POST."""
        found: Object = self.api.request("POST", kind.path(self.namespace), obj)
        return found

    def get(self, kind: Kind, name: str) -> Object | None:
        """None if it is not there."""
        try:
            found: Object = self.api.request("GET", kind.path(self.namespace, name))
        except Refused as refused:
            if refused.code == 404:
                return None
            raise
        return found

    def all(self, kind: Kind, selector: str = "") -> list[Object]:
        """By name."""
        query = {"labelSelector": selector} if selector else None
        items: list[Object] = self.api.request("GET", kind.path(self.namespace), query=query)["items"]
        return items

    def delete(self, kind: Kind, name: str) -> None:
        """In the background, as kubectl does."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        self.api.request("DELETE", kind.path(self.namespace, name), body)

    def merge(self, kind: Kind, name: str, patch: Object, subresource: str | None = None) -> Object:
        """A merge patch."""
        path = kind.path(self.namespace, name, subresource)
        found: Object = self.api.request("PATCH", path, patch, content=MERGE)
        return found

    def apply(self, kind: Kind, name: str, obj: Object, *, manager: str, subresource: str | None = None) -> Object:
        """Server-side apply, by force."""
        path = kind.path(self.namespace, name, subresource)
        full = {"apiVersion": f"{kind.group}/{kind.version}", "kind": kind.name, "metadata": {"name": name}, **obj}
        query = {"fieldManager": manager, "force": "true"}
        found: Object = self.api.request("PATCH", path, full, query=query, content=APPLY)
        return found

    def events(self, name: str) -> list[str]:
        """``reason: message`` of every event about the object of that name."""
        query = {"fieldSelector": f"involvedObject.name={name}"}
        items = self.api.request("GET", kinds.EVENT.path(self.namespace), query=query)["items"]
        return [f"{event['reason']}: {event['message']}" for event in items]
