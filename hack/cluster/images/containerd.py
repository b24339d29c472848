"""Handing images from buildah's store to a containerd, without writing or reading a layer that it has already."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hack.cluster import processes
from hack.cluster.images import buildah, folders
from hack.cluster.layout import ClusterError
from hack.cluster.processes import run

CONTENT = "io.containerd.content.v1.content"
SNAPSHOTS = "io.containerd.snapshotter.v1.overlayfs"
METADATA = "io.containerd.metadata.v1.bolt"

# What is not needed, and would leave folders outside the root (opt), or look for devices that are not there.
UNUSED_PLUGINS = (
    "io.containerd.internal.v1.opt",
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.native",
    "io.containerd.snapshotter.v1.zfs",
    "io.containerd.tracing.processor.v1.otlp",
    "io.containerd.internal.v1.tracing",
)


@dataclass(frozen=True)
class Containerd:
    """A running containerd, by its socket."""

    socket: Path

    def ctr(self, *words: str) -> str:
        """Run containerd's own client, in the namespace that Kubernetes uses."""
        return run("ctr", "--address", self.socket, "--namespace", "k8s.io", *words, seconds=600)

    def stacks(self) -> set[str]:
        """The stacks of layers that are unpacked, by :func:`chain_ids`."""
        return {line.split()[0] for line in self.ctr("snapshots", "ls").splitlines()[1:]}

    def load(self, name: str, tag: str) -> None:
        """Import an image of buildah's store under a name."""
        exchange = folders.exchange()
        shutil.rmtree(exchange, ignore_errors=True)
        _blob("sha256:x").parent.mkdir(parents=True)
        layers = buildah.layers(tag)
        chain = chain_ids(layers)
        unpacked = self.stacks()
        for digest, stack in zip(layers, chain, strict=True):
            if stack in unpacked:
                _blob(digest).touch()  # a blob that is there is not written again, whatever is in it
        buildah.push(tag, exchange, name)
        entry = json.loads((exchange / "index.json").read_text())["manifests"][0]
        manifest = json.loads(_blob(entry["digest"]).read_text())
        new = [layer["digest"] for layer, stack in zip(manifest["layers"], chain, strict=True) if stack not in unpacked]
        self._import(name, entry, [entry["digest"], manifest["config"]["digest"], *new])
        shutil.rmtree(exchange)
        if new:  # the unpacked layers are what containers run on; their archives would only take space again
            self.ctr("content", "rm", *new)

    def _import(self, name: str, entry: dict[str, object], digests: list[str]) -> None:
        importing = subprocess.Popen(
            ["nice", "ctr", "--address", str(self.socket), "--namespace", "k8s.io", "images", "import", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=processes.environment(),
        )
        assert importing.stdin is not None and importing.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # ctr ended early, and says why below
            _write_archive(importing.stdin, name, entry, digests)
            importing.stdin.close()
        said = importing.stdout.read().decode(errors="replace").strip()
        if importing.wait() != 0:
            raise ClusterError(f"{name} could not be imported from {folders.exchange()}: {said[-2000:]}")


def chain_ids(layers: list[str]) -> list[str]:
    """The name of each layer's stack, it and those below (OCI image specification, "Layer ChainID")."""
    stacks: list[str] = []
    for digest in layers:
        below = stacks[-1] if stacks else ""
        stacks.append(f"sha256:{hashlib.sha256(f'{below} {digest}'.encode()).hexdigest()}" if below else digest)
    return stacks


def _write_archive(output: IO[bytes], name: str, entry: dict[str, object], digests: list[str]) -> None:
    """An OCI archive of the blobs named; what it refers to besides is in containerd already."""
    named = {**entry, "annotations": {"io.containerd.image.name": name}}
    with tarfile.open(fileobj=output, mode="w|") as archive:
        for path, text in (
            ("oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"})),
            ("index.json", json.dumps({"schemaVersion": 2, "manifests": [named]})),
        ):
            info = tarfile.TarInfo(path)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
        for digest in digests:
            archive.add(_blob(digest), f"blobs/{digest.replace(':', '/')}")


def _blob(digest: str) -> Path:
    return folders.exchange() / "blobs" / digest.replace(":", "/")
