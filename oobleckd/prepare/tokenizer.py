"""The tokenizer of a job: its file, how many numbers it has, which of them end and begin a document, and its
chat template.

Owns where these are looked for: in ``tokenizer_config.json`` and the files beside ``tokenizer.json``, as
transformers does, and of numbers among the names that are in use where nothing is said.
It is opened by ``opening``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from oobleckd.prepare.opening import HINT, opened
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobdata import FROM_CHECKPOINT
from oobleckd.tokens.errors import DataError
from oobleckd.words import count

FILE = "tokenizer.json"
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")
_USUAL = {
    "eos": ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>"),
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "<|bos|>", "[BOS]", "<|startoftext|>"),
}
_DEFAULT = "default"
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
        raise DataError(f"data.tokenizer: is missing, and data.source = {job.data.source!r} needs it", HINT)
    path = Path(text).expanduser()
    if path.is_file():
        return path
    if (path / FILE).is_file():
        return path / FILE
    if not path.exists():
        raise DataError(f"{key}: {path} does not exist", HINT)
    others = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (path / name).is_file()]
    hint = f"make it of {others[0]}: AutoTokenizer.from_pretrained(…).save_pretrained(…)" if others else HINT
    raise DataError(f"{key}: {path} has no {FILE}", hint)


def tokenizer_of(job: Job) -> TokenizerOf:
    """Raises DataError where it cannot be read, or lacks what the job asks of it."""
    file = file_of(job)
    tokenizer = opened(file)
    numbers = tokenizer.get_vocab(with_added_tokens=True)
    size = max(numbers.values(), default=-1) + 1
    if not size:
        raise DataError(f"data.tokenizer: {file} has no tokens", HINT)
    ends = [
        _number_of(kind, file, numbers) if wanted else NONE
        for kind, wanted in (("eos", job.data.writes_eos), ("bos", job.data.bos))
    ]
    _check_vocabulary(job, size)
    return TokenizerOf(file, hashlib.sha256(file.read_bytes()).hexdigest(), size, *ends)


def special_of(file: Path) -> tuple[str, ...]:
    """The tokens that nothing but their name stands for, as text. Raises DataError."""
    added = opened(file).get_added_tokens_decoder()
    return tuple(token.content for _, token in sorted(added.items()) if token.special)


def words_of(folder: Path) -> dict[str, str | None]:
    """What the files beside a tokenizer call its special tokens: name -> text; None: there is none."""
    words: dict[str, str | None] = {}
    for name in reversed(_CONFIGS[:2]):
        for key, said in _config(folder / name).items():
            match said:
                case {"content": str(text)} | str(text) if key.endswith("_token"):
                    words[key] = text
                case None if key.endswith("_token"):
                    words[key] = None
                case _:
                    pass
    return words


def templates_of(job: Job, folder: Path) -> dict[str, str]:
    """The chat templates of ``job``, by name; ``default`` among them. Raises DataError."""
    if job.data.chat.template:
        return {_DEFAULT: _read(Path(job.data.chat.template).expanduser(), "data.chat.template")}
    found = {
        name: _read(file, "data.chat")
        for name, file in (
            (_DEFAULT, folder / "chat_template.jinja"),
            *((file.stem, file) for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))),
        )
        if file.is_file()
    } or _told(_config(folder / _CONFIGS[0]).get("chat_template"))
    if _DEFAULT not in found:
        several = f" that is the default; it has {', '.join(sorted(found))}" if found else ""
        raise DataError(
            f"data.chat: {folder} has no chat template{several}",
            f"put one into {folder / 'chat_template.jinja'}, or name one in data.chat.template",
        )
    return found


def _told(said: Any) -> dict[str, str]:
    """Templates, as a configuration has one or several."""
    match said:
        case str():
            return {_DEFAULT: said}
        case list():
            return {each["name"]: each["template"] for each in said if _is_template(each)}
        case _:
            return {}


def _is_template(said: Any) -> bool:
    match said:
        case {"name": str(), "template": str()}:
            return True
        case _:
            return False


def _read(file: Path, key: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{key}: {file} is not UTF-8", "name a file with a Jinja template") from error
    except OSError as error:
        raise DataError(f"{key}: {file}: {error.strerror}", "name a file with a Jinja template") from error


def _config(file: Path) -> dict[str, Any]:
    """What a configuration has; nothing where there is none that can be read."""
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


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
        config = _config(folder / name)
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
