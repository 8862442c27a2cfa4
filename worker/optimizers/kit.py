"""Looks whether a rule keeps what every rule promises: ``python -m oobleckd.worker.optimizers NAME``.

Owns the questions: whether a parameter's bits depend on what is updated together with it, on the other
parameters' numbers, on the clock, on a generator, on what the rule did before, or on where its numbers lie;
and whether anything is written that is not the rule's to write. What it finds is there; a rule that looks at
the clock once a year passes.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from oobleckd.protocol.optimizers import Knobs, Slot
from oobleckd.worker.optimizers.rule import OptimizerRule, UpdateStep

_VECTORS: tuple[tuple[int, ...], ...] = ((1,), (7,), (64,), (257,))
_MATRICES: tuple[tuple[int, ...], ...] = ((16, 16), (5, 33), (48, 8), (3, 1))
SHAPES = (*_VECTORS, *_MATRICES)
"""Of the parameters that a rule is tried on."""
_NUM_STEPS = 3
_LR, _DECAY = 1e-2, 0.1
_CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time")
_LEAP_S = 7919.0  # between two looks at the clock
_GAP = 64  # numbers before a parameter that lies in the middle of a storage, as the engine's do

State = tuple[Tensor, dict[str, Tensor]]
"""A parameter and its slots."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """A rule on parameters of ``shapes``, from one beginning."""

    make: Callable[[], OptimizerRule]
    knobs: Knobs
    shapes: tuple[tuple[int, ...], ...]

    def begin(self) -> list[State]:
        """Parameters, and slots of zeros."""
        rule = self.make()
        return [
            (
                _drawn(shape, key),
                {slot.name: torch.zeros(slot.shape) for slot in rule.slots(shape, self.knobs)},
            )
            for key, shape in enumerate(self.shapes)
        ]

    def run(self, rule: OptimizerRule, states: Sequence[State], groups: Sequence[Sequence[int]]) -> None:
        """Some steps; parameters are updated together as ``groups`` say, those with the same slots."""
        for number in range(_NUM_STEPS):
            step = UpdateStep(number, _LR / (number + 1), _DECAY, self.knobs)
            for group in groups:
                for keys in _alike(group, states):
                    params = [states[key][0] for key in keys]
                    grads = [_drawn(tuple(states[key][0].shape), 1000 * (number + 1) + key) for key in keys]
                    names = states[keys[0]][1]
                    slots = {name: [states[key][1][name] for key in keys] for name in names}
                    with torch.no_grad():
                        rule.update_(params, grads, slots, step)

    def after(self, groups: Sequence[Sequence[int]] | None = None) -> list[State]:
        """Where it comes to, with all together if ``groups`` do not say otherwise."""
        states = self.begin()
        self.run(self.make(), states, groups or [range(len(states))])
        return states


def problems_of(make: Callable[[], OptimizerRule], knobs: Knobs, *, matrices_only: bool = False) -> list[str]:
    """What the rule that ``make`` makes does not keep, in words; empty where nothing was found.
    ``matrices_only``: it takes no others.
    """
    trial = _Trial(make, knobs, _MATRICES if matrices_only else SHAPES)
    found = _problems_of_slots(trial)
    if found:
        return found
    right = trial.after()
    questions = (
        _grouping, _other_parameters, _clock, _generators, _memory_of_its_own, _place, _gradients,
    )  # fmt: skip
    return [problem for question in questions for problem in question(trial, right)]


# --------------------------------------------------------------------------- the questions


def _problems_of_slots(trial: _Trial) -> list[str]:
    def told() -> list[tuple[Slot, ...]]:
        return [tuple(trial.make().slots(shape, trial.knobs)) for shape in trial.shapes]

    return [] if told() == told() else ["its slots are others when they are asked for again"]


def _grouping(trial: _Trial, right: Sequence[State]) -> list[str]:
    keys = list(range(len(right)))
    ways = ([[key] for key in keys], [keys[::-1]], [keys[::2], keys[1::2]], [keys[3:], keys[:3]])
    if all(_same(trial.after(groups), right) for groups in ways):
        return []
    return ["a parameter's bits depend on what is updated together with it, or in which order"]


def _other_parameters(trial: _Trial, right: Sequence[State]) -> list[str]:
    for key in range(len(right)):
        states = trial.begin()
        for other, (param, _) in enumerate(states):
            if other != key:
                param.mul_(-3.0).add_(1.0)
        trial.run(trial.make(), states, [range(len(states))])
        if not _same(states[key : key + 1], right[key : key + 1]):
            return ["a parameter's bits depend on the numbers of another one"]
    return []


def _clock(trial: _Trial, right: Sequence[State]) -> list[str]:
    with _leaping_clocks(trial.make):
        again = trial.after()
    return [] if _same(again, right) else ["its bits depend on the clock"]


def _generators(trial: _Trial, right: Sequence[State]) -> list[str]:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - the global one is meant
    try:
        torch.manual_seed(20_011)
        random.seed(20_011)
        np.random.seed(20_011)  # noqa: NPY002
        seeded = _generators_now()
        again = trial.after()
        drew = seeded != _generators_now()
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])  # noqa: NPY002
    return [] if _same(again, right) and not drew else ["it draws from a generator"]


def _generators_now() -> tuple[bytes, object, bytes]:
    numbers = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), str(numbers).encode()


def _memory_of_its_own(trial: _Trial, right: Sequence[State]) -> list[str]:
    rule, states = trial.make(), trial.begin()
    trial.run(rule, trial.begin(), [range(len(states))])
    trial.run(rule, states, [range(len(states))])
    return (
        [] if _same(states, right) else ["its bits depend on updates of something else that it made before"]
    )


def _place(trial: _Trial, right: Sequence[State]) -> list[str]:
    states = [
        (_moved(param), {name: _moved(slot) for name, slot in slots.items()})
        for param, slots in trial.begin()
    ]
    kept = [(param.data_ptr(), [slot.data_ptr() for slot in slots.values()]) for param, slots in states]
    trial.run(trial.make(), states, [range(len(states))])
    moved = [(param.data_ptr(), [slot.data_ptr() for slot in slots.values()]) for param, slots in states]
    if kept != moved:
        return ["it does not update in place"]
    return [] if _same(states, right) else ["its bits depend on where the numbers lie in memory"]


def _gradients(trial: _Trial, right: Sequence[State]) -> list[str]:
    del right
    states, rule = trial.begin(), trial.make()
    for keys in _alike(range(len(states)), states):
        grads = [_drawn(tuple(states[key][0].shape), key) for key in keys]
        before = [grad.clone() for grad in grads]
        names = states[keys[0]][1]
        slots = {name: [states[key][1][name] for key in keys] for name in names}
        with torch.no_grad():
            step = UpdateStep(0, _LR, _DECAY, trial.knobs)
            rule.update_([states[key][0] for key in keys], grads, slots, step)
        if not all(map(torch.equal, grads, before)):
            return ["it writes into gradients"]
    return []


# --------------------------------------------------------------------------- how they are asked


@contextmanager
def _leaping_clocks(make: Callable[[], OptimizerRule]) -> Iterator[None]:
    """Every clock of ``time`` goes on by hours between two looks, also where the rule's module has its
    functions under names of its own.
    """
    plain = {name: getattr(time, name) for name in _CLOCKS}
    now = [0.0]

    def leaping(name: str) -> Callable[[], float]:
        def look() -> float:
            now[0] += _LEAP_S
            value = plain[name]() + now[0] * (10**9 if name.endswith("_ns") else 1)
            return int(value) if name.endswith("_ns") else value

        return look

    replaced: list[tuple[ModuleType, str, object]] = []
    own = sys.modules.get(type(make()).__module__)
    try:
        for module in filter(None, (time, own)):
            for name, value in list(vars(module).items()):
                clock = next((clock for clock, was in plain.items() if value is was), None)
                if clock is not None:
                    replaced.append((module, name, value))
                    setattr(module, name, leaping(clock))
        yield
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)


def _alike(group: Sequence[int], states: Sequence[State]) -> list[list[int]]:
    """``group`` in parts with the same slots, as the engine calls a rule."""
    parts: dict[tuple[str, ...], list[int]] = {}
    for key in group:
        parts.setdefault(tuple(states[key][1]), []).append(key)
    return list(parts.values())


def _drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _moved(tensor: Tensor) -> Tensor:
    """A copy in the middle of another storage."""
    memory = torch.zeros(tensor.numel() + 2 * _GAP)
    return memory[_GAP : _GAP + tensor.numel()].view(tensor.shape).copy_(tensor)


def _same(one: Sequence[State], other: Sequence[State]) -> bool:
    """To the bit."""
    return all(
        torch.equal(_bits(a[0]), _bits(b[0]))
        and all(torch.equal(_bits(a[1][name]), _bits(b[1][name])) for name in b[1])
        for a, b in zip(one, other, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.int32)
