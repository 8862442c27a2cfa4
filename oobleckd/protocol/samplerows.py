"""The samples of a micro-batch, as a worker's program tells of them: tokens, borders of documents, and which
of them the loss asks for.
"""

from __future__ import annotations

import msgspec

FILL = -2


class Border(msgspec.Struct, frozen=True):
    """Document ``document`` of the data (from 0) begins at position ``at`` of the row, ``into`` of whose
    tokens came before; or what fills the row up (``FILL``).
    """

    at: int
    document: int
    into: int = 0

    @property
    def is_fill(self) -> bool:
        """Whether no document begins there, and nothing of one comes behind."""
        return self.document == FILL


class SampleRow(msgspec.Struct, frozen=True):
    """A row of a micro-batch. ``sample``: its number in the whole run; ``epoch``: which pass over the data,
    from 0; ``start``: its first token in all of the data's. ``inputs``: what the model is shown; ``asked``:
    positions whose token it has to name; ``borders``: none where the data has no documents; ``source``: of
    several, or of an evaluation, its name.
    """

    sample: int
    epoch: int
    start: int
    tokens: tuple[int, ...]
    inputs: tuple[int, ...]
    asked: tuple[int, ...]
    borders: tuple[Border, ...] = ()
    source: str = ""


class SampleRows(msgspec.Struct, frozen=True):
    """All rows of a micro-batch. ``step`` is counted from 1 (0: of every evaluation), ``micro_batch`` from 0,
    of an evaluation in each source.
    """

    step: int
    micro_batch: int
    rows: tuple[SampleRow, ...]
