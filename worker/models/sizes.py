"""Whether the sizes of a configuration go together, in the words of the one who wrote them.

Owns what families have in common: counts that are none, heads that do not divide. What only one family asks
for, transformers says when the model is built (``split``).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from oobleckd.worker.runtime.errors import UserError

_COUNTS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "max_position_embeddings", "head_dim", "max_seq_len", "embedding_size",
)  # fmt: skip
_ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation", "activation")


def check_sizes(config: PretrainedConfig, given: Mapping[str, Any]) -> None:
    """``given``: the fields of the job, whose names for them are used. Raises UserError."""
    names = _names(config, given)
    for name in _COUNTS:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise UserError(f"model.config.{names(name)}: {value} is not 1 or more", "write a size")
    heads, groups = (_number(config, name) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads and groups and heads % groups:
        raise UserError(
            f"model.config.{names('num_key_value_heads')}: {groups} does not divide "
            f"{names('num_attention_heads')} = {heads}",
            "change one of the two",
        )
    _check_activations(config)


def misfit(config: PretrainedConfig) -> str:
    """What most likely does not fit in a configuration of which no model can be built; "" where that is not
    known. Heads of a width of their own, or of a rounded one, may well go without: nothing is refused by it.
    """
    names = _names(config, {})
    heads, width = (_number(config, name) for name in ("num_attention_heads", "hidden_size"))
    if heads and width and width % heads:
        return (
            f"model.config.{names('num_attention_heads')}: {heads} does not divide "
            f"{names('hidden_size')} = {width}"
        )
    return ""


def _names(config: PretrainedConfig, given: Mapping[str, Any]) -> Callable[[str], str]:
    """What the job calls a field; the family's own name where the job has none for it."""
    kind = config.attribute_map
    said = {kind.get(key, key): key for key in given}

    def name_of(field: str) -> str:
        own = kind.get(field, field)
        return said.get(own, own)

    return name_of


def _number(config: PretrainedConfig, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _check_activations(config: PretrainedConfig) -> None:
    for name in _ACTIVATIONS:
        value = getattr(config, name, None)
        if isinstance(value, str) and value not in ACT2FN:
            close = difflib.get_close_matches(value, list(ACT2FN), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(ACT2FN))}"
            raise UserError(f"model.config.{name}: there is no activation {value!r}", hint)
