"""Files of token numbers: plain ones, numpy's .npy, those with llm.c's header, and Megatron's .bin beside its
.idx.

Owns which of them a file is, by its content, and its tokens as an array that is mapped and never copied. What
is none of these is refused by its name (``foreign``), as is a plain file that looks like numbers of another
width: a header, or half of a number, is never trained on. Nothing is unpickled. Raises UserError.
"""

from __future__ import annotations

import struct
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oobleckd.words import count
from oobleckd.worker.data import foreign
from oobleckd.worker.runtime.errors import UserError

Tokens = npt.NDArray[np.integer[Any]]

_NPY = b"\x93NUMPY"
_NO_HEADER = (
    ValueError, TypeError, SyntaxError, EOFError, OverflowError, MemoryError, RecursionError,
    tokenize.TokenError,
)  # fmt: skip
"""What numpy raises for a header that it cannot read."""
_IDX = b"MMIDIDX\x00\x00"
_PLAIN_HINT = (
    'write the numbers alone: `numpy.asarray(tokens, "<u2").tofile(path)`, or "<u4" with '
    'data.dtype = "uint32"'
)
_LLMC_BYTES = 1024
_LLMC: dict[tuple[int, int], np.dtype[Any]] = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
"""Magic number and version -> what follows the header: of GPT-2, and of Llama 3."""
_LLMC_OTHERS = {
    20240326: "a model of llm.c", 20240327: "the debug state of a model of llm.c",
    20240328: "a tokenizer of llm.c",
    20240522: "an evaluation set of llm.c",
}  # fmt: skip
_MEGATRON = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_MEGATRON_HEAD = struct.Struct("<QBQQ")
_PLAIN: dict[str, np.dtype[Any]] = {
    "auto": np.dtype("<u2"),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
}

# Half of a uint32 is a valid uint16, so a plain file is taken for uint16 only where it does not look like
# something else. (D-data-002)
_MIN_ALIKE = 16
"""Numbers: of fewer it says nothing that every second one is 0."""
_MIN_SMALL = 128
_SMALL = 16
"""The upper halves of numbers of 32 bits are below it, as no vocabulary has a million tokens."""
_LOOKS, _LOOK = 32, 1 << 20
"""So many places of a file are looked at, spread over it, and so many numbers in each."""
_EDGE_BYTES = 4096


def read_tokens(path: Path, dtype: str) -> Tokens:
    """The tokens of ``path``; ``dtype`` is ``data.dtype``. Raises UserError."""
    try:
        if path.is_dir():
            raise UserError(
                f"data.path: {path} is {foreign.name_of_folder(path)}",
                f"data.source = tokens needs one file of numbers; {_PLAIN_HINT}",
            )
        if not path.is_file():
            path.stat()
            raise UserError(f"data.path: {path} is no file that can be mapped", "name a file on a disk")
        return _read(path, dtype)
    except OSError as error:
        raise UserError(
            f"data.path: {path}: {error.strerror}", "name a file or folder that every node can read"
        ) from error


def _read(path: Path, dtype: str) -> Tokens:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_LLMC_BYTES)
    if head.startswith(_NPY):
        return _declared(path, _npy(path, size), dtype, "is a .npy file")
    if head.startswith(_IDX):
        raise UserError(
            f"data.path: {path} is the index of a Megatron data set, which has no tokens",
            f"name the file with the tokens: {path.with_suffix('.bin')}",
        )
    if llmc := _llmc(path, head, size):
        return _declared(path, _mapped(path, llmc, _LLMC_BYTES), dtype, "has llm.c's header")
    index = path.with_suffix(".idx")
    if path.suffix == ".bin" and index.is_file() and _begins_with(index, _IDX):
        kind = _megatron(path, index, size)
        return _declared(path, _mapped(path, kind), dtype, "is of a Megatron data set")
    if found := foreign.name_of(path):
        hint = 'set data.source = "text", or make tokens of it first' if found == "text" else _PLAIN_HINT
        raise UserError(f"data.path: {path} is {found}, and no file of token numbers", hint)
    return _plain(path, size, dtype)


def _begins_with(path: Path, mark: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(mark)) == mark


def _mapped(path: Path, kind: np.dtype[Any], offset: int = 0) -> Tokens:
    if path.stat().st_size <= offset:
        return np.zeros(0, kind)
    return np.memmap(path, kind, mode="r", offset=offset)


def _declared(path: Path, tokens: Tokens, dtype: str, what: str) -> Tokens:
    """``tokens``, where their width is what the job says it is, if it says so."""
    if dtype != "auto" and tokens.dtype.itemsize != _PLAIN[dtype].itemsize:
        raise UserError(
            f"data.path: {path} {what} of {tokens.dtype.name}, and data.dtype = {dtype}",
            "leave data.dtype out: the file says what it has",
        )
    return tokens


# --------------------------------------------------------------------------- formats that say what they are


def _npy(path: Path, size: int) -> Tokens:
    """The array of a .npy file of any version: integers in one or two dimensions, the last one first."""
    try:
        array: npt.NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    except _NO_HEADER as error:
        return _empty_npy(path, str(error))
    kind = array.dtype
    resave = f"`numpy.save({str(path)!r}, numpy.asarray(tokens, dtype))` with a dtype of uint16 or uint32"
    if kind.kind not in "iu":
        raise UserError(
            f"data.path: {path} is a .npy file of {kind.name}, not of token numbers", f"save {resave}"
        )
    if kind.byteorder == ">":
        raise UserError(f"data.path: {path} is a .npy file of big-endian numbers", f"save it anew: {resave}")
    if array.ndim not in {1, 2} or not array.flags.c_contiguous:
        order = "" if array.flags.c_contiguous else " in Fortran's order"
        raise UserError(
            f"data.path: {path} is a .npy file of {array.ndim} dimensions{order}",
            "save it as one row of tokens: `numpy.save(path, numpy.ascontiguousarray(array).reshape(-1))`",
        )
    offset = getattr(array, "offset", 0)
    if offset + array.nbytes != size:
        raise UserError(
            f"data.path: {path} is a .npy file of {offset + array.nbytes:,} bytes, and has {size:,}",
            "it was cut or written twice: save it anew",
        )
    return array.reshape(-1)


def _empty_npy(path: Path, error: str) -> Tokens:
    """Of an array that numpy does not map: it has no elements, or is not whole."""
    try:
        with path.open("rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
    except _NO_HEADER:
        array = np.zeros(1)
    if array.size:
        raise UserError(
            f"data.path: {path} is a .npy file that cannot be read: {error.rstrip('.')}",
            "save it anew, as an array of uint16 or uint32",
        )
    return np.zeros(0, "<u2")


def _llmc(path: Path, head: bytes, size: int) -> np.dtype[Any] | None:
    """What is behind the header of llm.c (256 numbers of 32 bits: magic number, version, tokens); None where
    there is none.
    """
    if len(head) < _LLMC_BYTES:
        return None
    magic, version, told = struct.unpack_from("<3i", head)
    if magic in _LLMC_OTHERS:
        raise UserError(
            f"data.path: {path} is {_LLMC_OTHERS[magic]}, and no file of token numbers", _PLAIN_HINT
        )
    if magic not in {known for known, _ in _LLMC}:
        return None
    kind = _LLMC.get((magic, version))
    if kind is None:
        raise UserError(
            f"data.path: {path} has llm.c's header, of version {version}, which is not known", _PLAIN_HINT
        )
    there = (size - _LLMC_BYTES) / kind.itemsize
    if told != there:
        raise UserError(
            f"data.path: {path} has llm.c's header for {count(told, 'token')}, and {there:,} behind it",
            "it was cut, or is of another version: write it anew",
        )
    return kind


def _megatron(path: Path, index: Path, size: int) -> np.dtype[Any]:
    """What the index of a Megatron data set says of its tokens, once the two agree."""
    damaged = f"data.path: {index} does not belong to {path}: "
    hint = (
        f"make both anew with Megatron's preprocess_data; or rename {path.name}, if it is a plain file "
        "of "
        "numbers"
    )
    with index.open("rb") as file:
        data = file.read(len(_IDX) + _MEGATRON_HEAD.size)
        if len(data) < len(_IDX) + _MEGATRON_HEAD.size:
            raise UserError(f"{damaged}it is cut", hint)
        version, code, num_sequences, num_documents = _MEGATRON_HEAD.unpack_from(data, len(_IDX))
        if version != 1 or code not in _MEGATRON:
            raise UserError(f"{damaged}it is of version {version}, with numbers of kind {code}", hint)
        least = len(data) + 12 * num_sequences + 8 * num_documents
        if index.stat().st_size < least:
            raise UserError(f"{damaged}it is cut: {index.stat().st_size:,} of {least:,} bytes", hint)
        lengths = np.fromfile(file, "<i4", num_sequences)
    kind = np.dtype(_MEGATRON[code])
    if kind.kind == "f":
        raise UserError(
            f"data.path: {path} is a Megatron data set of {kind.name}, not of token numbers", _PLAIN_HINT
        )
    told = int(lengths.sum(dtype=np.int64)) * kind.itemsize
    if told != size:
        raise UserError(f"{damaged}it tells of {told:,} bytes of {kind.name}, and there are {size:,}", hint)
    return kind


# --------------------------------------------------------------------------- plain numbers


def _plain(path: Path, size: int, dtype: str) -> Tokens:
    kind = _PLAIN[dtype]
    if size % kind.itemsize:
        what = "an odd number" if kind.itemsize == 2 else "no multiple of 4"
        raise UserError(
            f"data.path: {path} has {size} bytes, {what}, and tokens are {kind.itemsize} bytes each",
            _PLAIN_HINT,
        )
    tokens = _mapped(path, kind)
    if problem := _other_width(tokens, certain=dtype == "auto"):
        raise UserError(f"data.path: {path} {problem[0]}", problem[1])
    return tokens


def _other_width(tokens: Tokens, *, certain: bool) -> tuple[str, str] | None:
    """Problem and hint where numbers of another width, or of the other byte order, were taken for ``tokens``.
    ``certain``: nobody said that the width is right, so likely is enough.
    """
    if len(tokens) < _MIN_ALIKE:
        return None
    wide = tokens.dtype.itemsize > 2
    twice = "64 bits, not of 32" if wide else "32 bits, not of 16"
    if wide:
        how = '`numpy.fromfile(path, "<i8").astype("<u4").tofile(path)`'
    else:
        how = (
            'if it has uint32, set data.dtype = "uint32"; else write it anew: `numpy.asarray(tokens, '
            '"<u2").tofile(path)`'
        )
    swapped = (
        f'write it anew in little-endian order: `numpy.asarray(tokens, "{tokens.dtype.str}").tofile(path)`'
    )
    likely = certain and not wide and len(tokens) >= _MIN_SMALL
    for holds, problem, hint in (
        (_second_zero, f"has 0 in every second place: it looks like numbers of {twice}", how),
        (_first_zero, f"has 0 in every other place: it looks like big-endian numbers of {twice}", swapped),
        (_low_zero, "has multiples of 256 alone: it looks like big-endian numbers", swapped),
        (
            _upper_halves if likely else _never,
            f"has numbers below {_SMALL} in every second place: it looks like numbers of {twice}",
            'if it has uint32, set data.dtype = "uint32"; if it is right as it is, data.dtype = "uint16"',
        ),
    ):
        if _all(tokens, holds):
            return problem, hint
    return None


def _second_zero(part: Tokens) -> bool:
    return not part[1::2].any()


def _first_zero(part: Tokens) -> bool:
    return not part[::2].any()


def _low_zero(part: Tokens) -> bool:
    return not (part & 0xFF).any()


def _never(_part: Tokens) -> bool:
    return False


def _upper_halves(part: Tokens) -> bool:
    """Whether every second number is small, and many of the others are not."""
    lower, upper = part[::2], part[1::2]
    return bool(upper.max(initial=0) < _SMALL and 4 * int((lower >= _SMALL).sum()) > len(lower))


def _all(tokens: Tokens, holds: Callable[[Tokens], bool]) -> bool:
    """Whether ``holds`` is true of every place that is looked at: of a good file the first one says no."""
    if len(tokens) <= _LOOKS * _LOOK:
        starts = list(range(0, len(tokens), _LOOK))
    else:
        starts = [(len(tokens) - _LOOK) * number // (_LOOKS - 1) & ~1 for number in range(_LOOKS)]
    return all(holds(np.asarray(tokens[start : start + _LOOK])) for start in starts)


# --------------------------------------------------------------------------- the vocabulary


def check_vocabulary(
    tokens: Tokens, name: str, vocab_size: int, spare: int, *, text: bool, part: bool = False
) -> None:
    """Whether all of ``tokens`` are in the model's vocabulary. ``spare``: how many numbers at its end are not
    for data: the mask token's; ``text``: they are bytes; ``part``: they are some of the file's, of any shape.
    Raises UserError.
    """
    most, kind = vocab_size - spare, np.iinfo(tokens.dtype)
    if kind.min < 0 and len(tokens) and (least := int(tokens.min())) < 0:
        raise UserError(
            f"data: {name} has token {least}, below 0",
            "write it without what marks padding or positions that do not count: every number is trained on",
        )
    if most > kind.max or not len(tokens):
        return
    largest = int(tokens.max())
    if largest < most:
        return
    end = f"the model's vocabulary ends at {vocab_size - 1}" + (", the mask token" if spare else "")
    raise UserError(
        f"data: {name} has token {largest}, but {end}",
        f"set model.config.vocab_size to {largest + 1 + spare} or more"
        if text
        else _first_look(tokens[:0] if part else tokens, most, spare, largest),
    )


def _first_look(tokens: Tokens, most: int, spare: int, largest: int) -> str:
    """What to look at before the vocabulary is made larger."""
    edge = min(_EDGE_BYTES // tokens.dtype.itemsize, len(tokens) // 2)
    inside = np.asarray(tokens[edge : len(tokens) - edge])
    before, behind = (bool((part >= most).any()) for part in (tokens[:edge], tokens[len(tokens) - edge :]))
    if not (inside >= most).any() and before != behind:
        where = "first" if before else "last"
        return (
            f"only its {where} {edge * tokens.dtype.itemsize:,} bytes have such numbers: they look like the "
            f"{'header' if before else 'end'} of a "
            f"format that is not known here; {_PLAIN_HINT}"
        )
    return (
        f"look first whether it has plain little-endian {tokens.dtype.name} of this model's tokenizer, and "
        "nothing before them; if so, "
        f"model.config.vocab_size must be the tokenizer's, above {largest + spare}"
    )
