"""Running programs: to their end, or in the background with a log, a pid file and a cgroup, by which they are found."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hack.cluster import cgroups, layout
from hack.cluster.layout import ClusterError

# A proxy is for the world outside; the cluster's own addresses are never behind it. The rest of the caller's
# environment (paths, locale, certificates of package registries) is left as it is.
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def environment(**changes: str) -> dict[str, str]:
    """The caller's environment without proxies, with the folders where Debian keeps administrators' programs."""
    kept = {name: value for name, value in os.environ.items() if name not in _PROXIES}
    kept["PATH"] = f"{kept.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
    kept.pop("KUBECONFIG", None)
    return {**kept, **changes}


def run(*command: str | Path, stdin: str | None = None, seconds: float = 60, env: dict[str, str] | None = None) -> str:
    """Run a program to its end and return its standard output. Raises ClusterError with what it said."""
    words = [str(word) for word in command]
    shown = " ".join(words)[:300]
    try:
        done = subprocess.run(
            words,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            env=env or environment(),
            check=False,
        )
    except FileNotFoundError:
        raise ClusterError(f"{words[0]} is not on this machine (wanted for: {shown})") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"`{shown}` did not end within {seconds:g} s") from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing")[-3000:]
        raise ClusterError(f"`{shown}` failed with exit status {done.returncode}: {said}")
    return done.stdout


def in_namespace(namespace: str, *command: str | Path) -> list[str]:
    """A command as run in a network namespace. Not by ``ip netns exec``: that one hides /sys/fs/cgroup."""
    return ["nsenter", f"--net=/run/netns/{namespace}", *map(str, command)]


# What runs: it notes its number, joins the cgroup, and becomes the program (same number).
_STARTER = 'echo $$ >"$1" && echo $$ >"$2" && shift 2 && exec "$@"'


def start(name: str, command: Sequence[str | Path], namespace: str | None = None, **changes: str) -> None:
    """Start a program in the background, in a network namespace; ``changes`` go to its environment.

    Raises ClusterError, with the end of its log, if it ends at once.
    """
    words = in_namespace(namespace, *command) if namespace else [str(word) for word in command]
    pid_file = _pid_file(name)
    pid_file.parent.mkdir(parents=True, exist_ok=True)
    layout.logs().mkdir(parents=True, exist_ok=True)
    pid_file.unlink(missing_ok=True)
    with log(name).open("ab") as output:
        subprocess.run(
            # setsid --fork: it becomes the init process's child, which also reaps it.
            ["setsid", "--fork", "sh", "-c", _STARTER, "sh", str(pid_file), str(cgroups.services()), *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(**changes),
            cwd="/",
            check=True,
        )
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        text = pid_file.read_text() if pid_file.exists() else ""
        if text.endswith("\n"):
            pid = int(text)
            began = start_time(pid)
            pid_file.write_text(json.dumps({"pid": pid, "start": began}))
            if not began:
                raise ClusterError(f"{name} ended at once: {tail(name) or 'its log is empty'}")
            return
        time.sleep(0.01)
    raise ClusterError(f"{name} could not be started: {tail(name) or 'its log is empty'}")


def stop(name: str) -> None:
    """End one program, if it is still the one that was started. It gets 5 s to do so by itself."""
    pid = running(name)
    if pid is not None:
        _signal(pid, 15)
        deadline = time.monotonic() + 5
        while running(name) is not None and time.monotonic() < deadline:
            time.sleep(0.05)
        if running(name) is not None:
            _signal(pid, 9)
    _pid_file(name).unlink(missing_ok=True)


def running(name: str) -> int | None:
    """The number of a program's process; None once it has ended, even if another has its number now."""
    try:
        noted = json.loads(_pid_file(name).read_text())
    except (OSError, ValueError):
        return None
    # One that ended before it could be noted has no start; its number has none either, now.
    if not isinstance(noted, dict) or not noted["start"] or start_time(noted["pid"]) != noted["start"]:
        return None
    return int(noted["pid"])


def started() -> list[str]:
    """Names of all programs that were started and not stopped; some may have died."""
    return sorted(path.name for path in _pid_file("any").parent.glob("*"))


def start_time(pid: int) -> str:
    """When a process began, in ticks since boot: tells it from a later one with the same number. "" if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def wait_for(what: str, probe: Callable[[], bool], seconds: float = 60, logs: Sequence[str] = ()) -> None:
    """Ask ``probe`` until it says yes. ``logs`` names the programs that it depends on: if one of them ends, or time is
    up, a ClusterError says what was waited for, with the end of their logs.
    """
    deadline = time.monotonic() + seconds
    while True:
        dead = [name for name in logs if running(name) is None]
        if not dead and probe():
            return
        if dead or time.monotonic() > deadline:
            why = f"{dead[0]} ended" if dead else f"it did not happen within {seconds:g} s"
            ends = "".join(f"\n--- end of {log(name)}\n{tail(name)}" for name in (dead or logs))
            raise ClusterError(f"waited for {what}: {why}{ends}")
        time.sleep(0.1)


def log(name: str) -> Path:
    return layout.logs() / f"{name}.log"


def tail(name: str, lines: int = 12) -> str:
    try:
        with log(name).open("rb") as file:
            file.seek(max(0, log(name).stat().st_size - 20000))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(line[:500] for line in text.splitlines()[-lines:])


def _pid_file(name: str) -> Path:
    return layout.state() / "pids" / name


def _signal(pid: int, signal: int) -> None:
    try:
        os.kill(pid, signal)
    except ProcessLookupError:
        return
