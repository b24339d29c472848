"""The cluster as a whole: ``up``, ``down``, and a handle with what tests and people do with it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hack.cluster import (
    addons,
    certificates,
    cgroups,
    control_plane,
    kuberay,
    layout,
    machine,
    network,
    nodes,
    processes,
    teardown,
)
from hack.cluster.images import catalog, folders
from hack.cluster.images.containerd import Containerd
from hack.cluster.layout import ClusterError
from hack.programs.binaries import cache_folder, program


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    Attributes:
        kubeconfig: an administrator's.
        local: whether it is this module's; of another one (KUBECONFIG) only ``kubectl`` works.
    """

    kubeconfig: Path
    local: bool = True

    def kubectl(self, *arguments: str | Path, stdin: str | None = None, seconds: float = 60) -> str:
        """Run kubectl, which must succeed; returns its output. Raises ClusterError with what it said."""
        return processes.run(
            program("kubectl"), "--kubeconfig", self.kubeconfig, *arguments, stdin=stdin, seconds=seconds
        )

    def try_kubectl(
        self, *arguments: str | Path, stdin: str | None = None, seconds: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl; the caller looks at the exit status."""
        return subprocess.run(
            [str(program("kubectl")), "--kubeconfig", str(self.kubeconfig), *map(str, arguments)],
            input=stdin or "",
            capture_output=True,
            text=True,
            env=processes.environment(),
            timeout=seconds,
            check=False,
        )

    def get(self, *arguments: str) -> Any:
        """What ``kubectl get … --output json`` says."""
        return json.loads(self.kubectl("get", *arguments, "--output", "json"))

    def apply(self, *objects: dict[str, Any]) -> None:
        """Apply objects, by server-side apply."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "--server-side", "--force-conflicts", "--filename", "-", stdin=json.dumps(listed))

    def gpus(self, node: str, number: int) -> None:
        """Let a node offer ``nvidia.com/gpu``: the scheduler counts them, there is no device."""
        self._must_be_local("GPUs can be made up")
        patch = [
            {"op": "add", "path": f"/status/{what}/nvidia.com~1gpu", "value": str(number)}
            for what in ("capacity", "allocatable")
        ]
        self.kubectl("patch", "node", node, "--subresource=status", "--type=json", "--patch", json.dumps(patch))

    def claim_directory(self, namespace: str, claim: str) -> Path:
        """The folder on this machine behind a bound PersistentVolumeClaim."""
        self._must_be_local("a claim's files can be read directly")
        volume = self.get("persistentvolumeclaim", claim, "--namespace", namespace)["spec"].get("volumeName")
        if not volume:
            raise ClusterError(f"claim {claim} in namespace {namespace} is not bound to a volume (yet)")
        return Path(self.get("persistentvolume", volume)["spec"]["hostPath"]["path"])

    def writes_of(self, account: str) -> list[str]:
        """What a ServiceAccount (``namespace:name``) has written, refused or not: ``verb resource namespace/name``."""
        self._must_be_local("the API server's audit log can be read")
        user, found = f"system:serviceaccount:{account}", []
        for line in control_plane.audit_log().read_text().splitlines():
            event = json.loads(line)
            if event["user"]["username"] == user:
                target = event["objectRef"]
                resource = "/".join(filter(None, [target["resource"], target.get("subresource")]))
                where = "/".join(filter(None, [target.get("namespace"), target.get("name")]))
                found.append(f"{event['verb']} {resource} {where}")
        return found

    def renew_volumes(self) -> list[str]:
        """Make volumes whose claim was deleted usable again, empty; returns their names."""
        self._must_be_local("volumes can be emptied")
        released = [v for v in self.get("persistentvolume")["items"] if v["status"].get("phase") == "Released"]
        names = [v["metadata"]["name"] for v in released if v["metadata"]["name"] in addons.volume_names()]
        for name in names:
            self.kubectl("delete", "persistentvolume", name)
            self.apply(addons.volume(name))
        return names

    def start_kuberay(self) -> None:
        """Install KubeRay's CRDs and start its operator; nothing to do where both are there."""
        self._must_be_local("KubeRay can be started")
        there = self.kubectl("get", "crd", "--output", "name")
        missing = [f"--filename={file}" for name, file in kuberay.crds_by_name().items() if f"/{name}\n" not in there]
        if missing:  # created, not applied: they are a megabyte each, and an apply takes the API server twice as long
            self.kubectl("create", *missing, seconds=120)
        names = [f"crd/{name}" for name in kuberay.crds_by_name()]

        def established() -> bool:  # of a CRD that is a moment old, kubectl says that it cannot be waited for
            return self.try_kubectl("wait", "--for=condition=Established", "--timeout=5s", *names).returncode == 0

        processes.wait_for("KubeRay's CRDs to be established", established, 60, ["kube-apiserver"])
        if processes.running("ray-operator") is None:
            kuberay.start_operator()

    def stop_kuberay(self, crds: bool = False) -> None:
        """Stop KubeRay's operator; with ``crds`` remove its CRDs as well, and so every RayCluster."""
        self._must_be_local("KubeRay can be stopped")
        if crds:  # while the operator runs: objects may have finalizers of its
            names = [f"crd/{name}" for name in kuberay.crds_by_name()]
            self.kubectl("delete", "--ignore-not-found", "--timeout=60s", *names, seconds=90)
        processes.stop("ray-operator")

    def stop_node(self, number: int) -> None:
        """Stop a node's kubelet, as if the machine had vanished from the network; its containers run on."""
        self._must_be_local("a node can be stopped")
        processes.stop(f"kubelet-{number}")

    def load(self, archive: Path) -> None:
        """Import an image archive (``docker save``, ``buildah push oci-archive:``) into every node, until ``down``."""
        self._must_be_local("images can be loaded")
        for number in range(1, layout.NODES + 1):
            socket = layout.containerd_socket(number)
            if socket.exists():
                processes.run("ctr", "-a", socket, "-n", "k8s.io", "images", "import", archive, seconds=1800)

    def _must_be_local(self, what: str) -> None:
        if not self.local:
            raise ClusterError(
                f"{what} only in the cluster that `python -m hack.cluster up` boots, not in {self.kubeconfig}"
            )


def up(
    nodes_wanted: int = layout.NODES, images: bool = True, policies: bool = True, with_kuberay: bool = True
) -> Cluster:
    """Boot the cluster, or return the one that is up and healthy, with the images as the code is now.

    Args:
        nodes_wanted: number of nodes.
        images: build and offer the project's images and the tests'; else only what pods need at least.
        policies: enforce NetworkPolicies.
        with_kuberay: install KubeRay and start its operator.

    Raises:
        ClusterError: it cannot run here, or something did not come up.
    """
    with _lock():
        machine.check(policies)
        for name in (
            *control_plane.PROGRAMS,
            "kubectl",
            "kubelet",
            "kube-proxy",
            "coredns",
            "kube-router",
            "ray-operator",
        ):
            program(name)
        with folders.lock():
            images_wanted = catalog.prepare(project=images)
            settings = {"nodes": nodes_wanted, "policies": policies, "kuberay": with_kuberay}
            reason = _why_not(settings)
            if reason and teardown.traces():
                _say(f"taking down what is there: {reason}")
                teardown.remove_all()
            if reason:
                _boot({**settings, "images": images_wanted})
            else:
                _load_newer_images(images_wanted)
    return Cluster(layout.kubeconfig())


def check() -> None:
    """Raises ClusterError if this machine cannot have a cluster; installs nothing."""
    with _lock():
        machine.check(policies=True, install=False)


def build_images() -> dict[str, str]:
    """Build and import what changed, without booting; returns image name → what it was made from."""
    with _lock(), folders.lock():
        machine.check_system(install=True)
        return catalog.prepare(project=True)


def is_up() -> bool:
    """Whether a cluster was booted to its end and its programs run."""
    return _record().exists() and all(processes.running(name) is not None for name in processes.started())


def down() -> None:
    """Take the cluster down, as far as there is one. Raises ClusterError if it is not this state folder's."""
    with _lock():
        machine.check_owner()
        teardown.remove_all()


def status() -> str:
    """In words: what is up, what is not."""
    try:
        machine.check_owner()
    except ClusterError as error:
        return str(error)
    traces = teardown.traces()
    if not traces:
        return "down: nothing of a cluster is on this machine"
    dead = [name for name in processes.started() if processes.running(name) is None]
    if dead:
        ends = "".join(f"\n--- end of {processes.log(name)}\n{processes.tail(name)}" for name in dead)
        return f"broken: {', '.join(dead)} ended{ends}"
    if not _record().exists():
        return f"half-way: {', '.join(traces[:8])}"
    return f"up: export KUBECONFIG={layout.kubeconfig()}\nrunning: {', '.join(processes.started())}"


def _why_not(settings: dict[str, Any]) -> str:
    """Why the cluster that is there, if any, cannot be used; "" if it can."""
    try:
        have = json.loads(_record().read_text())
    except (OSError, ValueError):
        return "its boot was not finished"
    different = [name for name, value in settings.items() if have[name] != value]
    if different:
        return f"it was booted with other settings ({', '.join(different)})"
    dead = [name for name in processes.started() if processes.running(name) is None and name != "ray-operator"]
    if dead:
        return f"{', '.join(dead)} ended"
    return "" if control_plane.ready() else "its API server does not answer"


def _load_newer_images(wanted: dict[str, str]) -> None:
    """Give the nodes of a running cluster what was built since its boot; pods that are started from now on have it."""
    record = json.loads(_record().read_text())
    newer = {name: tag for name, tag in wanted.items() if record["images"].get(name) != tag}
    for number in range(1, record["nodes"] + 1):
        for name, tag in newer.items():
            Containerd(layout.containerd_socket(number)).load(name, tag)
    if newer:
        record["images"] |= newer
        _record().write_text(json.dumps(record, indent=1))
        _say(f"the nodes have new versions of {', '.join(newer)}; pods that run keep theirs until they are restarted")


def _boot(wanted: dict[str, Any]) -> None:
    numbers = range(1, wanted["nodes"] + 1)
    start = time.monotonic()

    def step(what: str, action: Callable[[], None]) -> None:
        begun = time.monotonic()
        action()
        if os.environ.get("VERBOSE"):
            _say(f"{what}: {time.monotonic() - begun:.1f} s")

    layout.state().mkdir(parents=True, mode=0o700)
    machine.claim()
    machine.remember_settings()
    cgroups.prepare(wanted["nodes"])
    step("network", lambda: network.up(wanted["nodes"]))
    step("containerd", lambda: _start_containerds(numbers))
    step("control plane", control_plane.start)
    certificates.make_user("proxy", "/CN=system:kube-proxy")
    for number in numbers:
        nodes.wait_for_containerd(number)
        nodes.start(number)
    cluster = Cluster(layout.kubeconfig())
    step("objects", lambda: cluster.apply(*addons.dns(), *addons.storage()))
    if wanted["kuberay"]:
        step("KubeRay", cluster.start_kuberay)
    step("nodes", lambda: _wait_for_nodes(cluster, list(numbers), wanted["policies"]))
    cluster.gpus(layout.node_name(1), 1)
    _record().write_text(json.dumps(wanted, indent=1))
    _say(f"booted in {time.monotonic() - start:.1f} s; logs are in {layout.logs()}")


def _start_containerds(numbers: range) -> None:
    for number in numbers:
        nodes.start_containerd(number)


def _wait_for_nodes(cluster: Cluster, numbers: list[int], policies: bool) -> None:
    for number in numbers:
        names = nodes.programs(number)

        def is_ready(name: str = layout.node_name(number)) -> bool:
            done = cluster.try_kubectl("wait", "--for=condition=Ready", f"node/{name}", "--timeout=1s")
            return done.returncode == 0

        processes.wait_for(f"{layout.node_name(number)} to be Ready", is_ready, 90, names)
        if policies:
            nodes.start_firewall(number)

    def dns_is_ready() -> bool:
        available = "--for=condition=Available"
        wait = ("wait", available, "deployment/coredns", "--namespace", "kube-system", "--timeout=1s")
        return cluster.try_kubectl(*wait).returncode == 0

    processes.wait_for("DNS (deployment coredns in kube-system)", dns_is_ready, 90, ["kubelet-1", "kube-scheduler"])


def _record() -> Path:
    """Written last: what the cluster was booted with."""
    return layout.state() / "cluster.json"


@contextlib.contextmanager
def session() -> Iterator[None]:
    """Held by who needs the cluster for long, such as a run of tests: a second one waits instead of sharing it."""
    with _exclusive(".cluster.session.lock", "waiting for another run of tests that uses the cluster"):
        yield


def _lock() -> contextlib.AbstractContextManager[None]:
    """One boot or take-down at a time."""
    return _exclusive(".cluster.lock", "waiting for another process that boots the cluster or takes it down")


@contextlib.contextmanager
def _exclusive(name: str, waiting: str) -> Iterator[None]:
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / name).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(waiting)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(f"cluster: {text}", file=sys.stderr, flush=True)
