"""The chart on a real API server: accepted, upgraded, uninstalled, and its accounts may what they must."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from hack.apiserver.server import ApiServer, ServerError
from hack.programs.binaries import BuildError, program
from rlightning_operator.builders.access import role, role_binding, service_account
from rlightning_operator.builders.names import Identity
from tests.chart.values_files import CASES
from tests.support.helm import CHART, Helm
from tests.support.kube import Kube, wait_for_crds

pytestmark = pytest.mark.apiserver

SYSTEM = "rlightning-system"
CRDS = ("rljobs.rlightning.io", "policygroups.rlightning.io")


@pytest.fixture(scope="module")
def system() -> Iterator[Kube]:
    """An API server of our own: what is installed here is cluster-wide."""
    if os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG is set: no server of our own is used")
    try:
        with ApiServer() as server:
            kube = Kube(program("kubectl"), str(server.kubeconfig), SYSTEM)
            for name in (SYSTEM, "team-a", "team-b"):
                label = {"pod-security.kubernetes.io/enforce": "restricted"}
                kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": label}})
            yield kube
    except (BuildError, ServerError) as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="module")
def client(system: Kube, helm: Helm) -> Helm:
    return Helm(system.kubeconfig, helm.binary)


def installed(kube: Kube, release: str) -> set[str]:
    """All that carries the release's label."""
    kinds = (
        "deployments,services,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings,networkpolicies,pods"
    )
    label = f"app.kubernetes.io/instance={release}"
    found = kube.ok("get", kinds, "--all-namespaces", "--selector", label, "--output=name")
    return set(found.split())


@pytest.mark.parametrize("name", list(CASES))
def test_every_object_is_valid_to_the_api_server(system: Kube, helm: Helm, name: str):
    objects = [o for o in helm.render(CASES[name]) if o["kind"] != "ServiceMonitor"]  # Prometheus' own is not served
    anywhere = Kube(system.kubectl, system.kubeconfig, "")
    anywhere.ok(
        *("apply", "--server-side", "--dry-run=server", "--validate=strict", "--filename=-"),
        stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}),
    )


@pytest.mark.parametrize("name", list(CASES))
def test_restricted_pod_security_admits_every_pod(system: Kube, helm: Helm, name: str):
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": o["metadata"]["name"]}, "spec": spec}
        for o in helm.render(CASES[name])
        if (spec := o["spec"] if o["kind"] == "Pod" else o.get("spec", {}).get("template", {}).get("spec"))
        and o["kind"] in ("Deployment", "Pod")
    ]
    assert len(pods) >= 2
    for pod in pods:
        pod["spec"]["priorityClassName"] = ""  # classes are made by a controller that is not here
        system.ok("create", "--dry-run=server", "--filename=-", stdin=json.dumps(pod))
    escaped = json.loads(json.dumps(pods[0]))
    del escaped["spec"]["containers"][0]["securityContext"]
    refused = system.run("create", "--dry-run=server", "--filename=-", stdin=json.dumps(escaped))
    assert "violates PodSecurity" in refused.stderr


def test_the_ports_at_which_the_api_server_listens_are_asked_for(system: Kube, client: Helm):
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "kubernetes",
            "namespace": "default",
            "labels": {"kubernetes.io/service-name": "kubernetes"},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["10.0.0.7"]}],
        "ports": [{"name": "https", "port": 16443, "protocol": "TCP"}],
    }
    default = Kube(system.kubectl, system.kubeconfig, "default")
    default.apply(endpoints)
    try:
        arguments = ("install", "rlightning", str(CHART), "--namespace", SYSTEM, "--dry-run=server")
        assert client.ok(*arguments).count("port: 16443") == 2  # operator and status service
        addresses = {"apiServerEndpoints": ["10.0.0.7:16443"]}
        assert "port: 6443" not in client.ok(*arguments, values=addresses)
        # Who installs for some namespaces may not be allowed to ask.
        assert "port: 16443" not in client.ok(*arguments, values={"watchNamespaces": ["team-a"]})
    finally:
        default.ok("delete", "endpointslice", "kubernetes")


def test_install_upgrade_uninstall_keeps_the_crds_and_the_jobs(system: Kube, client: Helm):
    release = "rlightning"
    arguments = (release, str(CHART), "--namespace", SYSTEM)
    client.ok("install", *arguments)
    first = installed(system, release)
    assert {f"deployment.apps/rlightning-{name}" for name in ("operator", "status")} <= first
    assert not [name for name in first if name.startswith("pod/")], "helm test's pod is a hook"
    wait_for_crds(system, CRDS)
    job = {
        "apiVersion": "rlightning.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "kept", "namespace": "team-a"},
        "spec": {
            "environment": {"id": "CartPole-v1"},
            "policy": {"simplePPO": {}},
            "training": {"totalEnvSteps": 1000},
        },
    }
    team = Kube(system.kubectl, system.kubeconfig, "team-a")
    team.apply(job)
    uid = team.json("get", "rljob", "kept")["metadata"]["uid"]

    client.ok("upgrade", *arguments, values={"logLevel": "debug", "statusService": {"replicas": 2}})
    assert installed(system, release) == first
    operator = system.json("get", "deployment", "rlightning-operator")
    assert "--log-level=debug" in operator["spec"]["template"]["spec"]["containers"][0]["args"]
    # Turned off, a part goes; turned to namespaces, cluster-wide rights go.
    client.ok("upgrade", *arguments, values={"statusService": {"enabled": False}, **CASES["namespaced"]})
    left = installed(system, release)
    assert "deployment.apps/rlightning-status" not in left
    assert "clusterrole.rbac.authorization.k8s.io/rlightning-operator" not in left

    client.ok("uninstall", release, "--namespace", SYSTEM)
    assert installed(system, release) == set()
    for name in CRDS:
        system.ok("get", "crd", name)
    assert team.json("get", "rljob", "kept")["metadata"]["uid"] == uid

    client.ok("install", *arguments)  # and takes up the CRDs that it left
    assert installed(system, release) == first
    assert team.json("get", "rljob", "kept")["metadata"]["uid"] == uid
    client.ok("uninstall", release, "--namespace", SYSTEM)

    # They are that release's; as README says, another one takes them over or leaves them alone.
    other = ("install", "other", str(CHART), "--namespace", SYSTEM, "--dry-run=server")
    refused = client.run(*other)
    assert refused.returncode != 0
    assert "invalid ownership metadata" in refused.stderr
    client.ok(*other, "--take-ownership")
    client.ok(*other, "--set", "crds.install=false")


Question = tuple[str, str, str, str | None]  # account, verb, resource.group, namespace


def allowed(kube: Kube, questions: list[Question]) -> dict[Question, bool]:
    """What the API server says to SubjectAccessReviews."""
    reviews = []
    for account, verb, qualified, namespace in questions:
        resource, _, group = qualified.partition(".")
        resource, _, subresource = resource.partition("/")
        attributes = {
            "verb": verb,
            "group": group,
            "resource": resource,
            "subresource": subresource,
            "namespace": namespace or "",
        }
        spec = {"user": f"system:serviceaccount:{SYSTEM}:rlightning-{account}", "resourceAttributes": attributes}
        reviews.append({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec})
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": reviews})
    lines = kube.ok("create", "--filename=-", '--output=jsonpath={.status.allowed}{"\\n"}', stdin=text).split()
    return {question: line == "true" for question, line in zip(questions, lines, strict=True)}


@pytest.fixture(params=["cluster-wide", "namespaced"])
def release(request: pytest.FixtureRequest, client: Helm) -> Iterator[str]:
    values: dict[str, Any] = {} if request.param == "cluster-wide" else CASES["namespaced"]
    client.ok("install", "rlightning", str(CHART), "--namespace", SYSTEM, values=values)
    yield request.param
    client.ok("uninstall", "rlightning", "--namespace", SYSTEM)


def test_accounts_may_what_they_must_and_no_more(system: Kube, release: str):
    everywhere = release == "cluster-wide"
    wanted: dict[Question, bool] = {}
    for namespace, served in (("team-a", True), ("kube-system", everywhere), (None, everywhere)):
        for verb, resource in (
            ("watch", "rljobs.rlightning.io"),
            ("delete", "rljobs.rlightning.io"),
            ("patch", "rljobs/status.rlightning.io"),
            ("create", "policygroups.rlightning.io"),
            ("create", "rayclusters.ray.io"),
            ("create", "jobs.batch"),
            ("watch", "pods"),
            ("create", "roles.rbac.authorization.k8s.io"),
            ("create", "networkpolicies.networking.k8s.io"),
            ("create", "events"),
        ):
            wanted["operator", verb, resource, namespace] = served
        for verb, resource in (("get", "rljobs.rlightning.io"), ("get", "policygroups.rlightning.io")):
            wanted["status", verb, resource, namespace] = served
    for account in ("operator", "status"):
        for verb, resource in (
            ("get", "secrets"),
            ("get", "pods/log"),
            ("create", "pods/exec"),
            ("create", "pods"),
            ("delete", "pods"),
            ("update", "rljobs.rlightning.io"),
            ("create", "rljobs.rlightning.io"),
            ("get", "configmaps"),
        ):
            wanted[account, verb, resource, "team-a"] = False
    wanted |= {
        ("status", "create", "tokenreviews.authentication.k8s.io", None): True,
        ("status", "create", "subjectaccessreviews.authorization.k8s.io", None): True,
        ("status", "watch", "pods", "team-a"): False,
        ("status", "patch", "rljobs/status.rlightning.io", "team-a"): False,
        ("operator", "list", "endpointslices.discovery.k8s.io", "default"): True,
        ("operator", "list", "nodes", None): everywhere,  # the namespaced case has turned it off
    }
    assert allowed(system, list(wanted)) == wanted


def test_the_operator_may_give_a_driver_its_rights(system: Kube, release: str):
    """The API server refuses whoever grants more than they have."""
    identity = Identity(f"job-{secrets.token_hex(2)}", "team-a", "11111111-2222-3333-4444-555555555555")
    team = Kube(system.kubectl, system.kubeconfig, "team-a")
    for obj in (service_account(identity), role(identity), role_binding(identity)):
        obj["metadata"].pop("ownerReferences", None)
        team.ok(
            *("create", "--filename=-", f"--as=system:serviceaccount:{SYSTEM}:rlightning-operator"),
            stdin=json.dumps(obj),
        )
