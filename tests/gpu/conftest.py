"""Without a GPU these tests fail with one sentence: who asks for them wants to know, and not to see them
skipped.
"""

from __future__ import annotations

import pytest

from tests.helpers import gpu


@pytest.fixture(autouse=True)
def _machine() -> None:
    if problem := gpu.problem():
        pytest.fail(problem, pytrace=False)
