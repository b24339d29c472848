"""Evaluating a run's checkpoint, with the code that evaluates during training."""

from __future__ import annotations

import time
from pathlib import Path

from rlightning.api.models import RLJob
from rlightning.checkpoint.policy import find_checkpoint
from rlightning.checkpoint.store import load_checkpoint
from rlightning.engine.sync_rl_engine import evaluation_report
from rlightning.env import check_environment
from rlightning.errors import WeightMismatch
from rlightning.runtime.numerics import prepare_process
from rlightning.runtime.placement import open_group
from rlightning.runtime.reporter import EvaluationReport


def evaluate_run(
    run_dir: Path, *, episodes: int | None = None, seed: int | None = None, checkpoint: str | None = None
) -> EvaluationReport:
    """Play greedy episodes with a checkpoint's weights; with the run's own seed and episodes the result is the run's.

    Args:
        run_dir: run folder, or a checkpoint.
        episodes: None takes the manifest's.
        seed: of the episodes; None takes the manifest's.
        checkpoint: name such as ``iter-00000010``; None takes the newest.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    snapshot = load_checkpoint(find_checkpoint(run_dir, checkpoint))
    job = RLJob.from_stored(snapshot.job)
    one = {"replicas": 1, "pool": None}
    roles = job.spec.policy_group
    spec = job.spec.model_copy(
        update={
            "policy_group": roles.model_copy(
                update={"train": roles.train.model_copy(update=one), "eval": roles.eval.model_copy(update=one)}
            ),
            "weights": job.spec.weights.model_copy(update={"strategy": "None"}),
        }
    )
    prepare_process(spec.training.threads)
    meta = check_environment(spec.environment)
    started = time.perf_counter()
    with open_group(spec, meta, "local") as group:
        group.load_training_state(snapshot.model, snapshot.sections["learner"])
        group.start_versions(snapshot.version, snapshot.attempt)
        record = group.sync_weights()
        if record.first_mismatch is not None:
            raise WeightMismatch(record.version, record.first_mismatch)
        played = group.evaluate(
            spec.environment,
            spec.seed if seed is None else seed,
            spec.evaluation.episodes if episodes is None else episodes,
        )
    return evaluation_report(
        played, snapshot.iteration, snapshot.version, time.perf_counter() - started, spec.evaluation.stop_at_return
    )
