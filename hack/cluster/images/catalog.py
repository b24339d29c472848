"""Which images the cluster offers, and building and importing those that changed."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable
from pathlib import Path

from hack.cluster.images import base, buildah, folders, pip_settings, template
from hack.cluster.layout import ClusterError
from hack.programs.binaries import ROOT

OPERATOR = "localhost/rlightning-operator:dev"
TRAINER = "localhost/rlightning-trainer:dev"
TEST_IMAGES = Path("tests/cluster/images")
"""Each folder in it with a Dockerfile becomes ``localhost/<folder>:dev``, made from the trainer's (``ARG TRAINER``)."""

CODE = ("pyproject.toml", "README.md", "LICENSE", "rlightning", "operator")
COMMON = ("Dockerfile", ".dockerignore", "requirements/build.txt")


def prepare(project: bool) -> dict[str, str]:
    """Bring the template up to date; returns what a cluster must offer (image name → what it was made from).

    Without ``project`` the project's images stay as they are in the template, if they are there. Holds the caller's
    lock. Raises ClusterError.
    """
    wanted = base.tags()
    if project:
        wanted |= project_tags(wanted[base.BASE])
    have = template.contents()
    if all(have.get(name) == tag for name, tag in wanted.items()):
        return wanted
    buildah.clean_up()  # what a killed build may have left
    try:
        base.build()
        if project:
            _build_project(wanted)
        kept = {} if project else have
        template.fill({**kept, **wanted})
        buildah.remove_except({*template.contents().values()})
    finally:
        buildah.clean_up()
    return wanted


def project_tags(base_tag: str, root: Path = ROOT) -> dict[str, str]:
    """Image name → a tag that changes with everything that the image is made from."""
    tags = {}
    for name, target in ((OPERATOR, "operator"), (TRAINER, "trainer")):
        tags[name] = base.tag(target, base_tag, digest(root, (*COMMON, f"requirements/{target}.txt", *CODE)))
    for folder in _test_images(root):
        tags[f"localhost/{folder.name}:dev"] = base.tag(folder.name, tags[TRAINER], digest(folder, ("",)))
    return tags


def digest(root: Path, parts: Iterable[str]) -> str:
    """Of the names, modes and contents of files and folders below ``root``."""
    total = hashlib.sha256()
    for part in parts:
        top = root / part
        files = [top] if top.is_file() else sorted(path for path in top.rglob("*") if path.is_file())
        for file in files:
            if "__pycache__" in file.parts:
                continue
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            total.update(f"{file.relative_to(root)}\0{file.stat().st_mode & 0o777:o}\0{content}\n".encode())
    return total.hexdigest()


def default_base() -> str:
    """The public image that the Dockerfile starts from where nobody says otherwise."""
    found = re.search(r"^ARG BASE_IMAGE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    if found is None:
        raise ClusterError(f"{ROOT / 'Dockerfile'} has no line `ARG BASE_IMAGE=…`")
    return found[1]


def _build_project(wanted: dict[str, str]) -> None:
    for name, target, gigabytes, hint in (
        (OPERATOR, "operator", 1, "seconds"),
        (TRAINER, "trainer", 20, "the first time 10 minutes: torch's CUDA libraries are 3 GB of packages"),
    ):
        if buildah.exists(wanted[name]):
            continue
        start = time.monotonic()
        print(f"building {name} ({hint})", flush=True)
        # With the dependencies' layers there, only the code is new.
        folders.need_space(gigabytes if not _has_dependencies(target) else 1, f"building {name}")
        secrets, mounts = pip_settings.secrets_and_mounts()
        buildah.build(
            wanted[name],
            ROOT,
            ROOT / "Dockerfile",
            target=target,
            arguments={"BASE_IMAGE": wanted[base.BASE]},
            secrets=secrets,
            mounts=mounts,
        )
        print(f"built {name} in {time.monotonic() - start:.0f} s", flush=True)
    for folder in _test_images():
        name = f"localhost/{folder.name}:dev"
        if not buildah.exists(wanted[name]):
            buildah.build(wanted[name], folder, folder / "Dockerfile", arguments={"TRAINER": wanted[TRAINER]})


def _has_dependencies(target: str) -> bool:
    """Whether some earlier version of the image is in the store: its dependencies' layer then is, too."""
    return any(f"/{target}:" in name for name in buildah.names())


def _test_images(root: Path = ROOT) -> list[Path]:
    return sorted(path.parent for path in (root / TEST_IMAGES).glob("*/Dockerfile"))
