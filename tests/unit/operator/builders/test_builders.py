"""The objects of a job, against what KubeRay, Pod Security and the other parts of the project expect of them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from rlightning.api.models import PolicyGroupResource, RLJobSpec
from rlightning.api.resolve import training_spec
from rlightning_operator.builders import access, network, policy_group, submitter
from rlightning_operator.builders.names import Identity
from rlightning_operator.builders.ray_cluster import ray_cluster
from rlightning_operator.reconcile.snapshot import OperatorConfig

IDENTITY = Identity("walker", "team", "3f2a9c1e-0000-4000-8000-000000000000")
CONFIG = OperatorConfig(trainer_image="trainer:1", ray_version="2.60.0")
RC = IDENTITY.cluster(1)


def spec(**changes: Any) -> RLJobSpec:
    return RLJobSpec.from_stored(
        {
            "environment": {"id": "CartPole-v1", "numEnvs": 8},
            "policy": {"simplePPO": {"minibatchSize": 64}},
            "training": {"totalEnvSteps": 1000, "rolloutSteps": 32, "threads": 2},
            "policyGroup": {"train": {"pool": "learners"}, "eval": {"replicas": 4, "pool": "actors"}},
            "pools": [
                {
                    "name": "learners",
                    "gpusPerReplica": 1,
                    "resources": {"cpu": 4, "memory": "16Gi"},
                    "nodeSelector": {"accelerator": "h100"},
                    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
                },
                {"name": "actors", "replicas": 2, "membersPerReplica": 2},
            ],
            "checkpoints": {"claimName": "runs"},
            **changes,
        }
    )


def cluster(**changes: Any) -> dict[str, Any]:
    return ray_cluster(IDENTITY, spec(**changes), RC, CONFIG)


def job(**changes: Any) -> dict[str, Any]:
    owner = {"metadata": {"name": RC, "uid": "cluster-uid"}}
    return submitter.submitter(IDENTITY, spec(**changes), owner, 3, CONFIG)


def templates() -> Iterator[dict[str, Any]]:
    yield cluster()["spec"]["headGroupSpec"]["template"]
    yield from (group["template"] for group in cluster()["spec"]["workerGroupSpecs"])
    yield job()["spec"]["template"]


def head(**changes: Any) -> dict[str, Any]:
    pod: dict[str, Any] = cluster(**changes)["spec"]["headGroupSpec"]["template"]["spec"]
    return pod


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container["env"]}


# --------------------------------------------------------------------------------------------------------------- names


def test_names() -> None:
    assert RC == "walker-3f2a-1"
    assert IDENTITY.run_path == "team/walker-3f2a9c1e"
    assert [IDENTITY.cluster_number(n) for n in (RC, "walker-3f2a-12", "walker-3f2a-x", "runner-3f2a-1")] == [
        1,
        12,
        None,
        None,
    ]


def test_the_longest_name_fits_everywhere() -> None:
    """KubeRay takes 53 characters for a cluster, Kubernetes 63 for a Job whose pods carry its name, and a service."""
    identity = Identity("j" * 40, "n" * 63, IDENTITY.uid)
    name = identity.cluster(999)
    assert len(name) <= 53
    assert len(f"{name}-head-svc") <= 63
    assert len(f"{name}-{10**6}") <= 63


# ------------------------------------------------------------------------------------------------------------ all pods


@pytest.mark.parametrize("index", range(4))
def test_every_pod_meets_the_restricted_pod_security_profile(index: int) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted, rule by rule."""
    pod = list(templates())[index]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["fsGroup"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    for volume in pod["volumes"]:
        assert set(volume) - {"name"} <= {"emptyDir", "persistentVolumeClaim"}
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True
        assert not any("hostPort" in port for port in container.get("ports", ()))
        # Ray writes /tmp/ray, and the home of its user.
        assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
        assert environment(container)["HOME"] == "/tmp"


@pytest.mark.parametrize("index", range(4))
def test_every_pod_is_labelled_and_gives_up_a_dead_node_after_half_a_minute(index: int) -> None:
    template = list(templates())[index]
    labels = template["metadata"]["labels"]
    assert labels["rlightning.io/job"] == "walker"
    assert labels["rlightning.io/job-uid"] == IDENTITY.uid
    assert labels["rlightning.io/component"] == ("head", "worker", "worker", "submitter")[index]
    assert template["spec"]["enableServiceLinks"] is False
    assert template["spec"]["terminationGracePeriodSeconds"] <= 30
    for taint in ("not-ready", "unreachable"):
        assert {
            "key": f"node.kubernetes.io/{taint}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": 30,
        } in template["spec"]["tolerations"]


def test_only_the_head_has_the_jobs_token() -> None:
    assert [t["spec"]["automountServiceAccountToken"] for t in templates()] == [True, False, False, False]
    assert [t["spec"].get("serviceAccountName") for t in templates()] == ["rlj-walker", None, None, None]


def test_the_image_is_the_jobs_or_else_the_operators() -> None:
    assert {c["image"] for t in templates() for c in t["spec"]["containers"]} == {"trainer:1"}
    pod = head(image="mine:2", imagePullPolicy="Always", imagePullSecrets=[{"name": "registry"}])
    assert (pod["containers"][0]["image"], pod["containers"][0]["imagePullPolicy"]) == ("mine:2", "Always")
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert job(image="mine:2")["spec"]["template"]["spec"]["containers"][0]["image"] == "mine:2"


# ---------------------------------------------------------------------------------------------------------- RayCluster


def test_the_cluster_belongs_to_the_job_and_asks_for_a_token() -> None:
    made = cluster()
    assert (made["apiVersion"], made["kind"]) == ("ray.io/v1", "RayCluster")
    assert made["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "rlightning.io/v1alpha1",
            "kind": "RLJob",
            "name": "walker",
            "uid": IDENTITY.uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }
    ]
    assert made["metadata"]["annotations"]["rlightning.io/spec-hash"].startswith("sha256:")
    assert made["spec"]["authOptions"] == {"mode": "token"}
    assert made["spec"]["rayVersion"] == "2.60.0"
    assert "enableInTreeAutoscaling" not in made["spec"]
    assert "suspend" not in made["spec"]


def test_the_head_has_a_dashboard_port_the_claim_and_its_own_name() -> None:
    pod = head()
    (ray,) = pod["containers"]
    assert ray["name"] == "ray-head"
    ports = {port["name"]: port["containerPort"] for port in ray["ports"]}
    assert ports == {"gcs": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080}
    assert {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}} in pod["volumes"]
    assert {"name": "runs", "mountPath": "/runs"} in ray["volumeMounts"]
    names = environment(ray)
    assert names["RLIGHTNING_POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert names["RLIGHTNING_POD_UID"] == {"fieldRef": {"fieldPath": "metadata.uid"}}
    assert names["RAY_USAGE_STATS_ENABLED"] == "0"
    assert names["OMP_NUM_THREADS"] == "2"
    params = cluster()["spec"]["headGroupSpec"]["rayStartParams"]
    assert params == {"dashboard-host": "0.0.0.0"}


def test_without_a_claim_runs_are_in_the_pod() -> None:
    assert {"name": "runs", "emptyDir": {}} in head(checkpoints={})["volumes"]


def test_a_pool_is_a_group_of_fixed_size_that_offers_places() -> None:
    learners, actors = cluster()["spec"]["workerGroupSpecs"]
    assert [learners[k] for k in ("groupName", "replicas", "minReplicas", "maxReplicas")] == ["learners", 1, 1, 1]
    assert [actors[k] for k in ("groupName", "replicas", "minReplicas", "maxReplicas")] == ["actors", 2, 2, 2]
    quoted = actors["rayStartParams"]["resources"]
    assert quoted == r'"{\"rlightning-pool-actors\": 2}"'
    # What a shell makes of KubeRay's --resources=<this>:
    (argument,) = shlex.split(f"--resources={quoted}")
    assert json.loads(argument.removeprefix("--resources=")) == {"rlightning-pool-actors": 2}


def test_resources_and_places_of_a_pool() -> None:
    learners, actors = (group["template"]["spec"] for group in cluster()["spec"]["workerGroupSpecs"])
    assert learners["containers"][0]["resources"] == {
        "requests": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"},
        "limits": {"memory": "16Gi", "nvidia.com/gpu": "1"},
    }
    assert "nvidia.com/gpu" not in actors["containers"][0]["resources"]["limits"]
    assert learners["nodeSelector"] == {"accelerator": "h100"}
    assert learners["tolerations"][0] == {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert all(volume["name"] != "runs" for pod in (learners, actors) for volume in pod["volumes"])


def test_without_pools_there_is_only_a_head() -> None:
    assert cluster(pools=[], policyGroup={})["spec"]["workerGroupSpecs"] == []


# ----------------------------------------------------------------------------------------------------------- submitter


def test_the_submitter_starts_the_attempts_driver() -> None:
    made = job()
    assert made["metadata"]["name"] == f"{RC}-3"
    (container,) = made["spec"]["template"]["spec"]["containers"]
    command = container["command"]
    assert command[:3] == ["python", "-m", "rlightning.runtime.cluster.submitter"]
    options = dict(zip(command[3::2], command[4::2], strict=True))
    assert options["--address"] == f"http://{RC}-head-svc.team.svc:8265"
    assert options["--submission-id"] == f"{IDENTITY.uid}-3"
    driver = shlex.split(options["--entrypoint"])
    assert driver == [
        *("python", "-m", "rlightning.runtime.cluster.driver", "--namespace", "team", "--group", "walker"),
        *("--job-uid", IDENTITY.uid, "--attempt", "3", "--run-dir", "/runs/team/walker-3f2a9c1e"),
    ]
    token = {"secretKeyRef": {"name": RC, "key": "auth_token"}}
    assert environment(container)["RAY_AUTH_TOKEN"] == token


def test_the_submitter_is_tried_again_unless_its_exit_code_is_final() -> None:
    made = job()["spec"]
    assert (made["backoffLimit"], made["podReplacementPolicy"]) == (6, "Failed")
    assert made["template"]["spec"]["restartPolicy"] == "Never"
    assert made["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onExitCodes": {"containerName": "submitter", "operator": "In", "values": [1, 3]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]


def test_the_submitter_is_the_clusters_child_and_outlives_it() -> None:
    owners = job()["metadata"]["ownerReferences"]
    assert [(o["kind"], o["uid"], o["controller"]) for o in owners] == [
        ("RayCluster", "cluster-uid", True),
        ("RLJob", IDENTITY.uid, False),
    ]


def test_the_submitter_may_run_where_the_head_may() -> None:
    pod = job(head={"nodeSelector": {"zone": "a"}, "tolerations": [{"operator": "Exists"}]})["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"zone": "a"}
    assert {"operator": "Exists"} in pod["tolerations"]


# --------------------------------------------------------------------------------------------- PolicyGroup and access


def test_the_policy_group_holds_the_frozen_training_spec() -> None:
    training = training_spec(spec(image="mine:2"))
    stored = policy_group.policy_group_spec(IDENTITY, training, 2, "Running")
    group = PolicyGroupResource.from_stored(policy_group.policy_group(IDENTITY, stored))
    assert (group.metadata.name, group.spec.job, group.spec.attempt, group.spec.state) == (
        "walker",
        "walker",
        2,
        "Running",
    )
    assert (group.spec.train_replicas, group.spec.eval_replicas) == (1, 4)
    assert group.spec.training == training
    assert "image" not in stored["training"]


def test_the_token_opens_one_policy_group_and_nothing_else() -> None:
    role = access.role(IDENTITY)
    assert role["rules"] == [
        {
            "apiGroups": ["rlightning.io"],
            "resourceNames": ["walker"],
            "resources": ["policygroups"],
            "verbs": ["get", "list", "watch"],
        },
        {
            "apiGroups": ["rlightning.io"],
            "resourceNames": ["walker"],
            "resources": ["policygroups/status"],
            "verbs": ["get", "patch"],
        },
    ]
    binding = access.role_binding(IDENTITY)
    assert binding["roleRef"]["name"] == role["metadata"]["name"] == "rlj-walker"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "rlj-walker", "namespace": "team"}]
    assert access.service_account(IDENTITY)["automountServiceAccountToken"] is False


# ----------------------------------------------------------------------------------------------------- NetworkPolicies


def policies(**config: Any) -> dict[str, dict[str, Any]]:
    made = network.network_policies(IDENTITY, OperatorConfig(network_policies=True, **config))
    return {policy["metadata"]["name"].rpartition("-")[2]: policy["spec"] for policy in made}


def allowed(
    source: str, target: str, port: int, config: dict[str, Any] | None = None, namespace: str | None = None
) -> bool:
    """Whether the policies let ``source`` open a connection: components of the job, or "other", "api", "dns"."""
    made = policies(**(config or {}))

    def selected(policy: dict[str, Any], component: str) -> bool:
        return component in policy["podSelector"]["matchExpressions"][0]["values"]

    def peer_matches(peer: dict[str, Any], component: str) -> bool:
        if "podSelector" in peer:
            return component in peer["podSelector"]["matchExpressions"][0]["values"]
        if "namespaceSelector" in peer:
            return namespace in peer["namespaceSelector"]["matchExpressions"][0]["values"]
        return component == "api" and peer["ipBlock"]["cidr"] == "10.1.2.3/32"

    def open_(rules: list[dict[str, Any]], key: str, component: str) -> bool:
        for rule in rules:
            ports = rule.get("ports")
            if ports is not None and port not in [p["port"] for p in ports]:
                continue
            if key not in rule or any(peer_matches(peer, component) for peer in rule[key]):
                return True
        return False

    ours = ("head", "worker", "submitter")
    out = source not in ours or any(open_(p["egress"], "to", target) for p in made.values() if selected(p, source))
    in_ = target not in ours or any(open_(p["ingress"], "from", source) for p in made.values() if selected(p, target))
    return out and in_


API = {"api_server_endpoints": (("10.1.2.3", 6443),)}


@pytest.mark.parametrize(
    ("source", "target", "port", "config", "namespace", "expected"),
    [
        ("worker", "head", 6379, API, None, True),
        ("head", "worker", 52365, API, None, True),
        ("worker", "worker", 10002, API, None, True),
        ("submitter", "head", 8265, API, None, True),
        ("submitter", "head", 6379, API, None, False),
        ("submitter", "worker", 8265, API, None, False),
        ("head", "submitter", 8265, API, None, False),
        ("head", "api", 6443, API, None, True),
        ("head", "api", 443, API, None, False),
        ("worker", "api", 6443, API, None, False),
        ("submitter", "api", 6443, API, None, False),
        ("head", "internet", 6443, {}, None, True),
        ("head", "internet", 80, {}, None, False),
        ("head", "dns", 53, API, None, True),
        ("worker", "dns", 53, API, None, True),
        ("submitter", "dns", 53, API, None, True),
        ("other", "head", 8265, API, None, False),
        ("other", "worker", 8080, API, None, False),
        ("other", "worker", 8080, API | {"scrape_namespaces": ("monitoring",)}, "monitoring", True),
        ("other", "head", 8080, API | {"scrape_namespaces": ("monitoring",)}, "monitoring", True),
        ("other", "head", 8265, API | {"scrape_namespaces": ("monitoring",)}, "monitoring", False),
        ("other", "head", 8080, API | {"scrape_namespaces": ("monitoring",)}, "default", False),
        ("worker", "internet", 443, API, None, False),
    ],
)
def test_who_reaches_whom(
    source: str, target: str, port: int, config: dict[str, Any], namespace: str | None, expected: bool
) -> None:
    assert allowed(source, target, port, config, namespace) is expected


def test_policies_are_for_this_jobs_pods_alone_and_can_be_left_out() -> None:
    assert network.network_policies(IDENTITY, OperatorConfig(network_policies=False)) == []
    for policy in policies(**API).values():
        assert policy["podSelector"]["matchLabels"] == {"rlightning.io/job-uid": IDENTITY.uid}
        assert policy["policyTypes"] == ["Ingress", "Egress"]


def test_an_api_server_with_an_ipv6_address() -> None:
    head_ = policies(api_server_endpoints=(("fd00::1", 6443),))["head"]
    assert head_["egress"][0]["to"] == [{"ipBlock": {"cidr": "fd00::1/128"}}]


def test_content_hashes_follow_the_content() -> None:
    def hash_(**config: Any) -> str:
        policy = network.network_policies(IDENTITY, OperatorConfig(network_policies=True, **config))[1]
        found: str = policy["metadata"]["annotations"]["rlightning.io/content-hash"]
        return found

    assert hash_(**API) == hash_(**API) != hash_()
