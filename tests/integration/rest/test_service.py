"""The status service as a process beside a real API server, with the rights that the chart gives it and no others."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.helm import CHART, Helm
from tests.support.kube import Kube, eventually

pytestmark = pytest.mark.apiserver

Object = dict[str, Any]

ROOT = Path(__file__).parents[3]
DIGESTS = [f"xxh3-128:{n:032x}" for n in range(4)]
STATUS: dict[str, Any] = {
    "observedGeneration": 1,
    "state": "Running",
    "attempt": 2,
    "startTime": "2026-11-29T10:00:00Z",
    "conditions": [
        {
            "type": "Progressing",
            "status": "True",
            "observedGeneration": 1,
            "lastTransitionTime": "2026-11-29T10:01:00Z",
            "reason": "Iterating",
            "message": "iteration 3",
        }
    ],
    "progress": {
        "iteration": 3,
        "envSteps": 768,
        "percent": 76,
        "episodeReturnMean": 21.375,
        "stepsPerSecond": 1234.5678901234567,
        "lastReportTime": "2026-11-29T10:02:00Z",
        "metrics": [{"name": "loss", "value": -0.1}],
    },
    "weights": {"version": 3, "digest": DIGESTS[3], "consistentMembers": "2/2", "lastVerifiedVersion": 3},
}
GROUP_STATUS: dict[str, Any] = {
    "attempt": 2,
    "version": 3,
    "members": [
        {"name": "train-0", "role": "Train", "state": "Ready", "version": 3, "digest": DIGESTS[3]},
        {"name": "eval-0", "role": "Eval", "state": "Ready", "version": 3, "digest": DIGESTS[1]},
    ],
    "versions": [{"version": 3, "learnerDigest": DIGESTS[3], "verified": 2, "total": 2}],
}


@dataclass(frozen=True)
class Answer:
    """Of the service."""

    status: int
    body: dict[str, Any]
    headers: Message


@dataclass(frozen=True)
class Service:
    """A running service."""

    url: str
    process: subprocess.Popen[str]
    log: Path

    def get(self, path: str, token: str | None = None, **headers: str) -> Answer:
        request = urllib.request.Request(self.url + path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        if token is not None:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return Answer(answer.status, json.load(answer), answer.headers)
        except urllib.error.HTTPError as error:
            return Answer(error.code, json.loads(error.read() or b"{}"), error.headers)

    def resident_mib(self) -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


@pytest.fixture(scope="module")
def kube(kube: Kube) -> Iterator[Kube]:
    """With a namespace that no other file's tests leave RLJobs in."""
    own = replace(kube, namespace=f"rlightning-rest-{secrets.token_hex(3)}")
    kube.ok("create", "namespace", own.namespace)
    yield own
    kube.run("delete", "namespace", own.namespace, "--wait=false")


@pytest.fixture(scope="module")
def account(kube: Kube) -> Iterator[Callable[..., str]]:
    """Make a ServiceAccount, bind roles to it in the tests' namespace, hand out its token."""
    made: list[tuple[str, str]] = []

    def make(name: str, *cluster_roles: str, everywhere: bool = False, rules: Sequence[Object] = ()) -> str:
        kube.ok("create", "serviceaccount", name)
        subject = f"--serviceaccount={kube.namespace}:{name}"
        for role in cluster_roles:
            kind, unique = ("clusterrolebinding" if everywhere else "rolebinding"), f"{kube.namespace}-{name}-{role}"
            kube.ok("create", kind, unique, f"--clusterrole={role}", subject)
            made.append((kind, unique))
        if rules:
            metadata = {"name": name, "namespace": kube.namespace}
            kube.apply(
                {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata, "rules": [*rules]}
            )
            kube.ok("create", "rolebinding", name, f"--role={name}", subject)
        return kube.ok("create", "token", name, "--duration=1h").strip()

    yield make
    for kind, name in made:
        kube.run("delete", kind, name)


@pytest.fixture(scope="module")
def chart(kube: Kube) -> Iterator[str]:
    """The accounts and rights of the chart, in the tests' namespace; returns the release's name."""
    release = f"rlightning-{kube.namespace[-6:]}"
    objects = [
        obj
        for obj in Helm().render({"crds": {"install": False}, "rbac": {"nodes": False}}, release, kube.namespace)
        if obj["kind"] in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")
        and "helm.sh/hook" not in obj["metadata"].get("annotations", {})
    ]
    kube.apply(*objects)
    yield release
    for obj in objects:
        kube.run("delete", obj["kind"], obj["metadata"]["name"], "--wait=false")


def started(
    kube: Kube,
    token: str,
    folder: Path,
    *arguments: str,
    server: str | None = None,
    scheme: str = "http",
    ready: bool = True,
) -> Service:
    """A service that speaks to the API server with ``token``."""
    config = yaml.safe_load(Path(kube.kubeconfig).read_text())
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    if server:
        for cluster in config["clusters"]:
            cluster["cluster"]["server"] = server
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(json.dumps(config))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "rlightning_operator.rest.main", "--host=127.0.0.1", f"--port={port}"),
                *("--log-format=json", *arguments),
            ],
            env={**os.environ, "KUBECONFIG": str(kubeconfig), "PYTHONPATH": f"{ROOT}:{ROOT / 'operator'}"},
            stderr=file,
            text=True,
        )
    service = Service(f"{scheme}://127.0.0.1:{port}", process, log)

    def up() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return service.get("/healthz").status == 200
        except OSError:
            return False

    if ready:
        eventually(up, seconds=30, what="the service listens", every=0.05)
    return service


@pytest.fixture(scope="module")
def service(kube: Kube, chart: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    token = kube.ok("create", "token", f"{chart}-status", "--duration=1h").strip()
    running = started(kube, token, tmp_path_factory.mktemp("service"), "--cache-seconds=1")
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()


@pytest.fixture(scope="module")
def job(kube: Kube) -> dict[str, Any]:
    """A stored job with a status, and its PolicyGroup."""
    spec = {
        "seed": 7,
        "environment": {"id": "CartPole-v1", "numEnvs": 8, "shards": 1},
        "policy": {"simplePPO": {}},
        "training": {"totalEnvSteps": 1000},
    }
    api = {"apiVersion": "rlightning.io/v1alpha1"}
    kube.apply({**api, "kind": "RLJob", "metadata": {"name": "cartpole", "namespace": kube.namespace}, "spec": spec})
    done = kube.patch_status("rljob", "cartpole", STATUS)
    assert done.returncode == 0, done.stderr
    stored = kube.json("get", "rljob", "cartpole")
    owner = {**api, "kind": "RLJob", "name": "cartpole", "uid": stored["metadata"]["uid"]}
    kube.apply(
        {
            **api,
            "kind": "PolicyGroup",
            "metadata": {"name": "cartpole", "namespace": kube.namespace, "ownerReferences": [owner]},
            "spec": {"job": "cartpole", "attempt": 2, "trainReplicas": 1, "evalReplicas": 1, "training": spec},
        }
    )
    done = kube.patch_status("policygroup", "cartpole", GROUP_STATUS)
    assert done.returncode == 0, done.stderr
    for name in ("second", "third"):
        kube.apply({**api, "kind": "RLJob", "metadata": {"name": name, "namespace": kube.namespace}, "spec": spec})
    return stored


@pytest.fixture(scope="module")
def viewer(account: Callable[..., str], chart: str) -> str:
    return account("viewer", f"{chart}-view")


@pytest.fixture(scope="module")
def path(kube: Kube, job: dict[str, Any]) -> str:
    return f"/v1/namespaces/{kube.namespace}/rljobs/cartpole"


def test_a_token_with_rights_gets_the_numbers_that_are_stored(
    service: Service, job: dict[str, Any], path: str, viewer: str
):
    answer = service.get(path, viewer)
    assert answer.status == 200, answer.body
    assert answer.body["status"] == job["status"] == {**STATUS, **answer.body["status"]}
    assert answer.body["uid"] == job["metadata"]["uid"]
    assert answer.body["resourceVersion"] == job["metadata"]["resourceVersion"]
    assert answer.body["spec"]["evalReplicas"] == job["spec"]["policyGroup"]["eval"]["replicas"]
    same = service.get(path, viewer, If_None_Match=answer.headers["ETag"])
    assert (same.status, same.body) == (304, {})


def test_members_and_versions_are_those_of_the_group(service: Service, path: str, viewer: str):
    members = service.get(f"{path}/members", viewer)
    assert members.status == 200, members.body
    assert [{k: v for k, v in m.items() if k != "agrees"} for m in members.body["items"]] == GROUP_STATUS["members"]
    assert [m["agrees"] for m in members.body["items"]] == [True, False]
    versions = service.get(f"{path}/versions", viewer)
    assert versions.body["items"] == GROUP_STATUS["versions"]


def test_without_rights_403_names_verb_resource_and_namespace(
    service: Service, kube: Kube, path: str, account: Callable[..., str]
):
    stranger = account("stranger")
    for verb, where in (("get", path), ("list", path.removesuffix("/cartpole"))):
        answer = service.get(where, stranger)
        assert answer.status == 403
        assert answer.headers["Content-Type"] == "application/problem+json"
        user = f"system:serviceaccount:{kube.namespace}:stranger"
        assert answer.body["detail"].startswith(
            f"{user} may not {verb} rljobs.rlightning.io in namespace {kube.namespace}"
        )
    everywhere = service.get("/v1/rljobs", stranger)
    assert "may not list rljobs.rlightning.io in all namespaces" in everywhere.body["detail"]


def test_rights_in_one_namespace_are_none_in_another(service: Service, job: dict[str, Any], viewer: str):
    for path in ("/v1/namespaces/default/rljobs", "/v1/namespaces/default/rljobs/cartpole", "/v1/rljobs"):
        assert service.get(path, viewer).status == 403


def rule(verbs: list[str], *resources: str, **more: Any) -> dict[str, Any]:
    return {"apiGroups": ["rlightning.io"], "resources": list(resources), "verbs": verbs, **more}


def test_each_right_opens_its_own_door(service: Service, path: str, account: Callable[..., str]):
    lister = account("lister", rules=[rule(["list"], "rljobs")])
    getter = account("getter", rules=[rule(["get"], "rljobs")])
    only_one = account("only-one", rules=[rule(["get"], "rljobs", resourceNames=["cartpole"])])
    groups_only = account("groups-only", rules=[rule(["get"], "policygroups")])
    collection, other = path.removesuffix("/cartpole"), path.replace("cartpole", "second")
    seen = {
        name: [service.get(p, token).status for p in (collection, path, other, f"{path}/members", f"{path}/versions")]
        for name, token in
        (("lister", lister), ("getter", getter), ("only one", only_one), ("groups only", groups_only))
    }  # fmt: skip
    assert seen == {
        "lister": [200, 403, 403, 403, 403],
        "getter": [403, 200, 200, 403, 403],
        "only one": [403, 200, 403, 403, 403],
        "groups only": [403, 403, 403, 403, 403],
    }
    refused = service.get(f"{path}/members", getter).body
    assert refused["resource"] == "policygroups.rlightning.io"


def test_a_withdrawn_right_ends_within_seconds(service: Service, kube: Kube, path: str, account: Callable[..., str]):
    token = account("withdrawn", rules=[rule(["get"], "rljobs")])
    assert service.get(path, token).status == 200
    kube.ok("delete", "rolebinding", "withdrawn")
    eventually(lambda: service.get(path, token).status == 403, seconds=6, what="403 after the binding is gone")


def test_tokens_that_are_none(service: Service, kube: Kube, path: str, account: Callable[..., str], viewer: str):
    for token in (None, "garbage", viewer[:-6] + "AAAAAA", viewer + "x", "a.b.c"):
        answer = service.get(path, token)
        assert answer.status == 401, token
        assert answer.headers["WWW-Authenticate"].startswith("Bearer ")
        assert answer.body["type"] == "tag:rlightning.io,2026:problem/unauthenticated"
    account("deleted", rules=[rule(["get"], "rljobs")])
    token = kube.ok("create", "token", "deleted").strip()
    kube.ok("delete", "serviceaccount", "deleted")
    assert service.get(path, token).status == 401
    elsewhere = kube.ok("create", "token", "viewer", "--audience=somewhere-else").strip()
    assert service.get(path, elsewhere).status == 401


def test_an_expired_token_is_401(service: Service, kube: Kube, path: str, viewer: str, tmp_path: Path):
    """The server hands out none that lasts less than 10 minutes, so this one is signed with its own key."""
    key = Path(kube.kubeconfig).parent / "pki" / "apiserver.key"
    if os.environ.get("KUBECONFIG") or not key.is_file():
        pytest.skip("needs the signing key of an API server of our own")
    head, body, _ = viewer.split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))

    def signed(**times: int) -> str:
        payload = base64.urlsafe_b64encode(json.dumps({**claims, **times}).encode()).rstrip(b"=").decode()
        done = subprocess.run(
            ["openssl", "dgst", "-sha256", "-sign", str(key)],
            input=f"{head}.{payload}".encode(),
            capture_output=True,
            check=True,
        )
        return f"{head}.{payload}.{base64.urlsafe_b64encode(done.stdout).rstrip(b'=').decode()}"

    now = int(time.time())
    assert service.get(path, signed(exp=now + 600)).status == 200, "the forger's hand"
    expired = service.get(path, signed(nbf=now - 700, iat=now - 700, exp=now - 90))
    assert expired.status == 401
    assert "expired" in expired.body["detail"]


def test_what_is_not_there_is_404_and_what_cannot_be_is_422(service: Service, path: str, viewer: str):
    missing = service.get(path.replace("cartpole", "nothing"), viewer)
    assert missing.status == 404
    assert (missing.body["name"], missing.body["resource"]) == ("nothing", "RLJob")
    for wrong in (path.replace("cartpole", "Not_A_Name"), path.removesuffix("/cartpole") + "?limit=0"):
        answer = service.get(wrong, viewer)
        assert answer.status == 422, answer.body
        assert len(answer.body["errors"]) == 1


def test_pages(service: Service, path: str, viewer: str):
    collection, found, token = path.removesuffix("/cartpole"), [], ""
    for _ in range(3):
        answer = service.get(f"{collection}?limit=1" + (f"&continue={token}" if token else ""), viewer)
        assert answer.status == 200, answer.body
        found += [item["name"] for item in answer.body["items"]]
        token = answer.body.get("continue", "")
    assert (found, token) == (["cartpole", "second", "third"], "")
    broken = service.get(f"{collection}?limit=1&continue=nonsense", viewer)
    assert (broken.status, broken.body["errors"][0]["where"]) == (422, "query.continue")


def test_all_namespaces_for_whoever_may(service: Service, path: str, chart: str, account: Callable[..., str]):
    admin = account("reader-of-all", f"{chart}-view", everywhere=True)
    answer = service.get("/v1/rljobs", admin)
    assert answer.status == 200, answer.body
    assert {"cartpole", "second", "third"} <= {item["name"] for item in answer.body["items"]}


def test_a_service_with_an_audience_of_its_own_takes_only_tokens_for_it(
    kube: Kube, chart: str, path: str, viewer: str, tmp_path: Path
):
    token = kube.ok("create", "token", f"{chart}-status").strip()
    running = started(kube, token, tmp_path, "--audiences=rlightning", f"--namespaces={kube.namespace}")
    try:
        assert running.get(path, viewer).status == 401
        own = kube.ok("create", "token", "viewer", "--audience=rlightning").strip()
        assert running.get(path, own).status == 200
        assert running.get("/v1/rljobs", own).status == 200  # of the one namespace that it serves
    finally:
        running.process.kill()
        running.process.wait()


def test_an_api_server_that_is_away_is_503_and_sigterm_ends_it(kube: Kube, path: str, viewer: str, tmp_path: Path):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        running = started(kube, "x", tmp_path, server=f"https://127.0.0.1:{nobody.getsockname()[1]}")
        try:
            start = time.monotonic()
            answer = running.get(path, viewer)
            assert time.monotonic() - start < 11
            assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
            assert answer.body["type"] == "tag:rlightning.io,2026:problem/unavailable"
            assert running.get("/readyz").status == 503
        finally:
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(timeout=20) == 0


def test_helm_test_passes_and_fails_for_what_it_should(
    kube: Kube, service: Service, account: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    """The script of the chart's test pod, with the rights of that pod, here."""
    spec = importlib.util.spec_from_file_location("installed", CHART / "files" / "installed.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    (role,) = [o for o in Helm().render() if o["kind"] == "Role" and o["metadata"]["name"] == "rlightning-test"]
    (tmp_path / "token").write_text(account("helm-test", rules=role["rules"]))
    (cluster,) = [c["cluster"] for c in yaml.safe_load(Path(kube.kubeconfig).read_text())["clusters"]]
    (tmp_path / "ca.crt").write_bytes(base64.b64decode(cluster["certificate-authority-data"]))
    monkeypatch.setattr(script, "ACCOUNT", tmp_path)
    monkeypatch.setattr(script, "API", f"{cluster['server']}/apis/rlightning.io/v1alpha1")
    monkeypatch.setattr(script.time, "sleep", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["-c", kube.namespace, service.url])
    script.main()
    assert capsys.readouterr().out.count("ok ") == 6
    for arguments, words in (
        ([kube.namespace, "http://127.0.0.1:9"], "cannot be reached"),
        (["default", service.url], "FAILED an RLJob would be accepted: 403"),
    ):
        monkeypatch.setattr(sys, "argv", ["-c", *arguments])
        with pytest.raises(SystemExit, match=words):
            script.main()


def test_https_with_a_certificate_of_the_administrators(kube: Kube, tmp_path: Path):
    pki = Path(kube.kubeconfig).parent / "pki"  # any certificate will do: the API server's own
    if os.environ.get("KUBECONFIG") or not pki.is_dir():
        pytest.skip("needs a certificate")
    files = (f"--tls-cert-file={pki / 'apiserver.crt'}", f"--tls-key-file={pki / 'apiserver.key'}")
    running = started(kube, "x", tmp_path, *files, scheme="https", ready=False)
    context = ssl.create_default_context(cafile=str(pki / "apiserver.crt"))

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{running.url}/healthz", timeout=5, context=context) as answer:
                return bool(answer.status == 200)
        except OSError:
            assert running.process.poll() is None, running.log.read_text()
            return False

    try:
        eventually(answers, seconds=30, what="the service listens", every=0.05)
    finally:
        running.process.kill()
        running.process.wait()


def test_it_is_ready_counts_and_stays_small(service: Service, path: str, viewer: str):
    assert service.get("/readyz").status == 200
    for _ in range(200):
        assert service.get(path, viewer).status == 200
    with urllib.request.urlopen(f"{service.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert 'rlightning_status_access_cache_total{cache="token",result="hit"}' in text
    assert 'rlightning_status_apiserver_seconds_count{code="200",request="rljobs"}' in text
    resident = service.resident_mib()
    print(f"resident after all of the above: {resident:.0f} MiB")
    assert resident < 120
    log = service.log.read_text()
    assert viewer.split(".")[1] not in log
    assert "Traceback" not in log
    assert '"user": "system:serviceaccount:' in log
