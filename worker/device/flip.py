"""One flipped bit on demand, as bad memory flips it: what ``kill-node --how flip-…`` does to a device.

Owns which one: of the first bucket of which the device has numbers, in the mantissa, so that nothing becomes
infinite and only a comparison can find it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oobleckd.protocol.parts import How
from oobleckd.worker.round.reduce import Reducer
from oobleckd.worker.state.bucket_state import PARAM

BIT = 1 << 12
"""Of a float32 the middle of the mantissa; of a sum in float64 one of the last bits of its integers."""


def flip(how: How, reducer: Reducer) -> bool:
    """Flip a bit of a weight, of an optimizer moment, of a gradient sum that is to be contributed, or of the
    next mean gradient that the device makes; False: there is nothing yet.
    """
    # The shards of one rank of small buckets may be empty.
    buckets = {bucket: state for bucket, state in reducer.store.buckets.items() if state.params}
    if not buckets:
        return False
    first = min(buckets)
    match how:
        case "flip-weight":
            _flip(buckets[first].params[0])
        case "flip-moment":
            moments = [tensor for name, tensor in buckets[first].flats.items() if name != PARAM]
            if not moments:
                return False
            _flip(moments[0])
        case "flip-mean":
            reducer.upset = _flip
        case _:
            part = next(part for (bucket, _), part in reducer.parts.items() if bucket == first)
            memory = part.memory()
            if memory is None or first in reducer.exchange.contributed:
                return False
            _flip(memory)
    return True


def _flip(tensor: Tensor) -> None:
    flat = tensor.data.reshape(
        -1
    )  # unlike detach(), unseen by autograd; nor does memory tell it, between a forward and its backward
    words = flat.view(torch.int64 if flat.dtype == torch.float64 else torch.int32)
    words[len(words) // 2] ^= BIT
