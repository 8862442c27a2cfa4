"""State folders that earlier versions wrote, under today's programs: their jobs go on, and end at the same
bits (tests/data/README.md).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.cluster import Cluster
from tests.helpers.old_data import DIGESTS, PORTABLE, digest_of, inputs, state_folder


@pytest.mark.parametrize(
    "name",
    [
        "state-3-paused",
        "state-4-running",
        pytest.param("state-3-running", marks=pytest.mark.slow),
        pytest.param("state-4-paused", marks=pytest.mark.slow),
    ],
)
def test_a_job_of_an_earlier_version_ends_at_the_same_bits(tmp_path: Path, name: str) -> None:
    inputs(tmp_path)
    state_folder(name, tmp_path)
    with Cluster(tmp_path / "state", 2, env=PORTABLE) as cluster:
        if name.endswith("paused"):
            cluster.job_in("long", "paused")
            cluster.client.control("long", "resume")
        long = cluster.job_in("long", "done")
        losses = [step.loss_hex for step in cluster.client.steps("long")]
        assert digest_of(losses, Path(long.checkpoint)) == DIGESTS["long"]
        done = cluster.client.job("done-1")
        assert done.state == "done"
        # Of a job that is over only the journal has the steps.
        losses = [step.loss_hex for step in cluster.client.steps("done-1")]
        assert digest_of(losses, Path(done.checkpoint)) == DIGESTS["done"]
        assert sum(part.count for part in cluster.client.curve("done-1", bins=7).bins) == done.step
