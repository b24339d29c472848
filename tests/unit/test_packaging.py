"""What the distribution promises: a light import, one lock without addresses, no trace of the machine it came from."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import rlightning

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]


def in_fresh_python(code: str) -> Any:
    """Run code in a new interpreter at the repository's root; its standard output is JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout)


def pins() -> dict[str, Version]:
    return {
        canonicalize_name(requirement.name): Version(str(requirement.specifier).removeprefix("=="))
        for requirement in map(Requirement, LOCK)
    }


def tracked_files() -> list[Path]:
    """Files of the repository: git's list where there is a git folder, else what is not hidden or made by tools."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout: there is no list of the repository's files")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_importing_the_package_takes_a_moment_and_loads_no_heavy_library() -> None:
    code = """
import json, sys, time
start = time.perf_counter()
import rlightning
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "modules": sorted({name.split(".")[0] for name in sys.modules})}))
"""
    seconds = []
    for _ in range(3):
        found = in_fresh_python(code)
        assert not {"torch", "ray", "gymnasium", "numpy", "tensordict", "mujoco"} & set(found["modules"])
        seconds.append(found["seconds"])
    assert min(seconds) < 3 * 0.3, f"the promise is 0.3 s, allowed three times over; took {min(seconds):.3f} s"


def test_models_and_manifests_load_without_the_training_libraries() -> None:
    code = """
import json, sys
import rlightning.api, rlightning.api.manifests, rlightning.api.validate, rlightning.cli.app
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""
    assert not {"torch", "ray", "gymnasium", "numpy", "tensordict", "mujoco"} & set(in_fresh_python(code))


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["version"] == rlightning.__version__


def test_the_lock_holds_exact_versions_and_no_address() -> None:
    for line in LOCK:
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*==[0-9][0-9a-z.]*", line), f"{line!r} is not name==version"
    assert sorted(LOCK, key=lambda line: line.split("==")[0]) == LOCK


@pytest.mark.parametrize("extra", ["", *PROJECT["optional-dependencies"]])
def test_every_direct_dependency_is_locked_at_a_version_that_it_allows(extra: str) -> None:
    dependencies = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    locked = pins()
    for requirement in map(Requirement, dependencies):
        assert requirement.specifier, f"{requirement.name} has no lower bound"
        assert locked[canonicalize_name(requirement.name)] in requirement.specifier


def test_the_console_script_starts() -> None:
    module, function = PROJECT["scripts"]["rlightning"].split(":")
    done = subprocess.run(
        [sys.executable, "-c", f"import {module} as m; m.{function}()", "--version"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, f"rlightning {rlightning.__version__}", "")


def test_no_file_names_a_folder_of_the_machine_or_the_host_of_a_registry() -> None:
    home = re.escape(str(Path.home())) if len(Path.home().parts) > 1 else None
    patterns = [
        r"(?<![\w./-])/(?:work|farm|root|home/\w+)/[\w.]",
        r"https?://(?:pypi\.|files\.pythonhosted|proxy\.golang|registry\.npm)",
    ]
    patterns += [rf"(?<![\w./-]){home}/"] if home else []
    forbidden = re.compile("|".join(patterns))
    found = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if path != Path(__file__) and forbidden.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)


def test_ci_runs_the_command_that_the_readme_gives() -> None:
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "make test </dev/null"
    assert "make test" in (ROOT / "README.md").read_text()
    assert os.access(ROOT / ".ci/run", os.X_OK)
