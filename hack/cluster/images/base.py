"""The images that a cluster without a registry needs before any of ours: pause, CoreDNS, and Debian with Python."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hack.cluster.images import buildah, folders
from hack.cluster.processes import run
from hack.programs.binaries import program

PAUSE = "localhost/pause:dev"
COREDNS = "localhost/coredns:dev"
BASE = "localhost/rlightning-base:dev"

PAUSE_SOURCE = "#include <unistd.h>\nint main(void) { for (;;) pause(); }\n"
PAUSE_DOCKERFILE = 'FROM scratch\nCOPY pause /pause\nUSER 65535:65535\nENTRYPOINT ["/pause"]\n'
COREDNS_DOCKERFILE = 'FROM scratch\nCOPY coredns /coredns\nENTRYPOINT ["/coredns"]\n'

SUITE = "bookworm"
PACKAGES = "ca-certificates,python3,python3-venv,wget"
"""With what python:3.11-slim-bookworm stands for here; wget is what KubeRay's older probes call."""
BASE_DOCKERFILE = """\
FROM scratch
ADD rootfs.tar /
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8
CMD ["python3"]
"""


def tags() -> dict[str, str]:
    """Image name → a tag in buildah's store that changes with everything that the image is made from."""
    return {
        PAUSE: tag("pause", PAUSE_SOURCE, PAUSE_DOCKERFILE),
        COREDNS: tag("coredns", program("coredns").parent.name, COREDNS_DOCKERFILE),
        BASE: tag("base", SUITE, PACKAGES, BASE_DOCKERFILE),
    }


def tag(name: str, *parts: str) -> str:
    """The tag of a build: a name, and a hash of what it is made from."""
    return f"localhost/rlightning-build/{name}:{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


def build() -> None:
    """Build those that buildah's store lacks."""
    for name, make in ((PAUSE, _pause), (COREDNS, _coredns), (BASE, _base)):
        if not buildah.exists(tags()[name]):
            make(tags()[name])


def _pause(name: str) -> None:
    with _context(PAUSE_DOCKERFILE) as context:
        (context / "pause.c").write_text(PAUSE_SOURCE)
        run("gcc", "-O2", "-static", "-o", context / "pause", context / "pause.c")
        buildah.build(name, context, context / "Dockerfile")


def _coredns(name: str) -> None:
    with _context(COREDNS_DOCKERFILE) as context:
        shutil.copy2(program("coredns"), context / "coredns")
        buildah.build(name, context, context / "Dockerfile")


def _base(name: str) -> None:
    """Debian with Python, as near to the public image of the Dockerfile as a machine without registry gets."""
    print("making the base image with debootstrap; once, about a minute", flush=True)
    folders.need_space(1.5, "the base image")
    with _context(BASE_DOCKERFILE) as context:
        tree = context / "tree"
        mirror = _mirror()
        run(
            *("nice", "debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, tree),
            *([mirror] if mirror else []),
            seconds=900,
            env=dict(os.environ),
        )
        for left in ("var/cache/apt", "var/lib/apt/lists", "var/log"):
            for path in (tree / left).iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        run("tar", "--numeric-owner", "-C", tree, "-cf", context / "rootfs.tar", ".", seconds=300)
        shutil.rmtree(tree)
        buildah.build(name, context, context / "Dockerfile")


def _mirror() -> str:
    """The mirror that this machine's own apt uses for the suite, if it is a Debian; "" leaves it to debootstrap."""
    if not shutil.which("apt-get"):
        return ""
    listed = run("apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME) $(ORIGIN) $(COMPONENT)")
    for line in listed.splitlines():
        words = line.split(" ")
        if words[1:] == [SUITE, "Debian", "main"]:
            return words[0]
    return ""


@contextmanager
def _context(dockerfile: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folders.images()) as folder:
        (Path(folder) / "Dockerfile").write_text(dockerfile)
        yield Path(folder)
