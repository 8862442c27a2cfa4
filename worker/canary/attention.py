"""Which attention kernel the blocks of a model run, found by listening to what they ask torch for.

Owns the listening, and torch's rule for a CUDA device that is not here. A family is not known by its name: a
block of each kind runs once, in a device's canary or on the meta device, and its call of
``scaled_dot_product_attention`` is noted with shapes, mask and dropout. What torch makes of that on this
device it says itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from oobleckd.protocol.modelnotes import AttentionBackend, AttentionNote
from oobleckd.worker.models import Batch, Call, ModelSpec

_NAMES: dict[int, AttentionBackend] = {
    int(SDPBackend.MATH.value): "math",
    int(SDPBackend.FLASH_ATTENTION.value): "flash",
    int(SDPBackend.EFFICIENT_ATTENTION.value): "memory-efficient",
    int(SDPBackend.CUDNN_ATTENTION.value): "cudnn",
}
_FLASH_HEAD = 256
"""The widest head that flash takes."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A call of ``scaled_dot_product_attention``: the shapes of query, key and value (batch, heads, tokens,
    width), and of the mask, () where there is none; whether that is one of bools.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: tuple[int, ...] = ()
    of_bools: bool = False
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False
    dtype: torch.dtype = torch.float32


class Listener(TorchFunctionMode):
    """Within, the last call of torch's attention is noted. ``dtype``: that autocast makes of its inputs.
    ``through``: whether it is computed; else what comes out has its shape and no numbers.
    """

    def __init__(self, dtype: torch.dtype, *, through: bool = True) -> None:
        super().__init__()
        self.heard: AttentionCall | None = None
        self._dtype, self._through = dtype, through

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """As ``func``."""
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        out = self._note(*args, **kwargs)
        return func(*args, **kwargs) if self._through else out

    def _note(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        del scale
        self.heard = AttentionCall(
            tuple(query.shape),
            tuple(key.shape),
            tuple(value.shape),
            () if attn_mask is None else tuple(attn_mask.shape),
            attn_mask is not None and attn_mask.dtype == torch.bool,
            dropout_p,
            is_causal,
            enable_gqa,
            self._dtype,
        )
        return query.new_empty((*query.shape[:-1], value.shape[-1]))


def attention_of(spec: ModelSpec) -> tuple[tuple[AttentionCall | None, int], ...]:
    """What the blocks of ``spec`` ask torch for with one row of the job, and how many ask for it; None: they
    compute attention themselves.
    """
    batch = _row(spec)
    calls = spec.calls_for(batch)
    dtype = dtype_of(spec)
    # (D-models-009)
    by_kind: dict[tuple[str, str], AttentionCall | None] = {}
    found: dict[AttentionCall | None, int] = {}
    for layer in range(1, spec.num_layers - 1):
        kind = spec.kind_of(layer), spec.attention_kind(layer)
        if kind not in by_kind:
            by_kind[kind] = _listen(spec, layer, calls[layer], batch, dtype)
        found[by_kind[kind]] = found.get(by_kind[kind], 0) + 1
    return tuple(found.items())


def dtype_of(spec: ModelSpec) -> torch.dtype:
    """In which queries and keys are multiplied."""
    return torch.bfloat16 if spec.job.train.precision == "bf16" else torch.float32


def note_on(call: AttentionCall | None, blocks: int, device: torch.device) -> AttentionNote:
    """The kernel that torch chooses on ``device`` for ``call`` of so many blocks, as this process is set
    up.
    """
    if call is None:
        return _eager(blocks)
    backend = chosen(call, device)
    if device.type == "cuda":
        expected, why = chosen_by_cuda(call)
        return AttentionNote(blocks, backend, why if backend == expected else "")
    return AttentionNote(blocks, backend, "dropout" if backend == "math" and call.dropout else "")


def note_for_cuda(call: AttentionCall | None, blocks: int) -> AttentionNote:
    """The kernel that torch would choose on a CUDA device, which need not be here."""
    return _eager(blocks) if call is None else AttentionNote(blocks, *chosen_by_cuda(call))


def _eager(blocks: int) -> AttentionNote:
    return AttentionNote(blocks, "eager", "the family's own code")


def chosen(call: AttentionCall, device: torch.device) -> AttentionBackend:
    """What torch chooses for ``call`` on ``device``, in the mode that it is in."""
    query, key, value = (
        torch.empty(shape, dtype=call.dtype, device=device, requires_grad=True)
        for shape in (call.query, call.key, call.value)
    )
    mask = None
    if call.mask:
        mask = torch.empty(call.mask, dtype=torch.bool if call.of_bools else call.dtype, device=device)
    number = torch._fused_sdp_choice(  # noqa: SLF001 - what the call itself asks first
        query, key, value, mask, call.dropout, call.causal, enable_gqa=call.grouped
    )
    return _NAMES.get(number, "math")


def chosen_by_cuda(call: AttentionCall) -> tuple[AttentionBackend, str]:
    """What torch chooses for ``call`` on a card of compute capability 8.0 or newer, and why it is no better
    one.

    In strict mode cuDNN's is refused, and the others are deterministic, flash first (``sdp_utils.cpp`` of
    torch 2.13).
    """
    narrow, head = call.dtype != torch.float32, call.query[-1]
    not_flash = ""
    if call.mask:
        not_flash = "a mask"
    elif not narrow:
        not_flash = "float32"
    elif not head == call.key[-1] == call.value[-1] <= _FLASH_HEAD:
        not_flash = f"heads of {head}"
    if not not_flash:
        return "flash", ""
    aligned = 8 if narrow else 4
    if call.key[1] != call.query[1]:
        return "math", f"{not_flash}, and {call.query[1]} query heads share {call.key[1]} of keys"
    if any(shape[-1] % aligned for shape in (call.query, call.value)):
        return "math", f"{not_flash}, and heads of {head}, no multiple of {aligned}"
    return "memory-efficient", not_flash


def _listen(
    spec: ModelSpec, layer: int, call: Call, batch: Batch, dtype: torch.dtype
) -> AttentionCall | None:
    rows, length = batch.inputs.shape
    listener = Listener(dtype, through=False)
    with listener:
        spec.run_on_meta(layer, call, (rows, length))
    return listener.heard


def _row(spec: ModelSpec) -> Batch:
    """One row of the job; where documents are kept apart it has two."""
    length = spec.job.train.sequence
    tokens = torch.zeros((1, length), dtype=torch.int64)
    if not spec.job.data.is_separate:
        return Batch(tokens, tokens)
    half = (length + 1) // 2
    at = torch.arange(length).view(1, -1)
    return Batch(tokens, tokens, at % half, at // half, length)
