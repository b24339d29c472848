"""The template: a containerd root in which every image lies unpacked, once.

Images are imported by a containerd that runs only for that. Nodes then start from copies of its small databases, with
links to its layers: containers only ever write into layers of their own above them, so a layer is never changed, takes
its disk space once for all nodes, and a boot takes milliseconds per image however large it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from hack.children import die_with_parent
from hack.cluster import layout, processes
from hack.cluster.images import folders
from hack.cluster.images.containerd import CONTENT, METADATA, SNAPSHOTS, UNUSED_PLUGINS, Containerd
from hack.cluster.layout import ClusterError

REPLACED = "localhost/replaced/"
"""Earlier versions of images, kept as long as a running cluster may have containers on their layers."""


def contents() -> dict[str, str]:
    """What the template holds: image name → the tag of buildah's store that it was made from."""
    try:
        return dict(json.loads(_contents_file().read_text()))
    except (OSError, ValueError):
        return {}


def fill(wanted: Mapping[str, str]) -> None:
    """Make the template hold exactly these images (name → tag in buildah's store). Holds the caller's lock."""
    have = contents()
    if have == dict(wanted):
        return
    with _running() as containerd:
        for name in [*wanted, *(name for name in have if name not in wanted)]:
            if have.get(name) == wanted.get(name):
                continue
            if name in have:
                version = hashlib.sha256(have[name].encode()).hexdigest()[:16]
                containerd.ctr("images", "tag", "--force", name, f"{REPLACED}{version}")
            if name in wanted:
                containerd.load(name, wanted[name])
                have[name] = wanted[name]
            else:
                containerd.ctr("images", "rm", name)
                del have[name]
            _write_contents(have)
        _collect_garbage(containerd)


def copy_to(root: Path) -> None:
    """Make a node's containerd root."""
    source = folders.template()
    for folder in (METADATA, CONTENT):
        shutil.copytree(source / folder, root / folder)
    (root / SNAPSHOTS / "snapshots").mkdir(parents=True)
    shutil.copy2(source / SNAPSHOTS / "metadata.db", root / SNAPSHOTS / "metadata.db")
    for layer in (source / SNAPSHOTS / "snapshots").iterdir():
        (root / SNAPSHOTS / "snapshots" / layer.name).symlink_to(layer)


@contextlib.contextmanager
def _running() -> Iterator[Containerd]:
    """A containerd on the template."""
    folders.RUN.mkdir(parents=True, exist_ok=True)
    folders.template().mkdir(parents=True, exist_ok=True)
    containerd = Containerd(folders.RUN / "containerd.sock")
    containerd.socket.unlink(missing_ok=True)
    configuration = folders.RUN / "containerd.toml"
    configuration.write_text(
        f'version = 2\nroot = "{folders.template()}"\nstate = "{folders.RUN / "state"}"\n'
        f"disabled_plugins = {json.dumps([*UNUSED_PLUGINS, 'io.containerd.grpc.v1.cri'])}\n"
        f'[grpc]\n  address = "{containerd.socket}"\n[ttrpc]\n  address = "{containerd.socket}.ttrpc"\n'
    )
    log = folders.images() / "containerd.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            ["containerd", "--config", str(configuration)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=processes.environment(),
            preexec_fn=die_with_parent,  # two on one root would spoil it
        )
    try:
        processes.wait_for("containerd to open the image template", lambda: _answers(containerd, server, log), 60)
        yield containerd
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        shutil.rmtree(folders.RUN / "state", ignore_errors=True)
        for left in folders.RUN.glob("containerd*"):
            left.unlink()


def _answers(containerd: Containerd, server: subprocess.Popen[bytes], log: Path) -> bool:
    if server.poll() is not None:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
        raise ClusterError(f"containerd ended ({server.returncode}); the end of {log}:\n{end}")
    try:
        containerd.ctr("version")
    except ClusterError:
        return False
    return True


def _collect_garbage(containerd: Containerd) -> None:
    """Remove what no image uses any more. A running cluster's containers stand on layers of the images they were
    started from, so replaced images stay until there is none.
    """
    if not layout.state().exists():
        replaced = [name for name in containerd.ctr("images", "ls", "--quiet").split() if name.startswith(REPLACED)]
        if replaced:
            containerd.ctr("images", "rm", *replaced)
    # The only command that waits for the collector.
    lease = containerd.ctr("leases", "create").strip()
    containerd.ctr("leases", "rm", "--sync", lease)


def _contents_file() -> Path:
    return folders.images() / "template.json"


def _write_contents(contents: Mapping[str, str]) -> None:
    temporary = _contents_file().with_suffix(".new")
    temporary.write_text(json.dumps(contents, indent=1))
    temporary.replace(_contents_file())
