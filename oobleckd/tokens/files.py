"""Files of token numbers that others made: plain ones, numpy's .npy, those with llm.c's header, and
Megatron's .bin beside its .idx.

Owns which of them a file is, by its content, and its tokens as an array that is mapped and never copied. What
is none of these is refused by its name (``foreign``), as is a plain file that looks like numbers of another
width: a header, or half of a number, is never trained on. Nothing is unpickled. Raises DataError.
"""

from __future__ import annotations

import struct
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from oobleckd.tokens import foreign
from oobleckd.tokens.dtypes import NAMED, DType
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.index import MARK, check_size, read_index
from oobleckd.words import count

Tokens = npt.NDArray[np.integer[Any]]
Kind = Literal["npy", "llmc", "megatron", "bin"]
KINDS: tuple[str, ...] = get_args(Kind)
"""Of a file, as ``data.source`` may name them; "tokens" there is any."""

_NPY = b"\x93NUMPY"
_NO_HEADER = (
    ValueError, TypeError, SyntaxError, EOFError, OverflowError, MemoryError, RecursionError,
    tokenize.TokenError,
)  # fmt: skip
"""What numpy raises for a header that it cannot read."""
PLAIN_HINT = (
    'write the numbers alone: `numpy.asarray(tokens, "<u2").tofile(path)`, or "<u4" with '
    'data.dtype = "uint32"'
)
_LLMC_BYTES = 1024
_LLMC: dict[tuple[int, int], DType] = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
"""Magic number and version -> what follows the header: of GPT-2, and of Llama 3."""
_LLMC_OTHERS = {
    20240326: "a model of llm.c", 20240327: "the debug state of a model of llm.c",
    20240328: "a tokenizer of llm.c",
    20240522: "an evaluation set of llm.c",
}  # fmt: skip
_SAYS: dict[Kind, str] = {
    "npy": "is a .npy file", "llmc": "has llm.c's header", "megatron": "is of a Megatron data set",
    "bin": "says by no header or index what it has",
}  # fmt: skip

# Half of a uint32 is a valid uint16, so a plain file is taken for uint16 only where it does not look like
# something else. (D-data-002)
_MIN_ALIKE = 16
"""Numbers: of fewer it says nothing that every second one is 0."""
_MIN_SMALL = 128
_SMALL = 16
"""The upper halves of numbers of 32 bits are below it, as no vocabulary has a million tokens."""
_LOOKS, _LOOK = 32, 1 << 20
"""So many places of a file are looked at, spread over it, and so many numbers in each."""


def file_of(path: Path, source: str) -> Path:
    """The file with the tokens of ``path``; a Megatron data set is also named by its index, or without a
    suffix.
    """
    if source != "megatron" or (path.is_file() and path.suffix != ".idx"):
        return path
    return path.with_suffix(".bin") if path.suffix == ".idx" else Path(f"{path}.bin")


def index_of(path: Path) -> Path | None:
    """The Megatron index of a file of tokens; None where there is none. Raises OSError."""
    index = path.with_suffix(".idx")
    return index if path.suffix == ".bin" and index.is_file() and _begins_with(index, MARK) else None


def read_tokens(path: Path, dtype: str, source: str = "tokens") -> Tokens:
    """The tokens of ``path``; ``dtype`` and ``source`` as in ``[data]``. Raises DataError."""
    try:
        if path.is_dir():
            raise DataError(
                f"{path} is {foreign.name_of_folder(path)}",
                f"data.source = {source} needs one file of numbers; {PLAIN_HINT}",
            )
        if not path.is_file():
            path.stat()
            raise DataError(f"{path} is no file that can be mapped", "name a file on a disk")
        return _read(path, dtype, source)
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}", "name a file or folder that every node can read"
        ) from error


def _read(path: Path, dtype: str, source: str) -> Tokens:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_LLMC_BYTES)
    if head.startswith(_NPY):
        _check_kind(path, "npy", source)
        return _declared(path, _npy(path, size), dtype, "npy")
    if head.startswith(MARK):
        raise DataError(
            f"{path} is the index of a Megatron data set, which has no tokens",
            f"name the file with the tokens: {path.with_suffix('.bin')}",
        )
    if llmc := _llmc(path, head, size):
        _check_kind(path, "llmc", source)
        return _declared(path, _mapped(path, llmc, _LLMC_BYTES), dtype, "llmc")
    if index := index_of(path):
        _check_kind(path, "megatron", source)
        found = read_index(index)
        check_size(index, found, path, size)
        return _declared(path, _mapped(path, found.dtype), dtype, "megatron")
    if found_name := foreign.name_of(path):
        hint = 'set data.source = "text", or make tokens of it first' if found_name == "text" else PLAIN_HINT
        raise DataError(f"{path} is {found_name}, and no file of token numbers", hint)
    _check_kind(path, "bin", source)
    return _plain(path, size, dtype)


def _check_kind(path: Path, kind: Kind, source: str) -> None:
    """Whether a file of ``kind`` is what the job says. The tokens of a Megatron data set are a plain file,
    too.
    """
    if source in {"tokens", kind} or (source, kind) == ("bin", "megatron"):
        return
    more = f"; its index would be {path.with_suffix('.idx')}" if source == "megatron" else ""
    raise DataError(
        f"{path} {_SAYS[kind]}, and data.source is {source!r}{more}",
        f'set data.source = "{kind}", or "tokens" for whichever of them it is',
    )


def _begins_with(path: Path, mark: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(mark)) == mark


def _mapped(path: Path, kind: DType, offset: int = 0) -> Tokens:
    if path.stat().st_size <= offset:
        return np.zeros(0, kind)
    return np.memmap(path, kind, mode="r", offset=offset)


def _declared(path: Path, tokens: Tokens, dtype: str, kind: Kind) -> Tokens:
    """``tokens``, where their width is what the job says it is, if it says so."""
    if dtype != "auto" and tokens.dtype.itemsize != NAMED[dtype].itemsize:
        raise DataError(
            f"{path} {_SAYS[kind]} of {tokens.dtype.name}, and data.dtype = {dtype}",
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
        raise DataError(f"{path} is a .npy file of {kind.name}, not of token numbers", f"save {resave}")
    if kind.byteorder == ">":
        raise DataError(f"{path} is a .npy file of big-endian numbers", f"save it anew: {resave}")
    if array.ndim not in {1, 2} or not array.flags.c_contiguous:
        order = "" if array.flags.c_contiguous else " in Fortran's order"
        raise DataError(
            f"{path} is a .npy file of {array.ndim} dimensions{order}",
            "save it as one row of tokens: `numpy.save(path, numpy.ascontiguousarray(array).reshape(-1))`",
        )
    offset = getattr(array, "offset", 0)
    if offset + array.nbytes != size:
        raise DataError(
            f"{path} is a .npy file of {offset + array.nbytes:,} bytes, and has {size:,}",
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
        raise DataError(
            f"{path} is a .npy file that cannot be read: {error.rstrip('.')}",
            "save it anew, as an array of uint16 or uint32",
        )
    return np.zeros(0, "<u2")


def _llmc(path: Path, head: bytes, size: int) -> DType | None:
    """What is behind the header of llm.c (256 numbers of 32 bits: magic number, version, tokens); None where
    there is none.
    """
    if len(head) < _LLMC_BYTES:
        return None
    magic, version, told = struct.unpack_from("<3i", head)
    if magic in _LLMC_OTHERS:
        raise DataError(f"{path} is {_LLMC_OTHERS[magic]}, and no file of token numbers", PLAIN_HINT)
    if magic not in {known for known, _ in _LLMC}:
        return None
    kind = _LLMC.get((magic, version))
    if kind is None:
        raise DataError(f"{path} has llm.c's header, of version {version}, which is not known", PLAIN_HINT)
    there = (size - _LLMC_BYTES) / kind.itemsize
    if told != there:
        raise DataError(
            f"{path} has llm.c's header for {count(told, 'token')}, and {there:,} behind it",
            "it was cut, or is of another version: write it anew",
        )
    return kind


# --------------------------------------------------------------------------- plain numbers


def _plain(path: Path, size: int, dtype: str) -> Tokens:
    kind = NAMED["uint16" if dtype == "auto" else dtype]
    if size % kind.itemsize:
        what = "an odd number" if kind.itemsize == 2 else f"no multiple of {kind.itemsize}"
        raise DataError(
            f"{path} has {size} bytes, {what}, and tokens are {kind.itemsize} bytes each", PLAIN_HINT
        )
    tokens = _mapped(path, kind)
    if problem := _other_width(tokens, certain=dtype == "auto"):
        raise DataError(f"{path} {problem[0]}", problem[1])
    return tokens


def _other_width(tokens: Tokens, *, certain: bool) -> tuple[str, str] | None:
    """Problem and hint where numbers of another width, or of the other byte order, were taken for ``tokens``.
    ``certain``: nobody said that the width is right, so likely is enough.
    """
    if len(tokens) < _MIN_ALIKE:
        return None
    num_bytes = tokens.dtype.itemsize
    wider = f"{16 * num_bytes} bits, not of {8 * num_bytes}"
    how = {
        1: 'if it has uint16, set data.dtype = "uint16"',
        2: 'if it has uint32, set data.dtype = "uint32"; else write it anew: `numpy.asarray(tokens, '
        '"<u2").tofile(path)`',
        4: 'if it has int64, set data.dtype = "int64"',
    }.get(num_bytes, "")
    swapped = (
        f'write it anew in little-endian order: `numpy.asarray(tokens, "{tokens.dtype.str}").tofile(path)`'
    )
    likely = certain and num_bytes == 2 and len(tokens) >= _MIN_SMALL
    for holds, problem, hint in (
        (
            _second_zero if how else _never,
            f"has 0 in every second place: it looks like numbers of {wider}",
            how,
        ),
        (
            _first_zero if how else _never,
            f"has 0 in every other place: it looks like big-endian numbers of {wider}",
            swapped,
        ),
        (
            _low_zero if num_bytes > 1 else _never,
            "has multiples of 256 alone: it looks like big-endian numbers",
            swapped,
        ),
        (
            _upper_halves if likely else _never,
            f"has numbers below {_SMALL} in every second place: it looks like numbers of {wider}",
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
