"""Micro-batches that are drawn ahead for a GPU, and copied without waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oobleckd.worker.data.rows import Misread
from oobleckd.worker.models import Batch
from oobleckd.worker.round.batch_ahead import BatchAhead
from oobleckd.worker.round.passes import Passes
from tests.helpers.engine import World
from tests.helpers.engine_jobs import STAGES, check

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What is asked of tensors on their way to a GPU; they stay where they are."""
    asked: list[tuple[str, Any]] = []

    def pin(tensor: Tensor) -> Tensor:
        asked.append(("pin", tensor.numel()))
        return tensor

    def to(tensor: Tensor, device: torch.device, *, non_blocking: bool = False) -> Tensor:
        asked.append((str(device), non_blocking))
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", to)
    return asked


def batch(number: int) -> Batch:
    tokens = torch.full((1, 4), number)
    return Batch(tokens, tokens)


def test_a_batch_goes_to_a_gpu_from_pinned_memory_without_waiting(copied: list[tuple[str, Any]]) -> None:
    there = batch(3).to(GPU)
    assert copied == [
        ("pin", 4),
        ("cuda:0", True),
    ]  # shown and asked for is the same
    assert there.labels is there.inputs
    copied.clear()
    labels, places = torch.zeros(1, 2), torch.zeros(1, 3)
    there = Batch(torch.zeros(1, 1), labels, places, places.clone(), num_targets=7).to(GPU)
    assert [what for what, _ in copied] == ["pin", "cuda:0"] * 4
    assert (there.labels is labels, there.num_targets) == (True, 7)


def test_on_a_cpu_it_is_what_it_was() -> None:
    for each in (batch(1), Batch(torch.zeros(1), torch.ones(1), torch.ones(2), torch.ones(3), 5)):
        there = each.to(CPU)
        assert all(getattr(there, name) is getattr(each, name) for name in ("inputs", "labels", "positions"))


def test_what_was_drawn_ahead_is_not_drawn_again(copied: list[tuple[str, Any]]) -> None:
    drawn: list[int] = []

    def draw(number: int) -> Batch:
        drawn.append(number)
        return batch(number)

    ahead = BatchAhead(GPU)
    ahead.draw(1, lambda: draw(1))
    ahead.draw(1, lambda: draw(1))
    assert drawn == [1]
    assert ahead.take(1, lambda: draw(-1)).inputs[0, 0] == 1
    assert ahead.take(1, lambda: draw(2)).inputs[0, 0] == 2  # another attempt
    ahead.draw(3, lambda: draw(3))
    assert ahead.take(4, lambda: draw(4)).inputs[0, 0] == 4
    assert ahead.take(3, lambda: draw(-1)).inputs[0, 0] == 3
    assert drawn == [1, 2, 3, 4]


def test_what_cannot_be_read_is_said_to_who_asks(copied: list[tuple[str, Any]]) -> None:
    def draw() -> Batch:
        raise Misread("the text has changed", "put it back")

    ahead = BatchAhead(GPU)
    ahead.draw(1, draw)
    with pytest.raises(Misread):
        ahead.take(1, draw)
    assert ahead.take(1, lambda: batch(5)).inputs[0, 0] == 5


def test_on_a_cpu_nothing_is_drawn_ahead() -> None:
    BatchAhead(CPU).draw(1, lambda: pytest.fail("drawn"))


def test_drawn_ahead_or_not_the_bits_are_the_same_also_after_deaths(
    reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[int, bool]] = []
    passes, take = Passes.__init__, BatchAhead.take

    def made(self: Passes, *args: Any) -> None:
        passes(self, *args)
        self.batch_ahead.device = torch.device("meta")  # any that is no CPU

    def taken(self: BatchAhead, key: Any, draw: Any) -> Batch:
        drawn.append((key[0], self._batch is not None and self._key == key))
        return take(self, key, draw)

    monkeypatch.setattr(Passes, "__init__", made)
    monkeypatch.setattr(BatchAhead, "take", taken)
    monkeypatch.setattr(Batch, "to", lambda self, _device: self)
    world = World(reference[0], STAGES, 3, tmp_path)
    world.nodes["b0/0"].faults.arm("backward", 2)
    world.run()
    check(world, reference)
    assert world.fired
    assert sum(ahead for _, ahead in drawn) > len(drawn) / 3
