"""Chooses what makes the updates of a rule on a device: one pass, or torch's three.

Owns the choice, made once in a process, and the trial before it, which finds how torch rounds.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from oobleckd.protocol.optimizers import Knobs
from oobleckd.worker.optimizers.compiled import CompiledPass, Roundings, update_library
from oobleckd.worker.optimizers.one_pass import ElementRule, Update, UpdatedKeys, sees_elements
from oobleckd.worker.optimizers.rule import OptimizerRule, UpdateStep
from oobleckd.worker.optimizers.torch_passes import update_by_torch

_log = logging.getLogger(__name__)
_SIZES = [3, 7, 15, 15, 31, 1037]
"""Of the parameters that are tried: with few and with many numbers left over at any width."""
_WIDTHS = (16, 8, 4)
_BETAS = ((0.9, 0.95), (0.3, 0.4), (0.0, 0.0))
_SCALE = 0.37


def update_of(rule: OptimizerRule, kind: str) -> Update:
    """What makes the updates of ``rule`` on devices of this ``torch.device.type``."""
    in_one_pass = None
    if kind == "cpu" and sees_elements(rule):
        in_one_pass = _in_one_pass(cast("ElementRule", rule))
    return in_one_pass or functools.partial(update_by_torch, rule)


@functools.cache
def _in_one_pass(rule: ElementRule) -> Update | None:
    library = update_library()
    if library is None:
        _log.info("no compiled updates: install again where there is a C compiler, they are faster")
        return None
    # Which products and sums torch's kernels round at one go their compiler chose, and for numbers that are
    # left over at the end otherwise: it is tried, and not known by version. (D-kernels-005)
    for roundings in _possible():
        found = CompiledPass(library, rule.element, roundings)
        if as_torch(found, rule):
            return found
    _log.info("compiled updates have other bits than torch here: torch makes them")
    return None


forget = _in_one_pass.cache_clear
"""What was chosen is to be chosen anew."""


def as_torch(update: Update, rule: ElementRule) -> bool:
    """Whether ``update`` makes of some thousand numbers on a CPU what torch does by ``rule``, to the bit,
    with and without decay, momentum and clipping.
    """
    for case, (step, scale, narrow) in enumerate(_cases()):
        mine, wanted = (_keys(rule, case, step.knobs, narrow=narrow) for _ in range(2))
        update(mine, step, scale)
        update_by_torch(rule, wanted, step, scale)
        if not all(map(torch.equal, _bits(mine), _bits(wanted))):
            return False
    return True


def _possible() -> Iterator[Roundings]:
    nan = int(torch.full((1,), torch.nan).bfloat16().view(torch.int16)) & 0xFFFF
    for fuses, width in itertools.product((True, False), _WIDTHS):
        yield Roundings(width, fuses, nan)


def _cases() -> Iterator[tuple[UpdateStep, float, bool]]:
    for betas, decay, narrow in itertools.product(_BETAS, (0.0, 0.1), (False, True)):
        knobs = Knobs(betas, 1e-8, betas[0], nesterov=narrow)
        yield UpdateStep(3, 0.03, decay, knobs), _SCALE if decay else 1.0, narrow


def _keys(rule: ElementRule, seed: int, knobs: Knobs, *, narrow: bool) -> UpdatedKeys:
    """Parameters of ``_SIZES`` in the middle of their training."""
    generator = torch.Generator().manual_seed(seed)

    def drawn() -> list[Tensor]:
        flat = torch.randn(sum(_SIZES), generator=generator)
        zeros = torch.randint(8, flat.shape, generator=generator) == 0
        return list(torch.split(torch.where(zeros, flat * 0.0, flat), _SIZES))  # of both signs

    slots = {}
    for slot in rule.slots((1,), knobs):
        numbers = [tensor.mul(0.1) if slot.narrow else tensor.mul(0.1).square() for tensor in drawn()]
        slots[slot.name] = [number.bfloat16() for number in numbers] if narrow and slot.narrow else numbers
    params = drawn()
    return UpdatedKeys(params, drawn(), slots, [param.bfloat16() for param in params])


def _bits(keys: UpdatedKeys) -> Iterator[Tensor]:
    slots = [tensor for tensors in keys.slots.values() for tensor in tensors]
    for tensor in (*keys.params, *keys.grads, *slots, *(copy for copy in keys.rounded if copy is not None)):
        yield tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
