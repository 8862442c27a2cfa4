"""Shapes of mixtures of experts from their configurations, without transformers.

Owns the fields and defaults of the families, as transformers has them, and how they differ. Shapes of models
without experts are ``shapes``'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from oobleckd.ctl.configfields import Fields
from oobleckd.planner.costs.analytic import Shape
from oobleckd.planner.costs.mixture import Experts, Latent

_LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "attention_dropout": 0.0,
    "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
_ROUTED = {
    "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": ()}

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": _LLAMA | _ROUTED | {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "n_routed_experts": 256,
        "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
    "dots1": _LLAMA | _ROUTED | {
        "vocab_size": 152064, "hidden_size": 4608, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 62, "n_routed_experts": None, "num_experts_per_tok": None,
        "n_shared_experts": None, "first_k_dense_replace": 0,
    },
    "glm4_moe": _LLAMA | _ROUTED | {
        "vocab_size": 151552, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
    },
    "gpt_oss": _LLAMA | {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True,
        "num_local_experts": 128, "num_experts_per_tok": 4,
    },
    "granitemoe": _LLAMA | {
        "intermediate_size": 11008, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "hunyuan_v1_moe": _LLAMA | {
        "vocab_size": 290943, "intermediate_size": 11008, "num_experts": 1, "moe_topk": 1,
    },
    "mixtral": _LLAMA | {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": _LLAMA | {
        "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
    },
    "phimoe": _LLAMA | {
        "vocab_size": 32064, "intermediate_size": 6400, "num_key_value_heads": 8, "lm_head_bias": False,
        "num_local_experts": 16, "num_experts_per_tok": 2,
    },
    "qwen2_moe": _LLAMA | _SPARSE | {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4,
        "qkv_bias": True,
    },
    "qwen3_moe": _LLAMA | _SPARSE | {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
        "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    },
}  # fmt: skip
"""By family. Of minimax nothing is known: its lightning attention is measured."""

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk")


def mixture_shape(family: str, given: Mapping[str, Any]) -> Shape:
    """The shape of a ``family`` of ``DEFAULTS`` with ``given`` fields. Raises JobError."""
    defaults = DEFAULTS[family]
    return _FAMILIES[family](Fields(defaults, _named(defaults, given)))


def _named(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with the family's own names for how many experts there are and are chosen, whichever of its
    names are used.
    """
    own = {
        alias: next(name for name in names if name in defaults)
        for names in (_EXPERTS, _CHOSEN)
        for alias in names
    }
    return {own.get(key, key): value for key, value in given.items()}


def _count(fields: Fields, names: tuple[str, ...]) -> int:
    return fields.count(next(name for name in names if fields.has(name)))


def _decoder(fields: Fields, experts: Experts) -> Shape:
    """What all have in common."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    head = fields.count("head_dim", 0) or max(1, hidden // heads)  # glm4_moe's own do not divide its width
    return Shape(
        num_blocks=fields.count("num_hidden_layers"),
        hidden=hidden,
        ffn=fields.count("intermediate_size"),
        num_heads=heads,
        attention=head * heads,
        kv=head * fields.count("num_key_value_heads", heads),
        vocab=fields.count("vocab_size"),
        gated=True,
        qkv_bias=fields.flag("attention_bias"),
        output_bias=fields.flag("attention_bias"),
        tied=fields.flag("tie_word_embeddings"),
        attention_dropout=fields.share("attention_dropout"),
        experts=experts,
    )


def _experts(fields: Fields, width: str = "intermediate_size", **more: Any) -> Experts:
    return Experts(_count(fields, _EXPERTS), _count(fields, _CHOSEN), fields.count(width), **more)


def _head_norms(shape: Shape) -> Shape:
    """With norms of queries and keys that all heads share."""
    return msgspec.structs.replace(shape, query_norms=2 * (shape.attention // shape.num_heads))


def _mixtral(fields: Fields) -> Shape:
    return _decoder(fields, _experts(fields))


def _phimoe(fields: Fields) -> Shape:
    head_bias = fields.flag("lm_head_bias")
    return msgspec.structs.replace(_mixtral(fields), layer_norms=True, head_bias=head_bias)


def _olmoe(fields: Fields) -> Shape:
    shape = _mixtral(fields)
    return msgspec.structs.replace(shape, query_norms=shape.attention + shape.kv)


def _gpt_oss(fields: Fields) -> Shape:
    experts = _experts(fields, router_bias=True, bias=True)
    shape = _decoder(fields, experts)
    return msgspec.structs.replace(shape, sinks=True, angles=shape.attention // shape.num_heads // 2)


def _hunyuan(fields: Fields) -> Shape:
    shared = fields.count("intermediate_size")
    return _head_norms(_decoder(fields, _experts(fields, shared=shared, full_router=True)))


def _qwen2(fields: Fields) -> Shape:
    shared = fields.count("shared_expert_intermediate_size")
    experts = _experts(fields, "moe_intermediate_size", shared=shared, shared_gate=True)
    shape = _decoder(fields, experts)
    biased = fields.flag("qkv_bias")
    return msgspec.structs.replace(
        shape, qkv_bias=biased, output_bias=False, plain_blocks=_plain_blocks(fields)
    )


def _qwen3(fields: Fields) -> Shape:
    shape = _head_norms(_decoder(fields, _experts(fields, "moe_intermediate_size")))
    return msgspec.structs.replace(shape, plain_blocks=_plain_blocks(fields))


def _plain_blocks(fields: Fields) -> tuple[int, ...]:
    """Blocks of the Qwens without experts."""
    every, named = fields.count("decoder_sparse_step"), fields.numbers("mlp_only_layers")
    return tuple(
        number
        for number in range(fields.count("num_hidden_layers"))
        if number in named or (number + 1) % every
    )


def _routed(fields: Fields) -> Shape:
    """Of those that follow DeepSeek: shared experts, and first blocks without any."""
    width = "moe_intermediate_size"
    shared = fields.count(width) * fields.count("n_shared_experts")
    shape = _decoder(fields, _experts(fields, width, shared=shared, full_router=True))
    first = min(fields.count("first_k_dense_replace", 0), shape.num_blocks)
    return msgspec.structs.replace(shape, plain_blocks=tuple(range(first)))


def _glm4(fields: Fields) -> Shape:
    shape = _routed(fields)
    turned = fields.share("partial_rotary_factor")
    shape = msgspec.structs.replace(
        shape, output_bias=False, partly_rotary=turned < 1,
        angles=int(turned * (shape.attention // shape.num_heads)),
    )  # fmt: skip
    return _head_norms(shape) if fields.flag("use_qk_norm") else shape


def _dots1(fields: Fields) -> Shape:
    return _head_norms(_routed(fields))


def _deepseek(fields: Fields) -> Shape:
    shape = _routed(fields)
    latent = Latent(
        queries=fields.count("q_lora_rank", 0),
        keys=fields.count("kv_lora_rank"),
        plain=fields.count("qk_nope_head_dim"),
        rotary=fields.count("qk_rope_head_dim"),
        values=fields.count("v_head_dim"),
    )
    width = latent.attention(shape.num_heads)
    return msgspec.structs.replace(shape, latent=latent, attention=width, kv=width, angles=latent.rotary)


_FAMILIES: dict[str, Callable[[Fields], Shape]] = {
    "deepseek_v3": _deepseek,
    "dots1": _dots1,
    "glm4_moe": _glm4,
    "gpt_oss": _gpt_oss,
    "granitemoe": _mixtral,
    "hunyuan_v1_moe": _hunyuan,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "phimoe": _phimoe,
    "qwen2_moe": _qwen2,
    "qwen3_moe": _qwen3,
}
