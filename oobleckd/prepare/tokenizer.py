"""The tokenizer of a job: its file, how many numbers it has, and which of them end and begin a document.

Owns where these are looked for: in ``tokenizer_config.json`` and the configurations beside
``tokenizer.json``, as transformers does, and among the names that are in use where nothing is said.
``tokenizers`` itself is loaded when a tokenizer is opened.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from oobleckd.protocol.job import Job
from oobleckd.protocol.jobdata import FROM_CHECKPOINT
from oobleckd.tokens.errors import DataError
from oobleckd.words import count

FILE = "tokenizer.json"
_HINT = "name a folder with tokenizer.json, or such a file"
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")
_USUAL = {
    "eos": ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>"),
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "<|bos|>", "[BOS]", "<|startoftext|>"),
}
NONE = -1
"""In place of the number of a token that there is not to be."""


class TokenizerOf(NamedTuple):
    """``sha256``: of tokenizer.json. ``size``: one more than its largest number. ``eos``, ``bos``: ``NONE``
    where the job wants none.
    """

    file: Path
    sha256: str
    size: int
    eos: int
    bos: int


def file_of(job: Job) -> Path:
    """The tokenizer.json of ``job``. Raises DataError."""
    key, text = "data.tokenizer", job.data.tokenizer
    if text in {"", FROM_CHECKPOINT}:
        key, text = "model.checkpoint", job.model.checkpoint
    if not text:
        raise DataError(f"data.tokenizer: is missing, and data.source = {job.data.source!r} needs it", _HINT)
    path = Path(text).expanduser()
    if path.is_file():
        return path
    if (path / FILE).is_file():
        return path / FILE
    if not path.exists():
        raise DataError(f"{key}: {path} does not exist", _HINT)
    others = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (path / name).is_file()]
    hint = f"make it of {others[0]}: AutoTokenizer.from_pretrained(…).save_pretrained(…)" if others else _HINT
    raise DataError(f"{key}: {path} has no {FILE}", hint)


def tokenizer_of(job: Job) -> TokenizerOf:
    """Raises DataError where it cannot be read, or lacks what the job asks of it."""
    file = file_of(job)
    tokenizer = opened(file)
    numbers = tokenizer.get_vocab(with_added_tokens=True)
    size = max(numbers.values(), default=-1) + 1
    if not size:
        raise DataError(f"data.tokenizer: {file} has no tokens", _HINT)
    ends = [
        _number_of(kind, file, numbers) if wanted else NONE
        for kind, wanted in (("eos", job.data.eos), ("bos", job.data.bos))
    ]
    _check_vocabulary(job, size)
    return TokenizerOf(file, hashlib.sha256(file.read_bytes()).hexdigest(), size, *ends)


def opened(file: Path) -> Any:
    """The tokenizer of ``file``, which cuts nothing off and fills nothing up. Raises DataError."""
    # A process tokenizes on one core: there are as many processes as there are to be.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no other kind
        raise DataError(f"data.tokenizer: {file} cannot be read: {error}", _HINT) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _number_of(kind: str, file: Path, numbers: dict[str, int]) -> int:
    for said in _said(kind, file.parent):
        number = numbers.get(said, NONE) if isinstance(said, str) else said
        if 0 <= number <= max(numbers.values()):
            return number
    usual = [name for name in _USUAL[kind] if name in numbers]
    if len(usual) == 1:
        return numbers[usual[0]]
    what = "end" if kind == "eos" else "beginning"
    many = f"; it has {' and '.join(usual)}" if usual else ""
    raise DataError(
        f"data.{kind}: {file} does not say which token is the {what} of a document{many}",
        f'put {{"{kind}_token": "…"}} into {file.parent / _CONFIGS[0]}, or set data.{kind} = false',
    )


def _said(kind: str, folder: Path) -> Iterator[str | int]:
    """What the files beside a tokenizer say, the most certain first."""
    for name in _CONFIGS:
        try:
            config = json.loads((folder / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        if not isinstance(config, dict):
            continue
        for said in (config.get(f"{kind}_token"), config.get(f"{kind}_token_id")):
            match said:
                case {"content": str(text)}:
                    yield text
                case str() | int() if not isinstance(said, bool):
                    yield said
                case [int(first), *_]:
                    yield first
                case _:
                    pass


def _check_vocabulary(job: Job, size: int) -> None:
    """Raises DataError where the model has fewer tokens, if that is known here: a family's own default is
    the worker's matter.
    """
    known = _vocabulary_of(job)
    if known is not None and size > known:
        raise DataError(
            f"data.tokenizer: has {count(size, 'token')}, and the model's vocabulary ends at {known - 1:,}",
            f"set model.config.vocab_size to {size} or more, or name the model's own tokenizer",
        )


def _vocabulary_of(job: Job) -> int | None:
    said = job.model.config.get("vocab_size")
    if said is None and job.model.checkpoint:
        try:
            said = json.loads((Path(job.model.checkpoint).expanduser() / "config.json").read_bytes()).get(
                "vocab_size"
            )
        except (OSError, ValueError, AttributeError, RecursionError):
            return None  # who loads the model says what is wrong with it
    return said if isinstance(said, int) and not isinstance(said, bool) else None
