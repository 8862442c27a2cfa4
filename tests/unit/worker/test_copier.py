"""Weights that are copied beside what a device computes: by a thread on a CPU, and in the streams of a GPU,
of which there is a model here (``streams``) that lets nothing happen in order but what has to.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from oobleckd.worker.sharding.copier import StreamCopier, ThreadCopier, Wait, copier_of
from tests.helpers.cards import CUDA
from tests.helpers.models import CPU
from tests.helpers.streams import Gpu, Stream


def test_a_thread_copies_while_the_caller_goes_on() -> None:
    copier, go_on, found = ThreadCopier(), threading.Event(), []
    wait = copier.ahead(lambda: (go_on.wait(60), found.append(threading.current_thread())))
    assert not found
    go_on.set()
    wait()
    copier.now(lambda: found.append(threading.current_thread()))
    copier.settle()
    assert [thread is threading.main_thread() for thread in found] == [False, True]
    assert isinstance(copier_of(CPU), ThreadCopier)


class Layers:
    """A device of a shard group that goes through ``order``: each layer is gathered, computed with, dropped,
    as ``ShardGroup`` does it. ``seen``: layers, and what was computed with.
    """

    def __init__(self, gpu: Gpu, copier: StreamCopier, chance: random.Random) -> None:
        self.gpu, self.copier, self.chance = gpu, copier, chance
        self.seen: list[tuple[int, Any]] = []
        self._taken: dict[int, tuple[Stream, list[Any]]] = {}
        self._ahead: tuple[int, Wait] | None = None

    def copy(self, layer: int) -> Callable[[], None]:
        def copied() -> None:
            taken = self._taken[layer] = self.gpu.take()
            for _ in range(self.chance.randrange(3)):
                self.gpu.tell(lambda: None)
            self.gpu.tell(lambda: taken[1].__setitem__(0, layer))

        return copied

    def layer(self, layer: int, following: int | None) -> None:
        under_way, self._ahead = self._ahead, None
        if under_way is not None:
            under_way[1]()
        if under_way is None or under_way[0] != layer:
            if under_way is not None:
                self.drop(under_way[0])
            self.copier.now(self.copy(layer))
        if following is not None:
            self._ahead = following, self.copier.ahead(self.copy(following))
        _, memory = self._taken[layer]
        for _ in range(1 + self.chance.randrange(3)):
            self.gpu.tell(lambda: self.seen.append((layer, memory[0])))
        self.gpu.get_on()
        self.drop(layer)
        if self.chance.random() < 0.3:
            self.beside()

    def drop(self, layer: int) -> None:
        self.copier.drop(lambda: self.gpu.drop(self._taken.pop(layer)))

    def beside(self) -> None:
        """One who has a stream that is the same to the GPU takes memory of it, and writes to it."""
        with self.gpu.stream(self.copier._beside):
            taken = self.gpu.take()
            self.gpu.tell(lambda: taken[1].__setitem__(0, "somebody else's"))
            self.gpu.drop(taken)


def through(gpu: Gpu, copier: StreamCopier, seed: int) -> Layers:
    """Passes forth and back, of which some halt and leave a layer that nobody asks for."""
    chance = random.Random(seed)
    layers = Layers(gpu, copier, chance)
    for _ in range(4):
        order = list(range(5))[:: chance.choice((1, -1))]
        order = order[: chance.randrange(1, 6)]
        for place, layer in enumerate(order):
            after = order[place + 1] if place + 1 < len(order) else chance.choice((None, 7))
            layers.layer(layer, after)
    gpu.default.synchronize()
    return layers


@pytest.mark.parametrize("seed", range(40))
def test_a_gpu_computes_with_the_weights_of_the_layer(seed: int) -> None:
    gpu = Gpu(seed)
    layers = through(gpu, StreamCopier(CUDA, gpu), seed)
    assert layers.seen
    assert all(layer == found for layer, found in layers.seen)
    assert len(gpu.streams) == 2


class _Hasty(StreamCopier):
    """Takes memory, copies and gives it back without a look at what is still computed."""

    def ahead(self, copy: Callable[[], object]) -> Wait:
        computes = self._cuda.current_stream(CUDA)
        with self._cuda.stream(self._beside):
            copy()
            copied = self._beside.record_event()
        return lambda: computes.wait_event(copied)

    def drop(self, drop: Callable[[], object]) -> None:
        drop()


class _Rash(StreamCopier):
    """Gives memory back without a look at what is still computed."""

    def drop(self, drop: Callable[[], object]) -> None:
        drop()


class _Careless(StreamCopier):
    """Computes without a look at what is still copied."""

    def ahead(self, copy: Callable[[], object]) -> Wait:
        super().ahead(copy)
        return lambda: None


@pytest.mark.parametrize("wrong", [_Hasty, _Rash, _Careless])
def test_the_model_finds_what_a_gpu_would_do_with_less(wrong: type[StreamCopier]) -> None:
    found = 0
    for seed in range(40):
        gpu = Gpu(seed)
        layers = through(gpu, wrong(CUDA, gpu), seed)
        found += any(layer != what for layer, what in layers.seen)
    assert found > 5


def test_what_was_told_is_done_when_it_is_settled() -> None:
    gpu, done = Gpu(1), []
    copier = StreamCopier(CUDA, gpu)
    copier.now(lambda: gpu.tell(lambda: done.append("copied")))
    gpu.tell(lambda: done.append("computed"))
    assert not done
    copier.settle()
    assert done == ["copied", "computed"]


def test_a_copy_that_fails_leaves_the_stream_it_was_in() -> None:
    def fails() -> None:
        raise MemoryError

    gpu = Gpu(1)
    copier = StreamCopier(CUDA, gpu)
    with suppress(MemoryError):
        copier.now(fails)
    assert gpu.current_stream(CUDA) is gpu.default
