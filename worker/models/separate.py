"""Documents of a row kept apart: what the body and the blocks of a model are given so that no token sees
another document.

Owns masks, and what transformers takes for the borders of documents. Which family takes what is ``config``'s,
and what its blocks are called with a ``CallRecorder`` finds out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, masking_utils

from oobleckd.worker.models.config import BY_MASK, MASKED, first_position
from oobleckd.worker.models.split import Call, CallRecorder, mapped
from oobleckd.worker.runtime.errors import UserError

_GIVEN: ContextVar[tuple[Tensor | None] | None] = ContextVar("borders", default=None)
"""What ``borders`` was given, in this thread; None outside."""
_concluded = masking_utils.find_packed_sequence_indices


def _given_or_concluded(position_ids: Tensor) -> Tensor | None:
    given = _GIVEN.get()
    concluded: Tensor | None = _concluded(position_ids) if given is None else given[0]
    return concluded


# What it concludes it reads from the device, which costs a GPU a wait; and where no row of a micro-batch has
# a border it makes no mask, so that bits of a row would depend on the rows beside it. Replaced for good: two
# threads that exchange it and put it back would leave the one's in place. (D-models-006)
masking_utils.find_packed_sequence_indices = _given_or_concluded

_UNREAD: ContextVar[bool] = ContextVar("unread", default=False)
"""Whether ``without_masks`` is entered in this thread."""
_ANY_MASK = torch.zeros((1, 1, 1, 1))
_prepared = masking_utils._preprocess_mask_arguments  # noqa: SLF001 - what all that makes masks begins with


def _prepared_if_read(
    config: Any, inputs_embeds: Any, attention_mask: Any, *args: Any, **options: Any
) -> tuple[Any, ...]:
    mask = _ANY_MASK if _UNREAD.get() else attention_mask
    found: tuple[Any, ...] = _prepared(config, inputs_embeds, mask, *args, **options)
    return found


# Of a mask with four dimensions transformers makes no other; and to see whether one is needed at all it may
# read it, for which a GPU is waited for. (D-models-011)
masking_utils._preprocess_mask_arguments = _prepared_if_read  # noqa: SLF001


def record(
    recorder: CallRecorder, config: PretrainedConfig, positions: Tensor, documents: Tensor, dtype: torch.dtype
) -> tuple[Call, ...]:
    """What each block is called with for a micro-batch with these ``positions`` and ``documents``, int64
    (batch, sequence). Masks are of ``dtype``, that of the queries, and one for all blocks that are alike.
    """
    inputs: dict[str, Any] = {"position_ids": positions + first_position(config.model_type, config)}
    if config.model_type in BY_MASK:
        inputs["attention_mask"] = _masks(config, documents)
    with borders(documents):
        calls = recorder((positions.shape[0], positions.shape[1]), **inputs)
    if config._attn_implementation == "sdpa":  # noqa: SLF001 - which transformers chose
        calls = _additive(calls, dtype)
    return calls


@contextmanager
def borders(documents: Tensor | None) -> Iterator[None]:
    """Within, in this thread, transformers takes the numbers of ``documents`` in place of what it would
    conclude from positions; None: nothing has borders.
    """
    token = _GIVEN.set((documents,))
    try:
        yield
    finally:
        _GIVEN.reset(token)


@contextmanager
def without_masks() -> Iterator[None]:
    """Within, in this thread, transformers makes no masks: for a body without blocks, where nobody reads
    them.
    """
    token = _UNREAD.set(True)
    try:
        yield
    finally:
        _UNREAD.reset(token)


def check_apart(calls: tuple[Call, ...], documents: Tensor) -> None:
    """Whether what blocks were recorded to be called with hides the other documents. Raises UserError."""
    others = (documents[:, :, None] != documents[:, None, :])[:, None]
    for number, call in enumerate(calls):
        masks = [tensor for tensor in tensors_of(call) if tensor.dim() == 4]
        hides = [mask if mask.dtype == torch.bool else mask < -1 for mask in masks]  # of bools True hides
        if not hides or not all(bool(hidden[others].all()) for hidden in hides):
            raise UserError(
                f'data.documents: "separate" does not go with this model: block {number} would see other '
                "documents",
                'set data.documents = "joined", or see what the folder\'s config.json says of attention',
            )


def tensors_of(call: Call) -> list[Tensor]:
    """The tensors of ``call``, wherever they stand in it."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(call, note)
    return found


def _masks(config: PretrainedConfig, documents: Tensor) -> Tensor | dict[str, Tensor]:
    """Which tokens see which, (batch, 1, sequence, sequence), in the form that the family takes."""
    seen = (documents[:, :, None] == documents[:, None, :])[:, None]
    at = torch.arange(documents.shape[1], device=documents.device)
    if config.model_type not in MASKED:
        seen = seen & (at[:, None] >= at[None, :])
    if config.model_type == "modernbert":
        near = (at[:, None] - at[None, :]).abs() <= config.sliding_window
        return {"full_attention": seen, "sliding_attention": seen & near}
    if config._attn_implementation == "sdpa":  # noqa: SLF001
        return seen
    if config.model_type == "gpt_oss":
        near = at[:, None] - at[None, :] < config.sliding_window
        return {"full_attention": _as_scores(seen), "sliding_attention": _as_scores(seen & near)}
    return _as_scores(seen)


def _as_scores(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, torch.finfo(torch.float32).min)


def _additive(calls: tuple[Call, ...], dtype: torch.dtype) -> tuple[Call, ...]:
    """``calls`` with masks that are added to the scores, with the same bits as those of bools."""
    # Torch's attention makes one of bools in every layer, and keeps it for the backward. (D-models-008)
    made: dict[int, Tensor] = {}

    def of(tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.bool or tensor.dim() != 4:
            return tensor
        if id(tensor) not in made:
            blank = torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)
            made[id(tensor)] = blank.masked_fill_(~tensor, -torch.inf)
        return made[id(tensor)]

    return tuple(mapped(call, of) for call in calls)
