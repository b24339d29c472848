"""Environments: shards for training, slots for evaluation, and the check of a manifest's ``environment``."""

from rlightning.env.evaluation import EvaluationEnvs
from rlightning.env.registration import check_environment, resolve_vectorization
from rlightning.env.shard import EnvShard, StepResult

__all__ = ["EnvShard", "EvaluationEnvs", "StepResult", "check_environment", "resolve_vectorization"]
