"""The shape of a job's model from its configuration, without transformers.

Owns the fields and defaults of the few families whose layers ``oobleckd.planner.costs.analytic`` knows.
Everything else a worker measures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oobleckd.host import anyfile
from oobleckd.planner.costs.analytic import Shape
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobtable import JobError

_GPT2 = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
    "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "tie_word_embeddings": True,
}  # fmt: skip
_LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "attention_dropout": 0.0,
    "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8},
    "qwen2": _LLAMA | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32},
}
_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_ELSE = "let a cluster measure it once and name its journal with --profile, or plan a llama of this shape"


def shape_of(job: Job) -> Shape:
    """The shape of the model of ``job``. Raises JobError naming the key that is wrong, or not known."""
    family = job.model.family
    if family not in _DEFAULTS:
        known = ", ".join(sorted(_DEFAULTS))
        raise JobError("model.family", f"{family!r} has no analytic profile ({known} have)", _ELSE)
    given = _stored(job) | job.model.config
    if family == "gpt2":
        return _gpt2(_Fields(_GPT2, {_ALIASES.get(key, key): value for key, value in given.items()}))
    return _llama(_Fields(_DEFAULTS[family], given), qkv_bias=family == "qwen2")


def _stored(job: Job) -> dict[str, Any]:
    """What config.json in the checkpoint's folder says; nothing without a checkpoint."""
    if not job.model.checkpoint:
        return {}
    path = Path(job.model.checkpoint).expanduser() / "config.json"
    try:
        stored = json.loads(anyfile.text(path))
    except FileNotFoundError as error:
        raise JobError(
            "model.checkpoint", f"{path}: {error.strerror}", "name a folder with config.json"
        ) from error
    except anyfile.FileError as error:
        raise JobError("model.checkpoint", f"{path}: {error}", "name a folder with config.json") from error
    except (ValueError, RecursionError) as error:
        raise JobError("model.checkpoint", f"{path} is not JSON", "download the folder again") from error
    if not isinstance(stored, dict):
        raise JobError("model.checkpoint", f"{path} is no configuration", "download the folder again")
    return stored


class _Fields:
    """Fields of a configuration over a family's defaults, each checked when it is asked for."""

    def __init__(self, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self._given = given
        self._defaults = defaults

    def count(self, key: str, default: int = 0) -> int:
        """A whole number above 0; ``default`` where the field is null."""
        value = self._value(key)
        if value is None and default:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise JobError(
                f"model.config.{key}", f"{value!r} is no whole number above 0", "see docs/models.md"
            )
        return value

    def share(self, key: str) -> float:
        """A number from 0 to below 1."""
        value = self._value(key) or 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise JobError(f"model.config.{key}", f"{value!r} is not in [0, 1)", "0 switches dropout off")
        return float(value)

    def flag(self, key: str) -> bool:
        """Yes or no."""
        return bool(self._value(key))

    def _value(self, key: str) -> Any:
        return self._given.get(key, self._defaults[key])


def _gpt2(fields: _Fields) -> Shape:
    hidden = fields.count("n_embd")
    return Shape(
        num_blocks=fields.count("n_layer"),
        hidden=hidden,
        ffn=fields.count("n_inner", 4 * hidden),
        num_heads=_dividing(fields, "n_head", "n_embd"),
        attention=hidden,
        kv=hidden,
        vocab=fields.count("vocab_size"),
        positions=fields.count("n_positions"),
        bias=True,
        tied=fields.flag("tie_word_embeddings"),
        embedding_dropout=fields.share("embd_pdrop"),
        attention_dropout=fields.share("attn_pdrop"),
        block_dropout=fields.share("resid_pdrop"),
    )


def _llama(fields: _Fields, *, qkv_bias: bool) -> Shape:
    hidden, num_heads = fields.count("hidden_size"), _dividing(fields, "num_attention_heads", "hidden_size")
    head = fields.count("head_dim", hidden // num_heads)
    everywhere = fields.flag("attention_bias")
    return Shape(
        num_blocks=fields.count("num_hidden_layers"),
        hidden=hidden,
        ffn=fields.count("intermediate_size"),
        num_heads=num_heads,
        attention=head * num_heads,
        kv=head * fields.count("num_key_value_heads", num_heads),
        vocab=fields.count("vocab_size"),
        gated=True,
        qkv_bias=qkv_bias or everywhere,
        tied=fields.flag("tie_word_embeddings"),
        attention_dropout=fields.share("attention_dropout"),
    )


def _dividing(fields: _Fields, key: str, whole: str) -> int:
    number, width = fields.count(key), fields.count(whole)
    if width % number:
        raise JobError(
            f"model.config.{key}", f"{number} does not divide {whole} = {width}", "change one of the two"
        )
    return number
