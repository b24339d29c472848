"""The cluster itself: two nodes that can do what the other tests rely on, and images that keep their promises."""

from __future__ import annotations

import json
import secrets
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from hack.cluster import Cluster, layout
from hack.cluster.images import base, catalog

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PYTHON_SERVER = ["python3", "-m", "http.server", "8000", "--directory"]


@pytest.fixture(autouse=True)
def only_our_own(cluster: Cluster) -> None:
    if not cluster.local:
        pytest.skip("this is about the cluster of hack/cluster, and KUBECONFIG names another one")


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    name = f"boot-{secrets.token_hex(3)}"
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


def pod(namespace: str, name: str, image: str, command: list[str], *, node: int = 1, claim: str = "") -> dict[str, Any]:
    """A pod as restricted as pods of jobs are: no root, nothing writable but /tmp (and a claim at /data)."""
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "command": command,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    volumes: list[dict[str, Any]] = [{"name": "tmp", "emptyDir": {}}]
    if claim:
        container["volumeMounts"] += [{"name": "data", "mountPath": "/data"}]  # type: ignore[operator]
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": claim}})
    # The images say their user themselves; the bare base has none.
    user = {"runAsUser": 10001, "runAsGroup": 10001} if image == base.BASE else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": namespace, "name": name, "labels": {"app": name}},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": layout.node_name(node)},
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, **user},
            "containers": [container],
            "volumes": volumes,
        },
    }


def output_of(cluster: Cluster, namespace: str, image: str, *command: str, node: int = 1) -> str:
    """What a command prints in a pod of its own; it must succeed."""
    name = f"run-{secrets.token_hex(3)}"
    cluster.apply(pod(namespace, name, image, list(command), node=node))
    deadline = time.monotonic() + 120
    phase = ""
    while phase not in ("Succeeded", "Failed"):
        assert time.monotonic() < deadline, cluster.kubectl("describe", "pod", name, "--namespace", namespace)
        time.sleep(0.5)
        phase = cluster.get("pod", name, "--namespace", namespace)["status"].get("phase", "")
    log = cluster.kubectl("logs", name, "--namespace", namespace)
    assert phase == "Succeeded", log
    return log


def test_two_nodes_are_ready_labelled_and_one_offers_a_gpu(cluster: Cluster) -> None:
    nodes = {node["metadata"]["name"]: node for node in cluster.get("nodes")["items"]}
    ready = {
        name: next(c["status"] for c in node["status"]["conditions"] if c["type"] == "Ready")
        for name, node in nodes.items()
    }
    assert ready == {"node1": "True", "node2": "True"}
    pools = {name: node["metadata"]["labels"]["rlightning.io/node-pool"] for name, node in nodes.items()}
    assert pools == {"node1": "learners", "node2": "actors"}
    assert nodes["node1"]["status"]["allocatable"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in nodes["node2"]["status"]["allocatable"]


def test_a_claim_is_bound_written_by_a_pod_and_read_on_this_machine(cluster: Cluster, namespace: str) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"namespace": namespace, "name": "runs"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    cluster.apply(claim)
    write = ["sh", "-c", "echo hello >/data/file"]
    cluster.apply(pod(namespace, "writer", base.BASE, write, node=2, claim="runs"))
    cluster.kubectl(
        "wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/writer", "--namespace", namespace, "--timeout=60s"
    )
    file = cluster.claim_directory(namespace, "runs") / "file"
    assert file.read_text() == "hello\n"
    assert (file.stat().st_uid, file.stat().st_gid) == (10001, 10001)
    volume = cluster.get("persistentvolumeclaim", "runs", "--namespace", namespace)["spec"]["volumeName"]
    cluster.kubectl("delete", "pod/writer", "pvc/runs", "--namespace", namespace)
    deadline = time.monotonic() + 30
    while volume not in cluster.renew_volumes():  # others' claims may have gone as well
        assert time.monotonic() < deadline, cluster.get("persistentvolume", volume)
        time.sleep(0.2)
    assert not file.exists()


def test_services_have_names_across_nodes_and_policies_are_enforced(cluster: Cluster, namespace: str) -> None:
    cluster.apply(pod(namespace, "server", base.BASE, [*PYTHON_SERVER, "/etc"], node=1))
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": namespace, "name": "server"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    cluster.apply(service, pod(namespace, "client", base.BASE, ["sleep", "inf"], node=2))
    wait = ("--for=condition=Ready", "pod/server", "pod/client", "--namespace", namespace, "--timeout=60s")
    cluster.kubectl("wait", *wait, seconds=90)

    def answers() -> bool:
        get = ("wget", "-q", "-T", "2", "-t", "1", "-O", "-", "http://server/hostname")
        done = cluster.try_kubectl("exec", "client", "--namespace", namespace, "--", *get)
        return done.returncode == 0 and done.stdout == "server\n"

    def soon(wanted: bool) -> bool:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if answers() == wanted:
                return True
        return False

    assert soon(True)
    address = cluster.get("service", "server", "--namespace", namespace)["spec"]["clusterIP"]
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}/hostname", timeout=5) as answer:  # from this machine
        assert answer.read() == b"server\n"
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"namespace": namespace, "name": "nobody"},
        "spec": {"podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"]},
    }
    cluster.apply(policy)
    assert soon(False)
    cluster.kubectl("delete", "networkpolicy", "nobody", "--namespace", namespace)
    assert soon(True)


def test_what_a_container_writes_into_its_files_does_not_reach_the_image(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("label", "--overwrite", "namespace", namespace, "pod-security.kubernetes.io/enforce=privileged")
    vandal = pod(namespace, "vandal", base.BASE, ["sh", "-c", "echo changed >/etc/issue; rm /usr/bin/wget; sleep inf"])
    vandal["spec"]["securityContext"] = {"runAsUser": 0}
    vandal["spec"]["containers"][0]["securityContext"] = {}
    cluster.apply(vandal)
    cluster.kubectl("wait", "--for=condition=Ready", "pod/vandal", "--namespace", namespace, "--timeout=60s")
    look = "cat /etc/issue; ls /usr/bin/wget"
    for _ in range(50):
        done = cluster.try_kubectl("exec", "vandal", "--namespace", namespace, "--", "sh", "-c", look)
        if done.returncode != 0 and done.stdout == "changed\n":
            break
        time.sleep(0.1)
    assert done.stdout == "changed\n"
    for node in (1, 2):
        seen = output_of(cluster, namespace, base.BASE, "sh", "-c", look, node=node)
        assert seen.startswith("Debian GNU/Linux") and seen.endswith("/usr/bin/wget\n")


def test_the_operators_image_is_small_and_has_no_training_library(cluster: Cluster, namespace: str) -> None:
    sizes = {}
    for image in (base.BASE, catalog.OPERATOR):
        used = output_of(cluster, namespace, image, "sh", "-c", "du -skx / 2>/dev/null | cut -f 1")
        sizes[image] = int(used) / 1e3
    beyond = sizes[catalog.OPERATOR] - sizes[base.BASE]
    assert 20 < beyond < 150, f"the promise is 150 MB beyond the base; it is {beyond:.0f} MB"
    code = """
import importlib.util, json, os
names = ["torch", "ray", "numpy", "gymnasium", "rlightning", "rlightning_operator", "kopf"]
print(json.dumps({"uid": os.getuid(), "has": [n for n in names if importlib.util.find_spec(n)]}))
"""
    seen = json.loads(output_of(cluster, namespace, catalog.OPERATOR, "python", "-c", code))
    assert seen == {"uid": 10001, "has": ["rlightning", "rlightning_operator", "kopf"]}
    output_of(cluster, namespace, catalog.OPERATOR, "rlightning-operator", "--help")


def test_the_trainers_image_trains_without_root_and_without_writing_outside_tmp(
    cluster: Cluster, namespace: str
) -> None:
    manifest = json.dumps(
        {
            "apiVersion": "rlightning.io/v1alpha1",
            "kind": "RLJob",
            "metadata": {"name": "tiny"},
            "spec": {
                "environment": {"id": "Hopper-v5", "numEnvs": 4},
                "policy": {"simplePPO": {"hiddenSizes": [8], "minibatchSize": 32}},
                "training": {"totalEnvSteps": 256, "rolloutSteps": 32},
            },
        }
    )
    train = f"cd /tmp && cat >job.yaml <<'END'\n{manifest}\nEND\nrlightning run job.yaml"
    script = f"{train} && id -u && command -v ray && command -v wget"
    said = output_of(cluster, namespace, catalog.TRAINER, "sh", "-c", script, node=2)
    assert said.splitlines()[-3:] == ["10001", "/opt/rlightning/bin/ray", "/usr/bin/wget"]


def test_nothing_of_this_machine_is_in_the_images(cluster: Cluster, namespace: str) -> None:
    folders = "/run/secrets /dist ~root/.config ~root/.cache /tmp"
    look = f"ls -A {folders} 2>/dev/null | grep -v : ; cat /etc/pip.conf 2>/dev/null; env"
    for image in (catalog.OPERATOR, catalog.TRAINER):
        said = output_of(cluster, namespace, image, "sh", "-c", look)
        names = {line.partition("=")[0] for line in said.splitlines() if line.strip()}
        ours = {"PATH", "PYTHONPATH", "PYTHONUNBUFFERED", "HOME", "LANG", "HOSTNAME", "PWD", "RAY_USAGE_STATS_ENABLED"}
        assert {name for name in names if not name.startswith("KUBERNETES_")} <= {*ours, "SHLVL", "_", "OLDPWD"}


def test_a_users_image_has_its_policy_where_manifests_name_it(cluster: Cluster, namespace: str) -> None:
    code = "import policies, rlightning; print(policies.__file__)"
    said = output_of(cluster, namespace, "localhost/user-policy:dev", "python", "-c", code, node=2)
    assert said == "/app/policies.py\n"


def test_kuberay_can_be_removed_and_come_back(cluster: Cluster) -> None:
    cluster.stop_kuberay(crds=True)
    assert "rayclusters.ray.io" not in cluster.kubectl("get", "crd", "--output", "name")
    cluster.start_kuberay()
    assert "rayclusters.ray.io" in cluster.kubectl("get", "crd", "--output", "name")
