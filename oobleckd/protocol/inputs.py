"""What a job reads, by its identity: two devices that read other bytes do not train the same.

Owns the words for it and the comparison, shared by the devices (who read), the daemon (who compares), the
manifest of a checkpoint and ``verify``. How an identity is made is the worker's
(``oobleckd.worker.data.inputs``); what follows where two differ is the core's (``core.inputs``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

InputKind = Literal["data", "tokenizer", "model", "code"]
MAX_LISTED = 64
"""Files of which each is named: where there are more, only their number and the bytes of all can be told."""
_NAMED = 3


class Input(msgspec.Struct, frozen=True):
    """One thing that a job reads. ``place``: where it lies, for people; ``files`` of ``num_bytes`` in all.

    ``blocks``: a digest of the files' names and sizes, and of blocks of them that are chosen by a seed, so
    that terabytes take no longer than a stat and some reads ("": not known, as in a checkpoint of an older
    version). ``whole``: size and SHA-256 of all bytes, "" until somebody has read them all. ``listing``: file
    -> size and digest of what was read of it, where they are few. ``tokens``: of all rows that the job trains
    on, what fills them up included; it is no part of the identity (0: whoever said this did not say).
    """

    kind: InputKind
    place: str
    files: int
    num_bytes: int
    blocks: str = ""
    whole: str = ""
    listing: dict[str, str] = {}
    tokens: int = 0

    @property
    def known(self) -> str:
        """What of the content is known, for people and for a comparison by eye."""
        return self.whole or (f"{self.num_bytes}, blocks {self.blocks[:16]}" if self.blocks else "")


Inputs = tuple[Input, ...]


def of_corpus(corpus: str) -> Inputs:
    """The text of a checkpoint that knows its ``corpus`` alone, size and SHA-256 ("": nothing is known)."""
    size = corpus.partition("-")[0]
    return (Input("data", "", 0, int(size) if size.isdecimal() else 0, whole=corpus),) if corpus else ()


def same(one: Input, other: Input) -> bool:
    """Whether nothing that is known of both differs. All bytes count where both have read them all: names and
    places do not.
    """
    if one.whole and other.whole:
        return one.whole == other.whole
    if one.num_bytes != other.num_bytes:
        return False
    return not one.blocks or not other.blocks or one.blocks == other.blocks


def agree(one: Inputs, other: Inputs) -> bool:
    """Whether no kind that both name differs."""
    return not differing(one, other)


def differing(one: Inputs, other: Inputs) -> tuple[tuple[Input, Input], ...]:
    """The pairs of a kind that are not the same."""
    others = {each.kind: each for each in other}
    pairs = ((each, others[each.kind]) for each in one if each.kind in others)
    return tuple((mine, theirs) for mine, theirs in pairs if not same(mine, theirs))


def completed(one: Inputs, other: Inputs) -> Inputs:
    """``one``, with what only ``other``, which agrees with it, knows."""
    others = {each.kind: each for each in other}
    known = tuple(_completed(each, others.get(each.kind)) for each in one)
    return (*known, *(each for each in other if each.kind not in {mine.kind for mine in one}))


def _completed(one: Input, other: Input | None) -> Input:
    if other is None or (one.whole and one.blocks):
        return one
    if not one.blocks:  # of an older checkpoint: the place and the rest are better known by who reads it now
        return msgspec.structs.replace(other, whole=one.whole or other.whole)
    return msgspec.structs.replace(one, whole=other.whole)


def difference(wanted: Inputs, found: Inputs) -> str:
    """What differs, for a sentence: "/data/a.txt has 12 bytes, and 10 are wanted"; "" where nothing does."""
    return "; ".join(_of(mine, theirs) for mine, theirs in differing(wanted, found))


def _of(wanted: Input, found: Input) -> str:
    where = found.place or wanted.place or found.kind
    names = _names(wanted, found)
    if names:
        return f"{where}: {names}"
    if wanted.num_bytes != found.num_bytes:
        return f"{where} has {found.num_bytes:,} bytes, and the job's has {wanted.num_bytes:,}"
    return f"{where} has as many bytes as the job's, and others ({found.known[:40]}, not {wanted.known[:40]})"


def _names(wanted: Input, found: Input) -> str:
    """The files that differ, where both list theirs and there is more than one."""
    mine, theirs = wanted.listing, found.listing
    if not mine or not theirs or max(len(mine), len(theirs)) < 2:
        return ""
    parts = (
        ("changed", [name for name in mine if name in theirs and mine[name] != theirs[name]]),
        ("missing", [name for name in mine if name not in theirs]),
        ("new", [name for name in theirs if name not in mine]),
    )
    return ", ".join(f"{_few(names)} {what}" for what, names in parts if names)


def _few(names: Sequence[str]) -> str:
    shown = sorted(names)[:_NAMED]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def corpus_of(inputs: Iterable[Input]) -> str:
    """Size and SHA-256 of the text, "" where they are not known."""
    return next((each.whole for each in inputs if each.kind == "data"), "")
