"""What a manifest means once it starts, and its canonical forms: resolved spec, hash, YAML."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import yaml

from rlightning.api.manifests import resolve_plain
from rlightning.api.models import Manifest, RLJobSpec


def resolve(spec: RLJobSpec) -> RLJobSpec:
    """The spec with nothing left to choose: ``environment.shards`` becomes the eval replicas of this first start.

    Raises pydantic's ValidationError if the result breaks a rule (numEnvs not divisible by the eval replicas).
    """
    if spec.environment.shards is not None:
        return spec
    environment = spec.environment.model_copy(update={"shards": spec.policy_group.eval.replicas})
    stored = {**spec.to_dict(), "environment": environment.to_dict()}
    return RLJobSpec.model_validate(stored, by_alias=True, by_name=False)


def training_spec(spec: RLJobSpec, shards: int | None = None) -> RLJobSpec:
    """What a driver is given: the resolved spec without what only the operator acts on, which is put at its default.

    Two specs with equal training specs train alike, so that a change elsewhere (``suspend``, ``runPolicy``, resources)
    needs no new attempt.

    Args:
        spec: of the job.
        shards: as resolved at the job's first start (``status.shards``); None resolves them now.
    """
    if spec.environment.shards is None and shards is not None:
        environment = spec.environment.model_copy(update={"shards": shards})
        spec = spec.model_copy(update={"environment": environment})
    stored = resolve(spec).to_dict()
    for name in ("suspend", "image", "imagePullPolicy", "imagePullSecrets", "head", "runPolicy"):
        stored.pop(name, None)
    stored["pools"] = [
        {name: pool[name] for name in ("name", "replicas", "membersPerReplica")} for pool in stored["pools"]
    ]
    for name in ("claimName", "drainSeconds"):
        stored["checkpoints"].pop(name, None)
    return RLJobSpec.model_validate(stored, by_alias=True, by_name=False)


def spec_hash(spec: Manifest) -> str:
    """``sha256:`` + 64 hex digits over the canonical JSON (sorted keys, no spaces, defaults filled in).

    For comparing two specs read by the same version: a later one may know further fields, with defaults of their own.
    """
    text = json.dumps(spec.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def to_yaml(manifest: Manifest) -> str:
    """The manifest as YAML, fields in the order of the models; reading it back, here or by kubectl, gives the same."""
    return str(yaml.dump(manifest.to_dict(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML leaves what only kubectl takes for a number or a word (1e3, y) without quotes, and folds odd line breaks.
    scalar = resolve_plain(text)
    plain = scalar.value == text and not scalar.misread and text.isprintable()
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _text)
