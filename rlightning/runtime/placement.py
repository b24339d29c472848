"""Making a group: in this process, or in Ray actors."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlightning.errors import MemberDeadlineExceeded, RayUnavailable, RLightningError
from rlightning.policy.base_policy import PolicyRole
from rlightning.policy.loading import policy_class, policy_config, train_config
from rlightning.policy.policy_group import PolicyGroup, wrap
from rlightning.runtime.member import Member, gather
from rlightning.runtime.rng import Stream
from rlightning.runtime.stages import Stages

if TYPE_CHECKING:
    from rlightning.api.models import RLJobSpec, RoleSpec
    from rlightning.types import EnvMeta

Placement = Literal["local", "ray"]

POOL_RESOURCE = "rlightning-pool-"
"""Prefix of the Ray resource that a pool's nodes offer, one unit per member."""


class Cluster(Protocol):
    """A Ray cluster that was made for one job: its processes are started with spec.training.threads."""

    def wait_until_ready(self) -> None:
        """Return once every pool offers its members' places. Ray is connected by then.

        Raises:
            StoppedEarly, Superseded: while waiting.
        """


@contextmanager
def open_group(
    spec: RLJobSpec,
    meta: EnvMeta,
    placement: Placement,
    cluster: Cluster | None = None,
    stages: Stages | None = None,
) -> Iterator[PolicyGroup]:
    """A group whose members are initialized and joined; everything it started is shut down at the end.

    Args:
        spec: resolved.
        meta: of the environment.
        placement: where members live.
        cluster: that RAY_ADDRESS leads to, if it was made for this job.
        stages: to take the time of.

    Raises:
        MemberDeadlineExceeded: names the members that did not start in time.
    """
    stages = stages or Stages()
    with _policies(spec, placement, cluster, stages) as (train, evals, members):
        group = PolicyGroup(
            train, evals, policy_config(spec), deadlines=spec.deadlines, seed=spec.seed, members=members
        )
        try:
            group.init(train_config(spec), meta)
            group.init_placement_info()
            group.init_comm_group("gloo")
            stages.done("policies")
            group.init_weight_buffer()
            stages.done("weight buffers")
            yield group
        finally:
            group.shutdown()


_Made = tuple[list[Any], list[Any], tuple[list[Member], list[Member]]]


@contextmanager
def _policies(spec: RLJobSpec, placement: Placement, cluster: Cluster | None, stages: Stages) -> Iterator[_Made]:
    cls, config = policy_class(spec), policy_config(spec)
    roles = {PolicyRole.TRAIN: spec.policy_group.train, PolicyRole.EVAL: spec.policy_group.eval}
    if placement == "local":
        made = {role: [cls(config, role) for _ in range(of.replicas)] for role, of in roles.items()}
        wrapped = {
            role: [wrap(p, f"{role}-{i}", role, spec.seed, i) for i, p in enumerate(made[role])] for role in roles
        }
        yield (*made.values(), tuple(wrapped.values()))  # type: ignore[misc]
        return
    with ray_session(spec, cluster, stages):
        handles: dict[PolicyRole, list[Any]] = {PolicyRole.TRAIN: [], PolicyRole.EVAL: []}
        try:
            for role, of in roles.items():
                actor = cls.as_remote(num_cpus=0, resources=_resources(of))
                handles[role] = [actor.remote(config, role) for _ in range(of.replicas)]
            wrapped = {
                role: [wrap(h, f"{role}-{i}", role, spec.seed, i) for i, h in enumerate(handles[role])]
                for role in roles
            }
            _wait_for_start(spec, wrapped)
            stages.done("members")
            yield (*handles.values(), tuple(wrapped.values()))  # type: ignore[misc]
        finally:
            import ray

            with ExitStack() as kills:  # every one is tried, whatever the others do
                for handle in (*handles[PolicyRole.TRAIN], *handles[PolicyRole.EVAL]):
                    kills.callback(ray.kill, handle)


def _resources(role: RoleSpec) -> dict[str, float]:
    return {} if role.pool is None else {f"{POOL_RESOURCE}{role.pool}": 1}


def _wait_for_start(spec: RLJobSpec, members: dict[PolicyRole, list[Member]]) -> None:
    """Set every actor up and learn which node it is on."""
    futures = {}
    for role, of_role in members.items():
        for i, member in enumerate(of_role):
            # All train members draw the same numbers (see policy_group.wrap).
            stream, index = (Stream.LEARNER, 0) if role == PolicyRole.TRAIN else (Stream.MEMBER, i)
            futures[member.name] = member.call(
                "setup_member", member.name, spec.seed, int(stream), index, spec.training.threads
            )
    seconds = spec.deadlines.member_start_seconds
    try:
        places = gather(futures, what="starting", seconds=seconds, field="spec.deadlines.memberStartSeconds")
    except MemberDeadlineExceeded as late:
        import ray

        free = f"Ray has {ray.available_resources()} free."
        raise MemberDeadlineExceeded(late.what, late.late, late.seconds, late.field, free) from None
    for of_role in members.values():
        for member in of_role:
            member.node, member.pod = places[member.name]


@contextmanager
def ray_session(spec: RLJobSpec, cluster: Cluster | None, stages: Stages) -> Iterator[None]:
    """Ray, for as long as it is needed: the one that RAY_ADDRESS names or that is running, else one of our own.

    Raises:
        RLightningError: a pool that members need is not offered by the Ray cluster found.
    """
    import ray

    started = not ray.is_initialized()
    if started:
        options: dict[str, Any] = {"logging_level": logging.WARNING}
        if cluster is None:
            # Ray would set OMP_NUM_THREADS from num_cpus; results depend on the number of threads, so the manifest
            # rules. A cluster of the job's own has it in its pods: workers with an environment of their own start anew,
            # where others are started ahead.
            threads = str(spec.training.threads)
            options["runtime_env"] = {"env_vars": {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}}
        if not os.environ.get("RAY_ADDRESS"):
            pools = {f"{POOL_RESOURCE}{p.name}": float(p.replicas * p.members_per_replica) for p in spec.pools}
            options |= {"address": "local", "resources": pools or None, "include_dashboard": False}
        try:
            ray.init(**options)
        except Exception as error:
            if cluster is not None:
                raise RayUnavailable(f"the driver could not connect to Ray in its own pod: {error}") from error
            raise RayUnavailable(
                f"Ray did not start: {error} Its logs are in /tmp/ray/session_latest/logs; a machine that is too busy "
                "is the usual cause, and --placement local needs no Ray"
            ) from error
    stages.done("Ray")
    try:
        if cluster is not None:
            cluster.wait_until_ready()
            stages.done("pools")
        offered = ray.cluster_resources()
        for role, of in (("train", spec.policy_group.train), ("eval", spec.policy_group.eval)):
            for resource, _ in _resources(of).items():
                if resource not in offered:
                    if cluster is not None:  # it was there a moment ago
                        raise RayUnavailable(f"Ray offers no resource {resource!r} any more: a pod was lost")
                    raise RLightningError(
                        f"spec.policyGroup.{role}.pool: the Ray cluster offers no resource {resource!r}; start its "
                        f"nodes with --resources='{{\"{resource}\": <members>}}', or leave RAY_ADDRESS unset to start "
                        "a local Ray that has it"
                    )
        yield
    finally:
        if started:
            ray.shutdown()
