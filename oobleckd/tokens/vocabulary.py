"""Whether tokens are numbers of the model's vocabulary.

Owns the question and what to look at first where they are not: a larger vocabulary hides a header that was
taken for tokens.
"""

from __future__ import annotations

import numpy as np

from oobleckd.tokens.errors import DataError
from oobleckd.tokens.files import PLAIN_HINT, Tokens
from oobleckd.tokens.manifest import Manifest

_EDGE_BYTES = 4096


def check_largest(manifest: Manifest, name: str, vocab_size: int, spare: int) -> None:
    """Whether all tokens of prepared data are in the model's vocabulary, by what its manifest says; ``spare``
    as below. Raises DataError.
    """
    if manifest.largest < vocab_size - spare:
        return
    most = max(manifest.vocabulary, manifest.largest + 1) + spare
    raise DataError(
        f"{name} has token {manifest.largest}, but {_end(vocab_size, spare)}",
        f"set model.config.vocab_size to the tokenizer's, {most} or more, or prepare the text with the "
        "tokenizer of this model",
    )


def check_vocabulary(
    tokens: Tokens, name: str, vocab_size: int, spare: int, *, text: bool, part: bool = False
) -> None:
    """Whether all of ``tokens`` are in the model's vocabulary. ``spare``: how many numbers at its end are not
    for data: the mask token's; ``text``: they are bytes; ``part``: they are some of the file's, of any shape.
    Raises DataError.
    """
    most, kind = vocab_size - spare, np.iinfo(tokens.dtype)
    if kind.min < 0 and len(tokens) and (least := int(tokens.min())) < 0:
        raise DataError(
            f"{name} has token {least}, below 0",
            "write it without what marks padding or positions that do not count: every number is trained on",
        )
    if most > kind.max or not len(tokens):
        return
    largest = int(tokens.max())
    if largest < most:
        return
    raise DataError(
        f"{name} has token {largest}, but {_end(vocab_size, spare)}",
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
            f"format that is not known here; {PLAIN_HINT}"
        )
    return (
        f"look first whether it has plain little-endian {tokens.dtype.name} of this model's tokenizer, and "
        "nothing before them; if so, "
        f"model.config.vocab_size must be the tokenizer's, above {largest + spare}"
    )


def _end(vocab_size: int, spare: int) -> str:
    return f"the model's vocabulary ends at {vocab_size - 1}" + (", the mask token" if spare else "")
