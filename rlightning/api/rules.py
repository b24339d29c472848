"""Rules that span several fields: each in CEL for the API server and in Python for everybody else, side by side.

The two forms of a rule must give the same verdict: ``tests/integration/test_crds.py`` puts one table of manifests
through both.

A rule that compares with the object before (``oldSelf``) has :attr:`Rule.on_update` instead of :attr:`Rule.check`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from rlightning.api.models import PolicyGroupResource, RLJob, RLJobSpec

NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"


@dataclass(frozen=True)
class Violation:
    """One broken rule.

    Attributes:
        path: dotted camelCase path, relative to the object that the rule was checked on.
        message: what is wrong.
        value: what stands there.
        remedy: what to do.
    """

    path: str
    message: str
    value: Any
    remedy: str


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        at: where its CEL form is attached: path relative to the object that the table is for, ``[]`` for list items.
        cel: the rule, true when the object is fine; None where the schema itself says it (list-map keys).
        message: the sentence that users of the API server read, with field, value and remedy; ``%s`` for values.
        values: CEL expressions of those values.
        field: the field that the server's error points at, relative to ``at``.
        check: yields the violations of one object.
        on_update: yields the violations of a change from the first object to the second.
    """

    at: str
    cel: str | None
    message: str
    values: tuple[str, ...] = ()
    field: str = ""
    check: Callable[[Any], Iterable[Violation]] | None = None
    on_update: Callable[[Any, Any], Iterable[Violation]] | None = None

    @property
    def message_expression(self) -> str:
        """The CEL expression of the message. One ``format`` call: the server takes sums of strings for unbounded."""
        return f"'{self.message}'.format([{', '.join(self.values)}])" if self.values else f"'{self.message}'"


def violations(table: Sequence[Rule], subject: Any) -> list[Violation]:
    """All violations of the table's rules by one object."""
    return [v for rule in table if rule.check for v in rule.check(subject)]


def update_violations(table: Sequence[Rule], old: Any, new: Any) -> list[Violation]:
    """All violations of the table's transition rules by a change from ``old`` to ``new``."""
    return [v for rule in table if rule.on_update for v in rule.on_update(old, new)]


def enforce(table: Sequence[Rule], subject: Any) -> None:
    """Raise inside a pydantic validator what :func:`violations` finds; the error's context carries the list."""
    found = violations(table, subject)
    if found:
        text = "; ".join(f"{v.path}: {v.message} (value {v.value!r}; {v.remedy})" for v in found)
        raise PydanticCustomError("rules", "{text}", {"text": text, "violations": found})


# ------------------------------------------------------------------------------------------------------- RLJob.spec


def _one_policy(spec: RLJobSpec) -> Iterator[Violation]:
    given = [
        alias for alias, member in (("simplePPO", spec.policy.simple_ppo), ("custom", spec.policy.custom)) if member
    ]
    if len(given) != 1:
        yield Violation("policy", "must have exactly one policy", given, "set one of simplePPO, custom")


def _shards_divide(spec: RLJobSpec) -> Iterator[Violation]:
    env = spec.environment
    if env.shards is not None and env.num_envs % env.shards:
        yield Violation(
            "environment.shards",
            f"must divide numEnvs, {env.num_envs}, without rest",
            env.shards,
            "change shards or numEnvs",
        )


def _evals_have_shards(spec: RLJobSpec) -> Iterator[Violation]:
    shards, evals = spec.environment.shards, spec.policy_group.eval.replicas
    if shards is not None and evals > shards:
        yield Violation(
            "policyGroup.eval.replicas",
            f"must be at most environment.shards, {shards}: an eval member hosts whole shards",
            evals,
            "lower it or raise environment.shards",
        )


def _pool_names(spec: RLJobSpec) -> Iterator[Violation]:
    seen: set[str] = set()
    for i, pool in enumerate(spec.pools):
        if pool.name in seen:
            yield Violation(f"pools[{i}].name", "must be unique among the pools", pool.name, "rename one of them")
        seen.add(pool.name)


def _head_reserved(spec: RLJobSpec) -> Iterator[Violation]:
    for i, pool in enumerate(spec.pools):
        if pool.name == "head":
            yield Violation(f"pools[{i}].name", "is reserved for Ray's head pod", "head", "choose another name")


def _pool_exists(role: str) -> Callable[[RLJobSpec], Iterator[Violation]]:
    def check(spec: RLJobSpec) -> Iterator[Violation]:
        pool = getattr(spec.policy_group, role).pool
        names = [p.name for p in spec.pools]
        if pool is not None and pool not in names:
            remedy = f"use one of {', '.join(names)}" if names else "add the pool under spec.pools, or leave this out"
            yield Violation(f"policyGroup.{role}.pool", "names no pool of spec.pools", pool, remedy)

    return check


def _pool_named(role: str) -> Callable[[RLJobSpec], Iterator[Violation]]:
    def check(spec: RLJobSpec) -> Iterator[Violation]:
        if spec.pools and getattr(spec.policy_group, role).pool is None:
            names = ", ".join(p.name for p in spec.pools)
            yield Violation(
                f"policyGroup.{role}.pool", "is needed when spec.pools is set", None, f"set it to one of {names}"
            )

    return check


def _roles_fit(spec: RLJobSpec) -> Iterator[Violation]:
    roles = {"train": spec.policy_group.train, "eval": spec.policy_group.eval}
    for i, pool in enumerate(spec.pools):
        here = {name: role.replicas for name, role in roles.items() if role.pool == pool.name}
        places = pool.replicas * pool.members_per_replica
        if sum(here.values()) > places:
            members = " + ".join(f"{n} {name}" for name, n in here.items())
            yield Violation(
                f"pools[{i}]",
                f"pool {pool.name} has {places} places (replicas × membersPerReplica) for {members} members",
                {"replicas": pool.replicas, "membersPerReplica": pool.members_per_replica},
                "raise one of the two or lower policyGroup's replicas",
            )


def _minibatch_splits(spec: RLJobSpec) -> Iterator[Violation]:
    ppo, trains = spec.policy.simple_ppo, spec.policy_group.train.replicas
    if ppo and ppo.minibatch_size % trains:
        yield Violation(
            "policy.simplePPO.minibatchSize",
            f"must be a multiple of policyGroup.train.replicas, {trains}: each takes an equal slice",
            ppo.minibatch_size,
            "change one of the two",
        )


def _minibatch_fits(spec: RLJobSpec) -> Iterator[Violation]:
    ppo = spec.policy.simple_ppo
    steps = spec.environment.num_envs * spec.training.rollout_steps
    if ppo and ppo.minibatch_size > steps:
        yield Violation(
            "policy.simplePPO.minibatchSize",
            f"must be at most numEnvs × rolloutSteps, {steps}: an iteration has no more steps",
            ppo.minibatch_size,
            "lower it, or raise training.rolloutSteps or environment.numEnvs",
        )


def _target_needs_evaluation(spec: RLJobSpec) -> Iterator[Violation]:
    evaluation = spec.evaluation
    if evaluation.stop_at_return is not None and evaluation.every_iterations < 1:
        yield Violation(
            "evaluation.stopAtReturn",
            "needs evaluations, and evaluation.everyIterations is 0 (off)",
            evaluation.stop_at_return,
            "set evaluation.everyIterations to 1 or more, or leave stopAtReturn out",
        )


_ROLES_ON = " + ".join(
    f"(has(self.policyGroup.{role}.pool) && self.policyGroup.{role}.pool == p.name ? "
    f"self.policyGroup.{role}.replicas : 0)"
    for role in ("train", "eval")
)
_PLACES = "p.replicas * p.membersPerReplica"

SPEC_RULES: tuple[Rule, ...] = (
    Rule(
        at="policy",
        cel="has(self.simplePPO) != has(self.custom)",
        message="policy must have exactly one policy, it has %s; set one of simplePPO, custom",
        values=("has(self.custom) ? 'two' : 'none'",),
        check=_one_policy,
    ),
    Rule(
        at="environment",
        cel="!has(self.shards) || self.numEnvs % self.shards == 0",
        message="environment.shards %s must divide numEnvs, %s, without rest; change shards or numEnvs",
        values=("self.shards", "self.numEnvs"),
        field="shards",
        check=_shards_divide,
    ),
    Rule(
        at="",
        cel="!has(self.environment.shards) || self.policyGroup.eval.replicas <= self.environment.shards",
        message="policyGroup.eval.replicas %s must be at most environment.shards, %s: an eval member hosts whole "
        "shards; lower it or raise environment.shards",
        values=("self.policyGroup.eval.replicas", "self.environment.shards"),
        field="policyGroup.eval.replicas",
        check=_evals_have_shards,
    ),
    Rule(at="pools", cel=None, message="", check=_pool_names),
    Rule(
        at="pools[]",
        cel="self.name != 'head'",
        message="pools[].name %s is reserved for the head pod of Ray; choose another name",
        values=("self.name",),
        field="name",
        check=_head_reserved,
    ),
    *(
        Rule(
            at="",
            cel=f"!has(self.policyGroup.{role}.pool) || self.pools.exists(p, p.name == self.policyGroup.{role}.pool)",
            message=f"policyGroup.{role}.pool %s names no pool of spec.pools, which are %s; use one of them, add it "
            "there, or leave it out",
            values=(f"self.policyGroup.{role}.pool", "self.pools.map(p, p.name)"),
            field=f"policyGroup.{role}.pool",
            check=_pool_exists(role),
        )
        for role in ("train", "eval")
    ),
    *(
        Rule(
            at="",
            cel=f"size(self.pools) == 0 || has(self.policyGroup.{role}.pool)",
            message=f"policyGroup.{role}.pool is needed when spec.pools is set, and is left out; set it to one of %s",
            values=("self.pools.map(p, p.name)",),
            field=f"policyGroup.{role}.pool",
            check=_pool_named(role),
        )
        for role in ("train", "eval")
    ),
    Rule(
        at="",
        cel=f"self.pools.all(p, {_ROLES_ON} <= {_PLACES})",
        message="pools %s have too few places (replicas × membersPerReplica: %s) for their members (%s); raise one of "
        "the two or lower the replicas of policyGroup",
        values=tuple(
            f"self.pools.filter(p, {_ROLES_ON} > {_PLACES}).map(p, {what})" for what in ("p.name", _PLACES, _ROLES_ON)
        ),
        field="pools",
        check=_roles_fit,
    ),
    Rule(
        at="",
        cel="!has(self.policy.simplePPO) || self.policy.simplePPO.minibatchSize % self.policyGroup.train.replicas == 0",
        message="policy.simplePPO.minibatchSize %s must be a multiple of policyGroup.train.replicas, %s: each takes an "
        "equal slice; change one of the two",
        values=("self.policy.simplePPO.minibatchSize", "self.policyGroup.train.replicas"),
        field="policy.simplePPO.minibatchSize",
        check=_minibatch_splits,
    ),
    Rule(
        at="",
        cel="!has(self.policy.simplePPO) || "
        "self.policy.simplePPO.minibatchSize <= self.environment.numEnvs * self.training.rolloutSteps",
        message="policy.simplePPO.minibatchSize %s must be at most numEnvs × rolloutSteps, %s: an iteration has no "
        "more steps; lower it, or raise training.rolloutSteps or environment.numEnvs",
        values=("self.policy.simplePPO.minibatchSize", "self.environment.numEnvs * self.training.rolloutSteps"),
        field="policy.simplePPO.minibatchSize",
        check=_minibatch_fits,
    ),
    Rule(
        at="evaluation",
        cel="!has(self.stopAtReturn) || self.everyIterations >= 1",
        message="evaluation.stopAtReturn %s needs evaluations, and everyIterations is 0 (off); set everyIterations to "
        "1 or more, or leave stopAtReturn out",
        values=("self.stopAtReturn",),
        field="stopAtReturn",
        check=_target_needs_evaluation,
    ),
)


# ------------------------------------------------------------------------------------------------------------ RLJob


def is_job_name(name: str) -> bool:
    """Whether a job may have this name: a DNS-1035 label of at most 40 characters."""
    inner = name.replace("-", "a")
    return (
        0 < len(name) <= 40
        and name.isascii()
        and name[0].isalpha()
        and name[-1] != "-"
        and inner.isalnum()
        and inner == inner.lower()
    )


def _job_name(job: RLJob) -> Iterator[Violation]:
    if not is_job_name(job.metadata.name):
        yield Violation(
            "metadata.name",
            "must be at most 40 characters of a-z, 0-9 and -, beginning with a letter and not ending with - (DNS-1035)",
            job.metadata.name,
            "rename the job",
        )


def _default_shards_divide(job: RLJob) -> Iterator[Violation]:
    env, evals = job.spec.environment, job.spec.policy_group.eval.replicas
    resolved = job.status is not None and job.status.shards is not None
    if env.shards is None and not resolved and env.num_envs % evals:
        yield Violation(
            "spec.environment.numEnvs",
            f"must be a multiple of policyGroup.eval.replicas, {evals}: without shards each eval member is one",
            env.num_envs,
            "change one of the two, or set environment.shards",
        )


def _evals_have_resolved_shards(job: RLJob) -> Iterator[Violation]:
    evals = job.spec.policy_group.eval.replicas
    if job.status is not None and job.status.shards is not None and evals > job.status.shards:
        yield Violation(
            "spec.policyGroup.eval.replicas",
            f"must be at most the job's shards, {job.status.shards}, which were fixed at its first start",
            evals,
            "lower it, or start a new job with more shards",
        )


def _frozen(path: str, optional: bool = False) -> Rule:
    """The field may not change once the job has started."""
    _, *attributes = path.split(".")
    new, old = f"self.{path}", f"oldSelf.{path}"
    same = f"has({new}) == has({old}) && (!has({new}) || {new} == {old})" if optional else f"{new} == {old}"

    def on_update(before: RLJob, after: RLJob) -> Iterator[Violation]:
        if before.status is None or before.status.start_time is None:
            return
        values = []
        for job in (before, after):
            value: Any = job.to_dict()["spec"]
            for name in attributes:
                value = value.get(name) if value is not None else None
            values.append(value)
        if values[0] != values[1]:
            yield Violation(
                path,
                "cannot change once the job has started",
                values[1],
                f"put back {values[0]!r}, or start a new job",
            )

    return Rule(
        at="",
        cel=f"!has(oldSelf.status) || !has(oldSelf.status.startTime) || ({same})",
        message=f"{path} of job %s cannot change once the job has started (at %s); put the old value back, or start a "
        "new job",
        values=("self.metadata.name", "oldSelf.status.startTime"),
        field=path,
        on_update=on_update,
    )


JOB_RULES: tuple[Rule, ...] = (
    Rule(
        at="",
        cel=f"size(self.metadata.name) <= 40 && self.metadata.name.matches('{NAME_PATTERN}')",
        message="metadata.name %s must be at most 40 characters of a-z, 0-9 and -, beginning with a letter and not "
        "ending with - (DNS-1035); rename the job",
        values=("self.metadata.name",),
        check=_job_name,
    ),
    Rule(
        at="",
        cel="has(self.spec.environment.shards) || (has(self.status) && has(self.status.shards)) || "
        "self.spec.environment.numEnvs % self.spec.policyGroup.eval.replicas == 0",
        message="spec.environment.numEnvs %s must be a multiple of policyGroup.eval.replicas, %s: without shards each "
        "eval member is one; change one of the two, or set environment.shards",
        values=("self.spec.environment.numEnvs", "self.spec.policyGroup.eval.replicas"),
        field="spec.environment.numEnvs",
        check=_default_shards_divide,
    ),
    Rule(
        at="",
        cel="!has(self.status) || !has(self.status.shards) || "
        "self.spec.policyGroup.eval.replicas <= self.status.shards",
        message="spec.policyGroup.eval.replicas %s must be at most the shards of the job, %s, which were fixed at its "
        "first start; lower it, or start a new job with more shards",
        values=("self.spec.policyGroup.eval.replicas", "self.status.shards"),
        field="spec.policyGroup.eval.replicas",
        check=_evals_have_resolved_shards,
    ),
    _frozen("spec.seed"),
    _frozen("spec.environment"),
    _frozen("spec.policy"),
    _frozen("spec.training.rolloutSteps"),
    _frozen("spec.training.threads"),
    _frozen("spec.training.device"),
    _frozen("spec.policyGroup.train.pool", optional=True),
    _frozen("spec.policyGroup.eval.pool", optional=True),
    _frozen("spec.pools"),
    _frozen("spec.head"),
    _frozen("spec.image", optional=True),
    _frozen("spec.checkpoints.claimName", optional=True),
    _frozen("spec.weights.strategy"),
)


# ------------------------------------------------------------------------------------------------------ PolicyGroup


def _or_none(path: str) -> str:
    return f"has({path}) ? dyn({path}) : dyn('(left out)')"


def _group_shards(group: PolicyGroupResource) -> Iterator[Violation]:
    shards = group.spec.training.environment.shards
    if shards is None or group.spec.eval_replicas > shards:
        yield Violation(
            "spec.training.environment.shards",
            f"must be resolved, and at least evalReplicas, {group.spec.eval_replicas}",
            shards,
            "write the resolved spec",
        )


def _group_attempt(old: PolicyGroupResource, new: PolicyGroupResource) -> Iterator[Violation]:
    if new.spec.attempt < old.spec.attempt:
        yield Violation("spec.attempt", f"cannot go below {old.spec.attempt}", new.spec.attempt, "raise it")


def _group_frozen(old: PolicyGroupResource, new: PolicyGroupResource) -> Iterator[Violation]:
    if new.spec.attempt == old.spec.attempt and new.spec.training != old.spec.training:
        yield Violation(
            "spec.training", "is frozen for an attempt", f"attempt {new.spec.attempt}", "raise attempt to change it"
        )


def _group_monotonic(old: PolicyGroupResource, new: PolicyGroupResource) -> Iterator[Violation]:
    if old.status is None or new.status is None:
        return
    before = (old.status.attempt, -1 if old.status.version is None else old.status.version)
    after = (new.status.attempt, -1 if new.status.version is None else new.status.version)
    if after < before:
        yield Violation(
            "status",
            f"(attempt, version) cannot go below {before}",
            after,
            "an older driver is still writing; it must stop",
        )


def _versions_known(group: PolicyGroupResource) -> Iterator[Violation]:
    status = group.status
    if status is None:
        return
    newest = -1 if status.version is None else status.version
    beyond = [v.version for v in status.versions if v.version > newest]
    if beyond:
        yield Violation("status.versions", f"are newer than status.version, {newest}", beyond, "raise status.version")


GROUP_RULES: tuple[Rule, ...] = (
    Rule(
        at="spec",
        cel="has(self.training.environment.shards) && self.evalReplicas <= self.training.environment.shards",
        message="spec.training.environment.shards %s must be resolved, and at least evalReplicas, %s; write the "
        "resolved spec",
        values=(_or_none("self.training.environment.shards"), "self.evalReplicas"),
        field="training.environment.shards",
        check=_group_shards,
    ),
    Rule(
        at="spec",
        cel="self.attempt >= oldSelf.attempt",
        message="spec.attempt %s cannot go below %s; raise it",
        values=("self.attempt", "oldSelf.attempt"),
        field="attempt",
        on_update=_group_attempt,
    ),
    Rule(
        at="spec",
        cel="self.attempt != oldSelf.attempt || self.training == oldSelf.training",
        message="spec.training is frozen for attempt %s; raise attempt to change it",
        values=("self.attempt",),
        field="training",
        on_update=_group_frozen,
    ),
    Rule(
        at="status",
        cel="self.attempt > oldSelf.attempt || (self.attempt == oldSelf.attempt && "
        "(!has(oldSelf.version) || (has(self.version) && self.version >= oldSelf.version)))",
        message="status (attempt, version) (%s, %s) cannot go below (%s, %s); an older driver is still writing, it "
        "must stop",
        values=("self.attempt", _or_none("self.version"), "oldSelf.attempt", _or_none("oldSelf.version")),
        on_update=_group_monotonic,
    ),
    Rule(
        at="status",
        cel="self.versions.all(v, has(self.version) && v.version <= self.version)",
        message="status.versions %s go beyond status.version, %s; raise status.version",
        values=("self.versions.map(v, v.version)", _or_none("self.version")),
        field="versions",
        check=_versions_known,
    ),
)
