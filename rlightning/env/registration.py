"""From the manifest's ``environment`` to a Gymnasium environment, with errors that say what to change."""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec, load_env_creator

from rlightning.env.mujoco_log import log_warnings
from rlightning.errors import EnvironmentFault, EnvironmentNotFound, ManifestError, UnsupportedSpace
from rlightning.types import EnvMeta

if TYPE_CHECKING:
    from rlightning.api.models import EnvironmentSpec

Vectorization = Literal["Native", "Sync"]

_NATIVE = "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"
_NATIVE_KWARGS = frozenset({"sutton_barto_reward"})


def check_environment(spec: EnvironmentSpec) -> EnvMeta:
    """Make one environment, see that it can be learned from, and close it.

    Returns:
        Spaces of a single environment, with ``num_envs`` of the whole job.

    Raises:
        EnvironmentNotFound: no such id; near misses are suggested.
        ManifestError: a keyword argument or ``vectorization`` does not fit the environment.
        UnsupportedSpace: observations are not Box or Discrete, or actions not Discrete or Box.
        EnvironmentFault: the environment cannot be made.
    """
    resolve_vectorization(spec)
    env = make_environment(spec)
    try:
        check_spaces(spec.id, env.observation_space, env.action_space)
        return EnvMeta(spec.id, env.action_space, env.observation_space, spec.num_envs)
    finally:
        env.close()


def resolve_vectorization(spec: EnvironmentSpec) -> Vectorization:
    """How the environments of a shard are stepped: ``Auto`` is native where that can be saved and restored.

    Raises:
        EnvironmentNotFound: no such id.
        ManifestError: ``Native`` is asked for and this environment has none.
    """
    if spec.vectorization == "Sync":
        return "Sync"
    registered = find_registered(spec.id)
    if registered.vector_entry_point != _NATIVE or registered.additional_wrappers:
        why = f"{spec.id} has no native vector whose state can be saved"
    elif other := sorted(set(spec.kwargs) - _NATIVE_KWARGS):
        why = f"the native {spec.id} does not take environment.kwargs.{other[0]}"
    else:
        return "Native"
    if spec.vectorization == "Native":
        raise ManifestError(f"environment.vectorization: Native, but {why}; use Auto or Sync")
    return "Sync"


def find_registered(env_id: str) -> EnvSpec:
    """Gymnasium's entry for ``env_id``, after importing the module that the id names (``module:Name-v0``).

    Raises:
        EnvironmentNotFound: no such module or environment, or no version is given.
        EnvironmentFault: the module raises when imported.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise EnvironmentNotFound(
                f"environment.id {env_id!r}: module {error.name!r} is not installed here; install it, or correct the "
                "part before the colon"
            ) from error
        except Exception as error:
            raise EnvironmentFault(
                f"environment.id {env_id!r}: importing {module!r} raised {type(error).__name__}: {error}"
            ) from error
    if (registered := gymnasium.registry.get(name)) is not None:
        return registered
    if latest := _latest_version(name):
        raise EnvironmentNotFound(
            f"environment.id {env_id!r} has no version, so it would change with the installation; write {latest!r}"
        )
    raise EnvironmentNotFound(f"environment.id {env_id!r} is not registered with Gymnasium{_suggestion(name)}")


def _latest_version(name: str) -> str | None:
    versions = [e for e in gymnasium.registry.values() if re.sub(r"-v\d+$", "", e.id) == name and e.version is not None]
    return max(versions, key=lambda entry: entry.version or 0).id if versions else None


def _suggestion(name: str) -> str:
    by_lower: dict[str, list[str]] = {}
    for known in gymnasium.registry:
        by_lower.setdefault(known.lower(), []).append(known)
    # An id that differs in its version only comes first, whatever the length of the name; then near spellings.
    stem = re.sub(r"-v\d+$", "", name).lower()
    same = [known for lower, ids in by_lower.items() if re.sub(r"-v\d+$", "", lower) == stem for known in ids]
    near = [i for m in difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.75) for i in by_lower[m]]
    found = (
        sorted(same, key=_version, reverse=True) or sorted(near, key=lambda known: _likeness(known, name), reverse=True)
    )[:3]
    if found:
        return f"; did you mean {' or '.join(map(repr, found))}?"
    return (
        ". If a package of yours registers it, name its module: 'package.module:Name-v0'; "
        "`python -m pip list` shows what is installed, gymnasium.pprint_registry() what is registered"
    )


def _version(env_id: str) -> int:
    return int(match.group(1)) if (match := re.search(r"-v(\d+)$", env_id)) else -1


def _likeness(known: str, name: str) -> tuple[float, int]:
    return difflib.SequenceMatcher(None, known.lower(), name.lower()).ratio(), _version(known)


def make_environment(spec: EnvironmentSpec) -> gymnasium.Env:
    """One environment of the job, with Gymnasium's wrappers.

    Raises:
        EnvironmentNotFound, ManifestError, EnvironmentFault: as :func:`check_environment`.
    """
    registered = find_registered(spec.id)
    try:
        _check_kwargs(spec, registered)
        return _make(spec, registered)
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        mujoco = "pip install 'rlightning[mujoco]'"
        remedy = mujoco if _is_mujoco(registered) else "install it where this runs"
        raise EnvironmentNotFound(
            f"environment.id {spec.id!r} needs a package that is not installed ({error}): {remedy}"
        ) from error


def _is_mujoco(registered: EnvSpec) -> bool:
    return str(registered.entry_point).startswith("gymnasium.envs.mujoco")


def _make(spec: EnvironmentSpec, registered: EnvSpec) -> gymnasium.Env:
    try:
        if _is_mujoco(registered):
            log_warnings()
        # A copy of the arguments each: environments may keep and change what they are given.
        return gymnasium.make(registered, max_episode_steps=spec.max_episode_steps, **copy.deepcopy(dict(spec.kwargs)))
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError):
        raise
    except Exception as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown and unknown.group(1) in spec.kwargs:
            raise _unknown_argument(spec.id, unknown.group(1), _arguments(registered)) from error
        given = f" with environment.kwargs {dict(spec.kwargs)}" if spec.kwargs else ""
        raise EnvironmentFault(
            f"environment.id {spec.id!r} cannot be made{given}: {type(error).__name__}: {error}"
        ) from error


def _check_kwargs(spec: EnvironmentSpec, registered: EnvSpec) -> None:
    if "max_episode_steps" in spec.kwargs:
        raise ManifestError("environment.kwargs.max_episode_steps: this has its own field, environment.maxEpisodeSteps")
    for name in ("id", "disable_env_checker"):
        if name in spec.kwargs:
            raise ManifestError(f"environment.kwargs.{name}: this belongs to gymnasium.make; leave it out")
    names = _arguments(registered, closed_only=True)
    for name in spec.kwargs:
        if names and name not in names:
            raise _unknown_argument(spec.id, name, names)


def _arguments(registered: EnvSpec, closed_only: bool = False) -> list[str]:
    """Names that the environment's constructor takes, empty if unknown (or not all, with ``closed_only``)."""
    try:
        entry = registered.entry_point
        creator: Any = load_env_creator(entry) if isinstance(entry, str) else entry
        classes: Any = inspect.getmro(creator) if inspect.isclass(creator) else (creator,)
        names: list[str] = []
        for level in classes:
            parameters = inspect.signature(level).parameters.values()
            names += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
            if not any(p.kind == p.VAR_KEYWORD for p in parameters):
                return list(dict.fromkeys(names))
            if closed_only:
                return []
        return list(dict.fromkeys(names))
    except (ImportError, AttributeError, TypeError, ValueError):
        return []  # gymnasium.make, which comes next, says what is wrong with it


def _unknown_argument(env_id: str, name: str, known: Iterable[str]) -> ManifestError:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    takes = f"It takes {', '.join(known)}." if known else "It takes none of that name."
    return ManifestError(f"environment.kwargs.{name}: {env_id} has no such argument; {hint}{takes}")


def check_spaces(env_id: str, observation: spaces.Space, action: spaces.Space) -> None:
    """Refuse spaces that the policies here cannot see or act in.

    Raises:
        UnsupportedSpace: with the space and what to do.
    """
    remedy = "wrap the environment so that it is, and register the wrapped one"
    if isinstance(observation, spaces.Discrete):
        _check_start(env_id, "observation", observation)
    elif not isinstance(observation, spaces.Box):
        raise UnsupportedSpace(
            f"environment {env_id}: observations must be Box or Discrete, they are {observation}; {remedy} "
            "(gymnasium.wrappers.FlattenObservation makes a Box of most)"
        )
    if isinstance(action, spaces.Discrete):
        _check_start(env_id, "action", action)
    elif not isinstance(action, spaces.Box):
        raise UnsupportedSpace(f"environment {env_id}: actions must be Discrete or Box, they are {action}; {remedy}")
    elif not np.issubdtype(action.dtype, np.floating) or not action.shape:
        raise UnsupportedSpace(
            f"environment {env_id}: Box actions must be floats with at least one axis, they are {action}; {remedy}"
        )


def _check_start(env_id: str, what: str, space: spaces.Discrete) -> None:
    if int(space.start) != 0:
        raise UnsupportedSpace(
            f"environment {env_id}: its {what} space {space} does not start at 0; wrap the environment so that it does"
        )
