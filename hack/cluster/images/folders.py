"""Where images are kept, and the lock that their builds take."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

from hack.cluster.layout import INSTEAD, ClusterError
from hack.programs.binaries import cache_folder

RUN = Path("/run/rlightning-images")
"""What exists only while images are built or imported."""


def images() -> Path:
    return cache_folder() / "images"


def storage() -> Path:
    """The store of buildah: the layers that builds start from."""
    return images() / "storage"


def template() -> Path:
    """A containerd root that holds every image, unpacked."""
    return images() / "template"


def exchange() -> Path:
    """An OCI layout through which images go from the store into the template."""
    return images() / "exchange"


@contextlib.contextmanager
def lock() -> Iterator[None]:
    """One build, import or copy of the template at a time."""
    images().mkdir(parents=True, exist_ok=True)
    with (images() / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def need_space(gigabytes: float, what: str) -> None:
    """Raises ClusterError if the cache's disk has less free space."""
    free = shutil.disk_usage(images()).free / 1e9
    if free < gigabytes:
        raise ClusterError(
            f"{what} needs {gigabytes:g} GB for a while, and the disk of {images()} has {free:.1f} GB free. Free some "
            f"space, or set RLIGHTNING_CACHE to a folder on a larger disk. {INSTEAD}"
        )
