"""What is kept of what was sent: within its limit."""

from __future__ import annotations

import pytest
import torch

from oobleckd.planner.plan import Range, Route, Segment
from oobleckd.worker.round.boundary_cache import BoundaryCache
from oobleckd.worker.round_machine.tasks import Task

CPU = torch.device("cpu")
TASKS = [Task(Route(mb, 1, (Segment("a/0", Range(0, 1)),)), 0) for mb in range(3)]


def test_what_fits_is_kept_and_the_rest_is_not() -> None:
    kept = BoundaryCache(limit_bytes=2 * 16)
    for number, task in enumerate(TASKS):
        kept.put("F", task, torch.full((4,), float(number)))
    assert [kept.has("F", task) for task in TASKS] == [True, True, False]
    assert not kept.has("B", TASKS[0])
    assert torch.equal(kept.get("F", TASKS[1], CPU), torch.ones(4))
    assert kept.held_bytes == 32
    kept.clear()
    assert (kept.held_bytes, kept.has("F", TASKS[0])) == (0, False)
    kept.put("B", TASKS[2], torch.zeros(4))
    assert kept.has("B", TASKS[2])
    assert kept.held_bytes == 16


def test_nothing_is_kept_without_room() -> None:
    kept = BoundaryCache(limit_bytes=0)
    kept.put("F", TASKS[0], torch.zeros(1))
    assert not kept.has("F", TASKS[0])


@pytest.mark.gpu
def test_a_gpu_keeps_it_in_the_memory_of_its_host() -> None:
    device = torch.device("cuda", 0)
    kept = BoundaryCache(limit_bytes=1 << 20)
    sent = torch.arange(8.0, device=device)
    kept.put("F", TASKS[0], sent)
    again = kept.get("F", TASKS[0], device)
    assert again.device.type == "cuda"
    assert torch.equal(again, sent)
