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
from oobleckd.planner.costs.mixture import FULL, HALF, NUMBER, Experts, Latent
from oobleckd.planner.profile import MOMENT_BYTES, ROUNDED_BYTES, LayerCost, Profile, added_bytes

# Tensor by tensor and family by family: a formula for all would be off by a factor of two, and memory
# decides which plans there are. Other families are refused. (D-models-001)


class Shape(msgspec.Struct, frozen=True):
    """A decoder of blocks that are equal, but for ``plain_blocks``.

    ``attention``: width of all query heads together; ``kv``: that of the key heads. ``gated``: RMS norms,
    rotary positions and a gated MLP of ``ffn`` wide (Llama), else layer norms, learnt ``positions`` and a
    plain MLP (GPT-2). ``qkv_bias``, ``output_bias``, ``bias``: biases there, and everywhere; ``head_bias``:
    of the head. ``tied``: the head computes with the embedding's weights. Dropout after embedding,
    attention's probabilities and each half of a block, as shares. ``layer_norms``: with biases, although
    gated. ``query_norms``: parameters of norms of a block's queries and keys. ``angles``: rotary angles of a
    token, where these are not as many as a head is wide; ``partly_rotary``: the rest of a head is not turned.
    ``sinks``: attention has a number a head to leave its weight with, and none of torch's kernels computes
    it.

    ``experts``: in place of the MLP, but in ``plain_blocks``, by number. ``latent``: in place of plain
    queries and keys.
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
    output_bias: bool = False
    head_bias: bool = False
    layer_norms: bool = False
    query_norms: int = 0
    angles: int = 0
    partly_rotary: bool = False
    sinks: bool = False
    experts: Experts | None = None
    plain_blocks: tuple[int, ...] = ()
    latent: Latent | None = None

    def block(self, number: int) -> Shape:
        """As if all blocks were as this one."""
        if self.experts is None or number not in self.plain_blocks:
            return self
        return msgspec.structs.replace(self, experts=None, plain_blocks=())

    @property
    def attention_matrices(self) -> list[tuple[int, int]]:
        """Shapes of the weights of a block's attention."""
        if self.latent is not None:
            return self.latent.matrices(self.hidden, self.num_heads)
        square, narrow = (self.hidden, self.attention), (self.hidden, self.kv)
        return [square, square, narrow, narrow]

    @property
    def mlp_tensors(self) -> list[tuple[int, ...]]:
        """Shapes of a block's MLP, or of its experts."""
        if self.experts is not None:
            return self.experts.tensors(self.hidden)
        return [(self.hidden, self.ffn)] * (3 if self.gated else 2)

    @property
    def projections(self) -> int:
        """Weights of a block's matrix products, without biases."""
        mlp = self._mlp_weights if self.experts is None else self.experts.weights(self.hidden)
        return self._attention_weights + mlp

    @property
    def active_projections(self) -> int:
        """Of these the ones that a token is multiplied with."""
        mlp = self._mlp_weights if self.experts is None else self.experts.active_weights(self.hidden)
        return self._attention_weights + mlp

    @property
    def _attention_weights(self) -> int:
        return sum(rows * columns for rows, columns in self.attention_matrices)

    @property
    def _mlp_weights(self) -> int:
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def norm(self) -> int:
        """Parameters of one norm."""
        return self.hidden if self.gated and not self.layer_norms else 2 * self.hidden

    @property
    def _biases(self) -> int:
        """Of a block's products outside of experts."""
        from_hidden = self.attention + 2 * self.kv if self.latent is None else self.latent.biased
        qkv = from_hidden if self.qkv_bias or self.bias else 0
        output = self.hidden if self.output_bias or self.bias else 0
        return qkv + output + (self.ffn + self.hidden if self.bias else 0)

    @property
    def _small_params(self) -> int:
        """Of a block's norms and attention's sinks."""
        latent = 0 if self.latent is None else self.latent.norms
        return 2 * self.norm + self.query_norms + latent + self.sinks * self.num_heads

    @property
    def block_params(self) -> int:
        """Parameters of a block."""
        of_experts = 0 if self.experts is None else self.experts.biases(self.hidden)
        return self.projections + self._biases + of_experts + self._small_params

    def rounded_params(self, *, experts: bool) -> int:
        """Those of a block of which there is a copy in bfloat16 where linear layers round, and ``experts`` or
        not.
        """
        mlp = self._mlp_weights
        if self.experts is not None:
            mlp = self.experts.rounded(self.hidden, experts=experts)
        return self._attention_weights + mlp + self._biases

    @property
    def params(self) -> int:
        """Parameters of the model; a tied weight counts once."""
        blocks = sum(self.block(number).block_params for number in range(self.num_blocks))
        twice = self.hidden * self.vocab if self.tied else 0
        return self.embedding_params + blocks + self.head_params - twice

    @property
    def active_params(self) -> int:
        """Those that a token goes through, with all of the embedding: how models are spoken of."""
        if self.experts is None:
            return self.params
        return self.params - self._num_mixed * self.experts.idle_params(self.hidden)

    @property
    def _num_mixed(self) -> int:
        return sum(number not in self.plain_blocks for number in range(self.num_blocks))

    @property
    def embedding_params(self) -> int:
        """Parameters of the embedding."""
        return self.hidden * (self.vocab + self.positions)

    @property
    def weights(self) -> int:
        """Of all matrix products that a token goes through."""
        blocks = sum(self.block(number).active_projections for number in range(self.num_blocks))
        return blocks + self.hidden * self.vocab

    @property
    def head_params(self) -> int:
        """Parameters of the final norm and the output projection, which may be the embedding's."""
        return self.hidden * self.vocab + self.norm + self.head_bias * self.vocab


class Workload(msgspec.Struct, frozen=True):
    """A micro-batch: ``sequences`` of ``length`` tokens, ``precision`` "fp32" or "bf16" (autocast over
    float32 weights), ``experts_precision`` that of experts. ``state_bytes_per_param``: everything that lives
    as long as a parameter, itself included, and two moments in float32; ``slot_bytes``: of each layer what
    the optimizer keeps in place of these. ``separate``: whether documents of a sequence are kept apart, by a
    mask; ``chunked``: whether logits and loss are computed for some tokens at a time; ``selective``: whether
    blocks can compute again what is cheap (compiled ones cannot). ``added_bytes_per_param``: what adding a
    gradient to its sum moves.
    """

    sequences: int
    length: int
    precision: str
    state_bytes_per_param: int
    separate: bool = False
    chunked: bool = False
    slot_bytes: tuple[int, ...] | None = None
    selective: bool = True
    added_bytes_per_param: int = added_bytes(exact=True)
    experts_precision: str = "fp32"

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequences * self.length

    @property
    def half(self) -> bool:
        """Whether matrix products round to 16 bits."""
        return self.precision == "bf16"

    @property
    def half_experts(self) -> bool:
        """Whether products of experts do."""
        return self.experts_precision == "bf16"

    @property
    def product_bytes(self) -> int:
        """Bytes of a number that goes into, or comes out of, a matrix product."""
        return HALF if self.half else FULL


def analytic_profile(shape: Shape, work: Workload, device: DeviceSheet) -> Profile:
    """The costs of embedding, blocks and head for one micro-batch, and the link between nodes."""
    slot_bytes = work.slot_bytes or _moments(shape)
    output_bytes = FULL * work.tokens * shape.hidden
    embedding = _layer(
        "embedding",
        shape.embedding_params,
        slot_bytes[0],
        0.0,
        _embedding_bytes(shape, work),
        output_bytes,
        0,
        work,
        device,
    )
    blocks = [
        _block(f"block {number}", shape.block(number), slot_bytes[number + 1], work, device)
        for number in range(shape.num_blocks)
    ]
    if work.selective:
        blocks = [
            _with_selective(block, shape.block(number), work, device) for number, block in enumerate(blocks)
        ]
    head_s = 2.0 * work.tokens * shape.hidden * shape.vocab / device.flops(work.precision)
    head = _layer(
        "head", shape.head_params, slot_bytes[-1], head_s, _head_bytes(shape, work), FULL,
        0 if work.chunked else shape.head_params - shape.norm, work, device,
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
        node_bytes_per_s=device.node_bytes_per_s,
        shared_bytes=_shared_bytes(shape, work) if work.separate else 0,
        flops_per_token=flops.per_token(shape.weights, shape.num_blocks, shape.attention, work.length),
        params=shape.params,
        active_params=shape.active_params,
    )


def _moments(shape: Shape) -> tuple[int, ...]:
    """What AdamW keeps of each layer."""
    blocks = [shape.block(number).block_params for number in range(shape.num_blocks)]
    return tuple(MOMENT_BYTES * params for params in (shape.embedding_params, *blocks, shape.head_params))


def _block(name: str, shape: Shape, slot_bytes: int, work: Workload, device: DeviceSheet) -> LayerCost:
    by_experts = 0 if shape.experts is None else shape.experts.expert_weights(shape.hidden)
    of_token = 2.0 * (shape.active_projections - by_experts) + 4.0 * work.length * shape.attention
    # Experts have a precision of their own. (D-costs-002)
    products_s = of_token / device.flops(work.precision)
    products_s += 2.0 * by_experts / device.flops(work.experts_precision)
    block = _layer(
        name, shape.block_params, slot_bytes, work.tokens * products_s, _block_bytes(shape, work, device),
        FULL * work.tokens * shape.hidden, shape.rounded_params(experts=work.half_experts), work, device,
    )  # fmt: skip
    if shape.experts is None:
        return block
    # Sums are of all experts, whichever tokens went to them. (D-costs-003)
    added_s = work.added_bytes_per_param * shape.block_params / device.memory_bytes_per_s
    return msgspec.structs.replace(block, backward_s=block.backward_s + added_s)


def _layer(
    name: str,
    params: int,
    slot_bytes: int,
    products_s: float,
    kept_bytes: int,
    output_bytes: int,
    num_rounded: int,
    work: Workload,
    device: DeviceSheet,
) -> LayerCost:
    moved_s = 2 * (kept_bytes + output_bytes) / device.memory_bytes_per_s
    works_s = products_s + moved_s
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
    per_token = _gated_bytes(shape, work, device) if shape.gated else _plain_bytes(shape, work)
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
    # The code of a family with sinks wants masks in float32, one for each of its two kinds of attention.
    masks = 2 * FULL if shape.sinks else work.product_bytes
    return work.tokens * (masks * work.length + NUMBER + _angle_bytes(shape))


def _angle_bytes(shape: Shape) -> int:
    """Cosine and sine of a token's rotary angles."""
    return 2 * FULL * (shape.angles or shape.attention // shape.num_heads) if shape.gated else 0


def _plain_bytes(shape: Shape, work: Workload) -> int:
    """Of a token in a block like GPT-2's."""
    norm_inputs = FULL * 2 * shape.hidden
    product_inputs = 2 * shape.hidden + shape.attention  # of qkv, of the MLP, of the output projection
    heads = shape.attention + 2 * shape.kv  # q, k, v; their result is the output projection's input
    mlp = 5 * shape.ffn  # gelu_new is five operations that keep their input
    return norm_inputs + work.product_bytes * (product_inputs + heads + mlp)


def _gated_bytes(shape: Shape, work: Workload, device: DeviceSheet) -> int:
    """Of a token in a block like Llama's."""
    norms = 2 * _norm_bytes(shape)
    if shape.experts is not None:
        mlp = shape.experts.kept_bytes(shape.hidden, half=work.half, experts=work.half_experts)
    else:  # gate, its activation, up, their product
        mlp = work.product_bytes * ((2 if work.half else 1) * shape.hidden + 4 * shape.ffn)
    return norms + _attention_bytes(shape, work, device) + mlp


def _norm_bytes(shape: Shape) -> int:
    """Of a norm its input, and of an RMS norm what is multiplied with its weights."""
    return FULL * (2 if shape.gated and not shape.layer_norms else 1) * shape.hidden


def _attention_bytes(shape: Shape, work: Workload, device: DeviceSheet) -> int:
    """Of a token in attention with rotary positions."""
    if shape.latent is not None:
        length = 0 if device.fused_attention else work.length
        return shape.latent.kept_bytes(shape.hidden, shape.num_heads, half=work.half, length=length)
    # Autocast rounds an input anew for every product: q, k, v (and gate, up).
    product_inputs = (3 if work.half else 1) * shape.hidden
    # Attention with a mask wants as many heads of keys and values as of queries.
    heads = 2 * shape.attention + 2 * (shape.attention if work.separate or shape.sinks else shape.kv)
    if shape.partly_rotary:  # queries are put together anew, and the output follows their order in memory
        heads += shape.attention
    normed = (FULL + work.product_bytes) * (shape.attention + shape.kv) if shape.query_norms else 0
    plain = 0
    if shape.sinks:  # probabilities, rounded ones, and where the largest was
        plain = shape.num_heads * ((FULL + (HALF if work.half else 0)) * work.length + FULL + NUMBER)
    return normed + plain + work.product_bytes * (product_inputs + heads)


def _selective_bytes(shape: Shape, work: Workload, device: DeviceSheet) -> int:
    """Of a token in a block that keeps its input and the results of its products and of attention, which are
    as wide as the queries, with a number in float32 for each head. Attention that is no kernel of its own is
    computed again.
    """
    products = shape.attention + 2 * shape.kv + shape.hidden  # q, k, v, and the output projection
    attention = work.product_bytes * shape.attention + FULL * shape.num_heads
    if shape.sinks or (shape.attention_dropout and not device.fused_attention):
        attention = 0
    if shape.experts is not None:
        mlp = shape.experts.product_bytes(shape.hidden, half=work.half, experts=work.half_experts)
    else:  # gate and up, or up alone; down
        mlp = work.product_bytes * ((2 if shape.gated else 1) * shape.ffn + shape.hidden)
    return FULL * shape.hidden + work.product_bytes * products + attention + mlp


def _head_bytes(shape: Shape, work: Workload) -> int:
    norms = _norm_bytes(shape)
    if work.chunked:  # of hidden states and the projection the gradients, and no logits
        return FULL * shape.hidden * shape.vocab + work.tokens * (norms + FULL * shape.hidden)
    per_token = norms + work.product_bytes * shape.hidden + FULL * shape.vocab
    return work.tokens * per_token
