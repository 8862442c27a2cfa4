"""The shape of a job's model from its configuration, without transformers.

Owns the fields and defaults of the few families whose layers ``oobleckd.planner.costs.analytic`` knows.
Everything else a worker measures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oobleckd.ctl.configfields import Fields, dividing
from oobleckd.ctl.expertshapes import DEFAULTS as MIXTURES
from oobleckd.ctl.expertshapes import mixture_shape
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
    if family not in _DEFAULTS and family not in MIXTURES:
        known = ", ".join(sorted((*_DEFAULTS, *MIXTURES)))
        raise JobError("model.family", f"{family!r} has no analytic profile ({known} have)", _ELSE)
    given = _stored(job) | job.model.config
    if family in MIXTURES:
        return mixture_shape(family, given)
    if family == "gpt2":
        return _gpt2(Fields(_GPT2, {_ALIASES.get(key, key): value for key, value in given.items()}))
    return _llama(Fields(_DEFAULTS[family], given), qkv_bias=family == "qwen2")


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


def _gpt2(fields: Fields) -> Shape:
    hidden = fields.count("n_embd")
    return Shape(
        num_blocks=fields.count("n_layer"),
        hidden=hidden,
        ffn=fields.count("n_inner", 4 * hidden),
        num_heads=dividing(fields, "n_head", "n_embd"),
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


def _llama(fields: Fields, *, qkv_bias: bool) -> Shape:
    hidden, num_heads = fields.count("hidden_size"), dividing(fields, "num_attention_heads", "hidden_size")
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
        output_bias=everywhere,
        tied=fields.flag("tie_word_embeddings"),
        attention_dropout=fields.share("attention_dropout"),
    )
