"""The lines that users read."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rlightning.api.manifests import load_text
from rlightning.api.validate import errors, load_job, validate_manifest, validate_sources
from rlightning.errors import ManifestError

ROOT = Path(__file__).parents[3]

GOOD = """\
apiVersion: rlightning.io/v1alpha1
kind: RLJob
metadata:
  name: cartpole
spec:
  environment:
    id: CartPole-v1
  policy:
    simplePPO:
      clipRange: 0.2
  training:
    totalEnvSteps: 1000
"""


def lines(text: str) -> list[str]:
    return [str(p) for loaded in load_text(text, "job.yaml") for p in validate_manifest(loaded)]


def changed(old: str, new: str) -> list[str]:
    assert GOOD.count(old) == 1
    return lines(GOOD.replace(old, new))


@pytest.mark.parametrize("manifest", sorted((ROOT / "manifests").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_manifest_is_valid(manifest: Path) -> None:
    problems = validate_sources([manifest])
    assert errors(problems) == []
    assert {p.value for p in problems} <= {'"PersistentVolumeClaim"'}, "what is not ours is only mentioned"
    assert load_job(manifest).kind == "RLJob"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "clipRange: 0.2",
            "clipRnge: 0.2",
            "job.yaml:10:7: spec.policy.simplePPO.clipRnge: is an unknown field (did you mean clipRange?)",
        ),
        (
            "clipRange: 0.2",
            "clip_range: 0.2",
            "job.yaml:10:7: spec.policy.simplePPO.clip_range: is an unknown field (did you mean clipRange?)",
        ),
        (
            "clipRange: 0.2",
            "rolloutSteps: 9",
            "job.yaml:10:7: spec.policy.simplePPO.rolloutSteps: is an unknown field (it belongs under spec.training)",
        ),
        (
            "clipRange: 0.2",
            "clipRange: 0",
            "job.yaml:10:18: spec.policy.simplePPO.clipRange: must be above 0 and at most 10 "
            "(value 0; choose a value that is above 0 and at most 10)",
        ),
        (
            "clipRange: 0.2",
            'clipRange: "0.2"',
            "job.yaml:10:18: spec.policy.simplePPO.clipRange: must be a number, is text "
            '(value "0.2"; write it without quotes)',
        ),
        (
            "clipRange: 0.2",
            "activation: relu",
            "job.yaml:10:19: spec.policy.simplePPO.activation: must be one of Tanh, ReLU "
            '(value "relu"; did you mean ReLU?)',
        ),
        (
            "clipRange: 0.2",
            "minibatchSize: 2048",
            "job.yaml:10:22: spec.policy.simplePPO.minibatchSize: must be at most numEnvs × rolloutSteps, 1024: an "
            "iteration has no more steps "
            "(value 2048; lower it, or raise training.rolloutSteps or environment.numEnvs)",
        ),
        (
            "    totalEnvSteps: 1000",
            "    threads: 1",
            "job.yaml:11:3: spec.training.totalEnvSteps: is required (add totalEnvSteps: Valid environment steps; "
            "training ends with the first iteration at or past it)",
        ),
        (
            "id: CartPole-v1",
            "id: 1",
            'job.yaml:7:9: spec.environment.id: must be text, is a whole number (value 1; quote it: "1")',
        ),
        (
            "  training:",
            "  policyGroup: {eval: {replicas: 0}}\n  training:",
            "job.yaml:11:34: spec.policyGroup.eval.replicas: must be at least 1 and at most 256 "
            "(value 0; choose a value that is at least 1 and at most 256)",
        ),
        (
            "  training:",
            "  policyGroup: {eval: {pool: gpu}}\n  training:",
            "job.yaml:11:30: spec.policyGroup.eval.pool: names no pool of spec.pools "
            '(value "gpu"; add the pool under spec.pools, or leave this out)',
        ),
        (
            "name: cartpole",
            "name: Cart_Pole",
            "job.yaml:4:9: metadata.name: must be at most 40 characters of a-z, 0-9 and -, beginning with a letter and "
            'not ending with - (DNS-1035) (value "Cart_Pole"; rename the job)',
        ),
        (
            "kind: RLJob",
            "kind: RlJobs",
            "job.yaml:2:7: kind: is no kind of RLightning's (value \"RlJobs\"; did you mean RLJob?)",
        ),
        (
            "apiVersion: rlightning.io/v1alpha1",
            "apiVersion: rlightning.io/v1",
            'job.yaml:1:13: apiVersion: must be rlightning.io/v1alpha1 (value "rlightning.io/v1"; write '
            "rlightning.io/v1alpha1)",
        ),
        ("kind: RLJob\n", "", "job.yaml:1:1: kind: is required (write kind: RLJob)"),
    ],
)  # fmt: skip
def test_a_problem_names_file_line_path_value_and_remedy(old: str, new: str, expected: str) -> None:
    assert changed(old, new) == [expected]


def test_all_problems_are_listed_in_the_order_of_lines() -> None:
    found = lines(GOOD.replace("id: CartPole-v1", "num_envs: 0").replace("0.2", "9999").replace("1000", "1e30"))
    assert [line.split(": ")[1] for line in found] == [
        "spec.environment.id",
        "spec.environment.num_envs",
        "spec.policy.simplePPO.clipRange",
        "spec.training.totalEnvSteps",
    ]


def test_a_document_of_another_kind_is_reported_but_is_no_error() -> None:
    text = GOOD + "---\napiVersion: v1\nkind: ConfigMap\n"
    problems = [p for loaded in load_text(text, "job.yaml") for p in validate_manifest(loaded)]
    assert [str(p) for p in problems] == [
        "job.yaml:15:7: warning: kind: is not RLightning's; this document was not checked "
        '(value "ConfigMap"; kubectl apply --dry-run=server checks it)'
    ]
    assert errors(problems) == []


def test_what_is_no_object_at_all_is_an_error() -> None:
    assert lines("- 1\n") == [
        "job.yaml:1:1: is not a Kubernetes object (value [1]; begin with apiVersion, kind, metadata)"
    ]


def test_control_characters_in_values_do_not_reach_the_terminal() -> None:
    (line,) = changed("id: CartPole-v1", 'id: "\\e[31m red"')
    assert "\x1b" not in line
    assert "must not contain spaces" in line


def test_load_job_wants_exactly_one(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(GOOD + "---\napiVersion: v1\nkind: ConfigMap\n")
    assert load_job(file).metadata.name == "cartpole"
    file.write_text(GOOD + "---\n" + GOOD.replace("name: cartpole", "name: other"))
    with pytest.raises(ManifestError, match=r"holds 2 RLJobs \(cartpole, other\), and one is needed"):
        load_job(file)
    file.write_text("apiVersion: v1\nkind: ConfigMap\n")
    with pytest.raises(ManifestError, match="holds no RLJob"):
        load_job(file)


def test_load_job_lists_every_problem(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(GOOD.replace("clipRange", "clipRnge").replace("1000", "0"))
    with pytest.raises(ManifestError) as raised:
        load_job(file)
    assert [line.split(":")[1] for line in str(raised.value).splitlines()] == ["10", "12"]


def test_checking_a_manifest_takes_less_than_a_second_of_processor_time(pytestconfig: pytest.Config) -> None:
    code = "from rlightning.api.validate import validate_sources as v; assert v(['manifests/cartpole.yaml']) == []"
    assert pytestconfig.cache is not None
    compiled = pytestconfig.cache.mkdir("compiled")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(compiled)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for _ in range(2):  # the first one compiles
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 1


def test_the_api_imports_pydantic_and_yaml_only() -> None:
    code = (
        "import sys, rlightning.api.validate, rlightning.api.crds; print(*{m.partition('.')[0] for m in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    heavy = {"torch", "ray", "gymnasium", "numpy", "kubernetes", "typer", "rich"}
    assert heavy & set(done.stdout.split()) == set()
