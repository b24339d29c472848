"""Undisturbed runs of manifests on this machine, in one process: what runs on a cluster must end with their digest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.command import Completed, rlightning


@dataclass(frozen=True)
class LocalRun:
    """A finished run.

    Attributes:
        folder: its run folder.
        status: its status.json.
    """

    folder: Path
    status: dict[str, Any]

    @property
    def digest(self) -> str:
        return str(self.status["weights"]["digest"])

    @property
    def iterations(self) -> int:
        return int(self.status["progress"]["iteration"])

    @staticmethod
    def verify(folder: Path) -> Completed:
        """`rlightning verify` on any run folder."""
        return rlightning("verify", folder)


class LocalRuns:
    """Runs each manifest once.

    Args:
        folder: for their run folders.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done: dict[str, LocalRun] = {}

    def of(self, job: dict[str, Any]) -> LocalRun:
        """The run of a manifest; it must succeed."""
        key = json.dumps(job["spec"], sort_keys=True)
        if key not in self._done:
            manifest = self.folder / f"job-{len(self._done)}.json"
            manifest.write_text(json.dumps({**job, "metadata": {"name": job["metadata"]["name"]}}))  # JSON is YAML
            runs = self.folder / f"runs-{len(self._done)}"
            done = rlightning("run", manifest, "--run-dir", runs, "--quiet", seconds=300)
            assert done.returncode == 0, done.output
            folder = runs / job["metadata"]["name"] / "1"
            self._done[key] = LocalRun(folder, json.loads((folder / "status.json").read_text()))
        return self._done[key]
