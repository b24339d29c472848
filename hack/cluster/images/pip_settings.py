"""pip's settings of this machine, for builds: a mirror, a proxy, a certificate. They are mounted, never in an image."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from hack.cluster.images import folders

CERTIFICATE = "/run/secrets/ca.crt"
LOCAL_WHEELS = "/mnt"
"""Where a folder of wheels on this machine (``find-links``) is mounted."""

# What has a meaning inside a build; other settings (paths, the user's habits) have none there.
PASSED = ("index-url", "extra-index-url", "find-links", "no-index", "proxy", "timeout", "trusted-host")


def secrets_and_mounts() -> tuple[dict[str, Path], list[str]]:
    """What to hand to ``buildah build``: secrets (name → file), and mounts."""
    settings = effective()
    secrets: dict[str, Path] = {}
    mounts: list[str] = []
    certificate = settings.pop("cert", "") or os.environ.get("SSL_CERT_FILE", "")
    if certificate and Path(certificate).is_file():
        secrets["ca.crt"] = Path(certificate)
        settings["cert"] = CERTIFICATE
    links = []
    for link in settings.pop("find-links", "").split():
        folder = Path(link)
        if not folder.is_dir():
            links.append(link)
        elif any(folder.iterdir()) and not mounts:
            mounts.append(f"{folder}:{LOCAL_WHEELS}:ro")
            links.append(LOCAL_WHEELS)
    if links:
        settings["find-links"] = " ".join(links)
    file = folders.images() / "pip.conf"
    file.touch(mode=0o600)  # an index's address may hold a password
    file.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
    secrets["pip.conf"] = file
    return secrets, mounts


def effective() -> dict[str, str]:
    """Settings from pip's files and environment, as pip itself understands them."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return parse(done.stdout)


def parse(listed: str) -> dict[str, str]:
    """What ``pip config list`` printed; the environment is stronger than files."""
    found: dict[str, tuple[int, str]] = {}
    for line in listed.splitlines():
        where, _, quoted = line.partition("=")
        section, _, name = where.rpartition(".")
        strength = {"global": 0, "install": 1, ":env:": 2}.get(section)
        if strength is None or name not in (*PASSED, "cert") or found.get(name, (-1, ""))[0] > strength:
            continue
        # It prints Python's repr of a string; a shell reads that alike, and several lines come as \n.
        value = " ".join(shlex.split(quoted)).replace("\\n", " ")
        found[name] = (strength, " ".join(value.split()))
    return {name: value for name, (_, value) in found.items()}
