"""The model's configuration: the job's fields on top of the family's defaults, checked before anything is
built.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from oobleckd.protocol.job import Job
from oobleckd.words import count
from oobleckd.worker.models import rope, routers
from oobleckd.worker.models.experts import grouped
from oobleckd.worker.models.sizes import check_sizes
from oobleckd.worker.models.unsupported import unsupported
from oobleckd.worker.runtime.errors import UserError

CAUSAL = (
    "arcee", "biogpt", "bloom", "codegen", "cohere", "cohere2", "ernie4_5", "exaone4", "falcon", "gemma",
    "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "granite", "helium",
    "llama", "ministral", "mistral", "mpt", "nemotron", "olmo", "olmo2", "olmo3", "opt", "persimmon", "phi",
    "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2", "xglm",
)  # fmt: skip
"""Families that are trained to name the next token."""

MASKED = (
    "bert", "camembert", "convbert", "data2vec-text", "distilbert", "electra", "ernie", "eurobert",
    "modernbert", "rembert", "roberta", "roberta-prelayernorm", "xlm-roberta",
)  # fmt: skip
"""Families that are trained to name tokens that were hidden from them (``oobleckd.worker.data.masking``)."""

EXPERTS = (
    "deepseek_v3", "dots1", "glm4_moe", "gpt_oss", "granitemoe", "hunyuan_v1_moe", "minimax", "mixtral",
    "olmoe", "phimoe", "qwen2_moe", "qwen3_moe",
)  # fmt: skip
"""Causal families that are mixtures of experts."""

FAMILIES = tuple(sorted(CAUSAL + EXPERTS + MASKED))
"""Families whose split is proven bit-equal to the undivided model (tests/unit/worker/test_families.py)."""

_ROBERTAS = frozenset({"camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta"})
"""Their positions are counted from behind the padding token's number."""

TIED = _ROBERTAS | {"bert", "ernie"}
"""Untied, their heads keep a bias that nothing computes with, so it could not be trained."""

JOINED_ONLY = {
    "bloom": "its positions (ALiBi) are counted through the whole row",
    "convbert": "its convolutions reach over the borders of documents",
    "minimax": "its linear attention carries what it saw through the whole row",
}
"""Families that cannot keep the documents of a row apart, and why."""

# Found by trying every family with every input: the wrong one is passed over without a word, or loses the
# sliding window. (D-models-005)
BY_MASK = _ROBERTAS | {
    "bert", "biogpt", "distilbert", "electra", "ernie", "eurobert", "falcon", "gpt_oss", "modernbert", "mpt",
    "opt", "rembert", "xglm",
}  # fmt: skip
"""Families whose body keeps documents apart by a mask that it is given; the others make one of their own, of
where documents begin (tests/unit/worker/test_separate.py).
"""

_REFUSED = frozenset(
    {
        # the engine's own choice, or of no meaning to the training of a language model
        "add_cross_attention", "architectures", "chunk_size_feed_forward", "dtype", "id2label",
        "is_decoder", "is_encoder_decoder", "label2id", "output_hidden_states", "problem_type", "return_dict",
        "torch_dtype", "transformers_version", "use_cache",
        # drops whole blocks at random, which the cut would not see
        "layerdrop",
    }
)  # fmt: skip

_SHOWS = (
    "add_cross_attention", "chunk_size_feed_forward", "is_encoder_decoder", "layerdrop",
    "output_router_logits",
)  # fmt: skip
"""Of these, what a config.json may not have set: the model of transformers would compute something else."""

_PREFIX = re.compile(r"^(Class validation error for validator|Validation error for field) '\w+': \w+: ")
"""What huggingface_hub puts before the reason."""

_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_config(job: Job) -> PretrainedConfig:
    """The configuration of ``job``'s model. Raises UserError naming the key that is wrong."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    family = job.model.family
    if family not in FAMILIES:
        raise unsupported(family, FAMILIES)
    kind: type[PretrainedConfig] = CONFIG_MAPPING[family]
    if family in EXPERTS:
        grouped.check_given(job.model.config)
    _check_keys(kind, job.model.config)
    routers.check_given(job.model.config)
    fields = _fields(kind, _stored(job), job.model.config)
    if family in EXPERTS:
        fields["experts_implementation"] = grouped.IMPLEMENTATION
    config = _made(kind, fields)
    if "rope_parameters" in kind.__dataclass_fields__:
        rope.check_taken(config, job.model.config)
    _check_config(job, config)
    return config


def _fields(kind: type[PretrainedConfig], stored: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What the job gives over what is stored, under whichever of its names either has it."""
    names = {key: kind.attribute_map.get(key, key) for key in (*stored, *given)}
    said = {names[key]: key for key in given}
    for key in given:
        if said[names[key]] != key and given[said[names[key]]] != given[key]:
            raise UserError(
                f"model.config.{key}: is another name of {said[names[key]]}, which has another value",
                "leave one of the two out",
            )
    kept = {key: value for key, value in stored.items() if names[key] not in said}
    # Transformers writes into tables that it is given.
    fields: dict[str, Any] = copy.deepcopy({**rope.merged(kept, given), **given})
    return fields | dict.fromkeys(_out_of_reach(kind, fields))


def _made(kind: type[PretrainedConfig], fields: dict[str, Any]) -> PretrainedConfig:
    try:
        return kind(**(fields | {"use_cache": False}))
    except (
        StrictDataclassError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
    ) as error:
        raise UserError(
            f"model.config: {_one_line(error)}", f"see the fields of transformers' {kind.__name__}"
        ) from error


def _check_keys(kind: type[PretrainedConfig], given: Iterable[str]) -> None:
    fields = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    known = (fields | rope.keys_of(kind)) - _REFUSED
    if kind.model_type in EXPERTS:
        # Transformers reads head_dim of all of them, and declares it for some: Qwen3-30B-A3B has 128.
        known |= {"experts_implementation", "head_dim"}
    for key in given:
        if key not in known:
            raise UserError(
                f"model.config.{key}: {kind.model_type} has no such field to set",
                _nearest(key, known, "known fields"),
            )


def _stored(job: Job) -> dict[str, Any]:
    """The fields of config.json in the checkpoint's folder; none without a checkpoint."""
    if not job.model.checkpoint:
        return {}
    path = Path(job.model.checkpoint) / "config.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"model.checkpoint: {path}: {error.strerror}",
            "name a local folder with config.json and safetensors, seen by every node",
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"model.checkpoint: {path} is not JSON", "download the folder again") from error
    if not isinstance(stored, dict):
        raise UserError(f"model.checkpoint: {path} is no configuration", "download the folder again")
    family = stored.pop("model_type", None)
    if family != job.model.family:
        raise UserError(
            f"model.family is {job.model.family!r}, but {path} is of a {family!r} model",
            f'set model.family = "{family}"',
        )
    _check_stored(path, job.model.family, stored)
    return {key: value for key, value in stored.items() if key not in _REFUSED}


def _check_stored(path: Path, family: str, stored: Mapping[str, Any]) -> None:
    for key in ("quantization_config", "compression_config"):
        if (how := stored.get(key)) is not None:
            method = how.get("quant_method") if isinstance(how, dict) else None
            raise UserError(
                f"model.checkpoint: {path} has {key}: its weights are quantized "
                f"({method or 'by a method without a name'})",
                "name a folder with the weights as they were before, or dequantize them with transformers "
                "and save them",
            )
    for key in (*_SHOWS, "is_decoder") if family in MASKED else _SHOWS:
        if stored.get(key):
            raise UserError(
                f"model.checkpoint: {path} has {key} = {json.dumps(stored[key])}, with which no {family} is "
                "trained here",
                f"name another folder, or remove {key} from config.json if its weights do without",
            )


def _out_of_reach(kind: type[PretrainedConfig], fields: dict[str, Any]) -> list[str]:
    """Special tokens whose default number lies beyond a small vocabulary; nothing in training reads them."""
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(kind)}
    size = fields.get("vocab_size", defaults.get("vocab_size"))
    return [
        name
        for name in _SPECIAL_TOKENS
        if name not in fields
        and isinstance(defaults.get(name), int)
        and isinstance(size, int)
        and defaults[name] >= size
    ]


def _check_config(job: Job, config: PretrainedConfig) -> None:
    for name in ("num_hidden_layers", "max_position_embeddings", "vocab_size"):
        value = getattr(config, name, None)  # under another name it comes unchecked
        missing = value is None and name != "max_position_embeddings"
        if missing or isinstance(value, bool) or not isinstance(value, int | None):
            raise UserError(f"model.config.{name}: {value!r} is no whole number", "write one")
    if config.num_hidden_layers < 1:
        raise UserError("model.config: the model has no blocks", "set the number of layers to 1 or more")
    check_sizes(config, job.model.config)
    if job.data.is_separate:
        _check_separate(job, config)
    family = job.model.family
    if family in TIED and not config.tie_word_embeddings:
        raise UserError(
            f"model.config.tie_word_embeddings: {family} is trained with tied embeddings alone",
            "leave it out, or set it to true",
        )
    positions = _num_positions(family, config)
    if positions is not None and job.train.sequence > positions:
        raise UserError(
            f"train.sequence = {job.train.sequence}, but the model has only {count(positions, 'position')}",
            f"set train.sequence to {positions} or less, or raise model.config.{_named(config)}",
        )
    for name, value in sorted(vars(config).items()):
        if name.endswith(("dropout", "pdrop")) and isinstance(value, int | float) and not 0 <= value < 1:
            raise UserError(
                f"model.config.{name}: {value} is not in [0, 1)", "0 switches dropout off, 0.1 is usual"
            )


def _named(config: PretrainedConfig) -> str:
    """The field that says how many positions there are."""
    return "max_seq_len" if hasattr(config, "max_seq_len") else "max_position_embeddings"


def _num_positions(family: str, config: PretrainedConfig) -> int | None:
    """The longest sequence that the model has positions for; None where there is no such bound."""
    positions: int | None = getattr(config, "max_position_embeddings", getattr(config, "max_seq_len", None))
    return None if positions is None else positions - first_position(family, config)


def first_position(family: str, config: PretrainedConfig) -> int:
    """The number of the position at which a row begins. Raises UserError."""
    if family not in _ROBERTAS:
        return 0
    if config.pad_token_id is None:
        raise UserError(
            f"model.config.pad_token_id: {family} counts its positions from it, so it cannot be null",
            "leave it out, or set it to a number below model.config.vocab_size; 1 is usual",
        )
    return int(config.pad_token_id) + 1


def _check_separate(job: Job, config: PretrainedConfig) -> None:
    """Whether documents of a row can be kept apart, with the bits that each has beside any other."""
    reason, way_out = JOINED_ONLY.get(job.model.family), "choose another family"
    if reason is None and getattr(config, "alibi", False):
        reason, way_out = "with alibi its positions are counted through the whole row", "leave alibi out"
    if reason is None and (limit := rope.long_from(config)) is not None and job.train.sequence > limit:
        reason = (
            "its rotary angles (longrope) are other ones as soon as a document beside has more than "
            f"{count(limit, 'token')}"
        )
        way_out = f"set train.sequence to {limit} or less"
    if reason is not None:
        raise UserError(
            f'data.documents: "separate" does not go with model.family = {job.model.family!r}: {reason}',
            f'set data.documents = "joined", or {way_out}',
        )


def _nearest(word: str, known: Iterable[str], what: str) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"{what}: {', '.join(names)}"


def _one_line(error: Exception) -> str:
    words = (
        error.args[0] if isinstance(error, KeyError) and error.args else error
    )  # a KeyError's own text is quoted
    return _PREFIX.sub("", " ".join(str(words).split()))
