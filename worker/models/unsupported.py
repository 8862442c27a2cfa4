"""What is said of a family that is not trained here: whether it is a slip of the pen, a mixture of experts,
or a model of another kind.

Owns the words. Which families are trained is ``config``'s.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from oobleckd.worker.runtime.errors import UserError

_PAGE = "see docs/models.md for those that are"
_REASONS = {
    "ernie4_5_moe": "its routers correct their scores by a parameter (e_score_correction_bias) that no "
    "gradient reaches",
}
_SURE = 0.9
_EXPERTS = ("expert", "moe_")


def unsupported(family: str, families: Collection[str]) -> UserError:
    """The error for ``family``, which is none of ``families``."""
    what = f"model.family: {family!r} is not supported"
    plain = _plain(family)
    trained = {_plain(each): each for each in families}
    others = {_plain(each): each for each in CONFIG_MAPPING if _plain(each) not in trained}
    close = difflib.get_close_matches(plain, [*trained, *others], n=1)
    if plain in trained:
        said = what, f"did you mean {trained[plain]!r}?"
    elif plain in others:
        said = _of_another_kind(what, others[plain], families)
    elif "/" in family:
        said = what, "name a model type, such as llama; a local folder goes into model.checkpoint"
    elif close and close[0] in others and _alike(plain, close[0]) > _SURE:
        other = others[close[0]]
        said = _of_another_kind(f"{what}, and neither is {other!r}", other, families)
    elif meant := difflib.get_close_matches(plain, trained, n=1):
        said = what, f"did you mean {trained[meant[0]]!r}?"
    else:
        said = what, f"supported families: {', '.join(sorted(families))}"
    return UserError(*said)


def _of_another_kind(what: str, family: str, families: Collection[str]) -> tuple[str, str]:
    """Problem and hint for a family that transformers has."""
    if f"{family}_text" in families:
        return f"{what}: it is more than a language model", f"its text part is '{family}_text'"
    if family in _REASONS:
        return f"{what}: {_REASONS[family]}", _PAGE
    if has_experts(CONFIG_MAPPING[family]):
        return f"{what}: it is a mixture of experts of which nobody has proven yet that it can be cut", _PAGE
    if family not in {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MASKED_LM_MAPPING_NAMES}:
        return f"{what}: it is no causal or masked language model", _PAGE
    return f"{what}: transformers has it, and nobody has proven yet that it can be cut", _PAGE


def has_experts(kind: type[PretrainedConfig]) -> bool:
    """Whether the model of this configuration, or a part of it, is a mixture of experts."""
    names = [*(field.name for field in dataclasses.fields(kind)), *kind.attribute_map]
    if any(mark in name for name in names for mark in _EXPERTS):
        return True
    parts: dict[str, Any] = kind.sub_configs
    return any(has_experts(part) for part in parts.values() if hasattr(part, "__dataclass_fields__"))


def _alike(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _plain(name: str) -> str:
    """Without what people write in different ways: ``GPT-2`` is ``gpt2``."""
    return "".join(char for char in name.lower() if char.isalnum())
