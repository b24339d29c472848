"""A bare API server on loopback: etcd and kube-apiserver, nothing else, gone without a trace afterwards.

``python -m hack.apiserver.server`` boots one (4 s on two cores), prints how to use it and waits for Ctrl-C;
``python -m hack.apiserver.server COMMAND…`` runs a command with KUBECONFIG set instead. Tests use :class:`ApiServer`.

Between the caller and the two programs stands a supervisor, which ends them and removes the state folder when its
standard input closes. So nothing stays behind when the caller is killed; when the supervisor itself is killed, the
kernel ends the two programs, and the folder is swept by the next boot.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from hack.children import die_with_parent
from hack.programs.binaries import ROOT, BuildError, program

PREFIX = "rlightning-apiserver-"
BOOT_SECONDS = 60


class ServerError(Exception):
    """The API server did not come up; the message says why, with the end of its log."""


class ApiServer:
    """A running API server, as a context manager. ``kubeconfig`` is an administrator's."""

    kubeconfig: Path

    def __init__(self) -> None:
        self._supervisor: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        for name in ("etcd", "kube-apiserver", "kubectl"):
            program(name)  # a build may take minutes; the boot's deadline is not for that
        self._supervisor = subprocess.Popen(
            [sys.executable, "-m", "hack.apiserver.server", "--supervise"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is the caller's; the supervisor is told by its stdin
        )
        assert self._supervisor.stdout is not None
        line = self._supervisor.stdout.readline()
        answer = json.loads(line) if line else {"error": "the supervisor ended without a word"}
        if "error" in answer:
            self.__exit__(None, None, None)
            raise ServerError(answer["error"])
        self.kubeconfig = Path(answer["kubeconfig"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._supervisor is None:
            return
        assert self._supervisor.stdin is not None
        assert self._supervisor.stdout is not None
        self._supervisor.stdin.close()
        self._supervisor.wait(timeout=30)
        self._supervisor.stdout.close()
        self._supervisor = None


# --------------------------------------------------------------------------------------------------------- supervisor


def _supervise() -> int:
    """Boot, say so in one line of JSON, wait for stdin to close, end everything."""
    _sweep()
    closed = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        closed.set()

    threading.Thread(target=watch, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: closed.set())
    state = Path(tempfile.mkdtemp(prefix=PREFIX))
    children: list[subprocess.Popen[bytes]] = []
    try:
        (state / "pid").write_text(f"{os.getpid()} {_start_time(os.getpid())}")
        kubeconfig = _boot(state, children, closed)
        print(json.dumps({"kubeconfig": str(kubeconfig)}), flush=True)
        while not closed.wait(1):
            dead = next((c for c in children if c.poll() is not None), None)
            if dead is not None:
                name = Path(str(dead.args[0])).name if isinstance(dead.args, list) else "a program"
                print(f"hack.apiserver: {name} ended ({dead.returncode})\n{_tail(state, name)}", file=sys.stderr)
                return 1
    except (ServerError, BuildError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    finally:
        for child in reversed(children):  # the API server first; there is nothing to save
            child.kill()
            child.wait()
        shutil.rmtree(state, ignore_errors=True)
    return 0


def _boot(state: Path, children: list[subprocess.Popen[bytes]], closed: threading.Event) -> Path:
    """Start both programs, again with other ports if somebody took one meanwhile; returns the kubeconfig's path."""
    token = secrets.token_urlsafe(32)
    users = state / "users.csv"
    users.touch(mode=0o600)
    users.write_text(f'{token},admin,admin,"system:masters"\n')
    deadline = time.monotonic() + BOOT_SECONDS
    for _ in range(3):
        client, peer, api = _free_ports(3)
        etcd = _start(
            state,
            children,
            "etcd",
            f"--data-dir={state / 'etcd'}",
            "--unsafe-no-fsync",
            f"--listen-client-urls=http://127.0.0.1:{client}",
            f"--advertise-client-urls=http://127.0.0.1:{client}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
        )
        server = _start(
            state,
            children,
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{client}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={api}",
            f"--cert-dir={state / 'pki'}",  # it makes its own certificate there, whose key also signs tokens
            f"--service-account-signing-key-file={state / 'pki' / 'apiserver.key'}",
            f"--service-account-key-file={state / 'pki' / 'apiserver.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--endpoint-reconciler-type=none",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",  # no controller makes the default account
            f"--token-auth-file={users}",
        )
        while time.monotonic() < deadline and not closed.is_set():
            if _ready(state, api, token):
                return _kubeconfig(state, api, token)
            if etcd.poll() is not None or server.poll() is not None:
                break
            time.sleep(0.1)
        failed = etcd if etcd.poll() is not None else server
        name = "etcd" if failed is etcd else "kube-apiserver"
        log = _tail(state, name)
        for child in (server, etcd):
            child.kill()
            child.wait()
        children.clear()
        shutil.rmtree(state / "etcd", ignore_errors=True)
        if "address already in use" not in log:
            break
    what = "was not ready in time" if time.monotonic() >= deadline else f"ended ({failed.returncode})"
    raise ServerError(f"{name} {what}; the end of its log:\n{log}")


def _start(state: Path, children: list[subprocess.Popen[bytes]], name: str, *arguments: str) -> subprocess.Popen[bytes]:
    log: IO[bytes]
    with (state / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(
            [str(program(name)), *arguments],
            cwd=state,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )
    children.append(child)
    return child


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def _ready(state: Path, port: int, token: str) -> bool:
    certificate = state / "pki" / "apiserver.crt"
    if not certificate.is_file():
        return False
    request = urllib.request.Request(f"https://127.0.0.1:{port}/readyz", headers={"Authorization": f"Bearer {token}"})
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(certificate))),
    )
    try:
        with opener.open(request, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _kubeconfig(state: Path, port: int, token: str) -> Path:
    authority = base64.b64encode((state / "pki" / "apiserver.crt").read_bytes()).decode()
    path = state / "kubeconfig"
    path.touch(mode=0o600)
    cluster = {"server": f"https://127.0.0.1:{port}", "certificate-authority-data": authority}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "rlightning", "cluster": cluster}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "rlightning", "context": {"cluster": "rlightning", "user": "admin"}}],
        "current-context": "rlightning",
    }
    path.write_text(json.dumps(content, indent=1))  # JSON is YAML
    return path


def _tail(state: Path, name: str) -> str:
    log = state / f"{name}.log"
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:]) if log.is_file() else ""


def _start_time(pid: int) -> str:
    """When a process began, in ticks since boot: tells it from a later one with the same number. "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _sweep() -> None:
    """Remove the state folders of supervisors that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            pid, start = (folder / "pid").read_text().split()
        except (OSError, ValueError):
            continue  # just being made
        if _start_time(int(pid)) != start:
            shutil.rmtree(folder, ignore_errors=True)


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    if list(arguments) == ["--supervise"]:
        return _supervise()
    try:
        start = time.monotonic()
        with ApiServer() as server:
            if arguments:
                return subprocess.run(
                    arguments, env={**os.environ, "KUBECONFIG": str(server.kubeconfig)}, check=False
                ).returncode
            print(
                f"ready after {time.monotonic() - start:.1f} s; Ctrl-C ends it\n\nexport KUBECONFIG={server.kubeconfig}"
            )
            print(f"export PATH={program('kubectl').parent}:$PATH", flush=True)
            signal.pause()
    except KeyboardInterrupt:
        return 0
    except (ServerError, BuildError) as error:
        print(f"hack.apiserver: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
