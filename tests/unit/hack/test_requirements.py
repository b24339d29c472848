"""What the images get is what pyproject.toml asks for, at the versions of constraints.txt."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]
WANTED: dict[str, list[str]] = {
    "operator": [*PYPROJECT["project"]["dependencies"], *EXTRAS["operator"]],
    "trainer": [*PYPROJECT["project"]["dependencies"], *EXTRAS["train"], *EXTRAS["mujoco"], *EXTRAS["cluster"]],
    "build": PYPROJECT["build-system"]["requires"],
}
# The images are for CPython 3.11 on Linux x86-64, whatever the tests run on.
IMAGE = {
    "python_version": "3.11",
    "python_full_version": "3.11.2",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "implementation_name": "cpython",
    "os_name": "posix",
}


def lines(file: str) -> list[str]:
    return [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]


def closure(direct: list[str]) -> set[str] | None:
    """Names of everything that requirements need, followed through what is installed here; None if some is not."""
    found: set[tuple[str, str]] = set()
    open_ = [(canonicalize_name(r.name), extra) for r in map(Requirement, direct) for extra in ("", *r.extras)]
    while open_:
        name, extra = open_.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            return None
        for requirement in map(Requirement, needs):
            if requirement.marker is None or requirement.marker.evaluate({**IMAGE, "extra": extra}):
                open_ += [(canonicalize_name(requirement.name), inner) for inner in ("", *requirement.extras)]
    return {name for name, _ in found}


@pytest.mark.parametrize("image", WANTED)
def test_every_line_is_a_version_of_constraints_txt(image: str) -> None:
    locked = set(lines("constraints.txt"))
    for line in lines(f"requirements/{image}.txt"):
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*==[0-9][0-9a-z.]*", line), f"{line!r} is not name==version"
        assert line in locked, f"{line} is not in constraints.txt; `make lock`"


@pytest.mark.parametrize("image", WANTED)
def test_an_image_gets_what_its_extras_need_and_nothing_else(image: str) -> None:
    needed = closure(WANTED[image])
    if needed is None:
        pytest.skip("not everything that this image gets is installed here")
    listed = {line.partition("==")[0] for line in lines(f"requirements/{image}.txt")}
    assert listed == needed, "`make lock` makes the lists anew"


def test_the_operator_has_neither_torch_nor_ray() -> None:
    listed = {line.partition("==")[0] for line in lines("requirements/operator.txt")}
    assert not {"torch", "ray", "numpy", "gymnasium", "tensordict"} & listed
