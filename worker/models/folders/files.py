"""The files of a folder of a model: which of them hold its weights, and what their headers say.

Owns which file is preferred, as transformers prefers it, and what is refused by its name: pickles are never
opened, and no file outside the folder is. Links are followed: in the cache of the hub every file is one. Does
not own what a tensor is for (``folder``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from oobleckd.protocol.unreadable import UNREADABLE, problem_of
from oobleckd.worker.runtime.errors import UserError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_OF_RANKS = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_WHOLE = "the folder needs model.safetensors, or its index and all shards, on every node"
_AGAIN = "download the folder again"


@dataclass(frozen=True, slots=True)
class WeightsHeader:
    """Where a tensor is, and what it is without being read; ``dtype`` as safetensors has it, such as BF16."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def headers(folder: Path, explicit: str | None) -> dict[str, WeightsHeader]:
    """Every tensor of the files that hold the weights, by name. ``explicit``: the file that config.json
    names, if it does.

    All tensors of a shard count, whether its index names them or not; of one that is in two shards the last.
    Raises UserError.
    """
    found: dict[str, WeightsHeader] = {}
    for file in _files(folder, explicit):
        with opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no dict
                part = tensors.get_slice(name)
                found[name] = WeightsHeader(file, str(part.get_dtype()), tuple(part.get_shape()))
    return found


def read(headers: Mapping[str, WeightsHeader], names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors as they are stored, by name; their memory may be the files'. Each file is opened once: an
    expert has tensors of its own, and a block many of them. Raises UserError.
    """
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(headers[name].file, []).append(name)
    values: dict[str, Tensor] = {}
    for file, wanted in by_file.items():
        with opened(file) as tensors:
            values |= {name: tensors.get_tensor(name) for name in wanted}
    return values


def opened(file: Path) -> safe_open:
    """Raises UserError."""
    try:
        if not file.is_file():
            why = "is no file" if file.exists() else "does not exist"
            raise UserError(f"model.checkpoint: {file} {why}", _WHOLE)
        return safe_open(str(file), framework="pt", device="cpu")
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(
            f"model.checkpoint: {file} cannot be read: {error}", "download the file again"
        ) from error


def _files(folder: Path, explicit: str | None) -> list[Path]:
    """The files with weights, in the order in which transformers goes by them."""
    names = _names_in(folder)
    if any(_OF_RANKS.fullmatch(name) for name in names):
        raise UserError(
            f"model.checkpoint: {folder} holds the shards of ranks that trained together "
            "(shard-…-model-….safetensors)",
            "load it with transformers and save it with save_pretrained",
        )
    if "adapter_config.json" in names:
        raise UserError(
            f"model.checkpoint: {folder} holds an adapter (adapter_config.json), which is not applied here",
            "merge it into the model with peft and save that, or move the adapter's files elsewhere",
        )
    if explicit is not None:
        name = _inside(folder, "config.json", explicit)
        return _shards(folder, name) if name.endswith(".index.json") else [folder / name]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if (folder / _INDEX).is_file():
        return _shards(folder, _INDEX)
    raise UserError(f"model.checkpoint: {folder / _SINGLE} does not exist{_instead(names)}", _WHOLE)


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise UserError(
            f"model.checkpoint: {folder}: {error.strerror}", "name a folder that every node may read"
        ) from error


def _instead(names: Iterable[str]) -> str:
    """What is there, where what was looked for is not."""
    for suffixes, words in (
        ((".bin", ".pt", ".pth", ".ckpt"), "is a pickle, which may hold a program and is never opened"),
        ((".gguf",), "is of another format"),
        ((_SUFFIX,), "has another name"),
    ):
        if found := next((name for name in names if name.endswith(suffixes)), ""):
            return f"; {found} {words}"
    return ""


def _shards(folder: Path, index: str) -> list[Path]:
    path = folder / index
    try:
        named = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map.values()
    except OSError as error:
        raise UserError(f"model.checkpoint: {path}: {error.strerror}", _AGAIN) from error
    except UNREADABLE as error:
        raise UserError(f"model.checkpoint: {path} is damaged: {problem_of(error)}", _AGAIN) from error
    return [folder / _inside(folder, index, name) for name in sorted(set(named))]


def _inside(folder: Path, source: str, name: str) -> str:
    """``name``, which ``source`` gives as a file of the folder. Raises UserError where it is none, or is
    elsewhere.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        raise UserError(
            f"model.checkpoint: {folder / source} names {name!r}, which is not inside the folder", _AGAIN
        )
    if not name.endswith((_SUFFIX, f"{_SUFFIX}.index.json")):
        raise UserError(
            f"model.checkpoint: {folder / source} names {name!r}, which is no safetensors file",
            "save the model with save_pretrained, which writes safetensors",
        )
    return name
