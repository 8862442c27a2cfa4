"""A profile from a model's shape and a device's data sheet, where nothing was measured.

Owns the arithmetic of transformer layers: parameters, operations, and the bytes that a forward pass keeps.
Parameters, state and outputs are exact. Kept bytes are those that autograd keeps when the layers of
transformers run as they are (every term below is one tensor that is saved), so a profile that was measured on
a CPU has the same to within a few percent (tests/unit/worker/test_analytic.py). Times are estimates: matrix
products at the share of the peak that the sheet says, and what is kept written and read once more at the
memory's rate; a backward takes twice as long. No pass is quicker than its operations are started.

A block that computes again what is cheap ("selective") keeps its input and what its matrix products and its
attention make. Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models,
section 5) compute attention's softmax and dropout again, which fused attention does by itself; what is left
are norms, activation functions and residuals, which are bounded by the memory's rate and not by operations.

Operations as counted by Narayanan et al. 2021 (Megatron-LM) and Korthikanti et al. 2022: two a weight and
token, and ``4 * sequence * width`` a token for attention.
"""

from __future__ import annotations

import msgspec

from oobleckd.planner.costs import flops
from oobleckd.planner.costs.devices import DeviceSheet
from oobleckd.planner.profile import MOMENT_BYTES, ROUNDED_BYTES, LayerCost, Profile

# Tensor by tensor and family by family: a formula for all would be off by a factor of two, and memory
# decides which plans there are. Other families are refused. (D-models-001)
FULL = 4  # bytes of a float32: weights, norms, residuals, logits
NUMBER = 8  # bytes of a token's number, or of its position


class Shape(msgspec.Struct, frozen=True):
    """A decoder of equal blocks.

    ``attention``: width of all query heads together; ``kv``: that of the key heads. ``gated``: RMS norms,
    rotary positions and a gated MLP of ``ffn`` wide (Llama), else layer norms, learnt ``positions`` and a
    plain MLP (GPT-2). ``qkv_bias``, ``bias``: biases there, and everywhere. ``tied``: the head computes with
    the embedding's weights. Dropout after embedding, attention's probabilities and each half of a block, as
    shares.
    """

    num_blocks: int
    hidden: int
    ffn: int
    num_heads: int
    attention: int
    kv: int
    vocab: int
    positions: int = 0
    gated: bool = False
    qkv_bias: bool = False
    bias: bool = False
    tied: bool = False
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    block_dropout: float = 0.0

    @property
    def projections(self) -> int:
        """Weights of a block's matrix products, without biases."""
        attention = self.hidden * (2 * self.attention + 2 * self.kv)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def norm(self) -> int:
        """Parameters of one norm."""
        return self.hidden if self.gated else 2 * self.hidden

    @property
    def block_params(self) -> int:
        """Parameters of a block."""
        qkv = self.attention + 2 * self.kv if self.qkv_bias or self.bias else 0
        rest = self.hidden + self.ffn + self.hidden if self.bias else 0
        return self.projections + qkv + rest + 2 * self.norm

    @property
    def embedding_params(self) -> int:
        """Parameters of the embedding."""
        return self.hidden * (self.vocab + self.positions)

    @property
    def weights(self) -> int:
        """Of all matrix products of a token."""
        return self.num_blocks * self.projections + self.hidden * self.vocab

    @property
    def head_params(self) -> int:
        """Parameters of the final norm and the output projection, which may be the embedding's."""
        return self.hidden * self.vocab + self.norm


class Workload(msgspec.Struct, frozen=True):
    """A micro-batch: ``sequences`` of ``length`` tokens, ``precision`` "fp32" or "bf16" (autocast over
    float32 weights). ``state_bytes_per_param``: everything that lives as long as a parameter, itself
    included, and two moments in float32; ``slot_bytes``: of embedding, block and head what the optimizer
    keeps in place of these. ``separate``: whether documents of a sequence are kept apart, by a mask;
    ``chunked``: whether logits and loss are computed for some tokens at a time; ``selective``: whether blocks
    can compute again what is cheap (compiled ones cannot).
    """

    sequences: int
    length: int
    precision: str
    state_bytes_per_param: int
    separate: bool = False
    chunked: bool = False
    slot_bytes: tuple[int, int, int] | None = None
    selective: bool = True

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequences * self.length

    @property
    def half(self) -> bool:
        """Whether matrix products round to 16 bits."""
        return self.precision == "bf16"

    @property
    def product_bytes(self) -> int:
        """Bytes of a number that goes into, or comes out of, a matrix product."""
        return 2 if self.half else FULL


def analytic_profile(shape: Shape, work: Workload, device: DeviceSheet) -> Profile:
    """The costs of embedding, blocks and head for one micro-batch, and the link between nodes."""
    of_embedding, of_block, of_head = work.slot_bytes or tuple(
        MOMENT_BYTES * params for params in (shape.embedding_params, shape.block_params, shape.head_params)
    )
    output_bytes = FULL * work.tokens * shape.hidden
    embedding = _layer(
        "embedding",
        shape.embedding_params,
        of_embedding,
        0.0,
        _embedding_bytes(shape, work),
        output_bytes,
        0,
        work,
        device,
    )
    block_flops = work.tokens * (2.0 * shape.projections + 4.0 * work.length * shape.attention)
    block_bytes = _block_bytes(shape, work, device)
    rounded = shape.block_params - 2 * shape.norm
    blocks = [
        _layer(
            f"block {i}", shape.block_params, of_block, block_flops, block_bytes, output_bytes, rounded, work,
            device,
        )
        for i in range(shape.num_blocks)
    ]  # fmt: skip
    if work.selective:
        blocks = [_with_selective(block, shape, work, device) for block in blocks]
    head_flops = 2.0 * work.tokens * shape.hidden * shape.vocab
    head = _layer(
        "head", shape.head_params, of_head, head_flops, _head_bytes(shape, work), FULL,
        0 if work.chunked else shape.hidden * shape.vocab, work, device,
    )  # fmt: skip
    if work.chunked:
        head = _with_gradients(head, device)
    own = tuple((layer,) for layer in range(shape.num_blocks + 2))
    return Profile(
        key="analytic",
        device=device.name,
        layers=(embedding, *blocks, head),
        link_latency_s=device.link_latency_s,
        link_bytes_per_s=device.link_bytes_per_s,
        reserve_bytes=device.reserve_bytes,
        buckets=(*own, (0, shape.num_blocks + 1)) if shape.tied else own,
        host_bytes_per_s=device.host_bytes_per_s,
        shared_bytes=_shared_bytes(shape, work) if work.separate else 0,
        flops_per_token=flops.per_token(shape.weights, shape.num_blocks, shape.attention, work.length),
    )


def _layer(
    name: str,
    params: int,
    slot_bytes: int,
    flops: float,
    kept_bytes: int,
    output_bytes: int,
    num_rounded: int,
    work: Workload,
    device: DeviceSheet,
) -> LayerCost:
    moved_s = 2 * (kept_bytes + output_bytes) / device.memory_bytes_per_s
    works_s = flops / device.flops(work.precision) + moved_s
    forward_s, backward_s = max(works_s, device.dispatch_s), max(2 * works_s, device.dispatch_s)
    state_bytes = (work.state_bytes_per_param - MOMENT_BYTES) * params + slot_bytes
    # One copy in bfloat16 of what linear layers compute with, however many micro-batches are in flight.
    # (D-models-010)
    state_bytes += ROUNDED_BYTES * num_rounded if work.half else 0
    return LayerCost(
        name, forward_s, backward_s, FULL * params, state_bytes, kept_bytes, output_bytes,
        slot_bytes=slot_bytes,
    )  # fmt: skip


def _with_gradients(head: LayerCost, device: DeviceSheet) -> LayerCost:
    """``head``, whose forward makes the gradients, too: its backward reads, scales and writes them."""
    scaled_s = max(2 * head.activation_bytes / device.memory_bytes_per_s, device.dispatch_s)
    return msgspec.structs.replace(head, forward_s=head.forward_s + head.backward_s, backward_s=scaled_s)


def _with_selective(block: LayerCost, shape: Shape, work: Workload, device: DeviceSheet) -> LayerCost:
    """``block`` with what it costs to keep its products alone: what it does not keep is written and read once
    more, and its operations are started once more.
    """
    kept = min(block.activation_bytes, work.tokens * _selective_bytes(shape, work, device))
    again_s = max(2 * (block.activation_bytes - kept) / device.memory_bytes_per_s, device.dispatch_s)
    return msgspec.structs.replace(block, selective_bytes=kept, selective_s=min(again_s, block.forward_s))


# --------------------------------------------------------------------------- bytes kept for the backward


def _embedding_bytes(shape: Shape, work: Workload) -> int:
    dropped = FULL * shape.hidden if shape.embedding_dropout else 0
    positions = NUMBER * (work.tokens if work.separate else work.length) if shape.positions else 0
    return work.tokens * (NUMBER + dropped) + positions


def _block_bytes(shape: Shape, work: Workload, device: DeviceSheet) -> int:
    per_token = _gated_bytes(shape, work) if shape.gated else _plain_bytes(shape, work)
    if shape.block_dropout:
        per_token += 2 * FULL * shape.hidden
    if shape.attention_dropout and not device.fused_attention:
        # Probabilities, their mask, and what is left of them.
        per_token += 3 * FULL * shape.num_heads * work.length
    # Rotary angles serve all sequences of the micro-batch, where these all count alike.
    angles = 0 if work.separate else work.length * _angle_bytes(shape)
    return work.tokens * per_token + angles


def _shared_bytes(shape: Shape, work: Workload) -> int:
    """Of a micro-batch, once for all blocks: the mask, and positions and angles of every token."""
    return work.tokens * (work.product_bytes * work.length + NUMBER + _angle_bytes(shape))


def _angle_bytes(shape: Shape) -> int:
    """Cosine and sine of a token's rotary angles."""
    return 2 * FULL * (shape.attention // shape.num_heads) if shape.gated else 0


def _plain_bytes(shape: Shape, work: Workload) -> int:
    """Of a token in a block like GPT-2's."""
    norm_inputs = FULL * 2 * shape.hidden
    product_inputs = 2 * shape.hidden + shape.attention  # of qkv, of the MLP, of the output projection
    heads = shape.attention + 2 * shape.kv  # q, k, v; their result is the output projection's input
    mlp = 5 * shape.ffn  # gelu_new is five operations that keep their input
    return norm_inputs + work.product_bytes * (product_inputs + heads + mlp)


def _gated_bytes(shape: Shape, work: Workload) -> int:
    """Of a token in a block like Llama's."""
    norms = FULL * 2 * 2 * shape.hidden  # inputs, and what is multiplied with the weights
    # Autocast rounds an input anew for every product: q, k, v, and gate, up.
    product_inputs = (5 if work.half else 2) * shape.hidden
    # Attention with a mask wants as many heads of keys and values as of queries.
    heads = 2 * shape.attention + 2 * (shape.attention if work.separate else shape.kv)
    mlp = 4 * shape.ffn  # gate, its activation, up, their product
    return norms + work.product_bytes * (product_inputs + heads + mlp)


def _selective_bytes(shape: Shape, work: Workload, device: DeviceSheet) -> int:
    """Of a token in a block that keeps its input and the results of its products and of attention, which are
    as wide as the queries, with a number in float32 for each head. Attention that is no kernel of its own is
    computed again.
    """
    products = shape.attention + 2 * shape.kv + shape.hidden  # q, k, v, and the output projection
    products += (2 if shape.gated else 1) * shape.ffn + shape.hidden  # gate and up, or up alone; down
    attention = work.product_bytes * shape.attention + FULL * shape.num_heads
    if shape.attention_dropout and not device.fused_attention:
        attention = 0
    return FULL * shape.hidden + work.product_bytes * products + attention


def _head_bytes(shape: Shape, work: Workload) -> int:
    norms = FULL * shape.hidden * (2 if shape.gated else 1)
    if work.chunked:  # of hidden states and the projection the gradients, and no logits
        return FULL * shape.hidden * shape.vocab + work.tokens * (norms + FULL * shape.hidden)
    per_token = norms + work.product_bytes * shape.hidden + FULL * shape.vocab
    return work.tokens * per_token
