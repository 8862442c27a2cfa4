"""Nodes that somebody has marked, for several screens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Marks:
    """Names in order. They outlive the screen on which they were made, and no console."""

    names: tuple[str, ...] = ()

    def toggle(self, name: str) -> None:
        """Mark ``name``, or take the mark back."""
        others = tuple(other for other in self.names if other != name)
        self.names = others if name in self.names else tuple(sorted((*others, name)))

    def clear(self) -> None:
        """Take all marks back."""
        self.names = ()
