"""What holds for every test: one thread and no telemetry."""

from __future__ import annotations

import os

# Before anything imports numpy or torch, here and in every process that a test starts: results depend on the number
# of threads, and two workers on two cores want one each.
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    OPENBLAS_NUM_THREADS="1",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",  # Ray's coming default; unset, every Ray process warns of it
)
for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):  # a test that wants colour sets it
    os.environ.pop(name, None)

import hypothesis  # noqa: E402

# Examples are drawn the same way in every run: a red test stays red until it is mended. HYPOTHESIS_PROFILE=explore
# draws anew.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
