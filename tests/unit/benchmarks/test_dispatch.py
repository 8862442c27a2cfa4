"""What the device's loop does besides computing, counted: times would say more of who else is at work.

``benchmarks/dispatch.py`` has the times. A number here that grows is a call or an operator more for every
layer and micro-batch of every job; where one falls, it is to be lowered here.
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
from oobleckd.worker.sums.choice import kernels_of

PASSES = (NUM_BLOCKS + 2) * NUM_MICRO_BATCHES  # of a layer and a micro-batch, in a step
HOUSE = str(Path(oobleckd.__file__).parent)
CALLS = {"sums": 20, "models": 17, "loop": 89}
"""Functions of this project that are called for a layer and micro-batch, by who is called: sums, layers that
compute, everything else.
"""
OPERATORS = {True: -5, False: 13}
"""Of torch, for a layer and micro-batch, more than in a plain loop: where sums are compiled, and where
not.
"""
TORCH_OPERATORS = {True: 15, False: 22}
"""The same with sums that torch's operations add up, as on a GPU without Triton."""


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
def loop(tmp_path: Path) -> Iterator[Step]:
    """A step of the device's loop."""
    (folder := tmp_path / "here").mkdir()
    with our_loop(folder) as step:
        step()
        yield step


def test_a_layer_and_micro_batch_take_so_many_calls(loop: Step) -> None:
    found = {room: count / PASSES for room, count in calls(loop).items()}
    assert found.keys() == CALLS.keys()
    assert {room: count for room, count in found.items() if count > CALLS[room]} == {}


def test_a_layer_and_micro_batch_take_so_many_operators_more(loop: Step, tmp_path: Path) -> None:
    plain, compiled = plain_loop(), kernels_of("cpu") is not None
    plain()
    least = operators(plain)
    assert (operators(loop) - least) / PASSES <= OPERATORS[compiled]
    with our_loop(tmp_path, whole=True) as step:
        step()
        assert (operators(step) - least) / PASSES <= TORCH_OPERATORS[compiled]


def test_ratios_are_formed_within_a_round(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"plain loop": [1.0, 2.0, 4.0], "oobleckd": [1.1, 2.2, 4.4], "oobleckd, torch's sums": [1, 3, 8]}
    told, met = report(found)
    ratios: Any = told["ratios"]
    assert met
    assert ratios["oobleckd"]["median"] == pytest.approx(1.1)
    assert ratios["oobleckd, torch's sums"]["quartiles"] == [1.25, 1.75]
    assert "met" in capsys.readouterr().out
    found["oobleckd"] = [1.3, 2.6, 4.0]
    assert not report(found)[1]
