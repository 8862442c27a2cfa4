"""Words for deaths."""

from __future__ import annotations

from typing import Any

import pytest

from oobleckd.protocol.deaths import Memory, account_of, ways_out
from oobleckd.protocol.job import parse_job


def test_accounts() -> None:
    assert account_of(None) == ""
    assert account_of(None, 2**30) == ": planned 1 GiB"
    memory = Memory(used=3 * 2**30, capacity=4 * 2**30, wanted=2**30, others=2**29)
    said = ": planned 2 GiB, used 3 GiB of 4 GiB, asked for 1 GiB more, 512 MiB are held by others"
    assert account_of(memory, 2**31) == said


@pytest.mark.parametrize(
    ("changes", "first", "last"),
    [
        ({}, "a smaller train.micro_batch than 4", 'train.precision = "bf16"'),
        ({"train": {"micro_batch": 1}}, "a shorter train.sequence", 'train.precision = "bf16"'),
        ({"train": {"precision": "bf16"}, "schedule": {"update": "staggered"}}, "a smaller", 'schedule.update = "flushed"'),
        ({"train": {"precision": "bf16"}, "schedule": {"backward": "decoupled"}}, "a smaller", 'schedule.backward = "fused"'),
        ({"train": {"precision": "bf16"}}, "a smaller", "train.exact = false, which takes 8 bytes less of every parameter, and promises no equal bits"),
        ({"train": {"precision": "bf16", "exact": False}}, "a smaller", "schedule.boundary_memory"),
        ({"resources": {"device_memory": "16GiB"}}, "a smaller", 'bf16"'),
    ],
)  # fmt: skip
def test_three_ways_out(changes: dict[str, Any], first: str, last: str) -> None:
    train = {"steps": 3, "global_batch": 8, "micro_batch": 4, "sequence": 16} | changes.get("train", {})
    ways = ways_out(parse_job({"name": "a", **changes, "train": train})).removeprefix("try ").split("; or ")
    assert len(ways) == 3
    assert first in ways[0]
    assert "resources.device_memory" in ways[1]
    assert ("than 16GiB" in ways[1]) == ("resources" in changes)
    assert last in ways[2]
