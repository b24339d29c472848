"""Which images are rebuilt when, and what the Dockerfile promises; no image is built here."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hack.cluster import processes
from hack.cluster.images import base, buildah, catalog, containerd, folders, pip_settings, template
from hack.cluster.layout import ClusterError

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def stage(name: str) -> str:
    """The text of one stage of the Dockerfile, from its FROM to the next."""
    found = re.search(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return "\n".join(line for line in found[1].splitlines() if line and not line.startswith("#"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what images are made from."""
    for part in (*catalog.COMMON, *catalog.CODE, "requirements", str(catalog.TEST_IMAGES)):
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, tmp_path / part, dirs_exist_ok=True)
        else:
            (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / part, tmp_path / part)
    return tmp_path


def changed(tree: Path, before: dict[str, str]) -> set[str]:
    after = catalog.project_tags("base", tree)
    return {name.removeprefix("localhost/").removesuffix(":dev") for name in after if after[name] != before.get(name)}


EVERY = {"rlightning-operator", "rlightning-trainer", "user-policy"}


@pytest.mark.parametrize(
    ("file", "rebuilt"),
    [
        ("rlightning/errors.py", EVERY),
        ("operator/rlightning_operator/__init__.py", EVERY),  # one wheel has both packages
        ("pyproject.toml", EVERY),
        ("Dockerfile", EVERY),
        ("requirements/operator.txt", {"rlightning-operator"}),
        ("requirements/trainer.txt", {"rlightning-trainer", "user-policy"}),
        ("tests/cluster/images/user-policy/policies.py", {"user-policy"}),
        ("constraints.txt", set()),
        ("rlightning/__pycache__/errors.cpython-311.pyc", set()),
    ],
)
def test_a_changed_file_rebuilds_the_images_made_from_it(tree: Path, file: str, rebuilt: set[str]) -> None:
    before = catalog.project_tags("base", tree)
    (tree / file).parent.mkdir(exist_ok=True)
    with (tree / file).open("a") as text:
        text.write("\n# changed\n")
    assert changed(tree, before) == rebuilt


def test_another_base_rebuilds_everything(tree: Path) -> None:
    assert not set(catalog.project_tags("base", tree).values()) & set(catalog.project_tags("other", tree).values())


def test_the_default_base_is_a_public_python_image_of_the_version_that_is_locked() -> None:
    version = re.search(r"--python-version (\S+)", (ROOT / "hack" / "lock").read_text())
    assert version is not None
    assert catalog.default_base() == f"python:{version[1]}-slim-{base.SUITE}"


@pytest.mark.parametrize("image", ["operator", "trainer"])
def test_both_images_run_as_an_unprivileged_user_by_number(image: str) -> None:
    # By number, for Kubernetes' runAsNonRoot cannot judge names.
    assert re.findall(r"^USER (.*)$", stage(image), re.MULTILINE) == ["10001:10001"]
    assert "--uid 10001" in stage("base")


@pytest.mark.parametrize("image", ["operator", "trainer"])
def test_code_comes_after_the_dependencies_so_that_a_change_of_it_costs_a_small_layer(image: str) -> None:
    dependencies = stage(f"{image}-dependencies")
    assert f"FROM {image}-dependencies AS {image}" in DOCKERFILE
    assert re.findall(r"^COPY (.*)$", dependencies, re.MULTILINE) == [f"requirements/{image}.txt /requirements/"]
    assert stage(image).splitlines()[-1] == "COPY --from=wheel /install/ /"
    assert not re.findall(r"^(?:RUN|ADD) ", stage(image), re.MULTILINE)


def test_pip_is_given_its_settings_as_secrets_only() -> None:
    for instruction in re.findall(r"^RUN (?:.*\\\n)*.*", DOCKERFILE, re.MULTILINE):
        if " -r /requirements/" in instruction:
            assert "--mount=type=secret,id=pip.conf" in instruction and "--no-cache-dir" in instruction
    assert not re.findall(r"^(?:ARG|ENV) .*(?:PIP|INDEX|TOKEN|PASSWORD|CERT)", DOCKERFILE, re.MULTILINE)


def test_names_of_stacks_are_those_of_the_image_specification() -> None:
    # printf 'sha256:a sha256:b' | sha256sum, then that and ' sha256:c'
    second = "sha256:" + hashlib.sha256(b"sha256:a sha256:b").hexdigest()
    third = "sha256:" + hashlib.sha256(f"{second} sha256:c".encode()).hexdigest()
    assert containerd.chain_ids(["sha256:a", "sha256:b", "sha256:c"]) == ["sha256:a", second, third]


def test_a_node_cannot_change_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLIGHTNING_CACHE", str(tmp_path))
    source = folders.template()
    layer = source / containerd.SNAPSHOTS / "snapshots" / "1" / "fs"
    layer.mkdir(parents=True)
    (layer / "file").write_text("layer")
    files = [source / containerd.SNAPSHOTS / "metadata.db", source / containerd.METADATA / "meta.db"]
    files.append(source / containerd.CONTENT / "blobs" / "sha256" / "abc")
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("template")
    node = tmp_path / "node"
    template.copy_to(node)
    for file in files:
        (node / file.relative_to(source)).write_text("node")
    snapshots = node / containerd.SNAPSHOTS / "snapshots"
    assert (snapshots / "1" / "fs" / "file").read_text() == "layer"
    shutil.rmtree(node)
    assert [file.read_text() for file in files] == ["template"] * 3
    assert (layer / "file").read_text() == "layer"


def test_pips_settings_are_read_as_pip_prints_them() -> None:
    listed = "\n".join(
        [
            ":env:.index-url='https://mirror.example/simple'",
            "global.cert='/etc/ssl/a b.crt'",
            "global.index-url='https://elsewhere.example'",
            "global.find-links='\\n/wheels\\nhttps://wheels.example'",
            "global.require-virtualenv='true'",
            "freeze.timeout='10'",
            "install.trusted-host='mirror.example'",
        ]
    )
    assert pip_settings.parse(listed) == {
        "index-url": "https://mirror.example/simple",
        "cert": "/etc/ssl/a b.crt",
        "find-links": "/wheels https://wheels.example",
        "trusted-host": "mirror.example",
    }


def test_a_full_disk_is_said_before_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLIGHTNING_CACHE", str(tmp_path))
    folders.images().mkdir()
    with pytest.raises(ClusterError, match=r"the trainer needs 1e\+06 GB for a while, .* GB free.*RLIGHTNING_CACHE"):
        folders.need_space(1e6, "the trainer")


def test_test_images_are_made_from_the_trainers() -> None:
    for dockerfile in (ROOT / catalog.TEST_IMAGES).glob("*/Dockerfile"):
        assert "ARG TRAINER\nFROM ${TRAINER}\n" in dockerfile.read_text()


def test_the_build_sees_only_what_images_are_made_of() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == {*catalog.CODE, "requirements"}
    if not (ROOT / ".git").is_dir():
        pytest.skip("not a git checkout")
    ignored = subprocess.run(["git", "check-ignore", *kept], cwd=ROOT, capture_output=True, text=True).stdout
    assert ignored == ""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_templates_containerd_does_not_outlive_who_started_it(tmp_path: Path) -> None:
    program(tmp_path / "bin" / "containerd", f"echo $$ >{tmp_path}/pid; exec sleep 60")
    program(tmp_path / "bin" / "ctr", "exit 0")
    code = f"""
import time
from pathlib import Path
from hack.cluster.images import folders, template
folders.RUN = Path({str(tmp_path / "run")!r})
with template._running():
    print("up", flush=True)
    time.sleep(60)
"""
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "RLIGHTNING_CACHE": str(tmp_path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None and parent.stdout.readline() == "up\n"
    deadline = time.monotonic() + 10
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    containerd_ = int((tmp_path / "pid").read_text())
    parent.kill()
    parent.wait()
    while processes.start_time(containerd_) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not processes.start_time(containerd_)


def test_a_build_that_takes_too_long_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin" / "buildah", "echo fetching; exec sleep 60")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("RLIGHTNING_CACHE", str(tmp_path))
    monkeypatch.setattr(folders, "RUN", tmp_path / "run")
    monkeypatch.setattr(buildah, "BUILD_SECONDS", 0.5)
    folders.images().mkdir()
    with pytest.raises(ClusterError, match=r"(?s)Dockerfile \(target trainer\) was not built within 0\.5 s;.*fetching"):
        buildah.build("x", tmp_path, tmp_path / "Dockerfile", target="trainer")
