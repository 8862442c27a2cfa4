"""A job on three sources that changes its mix in the middle, on a real cluster: half of its nodes die at
once, come back, and no bit differs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.prepared import prepared

NODES, STEPS, CHANGES_AT = 6, 40, 21


def test_half_of_the_nodes_die_and_come_back(tmp_path: Path) -> None:
    dice = np.random.default_rng(3)
    folder = prepared(tmp_path / ("1" * 32), [dice.integers(0, 80, 9000)], "uint16")
    dice.integers(80, 160, 5000).astype("<u4").tofile(tmp_path / "code.bin")
    np.save(tmp_path / "wiki.npy", dice.integers(160, 256, 3000))
    sources = [
        {"name": "web", "kind": "jsonl", "path": "/none", "prepared": str(folder), "weight": 0.7},
        {"name": "code", "kind": "bin", "dtype": "uint32", "path": str(tmp_path / "code.bin"), "weight": 0.3},
        {
            "name": "wiki", "kind": "npy", "path": str(tmp_path / "wiki.npy"), "weight": 0,
            "epochs": 1, "at_limit": "drop",
        },
    ]  # fmt: skip
    data = {
        "source": sources,
        "tokenizer": "/none",
        "stage": [{"from_step": CHANGES_AT, "weights": {"web": 0.25, "code": 0.25, "wiki": 0.5}}],
    }
    with Cluster(tmp_path / "state", NODES) as cluster:
        job = cluster.client.submit(
            tiny_job("mixed", data=data, train={"steps": STEPS}, checkpoint={"every": 10})
        ).id
        nodes = cluster.at_step(job, CHANGES_AT - 7).nodes
        for node in nodes[:3]:
            cluster.kill(node, "sigkill")
        cluster.at_step(job, CHANGES_AT + 2)
        cluster.heal()
        done = cluster.job_in(job, "done")
        assert done.incidents
        cluster.verify(job)
