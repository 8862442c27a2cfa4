"""Rotary positions in ``[model.config]``: ``rope_theta``, ``rope_parameters``, ``rope_scaling`` and their
older names.

Owns whether what a job says of them is known, has values that can be computed with, and has arrived in the
configuration: transformers passes over a key that it does not know, or that another one outweighs, with a
warning at most. What the words mean is transformers' own (``modeling_rope_utils``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from oobleckd.words import count
from oobleckd.worker.runtime.errors import UserError

TABLES = ("rope_parameters", "rope_scaling")
_THETA, _PART = "rope_theta", "partial_rotary_factor"
NUMBERS = {
    "rope_theta": _THETA, "rotary_emb_base": _THETA, "rope_local_base_freq": _THETA,
    "global_rope_theta": _THETA,
    "local_rope_theta": _THETA, "partial_rotary_factor": _PART, "rotary_pct": _PART,
}  # fmt: skip
"""Older keys beside the tables -> what a table calls it."""

_KINDS = frozenset({"default", *ROPE_INIT_FUNCTIONS})
_WORDS = frozenset({"type", *RopeParameters.__annotations__})


def keys_of(kind: type[PretrainedConfig]) -> frozenset[str]:
    """What ``kind`` may be given of them besides its fields; nothing where it has no rotary positions."""
    return (
        frozenset({"rope_scaling", *NUMBERS})
        if "rope_parameters" in kind.__dataclass_fields__
        else frozenset()
    )


def merged(stored: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``stored``, from a config.json, without what the job's ``given`` outweighs. Raises UserError.

    A table of the job replaces the stored one, less the base, which stays where the job names none.
    """
    tables = [key for key in TABLES if given.get(key) is not None]
    numbers = [key for key in NUMBERS if key in given]
    if len(tables) == 2:
        raise UserError(
            "model.config.rope_scaling: is another name of rope_parameters, which is there too",
            "leave one of the two out",
        )
    for key in tables:
        _check_table(given[key], f"model.config.{key}")
    for key in numbers:
        _check_value(NUMBERS[key], given[key], f"model.config.{key}")
    if not tables and not numbers:
        return stored
    rest = {key: value for key, value in stored.items() if key not in TABLES}
    before: dict[str, Any] = next((stored[key] for key in TABLES if isinstance(stored.get(key), dict)), {})
    nested = any(isinstance(value, dict) for value in before.values())
    if numbers and nested and not tables:
        raise UserError(
            f"model.config.{numbers[0]}: the folder's config.json has one for each kind of layer",
            "set model.config.rope_parameters, with a table for each kind of layer",
        )
    if tables:
        return rest | ({} if nested else {key: before[key] for key in (_THETA, _PART) if key in before})
    if not before:
        return rest
    kept = {key: value for key, value in before.items() if key not in {NUMBERS[name] for name in numbers}}
    return rest | {"rope_parameters": kept}


def check_taken(config: PretrainedConfig, given: Mapping[str, Any]) -> None:
    """Whether all that the job's ``given`` says of rotary positions is in ``config``. Raises UserError."""
    family, found = config.model_type, list(_flat(getattr(config, "rope_parameters", None)))
    for key, word in NUMBERS.items():
        if key in given and not any(_same(table.get(word), given[key]) for table in found):
            raise UserError(
                f"model.config.{key}: {family} does not take it so, or something else outweighs it",
                f"set {word} in model.config.rope_parameters",
            )
    for key in TABLES:
        for entry, value in _entries(given.get(key)):
            name = "rope_type" if entry == "type" else entry
            if not any(_same(table.get(name), value) for table in found):
                raise UserError(f"model.config.{key}.{entry}: {family} does not take it", _form(config))
    _check_words(config, given)
    _check_lengths(config, given)


def long_from(config: PretrainedConfig) -> int | None:
    """The longest row whose angles do not depend on how long it is; None: those of no row do.

    Angles of type "dynamic" change only beyond ``max_position_embeddings``, which no row exceeds.
    """
    tables = _flat(getattr(config, "rope_parameters", None))
    limits = [
        table.get("original_max_position_embeddings", 0)
        for table in tables
        if table.get("rope_type") == "longrope"
    ]
    return min(limits, default=None)


def _check_words(config: PretrainedConfig, given: Mapping[str, Any]) -> None:
    """An entry of the job's that this kind of scaling does not know, of which transformers would warn."""
    entries = {entry: key for key in TABLES for entry, _ in _entries(given.get(key))}

    def check(
        rope_type: str,
        received: set[str],
        required: set[str],
        optional: set[str] | None = None,
        ignored: Any = None,
        **more: Any,
    ) -> None:
        optional = optional or more.get("optional_keys")
        ignored = ignored or more.get("ignore_keys")
        known = {*required, *(optional or ()), *(ignored or ()), _PART, "type", "rope_type"}
        for entry in sorted(entries.keys() & received - known):
            raise UserError(
                f"model.config.{entries[entry]}.{entry}: is nothing to positions of type {rope_type!r}",
                f"it knows {', '.join(sorted(known - {'type'}))}",
            )

    vars(config)["_check_received_keys"] = check  # in place of the one that warns
    try:
        config.validate_rope()
    except KeyError as error:
        raise UserError(f"model.config: {error.args[0]}", "see docs/models.md") from error
    finally:
        del vars(config)["_check_received_keys"]


def _check_lengths(config: PretrainedConfig, given: Mapping[str, Any]) -> None:
    """Lists with a factor for each pair of dimensions: a wrong length shows in the first block that computes,
    if at all.
    """
    said = {
        entry: key for key in TABLES for entry, value in _entries(given.get(key)) if isinstance(value, list)
    }
    if not said:
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for table in _flat(config.rope_parameters):
        pairs = int(head_dim * (table.get(_PART) or 1.0)) // 2
        for entry in sorted(said.keys() & {"short_factor", "long_factor"} & table.keys()):
            if len(table[entry]) != pairs:
                raise UserError(
                    f"model.config.{said[entry]}.{entry}: has {len(table[entry])} numbers, and a head has "
                    f"{count(pairs, 'pair')} of dimensions",
                    "write one number for each pair",
                )


def _check_table(table: Any, path: str) -> None:
    if not isinstance(table, dict):
        raise UserError(
            f"{path}: {table!r} is no table", 'write one, such as { rope_type = "linear", factor = 2.0 }'
        )
    for key, value in table.items():
        if isinstance(value, dict):
            _check_table(value, f"{path}.{key}")
        else:
            _check_value(key, value, f"{path}.{key}")


def _check_value(key: str, value: Any, path: str) -> None:
    """What transformers only warns of, and then computes with."""
    if key not in _WORDS:
        close = difflib.get_close_matches(key, sorted(_WORDS), n=1)
        known = f"did you mean {close[0]!r}?" if close else f"known words: {', '.join(sorted(_WORDS))}"
        raise UserError(f"{path}: is nothing to rotary positions", known)
    if value is None:
        return
    wanted = str(RopeParameters.__annotations__.get(key, ""))
    if key in {"rope_type", "type"}:
        if value not in _KINDS:
            raise UserError(f"{path}: there is no {value!r}", f"choose one of {', '.join(sorted(_KINDS))}")
    elif "list" in wanted:
        if not isinstance(value, list) or not all(_is_number(each) for each in value):
            raise UserError(
                f"{path}: {value!r} is no list of numbers",
                "write one number for each pair of rotated dimensions",
            )
    elif "bool" in wanted:
        if not isinstance(value, bool):
            raise UserError(f"{path}: {value!r} is neither true nor false", "write one of them")
    elif ("float" in wanted or "int" in wanted) and not (_is_number(value) and value > 0):
        raise UserError(f"{path}: {value!r} is no number above 0", "write one, such as 10000.0")
    if key == _PART and value > 1:
        raise UserError(f"{path}: {value!r} is more than all of a head", "write a number above 0, at most 1")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(found: Any, said: Any) -> bool:
    return _is_number(found) == _is_number(said) and bool(found == said)


def _flat(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """The tables that positions are computed with: one for all layers, or one for each kind of layer."""
    if not isinstance(parameters, dict):
        return
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]


def _entries(table: Any) -> Iterator[tuple[str, Any]]:
    for part in _flat(table):
        yield from part.items()
    if isinstance(table, dict) and any(isinstance(value, dict) for value in table.values()):
        yield from ((key, value) for key, value in table.items() if not isinstance(value, dict))


def _form(config: PretrainedConfig) -> str:
    kinds = [key for key, value in (config.rope_parameters or {}).items() if isinstance(value, dict)]
    if kinds:
        return (
            f"this family has one table for each kind of layer: rope_parameters = {{ {kinds[0]} = {{ … "
            "}, … }"
        )
    return "leave it out, or see the fields of transformers' RopeParameters"
