"""KubeRay: its CRDs, and its operator as a program on this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path

from hack.cluster import layout, processes
from hack.cluster.layout import ClusterError
from hack.programs.binaries import COMPONENTS, BuildError, build_lock, go_environment, go_program, program

MODULE = "github.com/ray-project/kuberay/ray-operator"
HEALTH_PORT = 18082


def crds() -> Path:
    """The folder of KubeRay's CRDs, from the same Go module as its operator. Raises ClusterError."""
    kept = program("ray-operator").parent / "crds"
    if not kept.is_dir():
        try:
            go = go_program()
        except BuildError as error:
            raise ClusterError(f"KubeRay's CRDs come with its Go module: {error}") from None
        with build_lock():
            if not kept.is_dir():
                _fetch_crds(go, kept)
    return kept


def _fetch_crds(go: str, kept: Path) -> None:
    done = subprocess.run(
        [go, "mod", "download", "-json", MODULE],
        cwd=COMPONENTS / "kubernetes",
        env=go_environment(GOFLAGS="-mod=mod"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode != 0:
        raise ClusterError(f"KubeRay's Go module could not be fetched: {done.stderr.strip() or done.stdout.strip()}")
    work = Path(tempfile.mkdtemp(prefix=".crds-", dir=kept.parent))
    try:
        copy = work / kept.name
        shutil.copytree(Path(json.loads(done.stdout)["Dir"]) / "config" / "crd" / "bases", copy)
        for path in [copy, *copy.iterdir()]:  # Go's module cache is read-only
            path.chmod(0o755 if path.is_dir() else 0o644)
        copy.rename(kept)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def crds_by_name() -> dict[str, Path]:
    """Name of each CRD (``rayclusters.ray.io`` and others) → its file."""
    return {".".join(reversed(path.stem.split("_"))): path for path in sorted(crds().glob("*.yaml"))}


def start_operator() -> None:
    """Start KubeRay's operator; its CRDs are there. Returns when it says that it is ready."""
    processes.start(
        "ray-operator",
        [
            program("ray-operator"),
            f"--kubeconfig={layout.kubeconfig()}",
            "--enable-leader-election=false",
            "--metrics-addr=:18080",
            f"--health-probe-bind-address=:{HEALTH_PORT}",
        ],
        namespace=layout.namespace(1),
    )
    processes.wait_for("KubeRay's operator to be ready", operator_ready, 60, ["ray-operator"])


def operator_ready() -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{layout.API_ADDRESS}:{HEALTH_PORT}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
