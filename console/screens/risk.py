"""Whose loss a screen asks about when nobody is marked: ranked when layers have changed or one is gone, not
in every frame.
"""

from __future__ import annotations

from dataclasses import dataclass

from oobleckd.console.model import View
from oobleckd.console.widgets import impact


@dataclass(slots=True)
class Risk:
    """The last ranking, and what it was made of. ``many``: of more nodes, where they are few."""

    many: bool = False

    _nodes: object = None
    _layers: object = None
    _found: tuple[tuple[str, ...], ...] = ()

    def candidates(self, view: View) -> tuple[tuple[str, ...], ...]:
        """Sets of nodes, those that matter most first. Ranking a thousand nodes takes longer than painting
        them.

        They are ranked again with other layers, which come anew after each change of a node, and when one of
        them is at work no more.
        """
        if self._layers != view.layers or (self._nodes is not view.nodes and not self._at_work(view)):
            self._found = impact.candidates(view, many=self.many)
        self._nodes, self._layers = view.nodes, view.layers
        return self._found

    def _at_work(self, view: View) -> bool:
        """Whether there are some, and all of them are."""
        names = {name for (name,) in self._found}
        return bool(names) and names <= {
            node.name for node in view.nodes if node.state == "active" and node.layers
        }
