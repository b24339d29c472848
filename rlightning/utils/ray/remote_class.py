"""Policies as Ray actors."""

from __future__ import annotations

from typing import Any


class RayActorMixin:
    """Makes a class usable as a Ray actor."""

    @classmethod
    def as_remote(
        cls,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        memory: int | None = None,
        object_store_memory: int | None = None,
        resources: dict[str, float] | None = None,
    ) -> Any:
        """This class as a Ray actor class; ``.remote(config, role)`` starts one.

        Args:
            num_cpus: CPUs that the scheduler sets aside. 0 is right for members: five at one CPU each would
                never start on two cores.
            num_gpus, memory, object_store_memory, resources: as Ray's own, None leaves Ray's default.
        """
        import ray

        options: dict[str, Any] = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "memory": memory,
            "object_store_memory": object_store_memory,
            "resources": resources,
        }
        options = {name: value for name, value in options.items() if value is not None}
        # An actor that Ray restarted would come back without weights, shards and RNG: it must be lost loudly instead.
        options |= {"max_restarts": 0, "max_task_retries": 0}
        return ray.remote(**options)(cls)
