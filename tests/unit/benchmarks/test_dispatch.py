"""What the device's loop does besides computing, counted: times would say more of who else is at work.

``benchmarks/dispatch.py`` has the times. A number here that grows is a call or an operator more for every
layer and micro-batch of every job; one that falls is to be brought down here.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import oobleckd
from benchmarks.alone import Step
from benchmarks.dispatch import NUM_BLOCKS, NUM_MICRO_BATCHES, our_loop, plain_loop, report

PASSES = (NUM_BLOCKS + 2) * NUM_MICRO_BATCHES  # of a layer and a micro-batch, in a step
HOUSE = str(Path(oobleckd.__file__).parent)
CALLS = {"sums": 27, "models": 14, "loop": 78}
"""Functions of this project that are called for a layer and micro-batch, by who calls: the sums of a GPU,
layers that compute, everything else.
"""
OPERATORS = {"here": 13, "gpu": 22}
"""Of torch, for a layer and micro-batch, more than in a plain loop; with the sums of this machine and those
of a GPU.
"""


class Operators(TorchDispatchMode):
    """Counts the operators of torch, those of backward passes too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operators(step: Step) -> int:
    """Of one step."""
    with Operators() as counted:
        step()
    return counted.count


def calls(step: Step) -> Counter[str]:
    """Of this project's functions in one step, by the name of the worker's room, "sums" or "models"; "loop"
    for all others.
    """
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(HOUSE):
            room = Path(path).parent.name
            found[room if room in CALLS else "loop"] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return found


@pytest.fixture
def gpu_loop(tmp_path: Path) -> Iterator[Step]:
    """A step of the device's loop with the sums of a GPU."""
    with our_loop(tmp_path, whole=True) as step:
        step()
        yield step


def test_a_layer_and_micro_batch_take_so_many_calls(gpu_loop: Step) -> None:
    found = {room: count / PASSES for room, count in calls(gpu_loop).items()}
    assert found.keys() == CALLS.keys()
    assert {room: count for room, count in found.items() if count > CALLS[room]} == {}


def test_a_layer_and_micro_batch_take_so_many_operators_more(gpu_loop: Step, tmp_path: Path) -> None:
    plain = plain_loop()
    plain()
    least = operators(plain)
    assert (operators(gpu_loop) - least) / PASSES <= OPERATORS["gpu"]
    with our_loop(tmp_path) as step:
        step()
        assert (operators(step) - least) / PASSES <= OPERATORS["here"]


def test_ratios_are_formed_within_a_round(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"plain loop": [1.0, 2.0, 4.0], "oobleckd": [1.1, 2.2, 4.4], "oobleckd, a GPU's sums": [1, 3, 8]}
    told, met = report(found)
    ratios: Any = told["ratios"]
    assert not met
    assert ratios["oobleckd"]["median"] == pytest.approx(1.1)
    assert ratios["oobleckd"]["met"]
    assert ratios["oobleckd, a GPU's sums"]["quartiles"] == [1.25, 1.75]
    assert "missed" in capsys.readouterr().out
