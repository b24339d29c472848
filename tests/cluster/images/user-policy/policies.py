"""A user's policy with a mistake in it, in an image made from the trainer's."""

from __future__ import annotations

from typing import Any

from rlightning.policy import SimplePPOPolicy


class RaisesInTrain(SimplePPOPolicy):
    """Raises in its third training step."""

    def train(self, *args: Any, **kwargs: Any) -> dict[str, float]:  # type: ignore[override]
        if self.progress.iteration == 3:
            raise ValueError("the user's own mistake")
        return super().train()
