"""A folder of a model to start from: its tensors as the model's parameters, bit for bit as
``from_pretrained`` has them.

Owns what is refused (quantized weights, shapes that differ, a folder of something else), which of several
names of a tied parameter is read, and what is to be said of the rest. Only headers are read until a parameter
is wanted; a device reads its own layers alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oobleckd.protocol.modelnotes import FolderNote, note_of
from oobleckd.words import count
from oobleckd.worker.models.experts.grouped import ShapesAlone
from oobleckd.worker.models.folders import files, names
from oobleckd.worker.models.folders.names import Recipe
from oobleckd.worker.runtime.errors import UserError

_WEIGHTS = frozenset({"F16", "BF16", "F32", "F64"})
_TOO_SMALL = re.compile(r"F[468](_\w+)?|I[48]|U4")
_COMPANION = re.compile(
    r"(^|[._:])(q?scales?(_inv|_\d|_and_zeros?)?|absmax|quant_map|quant_state|qweight|qzeros?|zero_points?|zeros|[gq]_idx"
    r"|SCB|weight_format|codebooks?|codes|qdata|packed|weight_shape|blocks|Qidxs|SU|SV|_data)(\.bitsandbytes__\w+)?$"
)
"""Last part of a name that a quantized weight keeps beside it, by all schemes that transformers knows."""
_UNQUANTIZED = (
    "name a folder with the weights as they were before, or dequantize them with transformers and save them"
)
_ROWS = 4096
"""Of a tied matrix are compared at once."""


class Folder:
    """The weights of ``model`` (on meta) in the folder ``path``.

    ``blocks``: the parameters of its blocks; where most of them are missing, it is a folder of something
    else. ``notes``: what is to be said of it. ``apart``: (source, other) of tied parameters that are stored
    with different values. ``missing`` and ``unexpected`` are what transformers reports under these names.
    Raises UserError.
    """

    def __init__(self, path: Path, model: PreTrainedModel, blocks: Collection[str]) -> None:
        self._path, self._model = path, model
        self._headers = files.headers(path, getattr(model.config, "transformers_weights", None))
        self._shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        found = names.mapped(model, self._headers)
        self._recipes: dict[str, Recipe] = {}
        for recipe in found.recipes:
            self._check_dtypes(recipe)
            self._recipes |= dict.fromkeys(self._targets(recipe), recipe)
        hits = sum(name in self._recipes for name in blocks)
        self._source, self.apart = self._tied()
        lacking = self._shapes.keys() - self._recipes.keys() - self._source.keys()
        meant = {target for targets in found.unread.values() for target in targets}
        self.missing, self.unexpected = names.told(model, lacking, meant)
        unread = [name for name, targets in found.unread.items() if self.unexpected.intersection(targets)]
        self._check_unread(unread)
        if 3 * hits < len(blocks):
            first = names.in_order(name for name in blocks if name not in self._recipes)[0]
            raise UserError(
                f"model.checkpoint: {path} has {hits} of the {count(len(blocks), 'tensor')} of the blocks "
                f"(no {first})",
                "name a folder of the same model, with all its safetensors files",
            )
        self.notes = tuple(self._notes([*unread, *found.repeated]))

    def has(self, key: str) -> bool:
        """Whether the parameter ``key`` is there, under whichever name."""
        return key in self._recipes or key in self._source

    def read(self, key: str) -> Tensor:
        """The parameter ``key`` as float32. Raises UserError."""
        key = self._source.get(key, key)
        recipe = self._recipes[key]
        stored = files.read(self._headers, recipe.names)
        values = [stored.pop(name) for name in recipe.names]
        # Cast last, all experts of a block take up their float32 once, and not three times.
        if not (recipe.moves_alone and len({value.dtype for value in values}) == 1):
            values = [value.to(torch.float32) for value in values]
        return recipe.made(values, self._model)[key].to(torch.float32)

    # ------------------------------------------------------------------ checks

    def _check_dtypes(self, recipe: Recipe) -> None:
        for name in recipe.names:
            header = self._headers[name]
            if header.dtype not in _WEIGHTS:
                raise UserError(
                    f"model.checkpoint: {header.file}: {name} is of dtype {header.dtype}, which is none of a "
                    "weight to train "
                    "(it may be quantized)",
                    _UNQUANTIZED,
                )

    def _targets(self, recipe: Recipe) -> tuple[str, ...]:
        """The parameters that a recipe makes, if their shapes are the model's."""
        shapes = [self._headers[name].shape for name in recipe.names]
        if recipe.converter is None:
            made = {recipe.first: shapes[0]}
        else:
            empty = [torch.empty(shape, device="meta") for shape in shapes]
            with ShapesAlone():
                made = {name: tuple(value.shape) for name, value in recipe.made(empty, self._model).items()}
        for target, shape in made.items():
            wanted = self._shapes.get(target)
            if shape != wanted:
                name = recipe.names[0]
                if len(recipe.names) > 1:
                    name = f"{target}, which {count(len(recipe.names), 'tensor')} such as {name} make,"
                needs = f"needs {wanted}" if wanted is not None else f"has no {target}"
                raise UserError(
                    f"model.checkpoint: {self._headers[recipe.names[0]].file}: {name} has shape {shape}, the "
                    f"model {needs}",
                    "remove fields of model.config that differ from the folder's config.json",
                )
        return tuple(made)

    def _check_unread(self, unread: Collection[str]) -> None:
        for name in unread:
            header = self._headers[name]
            if _COMPANION.search(name) or _TOO_SMALL.fullmatch(header.dtype):
                raise UserError(
                    f"model.checkpoint: {header.file}: {name} ({header.dtype}) belongs to quantized weights, "
                    "and nothing here uses it",
                    _UNQUANTIZED,
                )

    # ------------------------------------------------------------------ tied parameters

    def _tied(self) -> tuple[dict[str, str], tuple[tuple[str, str], ...]]:
        """Parameter -> the other name under which it is stored, where it is not stored under its own; and
        what differs.
        """
        elsewhere: dict[str, str] = {}
        apart: list[tuple[str, str]] = []
        for name, source in self._model.all_tied_weights_keys.items():
            if name in self._recipes and source not in self._recipes:
                elsewhere.setdefault(source, name)
            elif source in self._recipes and name not in self._recipes:
                elsewhere[name] = source
            held = elsewhere.get(source, source)
            if (
                name in self._recipes
                and held in self._recipes
                and held != name
                and not self._equal(held, name)
            ):
                apart.append((source, name))
        return elsewhere, tuple(apart)

    def _equal(self, one: str, other: str) -> bool:
        pairs = zip(self._rows(one), self._rows(other), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)

    def _rows(self, key: str) -> Iterator[Tensor]:
        recipe = self._recipes[key]
        if recipe.converter is not None:
            yield self.read(key)
            return
        (value,) = files.read(self._headers, recipe.names).values()
        for rows in torch.split(value, _ROWS):
            yield rows.to(torch.float32)

    # ------------------------------------------------------------------ what is to be said

    def _notes(self, unread: Collection[str]) -> Iterator[FolderNote]:
        if unread:
            yield note_of("unread", names.in_order(unread))
        # Said, and not refused: from_pretrained begins it fresh too, and a new head or more layers are
        # wanted. A warning that nobody sees was the fault. (D-models-003)
        if self.missing:
            yield note_of("fresh", names.in_order(self.missing))
