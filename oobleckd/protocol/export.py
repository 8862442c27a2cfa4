"""An exported model: what the worker's program tells oobleckctl, and which folder it may write.

Owns the names of the files and the answer to "may this folder be written"; both programs ask it. What is in
the files is the matter of ``worker.export``.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
COMPANIONS = (
    "added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt", "special_tokens_map.json",
    "spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip
"""What else lies in a folder of transformers; copied from the one that the job started from."""

_OURS = frozenset({CONFIG, WEIGHTS, INDEX, *COMPANIONS})


class Exported(msgspec.Struct, frozen=True):
    """A finished export. ``architecture``: the class in transformers. ``num_bytes``: of the weights in ``files``. ``skipped``: of the steps, those
    that made no update; ``not_finite``: tensors with a NaN or an infinity in them.
    """

    path: str
    step: int
    architecture: str
    dtype: str
    num_bytes: int
    files: tuple[str, ...]
    skipped: int = 0
    not_finite: tuple[str, ...] = ()


def shard_name(index: int, count: int) -> str:
    """Name of file ``index`` of ``count`` files of weights, as transformers looks for it."""
    return WEIGHTS if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def why_not(folder: Path, *, overwrite: bool) -> tuple[str, str] | None:
    """Problem and hint when ``folder`` must not be written; None when it may.

    It may when it is empty or absent, or with ``overwrite`` when it holds nothing but such a model: it is
    replaced as a whole.
    """
    if not folder.exists():
        return None
    if not folder.is_dir():
        return f"{folder} is not a folder", "name a folder that is empty or does not exist yet"
    names = sorted(path.name for path in folder.iterdir())
    if names and not overwrite:
        return f"{folder} is not empty", "name another folder, or replace the model in it with --overwrite"
    if foreign := [name for name in names if not _is_ours(name)]:
        return (
            f"{folder} holds {foreign[0]}, which is no part of an exported model",
            "name another folder: --overwrite replaces exported models alone",
        )
    return None


def _is_ours(name: str) -> bool:
    return name in _OURS or (name.startswith("model-") and name.endswith(".safetensors"))
