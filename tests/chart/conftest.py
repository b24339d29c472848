"""helm, built once."""

from __future__ import annotations

import pytest

from hack.programs.binaries import BuildError
from tests.support.helm import Helm


@pytest.fixture(scope="session")
def helm() -> Helm:
    try:
        return Helm()
    except BuildError as error:
        pytest.fail(str(error), pytrace=False)
