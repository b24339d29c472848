"""The CRDs on a real API server, and the promise that `rlightning validate` gives the verdict of that server.

One table of manifests goes through both. Each row is a small change to a valid manifest, written as YAML text, so that
scalars arrive exactly as somebody would type them.
"""

# ruff: noqa: E501  (tables)

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rlightning.api.manifests import load_text
from rlightning.api.models import RLJob
from rlightning.api.rules import GROUP_RULES, JOB_RULES, SPEC_RULES, Rule
from rlightning.api.validate import errors, validate_manifest, validate_update
from tests.support.kube import Kube

pytestmark = pytest.mark.apiserver

JOB = {
    "apiVersion": "rlightning.io/v1alpha1",
    "kind": "RLJob",
    "spec.environment.id": "CartPole-v1",
    "spec.policy.simplePPO": "{}",
    "spec.training.totalEnvSteps": "1000",
}
GROUP = {
    "apiVersion": "rlightning.io/v1alpha1",
    "kind": "PolicyGroup",
    "spec.job": "cartpole",
    "spec.attempt": "1",
    "spec.trainReplicas": "1",
    "spec.evalReplicas": "1",
    "spec.training.environment.id": "CartPole-v1",
    "spec.training.environment.shards": "1",
    "spec.training.policy.simplePPO": "{}",
    "spec.training.training.totalEnvSteps": "1000",
}


def manifest(base: dict[str, str], changes: dict[str, str | None]) -> str:
    """The base with changes, as block YAML; values are YAML text, None leaves a field out."""
    leaves: dict[str, str | None] = dict(base)
    for path, text in changes.items():
        for known in list(leaves):
            if path.startswith(f"{known}.") or known.startswith(f"{path}."):
                del leaves[known]
        leaves[path] = text
    tree: dict[str, Any] = {}
    for path, text in leaves.items():
        if text is not None:
            *parents, last = path.split(".")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = text

    def block(node: dict[str, Any], indent: str) -> str:
        return "".join(
            f"{indent}{key}:\n{block(value, indent + '  ')}" if isinstance(value, dict) else f"{indent}{key}: {value}\n"
            for key, value in node.items()
        )

    return block(tree, "")


@dataclass
class Row:
    """One manifest of the table.

    Attributes:
        title: what it is about.
        changes: to the valid manifest.
        wrong: path that both verdicts must name; None if the manifest is good.
        server_says: what the server's message contains, where that is not the path.
        base: the valid manifest.
    """

    title: str
    changes: dict[str, str | None] = field(default_factory=dict)
    wrong: str | None = None
    server_says: str | None = None
    base: dict[str, str] = field(default_factory=lambda: JOB)

    def text(self, name: str) -> str:
        """The manifest; its name is ``name`` unless the row is about names."""
        return manifest({**self.base, "metadata.name": name}, self.changes)


def good(title: str, /, **changes: str | None) -> Row:
    """A row whose changes are under spec; ``__`` stands for a dot."""
    return Row(title, {f"spec.{k.replace('__', '.')}": v for k, v in changes.items()})


def bad(title: str, wrong: str, /, says: str | None = None, **changes: str | None) -> Row:
    """The same, to be refused at ``wrong`` (relative to spec)."""
    return Row(title, good(title, **changes).changes, f"spec.{wrong}", says)


def ppo(**fields: str) -> dict[str, str | None]:
    return {f"policy__simplePPO__{name}": text for name, text in fields.items()}


POOL = "[{name: cpu, replicas: 2, membersPerReplica: 2}]"
ON_POOL: dict[str, str | None] = {"policyGroup__train__pool": "cpu", "policyGroup__eval__pool": "cpu"}
CUSTOM: dict[str, str | None] = {"policy__simplePPO": None, "policy__custom__class": '"my_pkg.policies:Mine"'}
KEYS_64 = "{" + ", ".join(f"k{i}: {i}" for i in range(64)) + "}"
KEYS_65 = "{" + ", ".join(f"k{i}: {i}" for i in range(65)) + "}"

ROWS = [
    # -- whole manifests
    good("the smallest"),
    good(
        "every field set",
        seed="7",
        environment="{id: Hopper-v5, numEnvs: 64, shards: 8, kwargs: {healthy_reward: 0.5, deep: {a: [1, {b: null}]}}, "
        "maxEpisodeSteps: 500, vectorization: Sync}",
        policy="{simplePPO: {hiddenSizes: [32], activation: ReLU, learningRate: 3e-4, learningRateSchedule: Linear, gamma: "
        "0.9, gaeLambda: 0.8, clipRange: .1, clipRangeSchedule: Linear, epochs: 4, minibatchSize: 2048, entropyCoef: "
        "0.01, valueCoef: 1, maxGradNorm: 1, normalizeAdvantages: false, normalizeObservations: true, targetKL: 0.02, "
        "logStdInit: -2}}",
        training="{totalEnvSteps: 1000000, rolloutSteps: 128, threads: 2, device: CPU}",
        evaluation="{everyIterations: 10, episodes: 20, stopAtReturn: -3.5}",
        policyGroup="{train: {replicas: 2, pool: learners}, eval: {replicas: 4, pool: actors}}",
        pools="[{name: learners, membersPerReplica: 2, gpusPerReplica: 1, resources: {cpu: 4}}, {name: actors, replicas: 2, "
        "membersPerReplica: 2, nodeSelector: {zone: a}, tolerations: []}]",
        weights="{strategy: Double, onMismatch: Resync}",
        head="{resources: {cpu: 500m, memory: 2Gi}, nodeSelector: {disk: ssd}, tolerations: [{key: gpu, operator: Exists, "
        "effect: NoExecute, tolerationSeconds: 30}, {operator: Equal, key: a, value: b}]}",
        image="trainer:1",
        imagePullPolicy="IfNotPresent",
        imagePullSecrets="[{name: registry}]",
        checkpoints="{everyIterations: 5, keep: 1, claimName: runs, drainSeconds: 30}",
        runPolicy="{backoffLimit: 0, activeDeadlineSeconds: 1, schedulingDeadlineSeconds: 2, progressDeadlineSeconds: 3, "
        "ttlSecondsAfterFinished: 0}",
        suspend="true",
        deadlines="{memberStartSeconds: 1, fragmentSeconds: 2, acknowledgementSeconds: 3, leaseSeconds: 4, "
        "collectiveSeconds: 86400}",
    ),
    good("a custom policy with free-form config", **CUSTOM, policy__custom__config="{layers: [1, 2], nested: {a: null}}"),
    Row("labels and annotations", {"metadata.labels": "{team: rl, example.com/tier: A-1}", "metadata.annotations": "{note: x y}"}),
    Row("no spec", dict.fromkeys(["spec.environment.id", "spec.policy.simplePPO", "spec.training.totalEnvSteps"]), "spec"),
    Row("spec is a list", {"spec": "[1]"}, "spec"),
    # -- numbers as people type them
    good("an exponent without a point for a number", **ppo(learningRate="3e-4")),
    good("a whole number with an exponent", training__totalEnvSteps="1e6"),
    good("a whole number with a point", environment__numEnvs="16.0"),
    good("binary", environment__numEnvs="0b11"),
    good("hexadecimal", environment__numEnvs="0x10"),
    good("octal with its letter", environment__numEnvs="0o20"),
    good("a plus sign", environment__numEnvs="+16"),
    good("a number that begins with its point", **ppo(gamma=".5")),
    good("a number that ends with its point", **ppo(gamma="1.")),
    good("a whole number for a fraction", **ppo(gamma="1")),
    bad("a fraction for a whole number", "environment.numEnvs", environment__numEnvs="8.5"),
    bad("a quoted number", "environment.numEnvs", environment__numEnvs='"8"'),
    bad("a quoted fraction", "policy.simplePPO.gamma", **ppo(gamma="'0.9'")),
    bad("true for a number", "environment.numEnvs", environment__numEnvs="true"),
    bad("a number for text", "environment.id", environment__id="3"),
    bad("true for text", "environment.id", environment__id="true"),
    bad("text for a boolean", "policy.simplePPO.normalizeAdvantages", **ppo(normalizeAdvantages='"true"')),
    bad("a number for a boolean", "policy.simplePPO.normalizeAdvantages", **ppo(normalizeAdvantages="1")),
    good("a date is text", environment__kwargs="{day: 2024-01-01, time: 12:30:45}"),
    bad("infinity", "policy.simplePPO.maxGradNorm", says="unsupported value", **ppo(maxGradNorm=".inf")),
    bad("not a number", "environment.kwargs.x", says="unsupported value", environment__kwargs="{x: .nan}"),
    # -- shapes
    bad("a mapping for a list", "policy.simplePPO.hiddenSizes", **ppo(hiddenSizes="{a: 1}")),
    bad("a number for a list", "policy.simplePPO.hiddenSizes", **ppo(hiddenSizes="64")),
    bad("a list for a mapping", "environment.kwargs", environment__kwargs="[1]"),
    bad("text for a mapping", "training", training="fast"),
    bad("a null in a list", "policy.simplePPO.hiddenSizes", **ppo(hiddenSizes="[64, null]")),
    good("null where there is a default", environment__numEnvs="null", pools="~", evaluation="", **ppo(epochs="null")),
    good("null where there is none", environment__shards="null", evaluation__stopAtReturn="null"),
    good("null for the pool of a role", policyGroup__eval__pool="null", policyGroup__train__pool=""),
    good("null for the other policy", policy__custom="null", policy__simplePPO="{targetKL: null}"),
    bad("null for a required field", "training.totalEnvSteps", training__totalEnvSteps="null"),
    bad("null for the only policy", "policy", policy__simplePPO=""),
    bad("a required field left out", "environment.id", environment="{numEnvs: 8}"),
    # -- what only a cluster uses
    good("a whole number for a quantity", head__resources="{cpu: 2, memory: 4Gi}"),
    good("a quoted number for a quantity", head__resources='{cpu: "2"}'),
    good("a fraction in a quantity", head__resources="{memory: 1.5Gi, cpu: '0.5'}"),
    good("null for a quantity", head__resources="{cpu: null}"),
    bad("a fraction as a number for a quantity", "head.resources.cpu", head__resources="{cpu: 0.5}"),
    bad("a unit that is none", "head.resources.memory", head__resources="{memory: 4GB}"),
    bad("a negative quantity", "head.resources.cpu", head__resources="{cpu: -1}"),
    bad("true for a quantity", "head.resources.cpu", head__resources="{cpu: true}"),
    bad("a misspelt resource", "head.resources.gpu", head__resources="{gpu: 1}"),
    bad("an image with a space", "image", image='"a b"'),
    bad("an empty image", "image", image='""'),
    bad("an unknown pull policy", "imagePullPolicy", imagePullPolicy="always"),
    bad("a claim in another namespace", "checkpoints.claimName", checkpoints="{claimName: other/runs}"),
    bad("a toleration with a misspelt effect", "head.tolerations[0].effect", head__tolerations="[{effect: NoRun}]"),
    bad("a selector that is no text", "head.nodeSelector.a", head__nodeSelector="{a: 1}"),
    bad("a backoff below 0", "runPolicy.backoffLimit", runPolicy__backoffLimit="-1"),
    bad("a deadline of 0 s for progress", "runPolicy.progressDeadlineSeconds", runPolicy__progressDeadlineSeconds="0"),
    bad("suspend as text", "suspend", suspend='"true"'),
    # -- misspelt
    bad("an unknown field under spec", "suspended", suspended="true"),
    bad("an unknown field under the policy", "policy.simplePPO.clipRnge", **ppo(clipRnge="0.2")),
    bad("the wrong case", "policy.simplePPO.targetKl", **ppo(targetKl="0.2")),
    bad("the Python name of a field", "environment.num_envs", environment__num_envs="8"),
    bad("an unknown policy", "policy.ppo", policy__ppo="{}"),
    bad("a field of another part", "environment.rolloutSteps", environment__rolloutSteps="8"),
    bad("an unknown field in a pool", "pools[0].gpus", says="gpus", pools="[{name: cpu, gpus: 1}]", **ON_POOL),
    Row("an unknown field under metadata", {"metadata.nmae": "x"}, "metadata.nmae", "nmae"),
    Row("an unknown field at the top", {"specs": "{}"}, "specs"),
    bad("an unknown choice", "environment.vectorization", environment__vectorization="auto"),
    bad("a device that does not work yet", "training.device", training__device="CUDA"),
    # -- bounds, on both sides
    good("seed, largest", seed="2147483647"),
    bad("seed, too large", "seed", seed="2147483648"),
    bad("seed, negative", "seed", seed="-1"),
    good("environments, most", environment__numEnvs="65536"),
    bad("environments, too many", "environment.numEnvs", environment__numEnvs="65537"),
    bad("no environments", "environment.numEnvs", environment__numEnvs="0"),
    good("steps, most", training__totalEnvSteps="1e15"),
    bad("steps, too many", "training.totalEnvSteps", training__totalEnvSteps="1000000000000001"),
    bad("steps beyond 64 bits", "training.totalEnvSteps", training__totalEnvSteps="1e30"),
    good("gamma 0", **ppo(gamma="0")),
    good("gamma -0.0", **ppo(gamma="-0.0")),
    bad("gamma below 0", "policy.simplePPO.gamma", **ppo(gamma="-0.001")),
    bad("gamma above 1", "policy.simplePPO.gamma", **ppo(gamma="1.0000001")),
    good("learning rate 1", **ppo(learningRate="1")),
    bad("learning rate 0 (an exclusive bound)", "policy.simplePPO.learningRate", **ppo(learningRate="0")),
    bad("clip range 0", "policy.simplePPO.clipRange", **ppo(clipRange="0.0")),
    good("hidden layers, most", **ppo(hiddenSizes=str([1] * 16))),
    bad("hidden layers, too many", "policy.simplePPO.hiddenSizes", **ppo(hiddenSizes=str([1] * 17))),
    bad("no hidden layer", "policy.simplePPO.hiddenSizes", **ppo(hiddenSizes="[]")),
    bad("an empty hidden layer", "policy.simplePPO.hiddenSizes[0]", **ppo(hiddenSizes="[0]")),
    good("train members, most", policyGroup__train__replicas="16"),
    bad("train members, too many", "policyGroup.train.replicas", policyGroup__train__replicas="17"),
    good("eval members, most", policyGroup__eval__replicas="256", environment__numEnvs="256"),
    bad("eval members, too many", "policyGroup.eval.replicas", policyGroup__eval__replicas="257", environment__numEnvs="257"),
    bad("no eval members", "policyGroup.eval.replicas", policyGroup__eval__replicas="0"),
    bad("no episodes", "evaluation.episodes", evaluation__episodes="0"),
    bad("no checkpoint kept", "checkpoints.keep", checkpoints__keep="0"),
    bad("a deadline of 0 s", "deadlines.leaseSeconds", deadlines__leaseSeconds="0"),
    good("keyword arguments, most", environment__kwargs=KEYS_64),
    bad("keyword arguments, too many", "environment.kwargs", environment__kwargs=KEYS_65),
    good("environment id, longest", environment__id="x" * 253),
    bad("environment id, too long", "environment.id", environment__id="x" * 254),
    bad("environment id, empty", "environment.id", environment__id='""'),
    bad("environment id with a space", "environment.id", environment__id="Cart Pole"),
    good("pool name, longest", pools=f"[{{name: {'p' * 20}, membersPerReplica: 2}}]", **dict.fromkeys(ON_POOL, "p" * 20)),
    bad("pool name, too long", "pools[0].name", pools=f"[{{name: {'p' * 21}, membersPerReplica: 2}}]", **dict.fromkeys(ON_POOL, "p" * 20), says="pools"),
    bad("pool name that begins with a digit", "pools[0].name", pools="[{name: 1cpu}]", **ON_POOL, says="pools"),
    good("pools, most", pools=str([{"name": f"p{i}", "membersPerReplica": 2} for i in range(7)]), **dict.fromkeys(ON_POOL, "p0")),
    bad("pools, too many", "pools", pools=str([{"name": f"p{i}", "membersPerReplica": 2} for i in range(8)]), **dict.fromkeys(ON_POOL, "p0")),
    bad("a pool without a name", "pools[0].name", says="name", pools="[{replicas: 1}]", **ON_POOL),
    # -- names of jobs
    Row("name, longest", {"metadata.name": "n" * 40}),
    Row("name, too long", {"metadata.name": "n" * 41}, "metadata.name"),
    Row("name that begins with a digit", {"metadata.name": "1abc"}, "metadata.name"),
    Row("name with a dot", {"metadata.name": "a.b"}, "metadata.name"),
    Row("name in capitals", {"metadata.name": "CartPole"}, "metadata.name"),
    Row("name that ends with -", {"metadata.name": "cartpole-"}, "metadata.name"),
    Row("a label with a space", {"metadata.labels": "{a: b c}"}, "metadata.labels"),
    Row("a label's key with a space", {"metadata.labels": "{a b: c}"}, "metadata.labels"),
    # -- rules over several fields
    bad("no policy", "policy", policy="{}"),
    bad("two policies", "policy", policy__simplePPO="{}", policy__custom__class="a:B"),
    bad("a custom policy without its class", "policy.custom.class", policy="{custom: {config: {}}}"),
    bad("a class without its module", "policy.custom.class", policy="{custom: {class: Mine}}"),
    good("shards that divide", environment__numEnvs="12", environment__shards="4"),
    bad("shards that do not divide", "environment.shards", environment__numEnvs="10", environment__shards="4"),
    good("eval members that divide", policyGroup__eval__replicas="4"),
    bad("eval members that do not divide", "environment.numEnvs", policyGroup__eval__replicas="3"),
    good("as many eval members as shards", environment__shards="2", policyGroup__eval__replicas="2"),
    bad("more eval members than shards", "policyGroup.eval.replicas", environment__shards="2", policyGroup__eval__replicas="3"),
    good("roles fill a pool", pools=POOL, **ON_POOL, policyGroup__eval__replicas="2", policyGroup__train__replicas="2"),
    bad("roles overfill a pool", "pools", pools=POOL, **ON_POOL, policyGroup__eval__replicas="4"),
    bad("an unknown pool", "policyGroup.eval.pool", pools=POOL, **ON_POOL | {"policyGroup__eval__pool": "gpu"}),
    bad("an unknown pool, train", "policyGroup.train.pool", pools=POOL, **ON_POOL | {"policyGroup__train__pool": "gpu"}),
    bad("a pool without pools", "policyGroup.eval.pool", policyGroup__eval__pool="cpu"),
    bad("pools, and eval without one", "policyGroup.eval.pool", pools=POOL, policyGroup__train__pool="cpu"),
    bad("pools, and train without one", "policyGroup.train.pool", pools=POOL, policyGroup__eval__pool="cpu"),
    bad("a pool called head", "pools[0].name", pools="[{name: head, membersPerReplica: 2}]", **dict.fromkeys(ON_POOL, "head")),
    bad("two pools of one name", "pools[1].name", says="duplicate", pools="[{name: cpu}, {name: cpu}]", **ON_POOL),
    good("a minibatch that splits", policyGroup__train__replicas="3", **ppo(minibatchSize="96")),
    bad("a minibatch that does not", "policy.simplePPO.minibatchSize", policyGroup__train__replicas="3"),
    good("a minibatch of all steps", training__rolloutSteps="8"),
    bad("a minibatch of more", "policy.simplePPO.minibatchSize", training__rolloutSteps="7"),
    good("a custom policy needs no minibatch", training__rolloutSteps="1", **CUSTOM),
    good("a target with evaluations", evaluation__stopAtReturn="475", evaluation__everyIterations="1"),
    bad("a target without", "evaluation.stopAtReturn", evaluation__stopAtReturn="475"),
    # -- PolicyGroup
    Row("a PolicyGroup", base=GROUP),
    Row("a PolicyGroup that is stopped", {"spec.state": "Stopped"}, base=GROUP),
    Row("an unknown state", {"spec.state": "Paused"}, "spec.state", base=GROUP),
    Row("attempt 0", {"spec.attempt": "0"}, "spec.attempt", base=GROUP),
    Row("shards not resolved", {"spec.training.environment.shards": None}, "spec.training.environment.shards", base=GROUP),
    Row("more eval members than shards", {"spec.evalReplicas": "2"}, "spec.training.environment.shards", base=GROUP),
    Row("a bad training spec", {"spec.training.evaluation.stopAtReturn": "1"}, "spec.training.evaluation.stopAtReturn", base=GROUP),
]  # fmt: skip

# What kubectl takes and we refuse: it means something else than people think. The value is compared below.
STRICTER = {
    "octal by a leading zero": "010",
    "a leading zero that is not even octal": "08",
    "a leading zero before a point": "01.5",
    "a minus and a leading zero": "-010",
    "an underscore": "1_000",
    "an underscore after the point": "1.000_1",
    "an underscore after a leading point": ".5_0",
    "on": "on",
    "Off": "Off",
    "yes": "yes",
    "NO": "NO",
    "y": "y",
    "N": "N",
    "beyond 64 bits": "18446744073709551615",
    "far beyond 64 bits": "123456789012345678901234567890",
    "beyond doubles": "1e400",
}
# What both take, and the loader must read as kubectl does.
SCALARS = [
    "3e-4", "3E-4", "3.0e-4", "1e6", "1e+6", "1e3", "1e21", "1.5e300", "5e-324", "1e-400", "0b11", "-0b11", "0B11", "0x1F", "0XfF", "-0x10",
    "0o17", "0O17", "0", "-0", "-0.0", "+5", "+.5", ".5", "5.", "5.e3", "1.0", "10.25", "0.1", "9223372036854775807",
    "-9223372036854775808", "true", "True", "FALSE", "null", "~", "Null", "", "2024-01-01", "2024-01-01T10:00:00Z",
    "12:30:45", "190:20:30", "1.2.3", "0x", "0b2", "0o8", "0xg", "--1", "1-2", "1e", "e5", ".e5", ".", "..", "+", "-a", "_1", "tRue",
    "yEs", "nULL", "<<x", "=", "0.0", "00x", "Infinity", "nan", "inf", '"010"', "'on'", '"1e3"', '"\\u00e9"', "a b", "é",
]  # fmt: skip


def offline(text: str) -> list[str]:
    """Paths of the errors that `rlightning validate` finds."""
    (loaded,) = load_text(text, "row.yaml")
    return [p.path for p in errors(validate_manifest(loaded))]


@dataclass
class Verdicts:
    """What the API server said to every row of a table."""

    accepted: set[str]
    said: str

    def message(self, name: str) -> str:
        """What it said about one object."""
        mine = [line for line in self.said.splitlines() if re.search(rf'["/]{re.escape(name)}(["; ]|\.yaml)', line)]
        return "\n".join(mine)


def apply(kube: Kube, folder: Path, *flags: str) -> Verdicts:
    """Put every file of a folder before the server in one go."""
    done = kube.run("apply", "--server-side", "--validate=strict", "--output=name", *flags, "--filename", str(folder))
    return Verdicts({line.rpartition("/")[2] for line in done.stdout.split()}, done.stderr)


def name_of(row: Row) -> str:
    return row.changes.get("metadata.name") or f"row-{ROWS.index(row)}"


@pytest.fixture(scope="module")
def verdicts(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    """The server's verdicts over ROWS."""
    folder = tmp_path_factory.mktemp("rows")
    for row in ROWS:
        (folder / f"{name_of(row)}.yaml").write_text(row.text(name_of(row)))
    return apply(kube, folder, "--dry-run=server")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_validate_and_the_server_give_the_same_verdict(row: Row, verdicts: Verdicts) -> None:
    name = name_of(row)
    found = offline(row.text(name))
    if row.wrong is None:
        assert found == []
        assert name in verdicts.accepted, verdicts.message(name)
    else:
        assert any(path.startswith(row.wrong) for path in found), found
        assert name not in verdicts.accepted
        said = verdicts.message(name)
        assert (row.server_says or row.wrong.partition("[")[0]) in said, said


RULES = [
    rule
    for rule in (*SPEC_RULES, *JOB_RULES, *GROUP_RULES)
    if rule.check and rule.cel and "self.status.shards" not in rule.message_expression and rule.at != "status"
]  # those that look at the status, or at the object before, have tests below


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.cel)
def test_every_rule_of_one_object_is_broken_by_some_row_and_explained(rule: Rule, verdicts: Verdicts) -> None:
    for fragment in rule.message.split("%s"):
        assert fragment in verdicts.said


# ------------------------------------------------------------------------------------------------------------ scalars


def in_kwargs(scalars: dict[str, str]) -> str:
    """A manifest that carries scalars as they stand, by name, where anything is allowed."""
    entries = "".join(f"      {name}: {text}\n" for name, text in scalars.items())
    text = manifest(JOB, {"metadata.name": "scalars", "spec.environment.kwargs": "KWARGS"})
    return text.replace("kwargs: KWARGS\n", f"kwargs:\n{entries}")


def stored_kwargs(kube: Kube, scalars: dict[str, str]) -> dict[str, Any]:
    applied = kube.json("apply", "--server-side", "--dry-run=server", "--filename=-", stdin=in_kwargs(scalars))
    kwargs: dict[str, Any] = applied["spec"]["environment"]["kwargs"]
    return kwargs


def typed(value: Any) -> tuple[str, Any]:
    """With its type, so that 1 is not True and not 1.0."""
    return type(value).__name__, value


def test_scalars_have_the_value_that_kubectl_stores(kube: Kube) -> None:
    for part in (SCALARS[:40], SCALARS[40:]):
        scalars = {f"s{i}": text for i, text in enumerate(part)}
        stored = stored_kwargs(kube, scalars)
        (loaded,) = load_text(in_kwargs(scalars))
        assert loaded.problems == []
        read = loaded.value["spec"]["environment"]["kwargs"]
        assert {part[i]: typed(read[f"s{i}"]) for i in range(len(part))} == {
            part[i]: typed(stored[f"s{i}"]) for i in range(len(part))
        }


def test_scalars_that_people_misread_are_refused_and_named(kube: Kube) -> None:
    scalars = {f"s{i}": text for i, text in enumerate(STRICTER.values())}
    stored = stored_kwargs(kube, scalars)
    (loaded,) = load_text(in_kwargs(scalars))
    assert [p.value for p in loaded.problems] == list(STRICTER.values())
    assert all("quote it" in p.remedy for p in loaded.problems)
    for name, text in scalars.items():
        value = loaded.value["spec"]["environment"]["kwargs"][name]
        # Python reads the server's 18446744073709552000 as an integer; it is the double that we have.
        assert value == stored[name] or float(stored[name]) == value, text


def test_keys_that_kubectl_turns_into_other_text_are_refused(kube: Kube) -> None:
    keys = {"on": "a", "010": "b", "3": "c", "1.50": "d"}
    assert stored_kwargs(kube, keys) == {"true": "a", "8": "b", "3": "c", "1.5": "d"}
    (loaded,) = load_text(in_kwargs(keys))
    assert [p.path.rpartition("kwargs.")[2] for p in loaded.problems] == list(keys)


def test_a_key_set_twice_is_refused_where_kubectl_takes_the_last(kube: Kube) -> None:
    assert stored_kwargs(kube, {"a": "1", "a ": "2"}) == {"a": 2}
    (loaded,) = load_text(in_kwargs({"a": "1", "a ": "2"}))
    assert ["is set twice" in p.message for p in loaded.problems] == [True]


# -------------------------------------------------------------------------------------------- what the server stores


def test_the_server_and_the_models_fill_in_the_same_defaults(kube: Kube) -> None:
    on_a = {"spec.policyGroup": "{train: {pool: a}, eval: {pool: a}}", "spec.pools": "[{name: a, replicas: 2}]"}
    for changes in ({}, {"spec.policy": "{custom: {class: a:B}}"}, on_a):
        text = manifest(JOB, {"metadata.name": "defaults", **changes})
        stored = kube.json("apply", "--server-side", "--dry-run=server", "--filename=-", stdin=text)
        (loaded,) = load_text(text)
        ours = RLJob.from_stored(loaded.value).to_dict()
        assert stored["spec"] == ours["spec"]


def test_a_stored_object_reads_back_as_the_manifest(kube: Kube) -> None:
    row = next(r for r in ROWS if r.title == "every field set")
    stored = kube.json("apply", "--server-side", "--dry-run=server", "--filename=-", stdin=row.text("everything"))
    (loaded,) = load_text(row.text("everything"))
    assert RLJob.from_stored(stored).spec == RLJob.from_stored(loaded.value).spec


def create(kube: Kube, name: str, changes: dict[str, str | None], status: dict[str, Any]) -> None:
    kube.ok("apply", "--server-side", "--filename=-", stdin=manifest({**JOB, "metadata.name": name}, changes))
    done = kube.patch_status("rljob", name, status)
    assert done.returncode == 0, done.stderr


def test_status_is_a_subresource_and_columns_show_it(kube: Kube) -> None:
    status = {
        "state": "Running",
        "evalReplicas": 1,
        "progress": {"iteration": 12, "envSteps": 3072, "episodeReturnMean": 401.5},
        "weights": {"version": 13, "digest": f"xxh3-128:{'0' * 32}", "consistentMembers": "2/2"},
    }
    create(kube, "columns", {}, status)
    header, line = kube.ok("get", "rlj", "columns").splitlines()
    assert header.split() == ["NAME", "STATE", "ITERATION", "RETURN", "VERSION", "CONSISTENT", "AGE"]
    assert line.split()[:6] == ["columns", "Running", "12", "401.5", "13", "2/2"]
    kube.ok("patch", "rljob", "columns", "--type=merge", '--patch={"status": {"state": "Failed"}}')
    assert kube.json("get", "rljob", "columns")["status"]["state"] == "Running"  # not through the main resource
    assert "status.attempt" in kube.patch_status("rljob", "columns", {"attempt": -1}).stderr


def test_scale_sets_the_eval_replicas_within_the_shards(kube: Kube) -> None:
    create(kube, "scaled", {"spec.environment.shards": "4"}, {"evalReplicas": 1})
    kube.ok("scale", "rljob/scaled", "--replicas=4")
    assert kube.json("get", "rljob", "scaled")["spec"]["policyGroup"]["eval"]["replicas"] == 4
    scale = kube.json("get", "rljob", "scaled", "--subresource=scale")
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (4, 1)
    refused = kube.run("scale", "rljob/scaled", "--replicas=5")
    assert "policyGroup.eval.replicas 5 must be at most environment.shards, 4" in refused.stderr


def test_scale_knows_the_shards_that_were_resolved_at_the_start(kube: Kube) -> None:
    create(kube, "resolved", {"spec.policyGroup.eval.replicas": "4"}, {"shards": 4})
    kube.ok("scale", "rljob/resolved", "--replicas=3")  # 8 environments in 4 shards on 3 members
    refused = kube.run("scale", "rljob/resolved", "--replicas=8")
    assert "the shards of the job, 4" in refused.stderr


STARTED = {"startTime": "2026-01-02T03:04:05Z"}
TWO_POOLS = "[{name: a, membersPerReplica: 8}, {name: b, membersPerReplica: 8}]"
BEFORE: dict[str, str | None] = {
    "spec.environment.shards": "4",
    "spec.pools": TWO_POOLS,
    "spec.policyGroup.train.pool": "a",
    "spec.policyGroup.eval.pool": "a",
}
# (changes, the path that cannot change or None)
UPDATES: list[tuple[dict[str, str | None], str | None]] = [
    ({}, None),
    ({"spec.training.totalEnvSteps": "2000"}, None),
    ({"spec.evaluation.everyIterations": "3", "spec.evaluation.stopAtReturn": "5"}, None),
    ({"spec.policyGroup.eval.replicas": "3"}, None),
    ({"spec.policyGroup.train.replicas": "2"}, None),
    ({"spec.checkpoints.keep": "9"}, None),
    ({"spec.deadlines.leaseSeconds": "9"}, None),
    ({"spec.weights.onMismatch": "Warn"}, None),
    ({"spec.seed": "0"}, None),  # the default, written out
    ({"spec.seed": "1"}, "spec.seed"),
    ({"spec.environment.id": "Acrobot-v1"}, "spec.environment"),
    ({"spec.environment.shards": "2"}, "spec.environment"),
    ({"spec.environment.shards": None}, "spec.environment"),
    ({"spec.environment.kwargs": "{a: 1}"}, "spec.environment"),
    ({"spec.policy.simplePPO.gamma": "0.98"}, "spec.policy"),
    ({"spec.policy": "{custom: {class: a:B}}"}, "spec.policy"),
    ({"spec.training.rolloutSteps": "64"}, "spec.training.rolloutSteps"),
    ({"spec.training.threads": "2"}, "spec.training.threads"),
    ({"spec.policyGroup.train.pool": "b"}, "spec.policyGroup.train.pool"),
    ({"spec.policyGroup.eval.pool": "b"}, "spec.policyGroup.eval.pool"),
    ({"spec.pools": TWO_POOLS.replace("8", "7")}, "spec.pools"),
    ({"spec.weights.strategy": "None"}, "spec.weights.strategy"),
]


@pytest.fixture(scope="module")
def update_verdicts(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> tuple[Verdicts, Verdicts]:
    """The server's verdicts over UPDATES, for a job that has not started and for one that has."""
    old, new, started = (tmp_path_factory.mktemp(name) for name in ("old", "new", "started"))
    for i, (changes, _) in enumerate(UPDATES):
        base = {**JOB, "metadata.name": f"update-{i}"}
        (old / f"{i}.yaml").write_text(manifest(base, BEFORE))
        (new / f"{i}.yaml").write_text(manifest(base, BEFORE | changes))
        base = {"apiVersion": base["apiVersion"], "kind": "RLJob", "metadata.name": f"update-{i}"}
        (started / f"{i}.yaml").write_text(manifest(base, {"status.startTime": f'"{STARTED["startTime"]}"'}))
    apply(kube, old)
    before = apply(kube, new, "--dry-run=server")
    assert len(apply(kube, started, "--subresource=status").accepted) == len(UPDATES)
    return before, apply(kube, new, "--dry-run=server")


@pytest.mark.parametrize("i", range(len(UPDATES)), ids=lambda i: ",".join(UPDATES[i][0]) + f"={i}")
def test_validate_update_and_the_server_give_the_same_verdict(
    i: int, update_verdicts: tuple[Verdicts, Verdicts]
) -> None:
    changes, frozen = UPDATES[i]
    fresh, started = update_verdicts
    before, after = (
        load_text(manifest({**JOB, "metadata.name": f"update-{i}"}, c))[0].value for c in (BEFORE, BEFORE | changes)
    )
    old = RLJob.from_stored({**before, "status": STARTED})
    new = RLJob.from_stored(after)
    assert validate_update(RLJob.from_stored(before), new) == []
    assert f"update-{i}" in fresh.accepted, fresh.message(f"update-{i}")
    assert [v.path for v in validate_update(old, new)] == ([frozen] if frozen else [])
    if frozen:
        assert f"update-{i}" not in started.accepted
        assert f"{frozen} of job update-{i} cannot change" in started.message(f"update-{i}")
    else:
        assert f"update-{i}" in started.accepted, started.message(f"update-{i}")


def test_policygroup_status_refuses_an_older_attempt_or_version(kube: Kube) -> None:
    kube.ok("apply", "--server-side", "--filename=-", stdin=manifest({**GROUP, "metadata.name": "monotonic"}, {}))

    def write(attempt: int, version: int | None) -> str:
        return kube.patch_status("policygroup", "monotonic", {"attempt": attempt, "version": version}).stderr

    assert write(1, None) == ""
    assert write(1, 5) == ""
    assert write(1, 5) == ""
    assert "(1, 4) cannot go below (1, 5)" in write(1, 4)
    assert "(1, (left out)) cannot go below (1, 5)" in write(1, None)
    assert write(2, 3) == ""  # a new attempt goes on from its checkpoint
    assert "(1, 9) cannot go below (2, 3)" in write(1, 9)
    assert write(2, 4) == ""


def test_policygroup_versions_are_a_ring_that_ends_with_the_newest(kube: Kube) -> None:
    kube.ok("apply", "--server-side", "--filename=-", stdin=manifest({**GROUP, "metadata.name": "ring"}, {}))

    def write(versions: range, newest: int) -> str:
        digest = f"xxh3-128:{'a' * 32}"
        ring = [{"version": v, "learnerDigest": digest, "verified": 1, "total": 1} for v in versions]
        return kube.patch_status("policygroup", "ring", {"attempt": 1, "version": newest, "versions": ring}).stderr

    assert write(range(32), 31) == ""
    assert "must have at most 32 items" in write(range(33), 32)
    assert "go beyond status.version, 31" in write(range(1, 33), 31)


def test_policygroup_training_is_frozen_for_an_attempt(kube: Kube) -> None:
    kube.ok("apply", "--server-side", "--filename=-", stdin=manifest({**GROUP, "metadata.name": "frozen"}, {}))

    def update(**changes: str) -> str:
        text = manifest(
            {**GROUP, "metadata.name": "frozen"}, {f"spec.{k.replace('__', '.')}": v for k, v in changes.items()}
        )
        return kube.run("apply", "--server-side", "--filename=-", stdin=text).stderr

    assert update(state="Stopped") == ""
    assert "spec.training is frozen for attempt 1" in update(training__seed="1")
    assert update(training__seed="1", attempt="2") == ""
    assert "spec.attempt 1 cannot go below 2" in update(training__seed="1", attempt="1")
