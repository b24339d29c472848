"""kubectl, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Kube:
    """An API server with a namespace of the tests' own."""

    kubectl: Path
    kubeconfig: str
    namespace: str

    def run(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl; the caller looks at the exit status."""
        return subprocess.run(
            [str(self.kubectl), "--namespace", self.namespace, *arguments],
            env={**os.environ, "KUBECONFIG": self.kubeconfig},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def ok(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl, which must succeed; returns its output."""
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}\n{done.stderr}"
        return done.stdout

    def json(self, *arguments: str, stdin: str | None = None) -> Any:
        """Run kubectl, which must succeed; returns its JSON output."""
        return json.loads(self.ok(*arguments, "--output", "json", stdin=stdin))

    def patch_status(self, kind: str, name: str, status: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        """Merge into an object's status, through its subresource; the caller looks at the exit status."""
        patch = json.dumps({"status": status})
        return self.run("patch", kind, name, "--subresource=status", "--type=merge", "--patch", patch)

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """One object, None if there is none."""
        text = self.ok("get", kind, name, "--ignore-not-found", "--output", "json")
        found: dict[str, Any] | None = json.loads(text) if text.strip() else None
        return found

    def all(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        """All objects of a kind in the namespace."""
        items: list[dict[str, Any]] = self.json("get", kind, *(["--selector", selector] if selector else []))["items"]
        return items

    def apply(self, *objects: dict[str, Any]) -> None:
        """Apply objects."""
        self.ok("apply", "--filename", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def merge(self, kind: str, name: str, patch: dict[str, Any]) -> None:
        """Patch an object."""
        self.ok("patch", kind, name, "--type=merge", "--patch", json.dumps(patch))

    def events(self, name: str) -> list[str]:
        """``reason: message`` of every event about the object of that name."""
        items = self.json("get", "events", "--field-selector", f"involvedObject.name={name}")["items"]
        return [f"{e['reason']}: {e.get('message') or e.get('note')}" for e in items]


def eventually(
    look: Callable[[], T | None], *, seconds: float, what: str, every: float = 0.3, now: Callable[[], str] | None = None
) -> T:
    """What ``look`` returns as soon as it is something; after the deadline an error that says what was waited for.

    Args:
        look: returns None (or False) as long as it is not there.
        seconds: the deadline.
        what: was waited for.
        every: seconds between looks.
        now: describes the state of things, for the error.
    """
    end = time.monotonic() + seconds
    while True:
        found = look()
        if found is not None and found is not False:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {seconds:g} s" + (f"; now: {now()}" if now else ""))
        time.sleep(every)


def wait_for_crds(kube: Kube, names: Iterable[str]) -> None:
    """Until the API server serves our CRDs, which were just applied, with their schemas."""
    # Again, if need be: where a CRD has no conditions yet, kubectl says that they are no list.
    established = ("wait", "--for=condition=Established", "--timeout=30s", *(f"crd/{name}" for name in names))
    eventually(lambda: kube.run(*established).returncode == 0, seconds=30, what="the CRDs are established")
    # Established comes a moment before every path of the server knows the schema.
    explained = ("explain", "rljob.spec.policy")
    eventually(lambda: kube.run(*explained).returncode == 0, seconds=30, every=0.1, what="rljob.spec.policy is known")
