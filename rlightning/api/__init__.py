"""RLJob and PolicyGroup: models, rules, manifest loading, offline validation and CRD generation.

Imports pydantic and yaml only.
"""

from __future__ import annotations

from rlightning.api.models import PolicyGroupResource, RLJob, RLJobSpec, RLJobStatus

__all__ = ["PolicyGroupResource", "RLJob", "RLJobSpec", "RLJobStatus"]
