"""Data that crosses between environments, policies and engines."""

from rlightning.types.batched_data import BatchedData
from rlightning.types.env_rets import EnvRet
from rlightning.types.fragment import Fragment
from rlightning.types.metadata import EnvMeta
from rlightning.types.policy_response import PolicyResponse

__all__ = ["BatchedData", "EnvMeta", "EnvRet", "Fragment", "PolicyResponse"]
