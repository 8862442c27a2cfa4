"""Weights before the first step: fresh by name and seed, or out of a Hugging Face folder.

Owns where values come from. Fresh weights follow the family's own ``_init_weights``, children first, with
the generator seeded anew by the name of every module: a pure function of seed and name, the same for any
split and on any device (values are drawn on the CPU).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from oobleckd.protocol.unreadable import UNREADABLE
from worker.errors import UserError
from worker.models.layer import hash63


def fresh(model: PreTrainedModel, root_name: str, names: tuple[str, ...], seed: int) -> dict[str, Tensor]:
    """Values of the parameters ``names``, all inside module ``root_name`` of ``model`` (on meta)."""
    root = model.get_submodule(root_name)
    # Not to_empty: on meta tensors that imports sympy, for half a second.
    tensors = itertools.chain(root.parameters(), root.buffers())
    room: dict[int, Any] = {id(t): _like(t) for t in tensors}
    twin = copy.deepcopy(root, {id(model.config): model.config, **room})
    with torch.random.fork_rng(devices=[]):
        for name, module in _children_first(twin, root_name):
            torch.default_generator.manual_seed(hash63(f"weights:{seed}:{name}"))
            model._init_weights(module)  # type: ignore[no-untyped-call]  # noqa: SLF001
    return {name: twin.get_parameter(name.removeprefix(f"{root_name}.")).detach() for name in names}


def _like(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _children_first(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _children_first(child, f"{name}.{child_name}")
    yield name, module


class Folder:
    """The safetensors of a Hugging Face folder. Names may lack the base model's prefix, as on the hub."""

    def __init__(self, path: Path, prefix: str) -> None:
        self._path = path
        self._prefix = f"{prefix}."
        self._files = self._index()

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Whether every parameter is there in its shape. Raises UserError."""
        for key, shape in shapes.items():
            file, name = self._find(key)
            with self._open(file) as tensors:
                found = tuple(tensors.get_slice(name).get_shape())
            if found != shape:
                raise UserError(
                    f"model.checkpoint: {file}: {name} has shape {found}, the model needs {shape}",
                    "remove fields of model.config that differ from the folder's config.json",
                )

    def read(self, key: str) -> Tensor:
        """The parameter ``key`` as float32. Raises UserError."""
        file, name = self._find(key)
        with self._open(file) as tensors:
            value: Tensor = tensors.get_tensor(name)
        return value.to(torch.float32)

    def _find(self, key: str) -> tuple[Path, str]:
        for name in (key, key.removeprefix(self._prefix)):
            if name in self._files:
                return self._files[name], name
        raise UserError(
            f"model.checkpoint: {self._path} has no tensor {key}",
            "name a folder of the same model, with all its safetensors files",
        )

    def _index(self) -> dict[str, Path]:
        index = self._path / "model.safetensors.index.json"
        if index.exists():
            try:
                names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
            except UNREADABLE as error:
                raise UserError(
                    f"model.checkpoint: {index} is damaged: {error}", "download the folder again"
                ) from error
            return {name: self._path / file for name, file in names.items()}
        single = self._path / "model.safetensors"
        with self._open(single) as tensors:
            return dict.fromkeys(tensors.keys(), single)

    def _open(self, file: Path) -> safe_open:
        try:
            return safe_open(str(file), framework="pt", device="cpu")
        except FileNotFoundError as error:
            raise UserError(
                f"model.checkpoint: {file} does not exist",
                "the folder needs model.safetensors, or its index and all shards, on every node",
            ) from error
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"model.checkpoint: {file} cannot be read: {error}", "download the file again"
            ) from error


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]
