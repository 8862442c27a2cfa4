"""An update in one pass: the bits of clipping, rule and copies by torch, from the C file as it is."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oobleckd.protocol.optimizers import Knobs
from oobleckd.worker.optimizers import choice, compiled
from oobleckd.worker.optimizers.choice import as_torch, update_of
from oobleckd.worker.optimizers.compiled import CompiledPass, Roundings
from oobleckd.worker.optimizers.one_pass import Element, ElementRule, Update, UpdatedKeys
from oobleckd.worker.optimizers.registry import rule_of
from oobleckd.worker.optimizers.rule import UpdateStep
from oobleckd.worker.optimizers.torch_passes import update_by_torch
from oobleckd.worker.runtime import library
from tests.helpers.kernels import update_folder

RULES = {
    "adamw": {}, "adam": {}, "lion": {}, "sgd": {},
    "momentum": {"momentum": 0.9}, "nesterov": {"momentum": 0.9, "nesterov": True},
}  # fmt: skip
"""By name what they are told of momentum."""
SHAPES = ((300, 7), (5,), (1030,), (1,), (3, 16, 2), (70_001,))


def knobs(name: str, betas: tuple[float, float] = (0.9, 0.95)) -> Knobs:
    more: dict[str, Any] = {"momentum": 0.0, "nesterov": False} | RULES[name]
    return Knobs(betas, 1e-8, **more)


def rule(name: str) -> ElementRule:
    return cast("ElementRule", rule_of("sgd" if "momentum" in RULES[name] else name))


@pytest.fixture(autouse=True)
def _as_it_is(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Updates are made by the C file as it is, whatever was installed."""
    monkeypatch.setattr(choice, "update_library", lambda: compiled.update_library(update_folder()))
    choice.forget()
    yield
    choice.forget()


def one_pass(name: str) -> CompiledPass:
    found = update_of(rule(name), "cpu")
    assert isinstance(found, CompiledPass), "no roundings are torch's"
    return found


def keys_of(
    name: str, shapes: list[tuple[int, ...]], numbers: Tensor, *, narrow: bool, copies: bool
) -> UpdatedKeys:
    """Of ``shapes``, with ``numbers`` in turn for everything: parameters, gradients, slots."""
    told = rule(name).slots((1,), knobs(name))
    drawn = [numbers.roll(row) for row in range(2 + len(told))]
    by_key = [
        [part.view(shape).clone() for part, shape in zip(flat.split(sizes_of(shapes)), shapes, strict=True)]
        for flat in drawn
    ]
    params, grads, *rest = by_key
    slots = {}
    for slot, tensors in zip(told, rest, strict=True):
        kept = [tensor.abs() for tensor in tensors] if slot.name == "exp_avg_sq" else tensors
        slots[slot.name] = [tensor.bfloat16() for tensor in kept] if narrow and slot.narrow else kept
    rounded = [torch.zeros(shape, dtype=torch.bfloat16) if copies else None for shape in shapes]
    return UpdatedKeys(params, grads, slots, rounded)


def sizes_of(shapes: list[tuple[int, ...]]) -> list[int]:
    return [math.prod(shape) for shape in shapes]


def bits_of(keys: UpdatedKeys) -> list[Tensor]:
    tensors = [*keys.params, *keys.grads, *(t for slot in keys.slots.values() for t in slot)]
    tensors += [copy for copy in keys.rounded if copy is not None]
    return [each.reshape(-1).view(torch.int32 if each.itemsize == 4 else torch.int16) for each in tensors]


def assert_as_torch(
    name: str, update: Update, step: UpdateStep, scale: float, *what: Any, **how: bool
) -> None:
    mine, wanted = (keys_of(name, *what, **how) for _ in range(2))
    update(mine, step, scale)
    update_by_torch(rule(name), wanted, step, scale)
    for number, (one, other) in enumerate(zip(bits_of(mine), bits_of(wanted), strict=True)):
        assert torch.equal(one, other), f"tensor {number}"


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", RULES)
def test_updates_are_those_of_torch_to_the_bit(name: str, narrow: bool) -> None:
    numbers = torch.randn(sum(sizes_of(list(SHAPES))), generator=torch.Generator().manual_seed(3)) * 0.1
    for decay, scale, betas in ((0.1, 0.37, (0.9, 0.95)), (0.0, 1.0, (0.3, 0.4))):
        step = UpdateStep(11, 0.03, decay, knobs(name, betas))
        assert_as_torch(name, one_pass(name), step, scale, list(SHAPES), numbers, narrow=narrow, copies=True)


def floats() -> st.SearchStrategy[float]:
    """Float32 numbers of all magnitudes, infinite and subnormal ones and zeros of both signs among them."""
    made = st.builds(math.ldexp, st.integers(-(2**24) + 1, 2**24 - 1), st.integers(-149, 104))
    return st.one_of(st.sampled_from([0.0, -0.0, math.inf, -math.inf, 1.0, -1.0]), made)


@pytest.mark.parametrize("name", RULES)
@given(data=st.data())
def test_of_any_numbers(name: str, data: st.DataObject) -> None:
    """Of parameters of any size, so with any number left over; of any magnitude; at any step."""
    values = data.draw(st.lists(floats(), min_size=1, max_size=40))
    narrow, copies = data.draw(st.booleans()), data.draw(st.booleans())
    betas = data.draw(st.tuples(st.floats(0, 0.9999), st.floats(0, 0.9999)))
    step = UpdateStep(
        data.draw(st.one_of(st.integers(0, 10**6), st.integers(2**24 - 2, 2**25))),
        data.draw(st.floats(1e-12, 1e3)),
        data.draw(st.sampled_from([0.0, 1e-6, 0.1, 1.0])),
        knobs(name, betas),
    )
    scale = data.draw(st.sampled_from([1.0, 0.999, 1e-3, 1e-30]))
    numbers = torch.tensor(values)
    assert_as_torch(
        name, one_pass(name), step, scale, [(len(values),)], numbers, narrow=narrow, copies=copies
    )


@pytest.mark.parametrize(("lr", "decay"), [(0.7652327131625477, 0.8923009687055531)])
def test_a_decay_is_rounded_once_where_torch_does(lr: float, decay: float) -> None:
    """1 - lr * decay lies where float32 shows whether the product was rounded."""
    step = UpdateStep(0, lr, decay, knobs("adamw"))
    ones = torch.ones(19)
    assert_as_torch("adamw", one_pass("adamw"), step, 1.0, [(19,)], ones, narrow=False, copies=False)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("parts", [2, 7])
@pytest.mark.parametrize("name", ["adamw", "nesterov"])
def test_threads_leave_no_trace_in_an_update(
    name: str, parts: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither ours nor torch's."""
    update = one_pass(name)
    monkeypatch.setattr(compiled, "num_parts", lambda _: parts)
    numbers = torch.randn(sum(sizes_of(list(SHAPES))), generator=torch.Generator().manual_seed(4))
    step = UpdateStep(2, 0.01, 0.1, knobs(name))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert_as_torch(name, update, step, 0.5, list(SHAPES), numbers, narrow=True, copies=True)
    finally:
        torch.set_num_threads(before)


def test_what_was_kept_for_a_backward_pass_and_is_updated_is_noticed() -> None:
    param = torch.ones(5, requires_grad=True)
    out = (param * param).sum()
    keys = UpdatedKeys([param], [torch.ones(5)], {}, [None])
    update_of(rule("sgd"), "cpu")(keys, UpdateStep(0, 0.1, 0.0, knobs("sgd")), 1.0)
    assert param.tolist() == pytest.approx([0.9] * 5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


# --------------------------------------------------------------------------- what makes an update


def test_roundings_that_are_not_torchs_are_found() -> None:
    """The trial knows every other way of rounding from the right one, or there would be nothing to choose."""
    found = compiled.update_library(update_folder())
    assert found is not None
    for name, element in (("adamw", Element.ADAMW), ("lion", Element.LION)):
        right = one_pass(name)._roundings
        others = [Roundings(width, fuses, right.nan) for width in (16, 8, 4) for fuses in (True, False)]
        alike = [each for each in others if as_torch(CompiledPass(found, element, each), rule(name))]
        assert alike == [right]


def test_where_no_roundings_are_torchs_torch_makes_the_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "as_torch", lambda *_: False)
    assert not isinstance(update_of(rule("adamw"), "cpu"), CompiledPass)


def test_without_a_library_torch_makes_the_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "update_library", lambda: compiled.update_library(tmp_path))
    assert not isinstance(update_of(rule("adamw"), "cpu"), CompiledPass)


@pytest.mark.parametrize(("name", "kind"), [("muon", "cpu"), ("adafactor", "cpu"), ("adamw", "cuda")])
def test_what_has_no_pass_of_its_own_is_torchs(name: str, kind: str) -> None:
    assert not isinstance(update_of(rule_of(name), kind), CompiledPass)


def test_a_library_of_another_interface_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "INTERFACE", compiled.INTERFACE + 1)
    assert compiled.update_library(update_folder()) is None
    assert library.library(update_folder(), "_update", "no_such_function", 1) is None


def test_a_cpu_without_fused_operations_has_torchs_bits_too() -> None:
    """torch as it computes there, and the same C file."""
    folder = str(update_folder())
    code = (
        "from oobleckd.worker.optimizers import choice, compiled\n"
        "from oobleckd.worker.optimizers.registry import rule_of\n"
        "from pathlib import Path\n"
        f"choice.update_library = lambda: compiled.update_library(Path({folder!r}))\n"
        "found = [choice.update_of(rule_of(name), 'cpu') for name in ('adamw', 'adam', 'sgd', 'lion')]\n"
        "print({each._roundings.fuses for each in found})\n"
    )
    env = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    command = [sys.executable, "-P", "-c", code]
    assert subprocess.run(command, env=env, check=True, capture_output=True).stdout == b"{False}\n"
