"""Which columns of a row are read."""

from __future__ import annotations

from typing import NamedTuple


class RowColumns(NamedTuple):
    """What is read of a row: columns of ``text``; of ``lists`` of tables; and ``more``, of anything, which a
    row need not have.
    """

    text: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    more: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """Those that every row has."""
        return self.text + self.lists
