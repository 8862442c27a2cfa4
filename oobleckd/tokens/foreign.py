"""Names what a file is that holds no token numbers, by its content, whatever its name says. Reads a few
kilobytes and nothing else.

Owns the marks of formats. A short mark alone may be two tokens by chance, so such a format has to agree in
more than that.
"""

from __future__ import annotations

import os
from pathlib import Path

HEAD_BYTES = 1 << 20
"""What of the beginning is looked at."""
_MIN_TEXT = 32
"""Bytes: fewer may be printable by chance, of an even number; an odd one is none of token numbers."""
_CONTROL = frozenset(range(32)) - set(b"\t\n\f\r")

_MARKS = (
    (b"BZh", "a bzip2 archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"\xfd7zXZ\x00", "an xz archive"),
    (b"\x04\x22\x4d\x18", "an lz4 archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"PK\x03\x04", "a zip archive (of numpy's .npz, of torch.save, or another)"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"SQLite format 3\x00", "an SQLite database"),
    (b"GGUF", "a GGUF model"),
    (b"\x7fELF", "a program"),
    (b"\x89PNG\r\n\x1a\n", "a PNG picture"),
    (b"%PDF-", "a PDF document"),
    (b"TNTIDX\x00\x00", "the index of a data set of fairseq"),
    (b"Obj\x01", "an Avro file"),
    (b"ORC", "an ORC file"),
)
_LEGACY_TORCH = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
_PROTOCOLS = frozenset((b"\x02", b"\x03", b"\x04", b"\x05"))
_PICKLED = frozenset(
    bytes([code]) for code in b"(]})cXlU\x8a\x8c\x95"
)  # what a pickle goes on with behind its protocol
_IN_HEADERS = frozenset((b'"', b"}", b" "))


def name_of(path: Path) -> str:
    """What ``path`` is, with its article, where it is certainly not a file of numbers; else "". Raises
    OSError.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        file.seek(max(0, size - 8))
        tail = file.read(8)
    marked = next((name for mark, name in _MARKS if head.startswith(mark)), "")
    return (
        marked
        or _by_more(head, tail, size)
        or _by_structure(head, size)
        or (_text(head, whole=size <= HEAD_BYTES) if size >= _MIN_TEXT or size % 2 else "")
    )


def name_of_folder(path: Path) -> str:
    """What the folder ``path`` is, as far as names in it say; else "a folder"."""
    names = {entry.name for entry in os.scandir(path)}
    if "index.json" in names:
        return "a folder of Mosaic's StreamingDataset or of LitData"
    if "dataset_info.json" in names or "dataset_dict.json" in names:
        return "a data set of Hugging Face datasets (save_to_disk)"
    suffixes = {name.rpartition(".")[2] for name in names}
    found = next(
        (suffix for suffix in ("parquet", "arrow", "tar", "jsonl", "zst", "gz") if suffix in suffixes), ""
    )
    return f"a folder with *.{found} in it" if found else "a folder"


def _by_more(head: bytes, tail: bytes, size: int) -> str:
    """Formats of two marks, or of one and something that follows from it."""
    protocol, opcode = head[1:2], head[2:3]
    length, short = int.from_bytes(head[:8], "little"), int.from_bytes(head[4:8], "little")
    found = {
        "a gzip archive": head[:3] == b"\x1f\x8b\x08" and head[3:4] < b"\x20",
        "a file of torch.save": head.startswith(_LEGACY_TORCH),
        "a pickle": head[:1] == b"\x80"
        and protocol in _PROTOCOLS
        and opcode in _PICKLED
        and tail.endswith(b"."),
        "a tar archive (of WebDataset, or another)": head[257:262] == b"ustar",
        "a stream of Arrow": head[:4] == b"\xff\xff\xff\xff" and short % 8 == 0 and 0 < short < size,
        "a safetensors file": head[8:9] == b"{" and 2 <= length <= size - 8 and head[9:10] in _IN_HEADERS,
    }
    return next((name for name, holds in found.items() if holds), "")


def _by_structure(head: bytes, size: int) -> str:
    """Formats without a mark: lengths or offsets that lead through the file."""
    count = int.from_bytes(head[:4], "little")
    end = 4 * (count + 2)
    if count > 0 and end <= min(len(head), size) and int.from_bytes(head[end - 4 : end], "little") == size:
        return "a chunk of Mosaic's StreamingDataset or of LitData"
    at, records = 0, 0
    while at + 12 <= len(head) and records < 4:
        length = int.from_bytes(head[at : at + 8], "little")
        if not 0 < length <= size - at - 16:
            return ""
        at, records = at + length + 16, records + 1
    # Lengths of eight bytes, whose upper four are 0: that three of them in a row lie where they should is no
    # chance.
    return "a TFRecord file" if at == size or records >= 3 else ""


def _text(head: bytes, *, whole: bool) -> str:
    """By its bytes: nothing that cannot be printed. Token numbers below 256 have zeros between them."""
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if whole or error.start < len(head) - 3:
            return ""
        text = head[: error.start].decode("utf-8")
    if not _CONTROL.isdisjoint(text.encode()[:HEAD_BYTES]):
        return ""
    return "JSON" if text.lstrip("\ufeff \t\r\n")[:1] in {"{", "["} else "text"
