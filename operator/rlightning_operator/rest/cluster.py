"""The API server, as far as the status service needs it: a handful of requests, each with a deadline.

Plain HTTP by aiohttp and not a generated client: the service is asked to stay small, and makes four kinds of request.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from rlightning_operator.rest import metrics

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_SECONDS = 10  # the kubelet replaces the token's file; the old token is good for minutes after that


class Unavailable(Exception):
    """The API server cannot be reached, does not answer in time, or says that it cannot answer now."""

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Refused(Exception):
    """The API server answered, and the answer is no: ``code`` and its own words."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


class ConfigurationError(Exception):
    """It cannot be found out where the API server is; the message says what to set."""


@dataclass(frozen=True)
class Endpoint:
    """Where the API server is, and who asks. A token file is read again and again, since it is replaced."""

    server: str
    ssl: ssl.SSLContext | bool = True
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> Endpoint:
        """The pod's own account inside a cluster, else what KUBECONFIG names. Raises ConfigurationError."""
        if environment.get("KUBECONFIG"):
            return cls.from_kubeconfig(Path(environment["KUBECONFIG"]))
        host = environment.get("KUBERNETES_SERVICE_HOST")
        if not host:
            raise ConfigurationError(
                "where is the API server? Neither KUBERNETES_SERVICE_HOST (set in every pod) nor KUBECONFIG is set"
            )
        if not (account / "token").is_file():
            raise ConfigurationError(f"{account}/token is missing: the pod's ServiceAccount token must be mounted")
        host = f"[{host}]" if ":" in host else host
        return cls(
            server=f"https://{host}:{environment.get('KUBERNETES_SERVICE_PORT', '443')}",
            ssl=ssl.create_default_context(cafile=str(account / "ca.crt")),
            token_file=account / "token",
        )

    @classmethod
    def from_kubeconfig(cls, path: Path) -> Endpoint:
        """The current context of a kubeconfig, with a token or a client certificate. Raises ConfigurationError."""
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
            contexts, clusters, users = (
                {item["name"]: item[one] for item in content.get(many) or ()}
                for many, one in (("contexts", "context"), ("clusters", "cluster"), ("users", "user"))
            )
            context = contexts[content["current-context"]]
            cluster, user = clusters[context["cluster"]], users[context["user"]]
            server = cluster["server"]
        except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"KUBECONFIG {path} cannot be used: {type(error).__name__}: {error}") from error
        if user.get("exec") or user.get("auth-provider"):
            raise ConfigurationError(
                f"KUBECONFIG {path} signs in with a plugin; outside a cluster only a token or a client certificate work"
            )
        tls: ssl.SSLContext | bool = True
        if server.startswith("https:"):
            tls = ssl.create_default_context()
            if authority := _content(cluster, "certificate-authority", path):
                tls = ssl.create_default_context(cadata=authority)
            if cluster.get("insecure-skip-tls-verify"):
                raise ConfigurationError(
                    f"KUBECONFIG {path} skips the check of the server's certificate: not supported"
                )
            if user.get("client-certificate") and user.get("client-key"):
                tls.load_cert_chain(path.parent / user["client-certificate"], path.parent / user["client-key"])
            elif user.get("client-certificate-data"):
                raise ConfigurationError(
                    f"KUBECONFIG {path} holds a client certificate inline; name files (client-certificate, client-key) "
                    "or a token instead"
                )
        token_file = user.get("tokenFile")
        return cls(server.rstrip("/"), tls, user.get("token"), path.parent / token_file if token_file else None)


def _content(where: Mapping[str, Any], name: str, kubeconfig: Path) -> str | None:
    """``name-data``, or what the file in ``name`` holds."""
    if data := where.get(f"{name}-data"):
        return base64.b64decode(str(data)).decode()
    if file := where.get(name):
        return (kubeconfig.parent / str(file)).read_text(encoding="utf-8")
    return None


class Cluster:
    """Requests to the API server. Raises :class:`Unavailable` or :class:`Refused`, nothing else."""

    def __init__(self, endpoint: Endpoint, seconds: float = 5.0) -> None:
        self._endpoint = endpoint
        self._seconds = seconds
        self._session: aiohttp.ClientSession | None = None
        self._token: tuple[float, str] | None = None

    async def open(self) -> None:
        """Make the connection pool; needs the running loop."""
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._seconds, sock_connect=min(self._seconds, 3.0)),
            connector=aiohttp.TCPConnector(limit=64, ssl=self._endpoint.ssl),
            headers={"Accept": "application/json", "User-Agent": "rlightning-status"},
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def get(self, what: str, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """GET an object or a list; ``what`` names the request in the metrics."""
        return await self._request("GET", what, path, query=query)

    async def create(self, what: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST an object; returns it as the server answered it."""
        return await self._request("POST", what, path, body=body)

    async def reachable(self) -> None:
        """Return when the API server answers that it is ready, and takes this service's token."""
        try:
            await self._request("GET", "readyz", "/readyz", parse=False)
        except Refused as error:
            if error.code != 403:  # an administrator may have closed the path; then being refused is the answer
                raise Unavailable(f"the API server answered {error.code} to /readyz") from error

    async def _request(
        self,
        method: str,
        what: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        parse: bool = True,
    ) -> dict[str, Any]:
        assert self._session is not None, "open() comes first"
        start = time.perf_counter()
        code = "none"
        try:
            headers = {} if (token := self._bearer()) is None else {"Authorization": f"Bearer {token}"}
            async with self._session.request(
                method, self._endpoint.server + path, params=query, json=body, headers=headers, allow_redirects=False
            ) as answer:
                code = str(answer.status)
                content = await answer.read()
                retry_after = answer.headers.get("Retry-After", "")
        except TimeoutError as error:
            raise Unavailable(f"the API server did not answer within {self._seconds:g} s") from error
        except aiohttp.ClientError as error:
            raise Unavailable(f"the API server cannot be reached ({type(error).__name__})") from error
        finally:
            metrics.API_SECONDS.labels(what, code).observe(time.perf_counter() - start)
        if code == "401":
            self._token = None  # read the file again: it may have been replaced just now
            raise Unavailable("the API server does not take the token of the status service's own account", 10)
        if code == "429" or code.startswith("5"):
            seconds = int(retry_after) if retry_after.isdigit() else 5
            raise Unavailable(f"the API server answered {code}: {_words(content)[1]}", min(max(seconds, 1), 60))
        if not code.startswith("2"):
            raise Refused(int(code), *_words(content))
        if not parse:
            return {}
        try:
            parsed = json.loads(content)
        except ValueError as error:
            raise Unavailable(f"the API server's answer to {method} {what} is not JSON") from error
        if not isinstance(parsed, dict):
            raise Unavailable(f"the API server's answer to {method} {what} is not an object")
        return parsed

    def _bearer(self) -> str | None:
        file = self._endpoint.token_file
        if file is None:
            return self._endpoint.token
        now = time.monotonic()
        if self._token is None or now - self._token[0] > TOKEN_SECONDS:
            try:
                self._token = (now, file.read_text(encoding="utf-8").strip())
            except OSError as error:
                raise Unavailable(f"the token of the status service's own account cannot be read: {error}") from error
        return self._token[1]


def _words(content: bytes) -> tuple[str, str]:
    """Reason and message of a metav1.Status, or of whatever else a proxy in between may have answered."""
    try:
        status = json.loads(content)
        return str(status.get("reason") or "Unknown"), str(status["message"])[:1024]
    except (ValueError, KeyError, AttributeError, TypeError):
        return "Unknown", content[:200].decode(errors="replace")
