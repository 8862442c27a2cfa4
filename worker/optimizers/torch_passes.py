"""An update by torch, in three passes over memory: clipping, the rule, and the copies in bfloat16.

What every other way of making an update must come to, to the bit.
"""

from __future__ import annotations

import torch

from oobleckd.worker.optimizers.one_pass import UpdatedKeys
from oobleckd.worker.optimizers.rule import OptimizerRule, UpdateStep


@torch.no_grad()
def update_by_torch(rule: OptimizerRule, keys: UpdatedKeys, step: UpdateStep, scale: float) -> None:
    """Multiply the gradients of ``keys`` by ``scale``, make the update ``step`` by ``rule``, and round the
    parameters to their copies, all in place.
    """
    if scale != 1.0:
        torch._foreach_mul_(list(keys.grads), scale)  # torch's only in-place multiply of a list
    if any(tensors[0].dtype != torch.float32 for tensors in keys.slots.values()):
        for number in range(len(keys.params)):  # what is widened is as large as its key, and not its bucket
            _update_widened(rule, keys, number, step)
    else:
        rule.update_(keys.params, keys.grads, keys.slots, step)
    pairs = [(copy, param) for copy, param in zip(keys.rounded, keys.params, strict=True) if copy is not None]
    if pairs:
        copies, params = zip(*pairs, strict=True)
        torch._foreach_copy_(list(copies), list(params))


def _update_widened(rule: OptimizerRule, keys: UpdatedKeys, number: int, step: UpdateStep) -> None:
    kept = {slot: tensors[number] for slot, tensors in keys.slots.items()}
    wide = {slot: tensor.float() for slot, tensor in kept.items()}
    slots = {slot: [tensor] for slot, tensor in wide.items()}
    rule.update_([keys.params[number]], [keys.grads[number]], slots, step)
    for slot, tensor in kept.items():
        if tensor.dtype != torch.float32:
            tensor.copy_(wide[slot])
