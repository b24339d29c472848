"""Building images with buildah, in a store of the project's own, so that nobody else's images are touched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hack.cluster import processes
from hack.cluster.images import folders
from hack.cluster.layout import ClusterError
from hack.cluster.processes import run

BUILD_SECONDS = 3600


def build(
    tag: str,
    context: Path,
    dockerfile: Path,
    target: str = "",
    arguments: Mapping[str, str] | None = None,
    secrets: Mapping[str, Path] | None = None,
    mounts: Sequence[str] = (),
) -> None:
    """Build a Dockerfile's target. ``secrets`` (name → file) are there for the RUN instructions that ask for them,
    ``mounts`` (HOST:CONTAINER:ro) for all of them; neither is in the image.
    """
    log = folders.images() / "build.log"
    command = [
        *_buildah("build", "--layers", "--network", "host", "--isolation", "chroot", "--format", "oci"),
        *("--signature-policy", str(_policy()), "--tag", tag, "--file", str(dockerfile)),
        *(["--target", target] if target else []),
        *(word for name, value in (arguments or {}).items() for word in ("--build-arg", f"{name}={value}")),
        *(word for name, file in (secrets or {}).items() for word in ("--secret", f"id={name},src={file}")),
        *(word for mount in mounts for word in ("--volume", mount)),
        str(context),
    ]
    why = ""
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                ["nice", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=BUILD_SECONDS,
                check=False,
                # Builds fetch packages, so proxies stay.
                env={**os.environ, "PATH": processes.environment()["PATH"]},
            )
            why = "could not be built" if done.returncode != 0 else ""
        except subprocess.TimeoutExpired:
            why = f"was not built within {BUILD_SECONDS:g} s"
    if why:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise ClusterError(f"{dockerfile} (target {target or 'the last'}) {why}; the end of {log}:\n{end}")


def exists(tag: str) -> bool:
    return tag in names()


def layers(tag: str) -> list[str]:
    """Digests of an image's uncompressed layers, the lowest first."""
    described = json.loads(run(*_buildah("inspect", "--type", "image", tag)))
    return list(described["OCIv1"]["rootfs"]["diff_ids"])


def push(tag: str, layout: Path, name: str) -> None:
    """Write an image into an OCI layout; layers that are there (by their uncompressed digest) are not written again."""
    run(
        # Layers without compression are not among the choices; this is the quickest.
        *_buildah("push", "--quiet", "--compression-format", "zstd", "--compression-level", "1"),
        *("--signature-policy", str(_policy()), tag, f"oci:{layout}:{name}"),
        seconds=1800,
    )


def remove_except(tags: set[str]) -> None:
    """Remove images of ours that no current version uses; layers that a kept image builds on stay."""
    listed = _images()
    stale = [name for image in listed for name in image.get("names") or [] if name not in tags]
    # Without a name are the stages that make the wheel; the newest one is where the next build starts.
    nameless = sorted((image for image in listed if not image.get("names")), key=lambda image: image["created"])
    for name in [*stale, *(image["id"] for image in nameless[:-1])]:
        run(*_buildah("rmi", "--force", name), seconds=300)


def clean_up() -> None:
    """Remove what a build that was killed left: its working containers, and mounts."""
    if folders.storage().exists():
        run(*_buildah("rm", "--all"), seconds=300)
    unmount_below(folders.storage())
    shutil.rmtree(folders.RUN / "buildah", ignore_errors=True)


def unmount_below(folder: Path) -> None:
    """Unmount everything that is mounted at or below a folder."""
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for path in sorted((p for p in mounted if p == str(folder) or p.startswith(f"{folder}/")), reverse=True):
        run("umount", "--lazy", path)


def names() -> list[str]:
    """Tags of all images in the store."""
    return [name for image in _images() for name in image.get("names") or []]


def _images() -> list[dict[str, Any]]:
    if not folders.storage().exists():
        return []
    return json.loads(run(*_buildah("images", "--json")) or "[]") or []


def _buildah(command: str, *words: str) -> list[str]:
    (folders.RUN / "buildah").mkdir(parents=True, exist_ok=True)
    return [
        *("buildah", "--storage-driver", "overlay", "--root", str(folders.storage())),
        *("--runroot", str(folders.RUN / "buildah"), command, *words),
    ]


def _policy() -> Path:
    """Images are not signed here; without a policy file buildah refuses to work, and not every system has one."""
    path = folders.images() / "policy.json"
    path.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    return path
