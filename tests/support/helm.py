"""helm, for tests: the chart rendered, and installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hack.programs.binaries import program

CHART = Path(__file__).parents[2] / "charts" / "rlightning"
REPOSITORIES = {
    "image": {"repository": "registry.example/rlightning-operator"},
    "trainer": {"image": {"repository": "registry.example/rlightning-trainer"}},
}
"""What everybody must set."""


class _Loader(yaml.CSafeLoader):
    """Times stay text, as they are in JSON."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


@dataclass(frozen=True)
class Helm:
    """The program, with folders of its own; with a kubeconfig only where one is given."""

    kubeconfig: str = os.devnull
    binary: Path = field(default_factory=lambda: Path(shutil.which("helm") or program("helm")))

    def run(self, *arguments: str, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        """Run helm; the caller looks at the exit status. ``values`` go through a file, over what the chart needs."""
        with tempfile.TemporaryDirectory() as folder:
            more: list[str] = []
            for name, layer in (("needed", REPOSITORIES if str(CHART) in arguments else None), ("values", values)):
                if layer is not None:
                    path = Path(folder) / f"{name}.json"
                    path.write_text(json.dumps(layer))
                    more += ["--values", str(path)]
            homes = {f"HELM_{name}_HOME": folder for name in ("CACHE", "CONFIG", "DATA")}
            return subprocess.run(
                [str(self.binary), *arguments, *more],
                env={**os.environ, **homes, "KUBECONFIG": self.kubeconfig},
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )

    def ok(self, *arguments: str, values: Mapping[str, Any] | None = None) -> str:
        """Run helm, which must succeed; returns its output."""
        done = self.run(*arguments, values=values)
        assert done.returncode == 0, f"helm {' '.join(arguments)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def render(
        self, values: Mapping[str, Any] | None = None, release: str = "rlightning", namespace: str = "rlightning-system"
    ) -> list[dict[str, Any]]:
        """The chart's objects, hooks included."""
        text = self.ok("template", release, str(CHART), "--namespace", namespace, values=values)
        return [obj for obj in yaml.load_all(text, _Loader) if obj]
