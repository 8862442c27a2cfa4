"""What the report's table of facts has of a job's model."""

from __future__ import annotations

import pytest

from oobleckd.protocol.jobviews import ProgressView
from oobleckd.report.tables import summary
from tests.helpers.api_server import job_view


@pytest.mark.parametrize(
    ("params", "active", "said"),
    [
        (46_702_792_704, 12_879_925_248, "46.7 B parameters, 12.9 B active"),
        (124_439_808, 124_439_808, "124 M parameters"),
        (0, 0, None),
    ],
)
def test_parameters_and_active_ones(params: int, active: int, said: str | None) -> None:
    job = job_view(progress=ProgressView(params=params, active_params=active))
    assert dict(summary(job, None)).get("Model") == said
