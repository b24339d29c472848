"""The chart as it is rendered: valid values and only those, few rights, restricted pods, the generated CRDs."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import ssl
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rlightning.api import crds
from rlightning.api.models import RLJob
from rlightning_operator.builders import access
from rlightning_operator.builders.names import Identity
from rlightning_operator.config import parse
from rlightning_operator.rest import main as status
from tests.chart.values_files import CASES, DIGEST
from tests.support.helm import CHART, REPOSITORIES, Helm

Object = dict[str, Any]
VALUES = (CHART / "values.yaml").read_text()
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, helm: Helm) -> tuple[str, list[Object]]:
    return request.param, helm.render(CASES[request.param])


def of(objects: list[Object], kind: str, component: str = "") -> list[Object]:
    return [
        obj
        for obj in objects
        if obj["kind"] == kind
        and component in ("", obj["metadata"].get("labels", {}).get("app.kubernetes.io/component"))
    ]


def one(objects: list[Object], kind: str, component: str = "") -> Object:
    (found,) = of(objects, kind, component)
    return found


def container(deployment: Object) -> Object:
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    return found


def test_lint_finds_nothing(helm: Helm):
    for values in CASES.values():
        helm.ok("lint", "--strict", str(CHART), values=values)


# ------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"watchNamespace": ["a"]}, "watchNamespace"),
        ({"image": {"tags": "x"}}, "tags"),
        ({"operator": {"replicas": 2}}, "replicas"),
        ({"statusService": {"service": {"prot": 1}}}, "prot"),
        ({"statusService": {"service": {"port": 0}}}, "port"),
        ({"image": {"digest": "sha256:abc"}}, "digest"),
        ({"image": {"pullPolicy": "always"}}, "pullPolicy"),
        ({"logLevel": "trace"}, "logLevel"),
        ({"watchNamespaces": "team-a"}, "watchNamespaces"),
        ({"watchNamespaces": ["Team"]}, "watchNamespaces"),
        ({"apiServerEndpoints": ["10.0.0.7"]}, "apiServerEndpoints"),
        ({"operator": {"resources": {"request": {}}}}, "request"),
        ({"imagePullSecrets": ["mirror"]}, "imagePullSecrets"),
        ({"image": {"repository": "reg/x:0.1.0"}}, "repository"),  # tag and digest are values of their own
        ({"image": {"repository": "x:0.1.0"}}, "repository"),
        ({"trainer": {"image": {"repository": f"reg/x@{DIGEST}"}}}, "repository"),
        ({"enabled": "yes"}, "enabled"),
    ],
)
def test_a_typo_in_the_values_is_refused_and_named(helm: Helm, values: Object, words: str):
    done = helm.run("template", "x", str(CHART), values=values)
    assert done.returncode != 0
    assert words in done.stderr


@pytest.mark.parametrize("repository", ["host:5000/path/x", "localhost/x", "reg.example/a/b/x", "x"])
def test_a_repository_may_be_on_a_port(helm: Helm, repository: str):
    objects = helm.render({"image": {"repository": repository, "tag": "1"}})
    assert container(one(objects, "Deployment", "operator"))["image"] == f"{repository}:1"


@pytest.mark.parametrize(
    ("values", "name", "target"),
    [
        ({"image": {"repository": ""}}, "image.repository", "operator"),
        ({"trainer": {"image": {"repository": ""}}}, "trainer.image.repository", "trainer"),
    ],
)
def test_without_an_image_the_install_says_what_to_build_and_set(helm: Helm, values: Object, name: str, target: str):
    """The defaults are empty: there is no public image."""
    defaults = yaml.safe_load(VALUES)
    assert (defaults["image"]["repository"], defaults["trainer"]["image"]["repository"]) == ("", "")
    done = helm.run("template", "x", str(CHART), values=values)
    assert done.returncode != 0
    assert f": {name} is empty: build the target {target}" in done.stderr
    assert f"--set {name}=REGISTRY/rlightning-{target}" in done.stderr


def test_the_schema_knows_every_value_and_no_other():
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    values = yaml.safe_load(VALUES)
    jsonschema.validate(values, SCHEMA)

    def resolved(node: Object) -> Object:
        return SCHEMA["definitions"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node

    def compare(schema: Object, value: Any, at: str) -> None:
        schema = resolved(schema)
        if "properties" in schema:
            assert schema["additionalProperties"] is False, at
            assert isinstance(value, dict)
            # Lists of Kubernetes' own may have more keys than the default shows.
            extra = set(schema["properties"]) - set(value)
            assert not extra or at.endswith("resources"), f"{at}: {extra} are not in values.yaml"
            for key, item in value.items():
                compare(schema["properties"][key], item, f"{at}.{key}")

    compare(SCHEMA, values, "")

    def closed(node: Any, at: str) -> None:
        if isinstance(node, dict):
            if node.get("type") == "object" and "properties" in node:
                assert node["additionalProperties"] is False, at
            for key, item in node.items():
                closed(item, f"{at}.{key}")

    closed(SCHEMA, "")


def test_every_value_is_documented_where_it_stands():
    """Each key that is no mere part of a Kubernetes object has a comment above it or above its group."""
    obvious = {"repository", "pullPolicy", "enabled", "resources", "annotations", "serviceAccount", "create", "service"}
    obvious |= {"type", "port", "interval", "image", "tls", "logFormat", "tolerations", "affinity", "priorityClassName"}
    obvious |= {"podAnnotations", "podLabels", "podSecurityContext", "containerSecurityContext", "requests", "limits"}
    obvious |= {"runAsNonRoot", "seccompProfile", "allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities"}
    obvious |= {"crds", "rbac", "operator", "jobs", "networkPolicy", "replicas"}
    lines = VALUES.splitlines()
    for i, line in enumerate(lines):
        if found := re.match(r" *([A-Za-z]+):", line):
            assert found[1] in obvious or lines[i - 1].lstrip().startswith("#"), f"no comment above: {line}"


def test_images_by_tag_and_by_digest(helm: Helm):
    defaults = helm.render()
    operator = container(one(defaults, "Deployment", "operator"))
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert operator["image"] == f"registry.example/rlightning-operator:{version}"
    assert f"--trainer-image=registry.example/rlightning-trainer:{version}" in operator["args"]
    everything = helm.render(CASES["everything"])
    for component in ("operator", "status"):
        assert container(one(everything, "Deployment", component))["image"] == f"mirror.example/rl/operator@{DIGEST}"
    assert (
        "--trainer-image=mirror.example/rl/trainer:1.2" in container(one(everything, "Deployment", "operator"))["args"]
    )


def test_the_chart_is_of_the_projects_version():
    project = tomllib.loads((CHART.parents[1] / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (project, project)


def test_the_programs_take_the_flags_that_the_chart_gives_them(case: tuple[str, list[Object]]):
    name, objects = case
    operator = container(one(objects, "Deployment", "operator"))
    settings = parse(operator["args"], {})
    watched = CASES[name].get("watchNamespaces")
    assert settings.namespaces == (tuple(watched) if watched else None)
    assert settings.jobs.network_policies is (name != "small")
    assert settings.detect_endpoints is (name not in ("small", "everything"))
    for deployment in of(objects, "Deployment", "status"):
        options = status._options(container(deployment)["args"])
        assert list(options.namespaces) == (watched or [])
    if name == "everything":
        assert settings.jobs.api_server_endpoints == (("10.0.0.7", 6443), ("fd00::7", 6443))
        assert settings.jobs.scrape_namespaces == ("monitoring",)
        assert settings.jobs.ray_version == "2.60.0"
        assert options.audiences == ("rlightning", "other")
        assert (options.tls_cert_file, options.tls_key_file) == ("/tls/tls.crt", "/tls/tls.key")


# --------------------------------------------------------------------------------------------------------------- CRDs


def test_the_crds_are_the_generated_ones_and_are_kept(case: tuple[str, list[Object]]):
    name, objects = case
    found = of(objects, "CustomResourceDefinition")
    if name == "small":
        assert found == []
        return
    generated = {crd["metadata"]["name"]: crd for crd in (crds.rljob_crd(), crds.policygroup_crd())}
    assert {crd["metadata"]["name"] for crd in found} == set(generated)
    for crd in found:
        assert crd["spec"] == generated[crd["metadata"]["name"]]["spec"]
        kept = crd["metadata"].get("annotations", {}).get("helm.sh/resource-policy")
        assert kept == (None if name == "everything" else "keep")


def test_no_job_is_installed(case: tuple[str, list[Object]]):
    assert not of(case[1], "RLJob")


# ------------------------------------------------------------------------------------------------------------- rights

SYSTEM_WIDE = {"nodes", "tokenreviews", "subjectaccessreviews"}


def rules(objects: list[Object], component: str) -> list[tuple[Object, Object]]:
    return [
        (obj, rule) for kind in ("ClusterRole", "Role") for obj in of(objects, kind, component) for rule in obj["rules"]
    ]


def test_no_right_is_wider_than_it_must_be(case: tuple[str, list[Object]]):
    for component in ("operator", "status", "users", "test"):
        for role, rule in rules(case[1], component):
            for part in ("apiGroups", "resources", "verbs"):
                assert not any("*" in word for word in rule[part]), (role["metadata"]["name"], rule)
            assert not {"secrets", "pods/log", "pods/exec", "pods/attach", "pods/portforward", "configmaps"} & set(
                rule["resources"]
            )
            assert not {"escalate", "bind", "impersonate", "deletecollection"} & set(rule["verbs"]) or (
                component == "users" and role["metadata"]["name"].endswith("-edit")
            )


def test_the_status_service_writes_nothing(case: tuple[str, list[Object]]):
    for _, rule in rules(case[1], "status"):
        if set(rule["resources"]) <= {"tokenreviews", "subjectaccessreviews"}:
            assert rule["verbs"] == ["create"]
        else:
            assert set(rule["verbs"]) <= {"get", "list", "watch"}


def test_the_operator_has_all_that_it_grants_to_drivers(case: tuple[str, list[Object]]):
    """The API server lets nobody grant more than they have."""
    if case[0] == "no rbac":
        assert not rules(case[1], "operator")
        return
    held = {
        (group, resource, verb)
        for obj, rule in rules(case[1], "operator")
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    granted = {
        (group, resource, verb)
        for rule in access.role(Identity("job", "team-a", "uid"))["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted <= held


def test_a_namespaced_install_has_cluster_wide_rights_to_little(helm: Helm):
    objects = helm.render(CASES["namespaced"] | {"rbac": {"nodes": True}})
    for component in ("operator", "status"):
        for obj in of(objects, "ClusterRole", component):
            assert {resource for rule in obj["rules"] for resource in rule["resources"]} <= SYSTEM_WIDE
        roles = of(objects, "Role", component)
        assert {obj["metadata"]["namespace"] for obj in roles} - {"default"} == {"team-a", "team-b"}
    without = helm.render(CASES["namespaced"] | {"rbac": {"nodes": False, "accessReviews": False, "userRoles": False}})
    assert not of(without, "ClusterRole")
    assert not of(without, "ClusterRoleBinding")


def test_every_binding_binds_a_role_that_is_there_to_an_account_that_is_there(case: tuple[str, list[Object]]):
    name, objects = case
    accounts = {(o["metadata"]["namespace"], o["metadata"]["name"]) for o in of(objects, "ServiceAccount")}
    for kind in ("Role", "ClusterRole"):
        roles = {(o["metadata"].get("namespace"), o["metadata"]["name"]) for o in of(objects, kind)}
        assert len(roles) == len(of(objects, kind))
        for binding in of(objects, f"{kind}Binding"):
            assert (binding["metadata"].get("namespace"), binding["roleRef"]["name"]) in roles
            for subject in binding["subjects"]:
                assert (subject["namespace"], subject["name"]) in accounts
    used = {o["spec"]["template"]["spec"]["serviceAccountName"] for o in of(objects, "Deployment")}
    assert used <= {name for _, name in accounts} | ({"mine"} if name == "no rbac" else set())


def test_people_may_change_jobs_and_only_look_at_groups(helm: Helm):
    defaults = helm.render()
    by_name = {o["metadata"]["name"]: o for o in of(defaults, "ClusterRole", "users")}
    assert set(by_name) == {"rlightning-view", "rlightning-edit"}
    writes = {"create", "update", "patch", "delete", "deletecollection"}
    for name, obj in by_name.items():
        written = {r for rule in obj["rules"] if writes & set(rule["verbs"]) for r in rule["resources"]}
        assert written == (set() if name.endswith("view") else {"rljobs", "rljobs/scale"})
        labels = obj["metadata"]["labels"]
        kind = name.removeprefix("rlightning-")
        assert labels[f"rbac.authorization.k8s.io/aggregate-to-{kind}"] == "true"
    for obj in of(helm.render(CASES["everything"]), "ClusterRole", "users"):
        assert not any("aggregate" in label for label in obj["metadata"]["labels"])


# --------------------------------------------------------------------------------------------------------------- pods


def test_there_is_one_operator_and_never_two(case: tuple[str, list[Object]]):
    spec = one(case[1], "Deployment", "operator")["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"] == {"type": "Recreate"}


def test_pods_have_probes_limits_and_a_root_that_cannot_be_written(case: tuple[str, list[Object]]):
    for deployment in of(case[1], "Deployment"):
        c = container(deployment)
        assert c["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert c["livenessProbe"]["httpGet"]["path"] == "/healthz"
        assert c["readinessProbe"]["httpGet"]["path"] == "/readyz"
        assert c["resources"]["requests"] and "memory" in c["resources"]["limits"]
        selector = deployment["spec"]["selector"]["matchLabels"]
        assert selector.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


def test_what_is_set_for_pods_reaches_all_of_them(helm: Helm):
    objects = helm.render(CASES["everything"])
    pods = [o["spec"]["template"] for o in of(objects, "Deployment")] + of(objects, "Pod")
    assert len(pods) == 3
    for pod in pods:
        spec = pod["spec"]
        assert spec["imagePullSecrets"] == [{"name": "mirror"}]
        assert spec["nodeSelector"] == {"kubernetes.io/os": "linux"}
        assert spec["tolerations"] == [{"key": "infra", "operator": "Exists"}]
        assert spec["affinity"] == {"nodeAffinity": {}}
        assert spec["priorityClassName"] == "system-cluster-critical"
        assert pod["metadata"]["annotations"]["e"] == "f"
        assert pod["metadata"]["labels"]["g"] == "h"
        assert pod["metadata"]["labels"]["team"] == "platform"
    for deployment, variable in zip(of(objects, "Deployment"), ("PYTHONMALLOC", "X"), strict=True):
        assert [e["name"] for e in container(deployment)["env"]] == [variable]


@pytest.mark.parametrize(("name", "audience"), [("defaults", None), ("everything", "rlightning"), ("small", None)])
def test_helm_test_asks_the_status_service_with_a_token_that_it_takes(helm: Helm, name: str, audience: str | None):
    spec = one(helm.render(CASES[name]), "Pod")["spec"]
    (c,) = spec["containers"]
    if audience is None:
        assert "volumes" not in spec and len(c["args"]) == (1 if name == "small" else 2)
        return
    ((volume,), (mount,)) = spec["volumes"], c["volumeMounts"]
    ((source,),) = (volume["projected"]["sources"],)
    token = source["serviceAccountToken"]
    assert token["audience"] == audience
    assert mount["name"] == volume["name"]
    assert c["args"][2] == f"{mount['mountPath']}/{token['path']}"


def test_helm_test_keeps_the_two_tokens_apart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    script = runpy.run_path(str(CHART / "files" / "installed.py"))["main"].__globals__
    account = script["ACCOUNT"]
    used = set()

    def ask(url: str, _: object, token: Path, body: Object | None = None) -> tuple[int, Object]:
        used.add((url.partition("/apis/")[0] if "/apis/" in url else "status", token))
        refused = url.endswith("/members") or (body or {}).get("spec", {}).get("training") == {"totalEnvSteps": 0}
        code = (403 if url.endswith("/members") else 422) if refused else 201 if body else 200
        return code, {"resources": [{"kind": "RLJob"}, {"kind": "PolicyGroup"}]}

    monkeypatch.setitem(script, "ask", ask)
    monkeypatch.setattr(ssl, "create_default_context", lambda **_: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    for arguments, token in (([], account / "token"), (["/status/token"], Path("/status/token"))):
        used.clear()
        monkeypatch.setattr(sys, "argv", ["-c", "team-a", "http://status", *arguments])
        script["main"]()
        assert used == {("https://kubernetes.default.svc", account / "token"), ("status", token)}
        assert capsys.readouterr().out.count("ok ") == 6


def test_an_upgrade_to_a_new_version_of_the_chart_alone_restarts_no_pod(helm: Helm):
    pod = one(helm.render({"image": {"tag": "1"}, "trainer": {"image": {"tag": "1"}}}), "Deployment", "operator")
    assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(pod["spec"]["template"]["metadata"]["labels"])


# ------------------------------------------------------------------------------------------------------------ network


def test_network_policies_open_what_is_needed(helm: Helm):
    defaults = helm.render()
    operator, service = (one(defaults, "NetworkPolicy", c)["spec"] for c in ("operator", "status"))
    assert operator["ingress"] == []
    assert service["ingress"] == [{"ports": [{"protocol": "TCP", "port": "http"}]}]
    for spec in (operator, service):
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        assert [p["port"] for rule in spec["egress"] for p in rule["ports"]] == [443, 6443]
    given = helm.render(CASES["everything"])
    operator, service = (one(given, "NetworkPolicy", c)["spec"] for c in ("operator", "status"))
    assert operator["egress"] == service["egress"]
    assert [rule["to"][0]["ipBlock"]["cidr"] for rule in operator["egress"]] == ["10.0.0.7/32", "fd00::7/128"]
    (rule,) = service["ingress"]
    test_pod, client = rule["from"]
    assert client == {"namespaceSelector": {"matchLabels": {"team": "ml"}}}
    labels = one(given, "Pod")["metadata"]["labels"]
    assert test_pod["podSelector"]["matchLabels"].items() <= labels.items()


def test_prometheus_finds_both_only_when_asked_to(helm: Helm):
    assert not of(helm.render(), "ServiceMonitor")
    objects = helm.render(CASES["everything"])
    services = of(objects, "Service")
    for monitor in of(objects, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = [s for s in services if wanted <= s["metadata"]["labels"].items()]
        assert monitor["spec"]["endpoints"][0]["port"] in [p["name"] for p in service["spec"]["ports"]]
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert len(of(objects, "ServiceMonitor")) == 2


def test_two_releases_that_watch_different_namespaces_share_no_object(helm: Helm):
    def names(namespace: str, watched: list[str]) -> set[tuple[str, str, str]]:
        objects = helm.render({"watchNamespaces": watched, "crds": {"install": False}}, namespace=namespace)
        return {(o["kind"], o["metadata"].get("namespace", ""), o["metadata"]["name"]) for o in objects}

    assert not names("one", ["a", "shared"]) & names("two", ["b", "shared"])


def test_the_notes_say_what_to_do_next(helm: Helm):
    done = helm.ok("install", "x", str(CHART), "--dry-run=client", values={"watchNamespaces": ["team-a"]})
    notes = done.partition("NOTES:")[2]
    for words in (
        "of team-a.",
        "KubeRay was not found",
        "helm test x",
        "kubectl apply --namespace team-a",
        "x-rlightning-status",
    ):
        assert words in notes
    assert "<no value>" not in notes
    assert "Prometheus" not in notes
    sample = yaml.safe_load(notes.partition("<<EOF\n")[2].partition("     EOF")[0])
    RLJob.model_validate(sample)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({}, ["reach the operator until networkPolicy.metricsNamespaces"]),
        ({"metricsNamespaces": ["monitoring"]}, []),
        (
            {"metricsNamespaces": ["monitoring"], "statusClients": [{"podSelector": {}}]},
            ["if networkPolicy.statusClients"],
        ),
        ({"enabled": False}, []),
    ],
)
def test_the_notes_say_when_prometheus_is_shut_out(helm: Helm, policy: Object, words: list[str]):
    values = {"serviceMonitor": {"enabled": True}, "networkPolicy": policy}
    arguments = ("install", "x", str(CHART), "--dry-run=client", "--disable-openapi-validation")
    notes = helm.ok(*arguments, values=values).partition("NOTES:")[2]
    assert notes.count("Prometheus") == len(words)
    for word in words:
        assert word in notes


def test_a_chart_that_has_this_one_as_a_part_can_leave_it_out(helm: Helm, tmp_path: Path):
    shutil.copytree(CHART, tmp_path / "charts" / "rlightning")
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    part = {"name": "rlightning", "version": version, "condition": "rlightning.enabled"}
    parent = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [part]}
    (tmp_path / "Chart.yaml").write_text(json.dumps(parent))
    assert "kind: Deployment" in helm.ok("template", "x", str(tmp_path), values={"rlightning": REPOSITORIES})
    assert "kind:" not in helm.ok("template", "x", str(tmp_path), values={"rlightning": {"enabled": False}})
