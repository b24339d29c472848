"""The service as a process: it is light, listens, ends in peace, and says what it lacks."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlightning_operator.rest.cluster import ConfigurationError, Endpoint

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'operator'}"}


def test_it_imports_neither_torch_nor_ray_nor_kopf():
    code = (
        "import sys, rlightning_operator.rest.main\n"
        "heavy = {'torch', 'ray', 'numpy', 'gymnasium', 'kopf', 'kubernetes', 'pandas'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A service whose API server is down."""
    with socket.socket() as s, socket.socket() as t:
        s.bind(("127.0.0.1", 0))
        t.bind(("127.0.0.1", 0))
        port, nobody = s.getsockname()[1], t.getsockname()[1]
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(json.dumps(config({"server": f"http://127.0.0.1:{nobody}"}, {"token": "t"})))
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "rlightning_operator.rest.main"),
            *("--host=127.0.0.1", f"--port={port}", "--log-format=json", "--log-level=debug"),
        ],
        env={**ENVIRONMENT, "KUBECONFIG": str(kubeconfig)},
        stderr=subprocess.PIPE,
        text=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(f"{url}/healthz", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
                time.sleep(0.05)
        yield process, url
    finally:
        process.kill()
        process.communicate()


def config(cluster: dict, user: dict) -> dict:
    return {
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }


def test_without_an_api_server_it_lives_says_503_and_ends_with_0_on_sigterm(service):
    process, url = service
    with pytest.raises(urllib.error.HTTPError) as answer:
        urllib.request.urlopen(f"{url}/readyz", timeout=10)
    assert answer.value.code == 503
    assert json.load(answer.value)["detail"].startswith("the API server cannot be reached")
    resident = next(
        int(line.split()[1]) / 1024
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )
    assert resident < 120, f"{resident:.0f} MiB"
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=10)
    assert process.returncode == 0, log
    for line in log.splitlines():
        json.loads(line)


def test_outside_a_cluster_and_without_kubeconfig_it_says_what_to_set():
    environment = {k: v for k, v in ENVIRONMENT.items() if not k.startswith(("KUBE",))}
    done = subprocess.run(
        [sys.executable, "-m", "rlightning_operator.rest.main"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert "Neither KUBERNETES_SERVICE_HOST (set in every pod) nor KUBECONFIG is set" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be used"),
        ("{}", "cannot be used: KeyError: 'current-context'"),
        (json.dumps(config({"server": "https://a"}, {"exec": {"command": "x"}})), "signs in with a plugin"),
        (json.dumps(config({"server": "https://a", "insecure-skip-tls-verify": True}, {})), "skips the check"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_explained(tmp_path: Path, content: str, words: str):
    path = tmp_path / "kubeconfig"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=words):
        Endpoint.find({"KUBECONFIG": str(path)})


def test_in_a_pod_the_accounts_token_is_used_and_its_replacement_noticed(tmp_path: Path):
    (tmp_path / "token").write_text("one\n")
    bundle = Path(ssl_bundle())
    (tmp_path / "ca.crt").write_bytes(bundle.read_bytes())
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    endpoint = Endpoint.find(environment, tmp_path)
    assert endpoint.server == "https://[fd00::1]:6443"
    assert endpoint.token_file == tmp_path / "token"
    assert "one" not in repr(endpoint)
    (tmp_path / "token").unlink()
    with pytest.raises(ConfigurationError, match="must be mounted"):
        Endpoint.find(environment, tmp_path)


def ssl_bundle() -> str:
    certifi = pytest.importorskip("certifi")
    return str(certifi.where())


def test_a_token_never_shows_in_an_endpoints_repr():
    assert base64.b64encode(b"s").decode() not in repr(Endpoint("http://a", token=base64.b64encode(b"s").decode()))
