"""The manifests: RLJob, which users write, and PolicyGroupResource, through which operator and driver talk.

Everything else is made from these models: the CRDs (``crds.py``), the offline check (``validate.py``), the frozen
training spec in the cluster and the ``job.yaml`` of a run folder. Rules that span several fields stand in
``rules.py``, in CEL and in Python side by side.

Attributes are snake_case in Python and camelCase in YAML. Models are frozen and refuse unknown fields; readers of
*stored* objects use :meth:`Manifest.from_stored`, which ignores them, so that an older engine runs under a newer
operator. ``null`` means "left out", as it does on the API server.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from rlightning.api import rules

GROUP = "rlightning.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

# Where camelCase alone would be wrong: initialisms keep their case, as everywhere in the Kubernetes API.
_ALIASES = {"simple_ppo": "simplePPO", "target_kl": "targetKL", "class_": "class", "pod_uid": "podUID"}


@cache
def _alias(name: str) -> str:
    return _ALIASES.get(name) or to_camel(name)


class Manifest(BaseModel):
    """Base of all models: strict types (``"8"`` is not 8), frozen, camelCase outside."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        alias_generator=_alias,
        populate_by_name=True,
        allow_inf_nan=False,
        defer_build=True,  # each schema is built once, inside the manifest that uses it
    )

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> Self:
        """Read an object as the API server or a run folder holds it: camelCase only, unknown fields ignored."""
        return cls.model_validate(drop_nulls(cls, dict(stored)), extra="ignore", by_alias=True, by_name=False)

    def to_dict(self) -> dict[str, Any]:
        """The camelCase JSON form, in declaration order, defaults included, without what is left out."""
        dumped: dict[str, Any] = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return dumped


def drop_nulls(model: type[BaseModel], value: Any) -> Any:
    """``value`` without the nulls that the API server prunes: every one in a typed field, none in a free-form map."""
    if not isinstance(value, dict):
        return value
    fields = {_alias(name): info for name, info in model.model_fields.items()}
    kept: dict[Any, Any] = {}
    for key, item in value.items():
        info = fields.get(key) if isinstance(key, str) else None
        if info is None:
            kept[key] = item
        elif item is not None:
            inner = _model_in(info.annotation)
            if inner is None:
                extra = info.json_schema_extra
                is_map = isinstance(item, dict) and not (isinstance(extra, dict) and FREE_FORM in extra)
                kept[key] = {k: v for k, v in item.items() if v is not None} if is_map else item
            elif isinstance(item, list):
                kept[key] = [drop_nulls(inner, i) for i in item]
            else:
                kept[key] = drop_nulls(inner, item)
    return kept


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model inside ``X``, ``X | None``, ``list[X]`` or ``Annotated[X, …]``; None for scalars and maps."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _model_in(argument)
        if found is not None:
            return found
    return None


# ---------------------------------------------------------------------------------------------------------- scalars

FREE_FORM = "x-kubernetes-preserve-unknown-fields"
# JSON numbers are exact up to 2^53; and the API server compares whole numbers with bounds cut to 64 bits, so that a
# maximum of 1e300 refuses everything.
MAX_INTEGER = 10**15


def _as_stored(value: Any, where: str = "", depth: int = 0) -> Any:
    """A free-form value as JSON can carry it: whole floats become integers, as they do on their way through kubectl."""
    if depth > 16:
        raise ValueError(f"{where or 'it'} is nested deeper than 16 levels")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{where or 'it'} is {value}, which does not fit 64 bits; write it as a string")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where or 'it'} is {value}, which JSON cannot carry; write it as a string")
        return int(value) if value.is_integer() and abs(value) < 2**63 else value
    if isinstance(value, list | tuple):
        return [_as_stored(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where or 'it'} has the key {key!r}; keys must be strings")
        return {k: _as_stored(v, f"{where}.{k}" if where else k, depth + 1) for k, v in value.items()}
    raise ValueError(f"{where or 'it'} is a {type(value).__name__}; only what JSON can carry is allowed")


FreeForm = Annotated[
    dict[str, Any],
    Field(max_length=64, json_schema_extra={FREE_FORM: True}),
    BeforeValidator(_as_stored),
]
Label = Annotated[str, Field(max_length=20, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]
Digest = Annotated[str, Field(max_length=41, pattern=r"^xxh3-128:[0-9a-f]{32}$")]
CamelWord = Annotated[str, Field(max_length=64, pattern=r"^[A-Z][A-Za-z0-9]*$")]
Text = Annotated[str, Field(max_length=4096)]
ShortText = Annotated[str, Field(max_length=253)]
ImageName = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^\S+$")]
Count = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Time = Annotated[
    str,
    Field(
        max_length=40,
        pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})$",
    ),
]

QUANTITY_PATTERN = r"^([0-9]+|[0-9]+\.[0-9]+)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"


def _quantity(value: Any) -> Any:
    """A Kubernetes quantity as people write it: ``4``, ``500m``, ``16Gi``."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
        return value
    if isinstance(value, str) and len(value) <= 32 and re.fullmatch(QUANTITY_PATTERN, value):
        return value
    raise PydanticCustomError("quantity", "must be a whole number or a quantity like 500m or 16Gi")


# As the Kubernetes API does: `cpu: 4` and `cpu: "4"` are both fine.
Quantity = Annotated[
    Any,
    BeforeValidator(_quantity),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "pattern": QUANTITY_PATTERN,
            "maxLength": 32,
            "minimum": 0,
            "maximum": 2**31 - 1,
        }
    ),
]

LIST_ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}


def _list_map(key: str) -> dict[str, Any]:
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


# ------------------------------------------------------------------------------------------------------ RLJob: spec


class EnvironmentSpec(Manifest):
    """Where the policies act: vectors of one Gymnasium environment, cut into shards."""

    id: str = Field(
        min_length=1,
        max_length=253,
        pattern=r"^\S+$",
        description="Gymnasium's id, with a module to import first where one is needed: CartPole-v1, my_pkg:MyEnv-v0.",
    )
    num_envs: int = Field(default=8, ge=1, le=65536, description="Environments in all, over all shards.")
    shards: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Fixed parts of the environments; each eval member hosts whole ones, so this is the largest number "
        "of eval members. numEnvs must divide by it. Left out: the eval replicas at the first start. The results "
        "depend on it, not on the members that host them.",
    )
    kwargs: FreeForm = Field(default={}, description="Keyword arguments of gymnasium.make, passed on as they are.")
    max_episode_steps: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="Truncate episodes after so many steps. Left out: the environment's own limit.",
    )
    vectorization: Literal["Auto", "Native", "Sync"] = Field(
        default="Auto",
        description="Native: the environment's own vector implementation; Sync: one after the other; Auto: native "
        "where its state can be saved, else Sync.",
    )


class SimplePPOSpec(Manifest):
    """Proximal policy optimisation with a multi-layer perceptron; defaults are stable-baselines3's."""

    hidden_sizes: list[Annotated[int, Field(ge=1, le=16384)]] = Field(
        default=[64, 64],
        min_length=1,
        max_length=16,
        description="Width of each hidden layer, in the actor and in the critic.",
        json_schema_extra=LIST_ATOMIC,
    )
    activation: Literal["Tanh", "ReLU"] = Field(default="Tanh", description="Between the layers.")
    learning_rate: float = Field(default=3e-4, gt=0, le=1, description="Adam's, at the start.")
    learning_rate_schedule: Literal["Constant", "Linear"] = Field(
        default="Constant", description="Linear: down to 0 over training.totalEnvSteps."
    )
    gamma: float = Field(default=0.99, ge=0, le=1, description="Discount.")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="Of generalised advantage estimation.")
    clip_range: float = Field(default=0.2, gt=0, le=10, description="Of the probability ratio, at the start.")
    clip_range_schedule: Literal["Constant", "Linear"] = Field(
        default="Constant", description="Linear: down to 0 over training.totalEnvSteps."
    )
    epochs: int = Field(default=10, ge=1, le=1000, description="Passes over each iteration's data.")
    minibatch_size: int = Field(
        default=64, ge=1, le=2**24, description="Steps per update, over all train members; divides by their number."
    )
    entropy_coef: float = Field(default=0.0, ge=0, le=100, description="Weight of the entropy bonus in the loss.")
    value_coef: float = Field(default=0.5, ge=0, le=100, description="Weight of the value loss.")
    max_grad_norm: float = Field(
        default=0.5, gt=0, le=1e6, description="Gradients are scaled down to this global norm."
    )
    normalize_advantages: bool = Field(default=True, description="To mean 0 and deviation 1 in each minibatch.")
    normalize_observations: bool = Field(
        default=False, description="By running mean and deviation, kept with the weights."
    )
    target_kl: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="End an iteration's updates when the KL divergence passes 1.5 times this.",
    )
    log_std_init: float = Field(
        default=0.0, ge=-20, le=20, description="Log of the actions' deviation at the start (Box)."
    )


class CustomPolicySpec(Manifest):
    """A policy class of the user's."""

    class_: str = Field(
        max_length=253,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$",
        description='"module:Class" of a subclass of rlightning.policy.BasePolicy.',
    )
    config: FreeForm = Field(default={}, description="Handed to the policy as PolicyConfig.policy_kwargs, as it is.")


class PolicySpec(Manifest):
    """What is trained: exactly one of these."""

    simple_ppo: SimplePPOSpec | None = None
    custom: CustomPolicySpec | None = None


class TrainingSpec(Manifest):
    """How long, and on what."""

    total_env_steps: int = Field(
        ge=1,
        le=MAX_INTEGER,
        description="Valid environment steps; training ends with the first iteration at or past it.",
    )
    rollout_steps: int = Field(
        default=128, ge=1, le=10**6, description="Steps of each environment per iteration (the length of a fragment)."
    )
    threads: int = Field(
        default=1, ge=1, le=256, description="Of each member's numerical library. Part of the numerics key."
    )
    device: Literal["CPU"] = Field(default="CPU", description="Where tensors live.")


class EvaluationSpec(Manifest):
    """Greedy episodes in environments of their own; they never change the training."""

    every_iterations: int = Field(default=0, ge=0, le=10**9, description="0: off.")
    episodes: int = Field(default=100, ge=1, le=10**6, description="Per evaluation.")
    stop_at_return: float | None = Field(
        default=None,
        ge=-MAX_INTEGER,
        le=MAX_INTEGER,
        description="End the job, as succeeded, when an evaluation's mean return reaches it. Needs everyIterations.",
    )


class RoleSpec(Manifest):
    """The members of one role."""

    replicas: int = Field(default=1, ge=1, le=256)
    pool: Label | None = Field(default=None, description="Name of one of the pools. Needed when there are pools.")


class TrainRoleSpec(RoleSpec):
    """Train members: each takes its slice of every minibatch."""

    replicas: int = Field(default=1, ge=1, le=16, description="Gradients are summed over all. Part of the bit promise.")

    @model_validator(mode="before")
    @classmethod
    def _any_role(cls, value: Any) -> Any:
        return value.model_dump() if type(value) is RoleSpec else value


class EvalRoleSpec(RoleSpec):
    """Eval members: they roll out and evaluate."""

    replicas: int = Field(default=1, ge=1, le=256, description="At most environment.shards. `kubectl scale` sets it.")

    @model_validator(mode="before")
    @classmethod
    def _any_role(cls, value: Any) -> Any:
        return value.model_dump() if type(value) is RoleSpec else value


class RolesSpec(Manifest):
    """How many policies of each role."""

    train: TrainRoleSpec = Field(default_factory=TrainRoleSpec)
    eval: EvalRoleSpec = Field(default_factory=EvalRoleSpec)


class ResourcesSpec(Manifest):
    """What a pod is promised. Memory is its limit as well; the processor is not capped."""

    cpu: Quantity = Field(default="1", description="Cores: 4, 500m.")
    memory: Quantity = Field(default="4Gi", description="Bytes: 16Gi. Shared memory counts.")


class TolerationSpec(Manifest):
    """A taint that the pods of a group tolerate, as in a pod's spec."""

    key: ShortText | None = None
    operator: Literal["Equal", "Exists"] = "Equal"
    value: ShortText | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = Field(default=None, ge=0, le=MAX_INTEGER)


NodeSelector = Annotated[
    dict[str, Annotated[str, Field(max_length=63)]],
    Field(max_length=16, description="Labels that the nodes must have."),
]
Tolerations = Annotated[
    list[TolerationSpec],
    Field(max_length=16, json_schema_extra=LIST_ATOMIC, description="Taints of nodes that the pods tolerate."),
]


class HeadSpec(Manifest):
    """The pod of Ray's head, where the driver runs. Used in a cluster only."""

    resources: ResourcesSpec = Field(default_factory=ResourcesSpec)
    node_selector: NodeSelector = {}
    tolerations: Tolerations = []


class PoolSpec(Manifest):
    """Equal pods (on a laptop: Ray nodes) that host members."""

    name: Label
    replicas: int = Field(default=1, ge=1, le=256, description="Pods.")
    members_per_replica: int = Field(default=1, ge=1, le=256, description="Members that share a pod.")
    gpus_per_replica: int = Field(
        default=0, ge=0, le=64, description="Devices (nvidia.com/gpu) of each pod. Used in a cluster only."
    )
    resources: ResourcesSpec = Field(default_factory=ResourcesSpec, description="Of each pod. Used in a cluster only.")
    node_selector: NodeSelector = {}
    tolerations: Tolerations = []


class WeightsSpec(Manifest):
    """How a new version reaches the members."""

    strategy: Literal["None", "Double", "Shared"] = Field(
        default="Shared",
        description="None: copied in place; Double: into a second buffer of each member's; Shared: one read-only copy "
        "per node, which all its members map.",
    )
    on_mismatch: Literal["Warn", "Resync", "Fail"] = Field(
        default="Fail", description="What to do when a member's live weights differ from the learner's."
    )


_DnsName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]


class CheckpointsSpec(Manifest):
    """What is kept, for resuming and for use."""

    every_iterations: int = Field(default=10, ge=1, le=10**9, description="One is saved at the end too.")
    keep: int = Field(default=3, ge=1, le=1000, description="The newest so many; older ones are removed.")
    claim_name: _DnsName | None = Field(
        default=None,
        description="PersistentVolumeClaim, in the job's namespace, that holds the run folder. Without one a job in a "
        "cluster has no checkpoint that outlives its head pod.",
    )
    drain_seconds: int = Field(
        default=60, ge=1, le=86400, description="To finish an iteration and save when a job is suspended."
    )


class DeadlinesSpec(Manifest):
    """How long to wait for members, in seconds; who was late is named."""

    member_start_seconds: int = Field(default=120, ge=1, le=86400, description="For a member to be ready.")
    fragment_seconds: int = Field(default=300, ge=1, le=86400, description="For a fragment or an update.")
    acknowledgement_seconds: int = Field(
        default=30, ge=1, le=86400, description="For the digest of a published version."
    )
    lease_seconds: int = Field(default=10, ge=1, le=86400, description="For readers to leave a shared slot.")
    collective_seconds: int = Field(default=60, ge=1, le=86400, description="For an exchange between train members.")


class RunPolicySpec(Manifest):
    """How long a job in a cluster may take, and how often it is started again."""

    backoff_limit: int = Field(
        default=3, ge=0, le=1000, description="Lost attempts (a pod, node or driver died) that are made good for."
    )
    active_deadline_seconds: int | None = Field(
        default=None, ge=1, le=MAX_INTEGER, description="From the start, or the last resume, to the end."
    )
    scheduling_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        le=MAX_INTEGER,
        description="For the Ray cluster's pods to be ready, and then for the submitter's to start. Left out: none.",
    )
    progress_deadline_seconds: int = Field(
        default=900,
        ge=1,
        le=MAX_INTEGER,
        description="Between two reports of progress while all pods are ready; then the attempt counts as lost.",
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None, ge=0, le=MAX_INTEGER, description="After which a finished job is deleted. Left out: never."
    )


class PullSecret(Manifest):
    """A Secret with credentials for a registry."""

    name: _DnsName


class RLJobSpec(Manifest):
    """A training job."""

    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Of everything random.")
    environment: EnvironmentSpec
    policy: PolicySpec
    training: TrainingSpec
    evaluation: EvaluationSpec = Field(default_factory=EvaluationSpec)
    policy_group: RolesSpec = Field(default_factory=RolesSpec)
    pools: list[PoolSpec] = Field(
        default=[],
        max_length=7,
        json_schema_extra=_list_map("name"),
        description="Where members live. Left out: one node (in a cluster: Ray's head) hosts them all.",
    )
    head: HeadSpec = Field(default_factory=HeadSpec)
    image: ImageName | None = Field(
        default=None,
        description="Of all pods; made from RLightning's trainer image. Left out: the operator's default.",
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="Left out: the operator's default."
    )
    image_pull_secrets: list[PullSecret] = Field(
        default=[], max_length=8, json_schema_extra=LIST_ATOMIC, description="For a private registry."
    )
    weights: WeightsSpec = Field(default_factory=WeightsSpec)
    checkpoints: CheckpointsSpec = Field(default_factory=CheckpointsSpec)
    deadlines: DeadlinesSpec = Field(default_factory=DeadlinesSpec)
    run_policy: RunPolicySpec = Field(default_factory=RunPolicySpec)
    suspend: bool = Field(
        default=False,
        description="true: save, release the cluster and wait; false again: go on from there. Used in a cluster only.",
    )

    @model_validator(mode="after")
    def _rules(self) -> Self:
        rules.enforce(rules.SPEC_RULES, self)
        return self


# ---------------------------------------------------------------------------------------------------- RLJob: status


class Condition(Manifest):
    """metav1.Condition."""

    type: CamelWord
    status: Literal["True", "False", "Unknown"]
    observed_generation: Count | None = None
    last_transition_time: Time
    reason: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    message: Annotated[str, Field(max_length=32768)]


class Restart(Manifest):
    """Why an attempt ended and the next one began."""

    attempt: Count
    time: Time
    reason: CamelWord
    message: Text = ""


class Metric(Manifest):
    """One named number of the last report."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    value: float


class Progress(Manifest):
    """How far training is; absent fields were not measured yet."""

    iteration: Count = Field(description="Finished iterations.")
    env_steps: Count = Field(description="Valid steps, all attempts together.")
    percent: int | None = Field(default=None, ge=0, le=100, description="Of training.totalEnvSteps.")
    estimated_completion_time: Time | None = None
    episode_return_mean: float | None = Field(default=None, description="Of the last 100 finished episodes at most.")
    steps_per_second: float | None = None
    last_report_time: Time | None = None
    metrics: list[Metric] = Field(default=[], max_length=64, json_schema_extra=_list_map("name"))


class WeightsStatus(Manifest):
    """Which weights run, and the proof."""

    version: Count = Field(description="The last published one.")
    digest: Digest = Field(description="Of the learner's live tensors at that version.")
    consistent_members: Annotated[str, Field(max_length=11, pattern=r"^[0-9]{1,5}/[0-9]{1,5}$")] | None = Field(
        default=None, description="Members whose live tensors have this digest, of all."
    )
    last_verified_version: Count | None = Field(default=None, description="The last version that every member proved.")


class CheckpointStatus(Manifest):
    """The last durable checkpoint."""

    path: Annotated[str, Field(min_length=1, max_length=1024)]
    iteration: Count
    digest: Digest
    resume: Literal["exact", "approximate"] | None = Field(
        default=None, description="approximate: the environments' state cannot be saved, so they restart from reset."
    )


class PoolStatus(Manifest):
    """The pods of one pool."""

    name: Label
    wanted: Count
    ready: Count
    reason: CamelWord | None = Field(default=None, description="Why they are not all ready.")
    message: Text | None = None


class RLJobStatus(Manifest):
    """What is known of a job. Written by the operator in a cluster, into status.json by a local run."""

    observed_generation: Count | None = None
    conditions: list[Condition] = Field(default=[], max_length=16, json_schema_extra=_list_map("type"))
    state: CamelWord | None = Field(
        default=None,
        description="For people: Pending, Starting, Running, Suspending, Suspended, Stopped, Succeeded, Failed. "
        "Derived from the conditions.",
    )
    attempt: Count | None = Field(default=None, description="Lives of the driver so far.")
    lost_attempts: Count | None = Field(default=None, description="Those that count against runPolicy.backoffLimit.")
    restarts: list[Restart] = Field(
        default=[], max_length=10, json_schema_extra=LIST_ATOMIC, description="The last 10."
    )
    start_time: Time | None = Field(
        default=None, description="Of the first start. From then on most of the spec is immutable."
    )
    completion_time: Time | None = None
    shards: int | None = Field(
        default=None, ge=1, le=1024, description="environment.shards as resolved at the first start."
    )
    image: ImageName | None = Field(
        default=None,
        description="Of all pods: spec.image, or the operator's default of then; kept from the first iteration on.",
    )
    ray_version: ShortText | None = Field(default=None, description="Ray's in that image, as the operator was told.")
    ray_cluster: ShortText | None = Field(default=None, description="Name of the RayCluster of this attempt.")
    run_path: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        default=None, description="Folder of the run on the claim."
    )
    pools: list[PoolStatus] = Field(default=[], max_length=8, json_schema_extra=_list_map("name"))
    progress: Progress | None = None
    weights: WeightsStatus | None = None
    eval_replicas: int | None = Field(
        default=None, ge=0, le=256, description="Eval members that run. `kubectl scale` reads it."
    )
    checkpoint: CheckpointStatus | None = None


# ------------------------------------------------------------------------------------------------------ the resources


_QUALIFIED = (
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
)
_LabelKey = Annotated[str, Field(max_length=317, pattern=_QUALIFIED)]
_LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]


class ObjectMeta(Manifest):
    """metav1.ObjectMeta, as far as a manifest sets it or `kubectl get -o yaml` prints it.

    The API server owns these rules, not the CRD: they are repeated here so that the offline check agrees with it.
    """

    name: str = Field(max_length=253)
    namespace: Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] | None = None
    labels: dict[_LabelKey, _LabelValue] = Field(default={})
    annotations: dict[_LabelKey, str] = Field(default={})
    finalizers: list[_LabelKey] = Field(default=[])
    owner_references: list[dict[str, Any]] = Field(default=[])
    uid: str | None = None
    resource_version: str | None = None
    generation: int | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    self_link: str | None = None

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value not in ({}, [], None)}


class RLJob(Manifest):
    """One training job: what users apply with kubectl, or run on a laptop."""

    api_version: Literal["rlightning.io/v1alpha1"] = "rlightning.io/v1alpha1"
    kind: Literal["RLJob"] = "RLJob"
    metadata: ObjectMeta
    spec: RLJobSpec
    status: RLJobStatus | None = None

    @model_validator(mode="after")
    def _rules(self) -> Self:
        rules.enforce(rules.JOB_RULES, self)
        return self


class MemberStatus(Manifest):
    """One policy actor, as it proved itself."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    role: Literal["Train", "Eval"]
    state: CamelWord
    version: Count | None = Field(default=None, description="That its live tensors hold.")
    digest: Digest | None = Field(default=None, description="Computed by the member from the tensors that it runs.")
    pod: ShortText | None = Field(default=None, description="Where it runs.")


class VersionStatus(Manifest):
    """One published version of the weights."""

    version: Count
    learner_digest: Digest
    parent_digest: Digest | None = Field(default=None, description="Of the version before, over resumes too.")
    verified: Count = Field(description="Members that proved the learner's digest.")
    total: Count = Field(description="Members that had to.")
    first_mismatch: ShortText | None = Field(
        default=None, description='"member: tensor" of the first difference, which may have been mended since.'
    )


class GroupOutcome(Manifest):
    """How the attempt ended. Stored before the driver exits."""

    state: Literal["Succeeded", "Stopped", "Failed", "Lost"] = Field(
        description="Failed: the job's own error, final. Lost: what it ran on failed; tried again from the checkpoint."
    )
    reason: CamelWord
    message: Text = ""


class PolicyGroupSpec(Manifest):
    """What the operator wants of a driver."""

    job: Annotated[str, Field(max_length=40, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")] = Field(
        description="Name of the RLJob, in the same namespace."
    )
    state: Literal["Running", "Stopped"] = Field(
        default="Running", description="Stopped: save at the next iteration's end, report, exit."
    )
    attempt: int = Field(ge=1, le=10**6, description="A driver that sees a higher one stops without writing.")
    train_replicas: int = Field(ge=1, le=16, description="Wanted train members.")
    eval_replicas: int = Field(ge=1, le=256, description="Wanted eval members.")
    training: RLJobSpec = Field(description="The job's spec with everything resolved, frozen for this attempt.")


class DriverStatus(Manifest):
    """Which process reports."""

    pod: ShortText
    pod_uid: ShortText
    start_time: Time


class PolicyGroupStatus(Manifest):
    """What the driver reports."""

    attempt: int = Field(ge=0, le=10**6, description="That reports. Never goes down.")
    driver: DriverStatus | None = None
    version: Count | None = Field(
        default=None, description="The last published one. Never goes down within an attempt."
    )
    outcome: GroupOutcome | None = None
    progress: Progress | None = None
    members: list[MemberStatus] = Field(default=[], max_length=272, json_schema_extra=LIST_ATOMIC)
    versions: list[VersionStatus] = Field(
        default=[], max_length=32, json_schema_extra=LIST_ATOMIC, description="The last 32."
    )
    checkpoint: CheckpointStatus | None = None


class PolicyGroupResource(Manifest):
    """The custom resource PolicyGroup: spec by the operator, status by the driver."""

    api_version: Literal["rlightning.io/v1alpha1"] = "rlightning.io/v1alpha1"
    kind: Literal["PolicyGroup"] = "PolicyGroup"
    metadata: ObjectMeta
    spec: PolicyGroupSpec
    status: PolicyGroupStatus | None = None

    @model_validator(mode="after")
    def _rules(self) -> Self:
        rules.enforce(rules.GROUP_RULES, self)
        return self
