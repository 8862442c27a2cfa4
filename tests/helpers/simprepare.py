"""The prepared folders of a simulated world, and the processes that make them.

Whole pieces stay, whoever made them: as ``oobleckd.prepare.build`` has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from oobleckd.protocol.datamessages import PrepareData, PrepareDone, PrepareFailed, Preparing

if TYPE_CHECKING:
    from oobleckd.worker.processes.preparing import Word
    from tests.helpers.simagent import SimNode
    from tests.helpers.world import World

FOLDER = "/cache/folder"
_PIECE_S, _LOOK_S = 0.4, 0.2


@dataclass
class Process:
    """One that prepares on ``node``."""

    node: SimNode
    order: PrepareData
    heard: Callable[[Word], None]
    ended: Callable[[str], None]
    alive: bool = True

    def end(self) -> None:
        self.alive = False


@dataclass
class SimFolders:
    """``blind``: nodes that do not see the text; ``bad``: it has a row that nobody can read; ``pieces`` that
    are whole, of ``num_pieces``.
    """

    world: World
    num_pieces: int = 5
    pieces: int = 0
    bad: bool = False
    blind: set[str] = field(default_factory=set)
    processes: list[Process] = field(default_factory=list)
    looks: int = 0

    def begin(
        self, node: SimNode, order: PrepareData, heard: Callable[[Word], None], ended: Callable[[str], None]
    ) -> Callable[[], None]:
        process = Process(node, order, heard, ended)
        self.processes.append(process)
        self.world.after(_LOOK_S, self._next, process, True)
        return process.end

    def at_work(self) -> list[str]:
        """Nodes on which one runs."""
        return [each.node.name for each in self.processes if self._lives(each)]

    def kill(self) -> None:
        """kill -9 of all of them."""
        for process in [each for each in self.processes if self._lives(each)]:
            process.alive = False
            process.node.agent.call(process.ended, "by signal 9")

    @staticmethod
    def _lives(process: Process) -> bool:
        return process.alive and process.node.alive

    def _next(self, process: Process, first: bool) -> None:
        """A piece, or the look before them, is over."""
        if not self._lives(process):
            return
        job, say = process.order.job, process.node.agent.call
        if first:
            self.looks += 1
            if process.node.name in self.blind:
                process.alive = False
                say(process.heard, PrepareFailed(job, "data.path: /x does not exist"))
                say(process.ended, "with exit code 0")
                return
        elif self.bad:
            process.alive = False
            say(process.heard, PrepareFailed(job, "/x.jsonl:3: is no JSON", "mend it", begun=True))
            say(process.ended, "with exit code 0")
            return
        else:
            self.pieces = min(self.pieces + 1, self.num_pieces)
        if self.pieces == self.num_pieces:
            process.alive = False
            say(process.heard, PrepareDone(job, (FOLDER,)))
            say(process.ended, "with exit code 0")
            return
        far = Preparing(
            job, phase="tokenize", done_bytes=self.pieces << 20, total_bytes=self.num_pieces << 20,
            bytes_per_s=float(1 << 20),
        )  # fmt: skip
        say(process.heard, far)
        self.world.after(_PIECE_S, self._next, process, False)
