"""What the tensors of a folder are in the model: names and conversions as transformers has them when it
loads.

Owns the use of transformers' own loader: every stored name goes through its functions, so whatever it
renames, merges, splits or passes over is so here too. They are no public interface; where a version lacks
one, a folder is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import transformers
from torch import Tensor
from transformers import PreTrainedModel

from oobleckd.worker.runtime.errors import UserError

try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        Concatenate,
        MergeModulelist,
        Transpose,
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
        revert_weight_conversion,
    )
except ImportError as error:  # another version
    _lacks = str(error)
else:
    _lacks, _MOVES = "", {Concatenate, MergeModulelist, Transpose}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How stored tensors become parameters. ``sources``: (pattern, stored name), in order; ``first``: the
    name that they are renamed to, which is the parameter's where nothing but the name changes (``converter``
    is None).
    """

    first: str
    sources: tuple[tuple[str, str], ...]
    converter: Any = None

    @property
    def names(self) -> tuple[str, ...]:
        """The stored tensors that it takes."""
        return tuple(name for _, name in self.sources)

    @property
    def moves_alone(self) -> bool:
        """Whether no number is computed with: it may be cast before or after."""
        return self.converter is None or all(type(each) in _MOVES for each in self.converter.operations)

    def made(self, values: Sequence[Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """The parameters by name, of the ``values`` of ``names``. Raises UserError where they do not fit."""
        if self.converter is None:
            return {self.first: values[0]}
        converter = copy.deepcopy(self.converter)
        for (pattern, name), value in zip(self.sources, values, strict=True):
            converter.add_tensor(self.first, name, pattern, value)
        try:
            made = converter.convert(self.first, model=model, config=model.config)
        except Exception as error:  # whatever others' code makes of tensors that do not fit
            raise UserError(
                f"model.checkpoint: {', '.join(self.names[:2])} cannot be converted: "
                f"{' '.join(str(error).split())}",
                "download the folder again, or load it with transformers and save it with save_pretrained",
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass(frozen=True, slots=True)
class Mapped:
    """``recipes`` in the order in which they are carried out; ``unread``: stored name -> what it would be
    called in the model; ``repeated``: stored names of which another one is the same parameter, and is taken.
    """

    recipes: tuple[Recipe, ...]
    unread: dict[str, tuple[str, ...]]
    repeated: tuple[str, ...]


def mapped(model: PreTrainedModel, names: Iterable[str]) -> Mapped:
    """What the tensors called ``names`` are in ``model`` (on meta), as ``from_pretrained`` has it. Raises
    UserError.
    """
    _check_version()
    state, prefix = model.state_dict(), model.base_model_prefix
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    taken: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    unread, repeated = {}, []
    for name in sorted(names, key=dot_natural_key):
        # transformers' own loader and no list of ours, which had one rule of its dozens: GPT-NeoX as its
        # save_pretrained writes it was refused. 2,000 random folders gave the loader's bits. (D-models-002)
        first, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if first not in state and name in state:
            first, pattern = rename_source_key(name, [], [], prefix, state)
        if first in state:
            converter, sources = taken.setdefault(first, (of_pattern[pattern] if pattern else None, []))
            sources.append((pattern or name, name))
            if converter is None and len(sources) > 1:
                repeated.append(name)
        elif pattern is not None:
            targets = of_pattern[pattern].target_patterns
            unread[name] = tuple(first.replace(targets[0], target) for target in targets)
        else:
            unread[name] = (first,)
    recipes = [
        Recipe(first, tuple(sources if converter is not None else sources[:1]), converter)
        for first, (converter, sources) in taken.items()
    ]
    return Mapped(tuple(recipes), unread, tuple(repeated))


def saved(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors``, parameters and buffers of ``model`` by name, as ``save_pretrained`` names and divides
    them; several may share memory. What one tensor of a file is made of has to be among them: of a layer,
    all.
    """
    _check_version()
    # As the hub has them, experts one by one: what serves or converts models reads those names alone.
    # (D-models-013)
    made: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return made


def told(model: PreTrainedModel, missing: Iterable[str], unread: Iterable[str]) -> tuple[set[str], set[str]]:
    """Of parameters that are missing and of names that are nothing to the model those that transformers would
    tell of.
    """
    info: Any = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unread))
    model._adjust_missing_and_unexpected_keys(info)  # noqa: SLF001 - rules of its own for each family
    return info.missing_keys, info.unexpected_keys


def _check_version() -> None:
    if _lacks:
        raise UserError(
            f"model.checkpoint: transformers {transformers.__version__} loads folders otherwise: {_lacks}",
            "install the version of transformers in constraints.txt",
        )


def in_order(names: Iterable[str]) -> list[str]:
    """Names as people count: layer 2 before layer 10."""
    ordered: list[str] = sorted(names, key=dot_natural_key)
    return ordered
