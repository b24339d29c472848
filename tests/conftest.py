"""What holds for every test: one thread, no telemetry, and which tests share a worker."""

from __future__ import annotations

import os
from pathlib import Path

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
import pytest  # noqa: E402

ROOT = Path(__file__).parent.parent

# Examples are drawn the same way in every run: a red test stays red until it is mended. HYPOTHESIS_PROFILE=explore
# draws anew.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file's tests in one worker (they share fixtures), and all that want a machine part for themselves in one.

    Two local Rays at once would be four busy processes too many for two cores, and one kube-apiserver serves all.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is not None:
            continue
        alone = next((name for name in ("ray", "apiserver") if item.get_closest_marker(name) is not None), None)
        item.add_marker(pytest.mark.xdist_group(alone or str(item.path.relative_to(ROOT))))
