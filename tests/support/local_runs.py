"""Undisturbed runs of manifests on this machine, in one process: what runs on a cluster must end with their digest."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
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
    """Runs each manifest once, two at a time: a run is one process with one thread.

    Args:
        folder: for their run folders.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: dict[str, Future[LocalRun]] = {}
        self._worker = ThreadPoolExecutor(2)

    def begin(self, job: dict[str, Any]) -> Future[LocalRun]:
        """Run a manifest beside what else is done: while a test waits for the cluster, say."""
        key = json.dumps(job["spec"], sort_keys=True)
        if key not in self._runs:
            self._runs[key] = self._worker.submit(self._run, job, len(self._runs))
        return self._runs[key]

    def of(self, job: dict[str, Any]) -> LocalRun:
        """The run of a manifest; it must succeed."""
        return self.begin(job).result(timeout=600)

    def settle(self) -> None:
        """Wait for all that were begun."""
        for run in self._runs.values():
            run.result(timeout=600)

    def close(self) -> None:
        """Begin no more; returns when those under way have ended."""
        self._worker.shutdown(cancel_futures=True)

    def _run(self, job: dict[str, Any], number: int) -> LocalRun:
        manifest = self.folder / f"job-{number}.json"
        manifest.write_text(json.dumps({**job, "metadata": {"name": job["metadata"]["name"]}}))  # JSON is YAML
        runs = self.folder / f"runs-{number}"
        done = rlightning("run", manifest, "--run-dir", runs, "--quiet", seconds=300)
        assert done.returncode == 0, done.output
        folder = runs / job["metadata"]["name"] / "1"
        return LocalRun(folder, json.loads((folder / "status.json").read_text()))
