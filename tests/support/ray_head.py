"""A Ray head as KubeRay starts one: dashboard, token authentication, the environment of a job's pods."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOKEN = "open-sesame-open-sesame"
START_SECONDS = 120


class RayHead:
    """One head on this machine; its pod is called ``the-pod``.

    Args:
        folder: for its files; a short path (Ray puts sockets there).
        pools: places that it offers, by pool.
        environment: of the drivers and members that it runs.
    """

    def __init__(self, folder: Path, pools: Mapping[str, int], environment: Mapping[str, str]) -> None:
        ports = _free_ports(7)
        names = (
            "port",
            "dashboard-port",
            "dashboard-agent-listen-port",
            "dashboard-agent-grpc-port",
            "runtime-env-agent-port",
            "metrics-export-port",
            "ray-client-server-port",
        )
        self.address = f"http://127.0.0.1:{ports[1]}"
        self._log = (folder / "head.log").open("w")
        self._process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("ray")),
                *("start", "--head", "--block", "--dashboard-host", "127.0.0.1", "--num-cpus", "1"),
                *("--node-ip-address", "127.0.0.1", "--temp-dir", str(folder / "ray")),
                *("--resources", json.dumps({f"rlightning-pool-{name}": places for name, places in pools.items()})),
                *(word for name, port in zip(names, ports, strict=True) for word in (f"--{name}", str(port))),
            ],
            cwd=ROOT,
            env={
                **os.environ,
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": TOKEN,
                "RAY_CLOUD_INSTANCE_ID": "the-pod",
                "RLIGHTNING_POD_NAME": "the-pod",
                "RLIGHTNING_POD_UID": "uid-of-the-pod",
                "PYTHONPATH": str(ROOT),
                **environment,
            },
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._wait()

    def _wait(self) -> None:
        request = urllib.request.Request(f"{self.address}/api/jobs/", headers={"Authorization": f"Bearer {TOKEN}"})
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(request, timeout=5):
                    return
            except (urllib.error.URLError, OSError) as error:
                if time.monotonic() > end or self._process.poll() is not None:
                    self.stop()
                    raise RuntimeError(
                        f"Ray's head did not start: {error}; {Path(self._log.name).read_text()}"
                    ) from None
                time.sleep(0.5)

    def stop(self) -> None:
        """Kill all of it at once, as a node that goes. What its raylet started ends by itself."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports
