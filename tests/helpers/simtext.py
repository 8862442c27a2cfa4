"""The text of a simulated world: files that nodes share or have of their own, replaced, written to in place,
gone and back.

Real is the worker's ``Reading``; not real are files and time. Who reads a micro-batch from a wrong file makes
its loss and its update wrong, and whoever opens one says another identity.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from oobleckd.protocol.inputs import Input
from oobleckd.protocol.job import Job
from oobleckd.protocol.parts import Counters
from oobleckd.worker.data.input_watch import Changed, Checked, Finding, Moved
from oobleckd.worker.device.reading import Reading
from oobleckd.worker.runtime.errors import UserError

if TYPE_CHECKING:
    from tests.helpers.simdevice import SimDevice
    from tests.helpers.world import World

RIGHT, WRONG = "right", "wrong"
PATH = "/data/text"


@dataclass(eq=False)
class File:
    """An inode. ``writes``: how often it was written to by the ordinary ways, which shows in a stat."""

    content: str = RIGHT
    writes: int = 0


def identity(content: str, *, whole: bool = True) -> Input:
    """Of a file. Where ``whole`` is not known, blocks may look the same although the rest is not."""
    blocks = content.partition("~")[0]
    return Input("data", PATH, 1, 100, blocks, f"100-{content}" if whole else "", {"text": f"100-{blocks}"})


@dataclass
class Texts:
    """``of``: the file at ``PATH`` on each node (None: gone). ``large``: nobody knows all of it when it is
    opened. ``written``: somebody wrote in place.

    ``misread``: (job, round, micro-batch) -> whether its loss came from a wrong text.
    """

    world: World
    of: dict[str, File | None] = field(default_factory=dict)
    large: bool = False
    pass_s: tuple[float, float] = (0.001, 0.05)
    written: bool = False
    misread: dict[tuple[str, int, int], bool] = field(default_factory=dict)
    watches: list[SimWatch] = field(default_factory=list)
    _shared: File | None = field(default_factory=File)

    def __post_init__(self) -> None:
        self.dice = random.Random(f"texts {self.world.seed}")

    def at(self, node: str) -> File | None:
        return self.of.get(node, self._shared)

    def put(self, content: str = WRONG, nodes: Iterable[str] | None = None) -> None:
        """Another file takes the place of the one that is there."""
        self._place(File(content), nodes)

    def remove(self, nodes: Iterable[str] | None = None) -> None:
        self._place(None, nodes)

    def put_back(self, file: File | None, nodes: Iterable[str] | None = None) -> None:
        """The very same file again."""
        self._place(file, nodes)

    def write(self, content: str = WRONG, nodes: Iterable[str] | None = None, *, shows: bool = True) -> None:
        """Into the file itself; ``shows``: in its times."""
        for file in {self.at(node) for node in nodes} if nodes is not None else {self._shared}:
            assert file is not None
            self.written |= content != RIGHT
            file.content = content
            file.writes += shows
        self._changed()

    def _place(self, file: File | None, nodes: Iterable[str] | None) -> None:
        if nodes is None:
            self._shared = file
        else:
            self.of |= dict.fromkeys(nodes, file)
        self._changed()

    def _changed(self) -> None:
        self.watches = [watch for watch in self.watches if not watch.stopped and watch.sim.alive]
        for watch in self.watches:
            watch.look_soon()

    def note(self, job: str, round_: int, micro_batch: int, *, wrong: bool) -> None:
        self.misread[job, round_, micro_batch] = wrong

    def spoilt(self, job: str, round_: int) -> bool:
        """Whether an update of the round comes from a wrong text."""
        return any(self.misread.get((job, round_, mb), False) for mb in range(self.world.num_micro_batches))


class SimOpened:
    """In place of ``oobleckd.worker.data.inputs.Opened``."""

    handles = (0,)

    def __init__(self, world: World, node: str) -> None:
        file = world.texts.at(node)
        if file is None:
            raise UserError(f"data.path: {PATH}: No such file or directory", "name a file")
        self.world, self.node, self.file = world, node, file
        self.part = identity(file.content, whole=not world.texts.large)
        self.seen = self.stat()

    def stat(self) -> tuple[Any, ...]:
        return (self.file, self.file.writes)

    def digest(self) -> str:
        return identity(self.file.content).whole

    def lies_there(self) -> bool:
        return self.world.texts.at(self.node) is self.file

    def fresh(self) -> bool:
        return True


class SimEvaluation:
    """Of ``oobleckd.worker.data.evaluation.EvalCorpus`` what is asked of it where nothing is read."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.targets = tuple(5 + number % 3 for number in range(job.eval_rounds.total))

    def source_of(self, number: int) -> str:
        return self.job.eval_sources[number // self.job.eval_micro_batches]


class SimCorpus:
    """A sample for every micro-batch, and in all so many tokens."""

    num_tokens = 640

    def __init__(self, inputs: Any = None, evaluation: SimEvaluation | None = None) -> None:
        self.inputs: Any = inputs
        self.evaluation = evaluation

    @property
    def digest(self) -> str:
        return str(self.inputs.part.whole)

    @property
    def wrong(self) -> bool:
        """Whether what is read now is not the right text."""
        return bool(self.inputs.file.content != RIGHT)

    def sample_ids(self, step: int, micro_batch: int) -> tuple[int, ...]:
        return (step * 1000 + micro_batch,)

    def draw_ahead(self, step: int) -> None:
        """Nothing that would be worth it."""


class SimWatch:
    """In place of ``oobleckd.worker.data.input_watch.InputWatch``, in virtual time."""

    def __init__(self, sim: SimDevice, inputs: SimOpened) -> None:
        self.sim, self.inputs, self.texts = sim, inputs, sim.world.texts
        self.found: list[Finding] = []
        self.resting = self.stopped = self.looking = False
        self.said = "back"
        self.texts.watches.append(self)
        self.look_soon()

    def check(self, counters: Counters, *, hurry: bool = False) -> None:
        self._after(self.texts.dice.uniform(*self.texts.pass_s), self._read, counters)

    def go_on(self) -> None:
        self.resting = False
        self.look_soon()

    def rest(self) -> None:
        self.resting = True

    def stop(self) -> None:
        self.stopped = True

    def hear(self) -> list[Finding]:
        found, self.found = self.found, []
        return found

    def look_soon(self) -> None:
        """Something has changed, so the next look is of interest: it comes within a second."""
        if not self.looking:
            self.looking = True
            self._after(self.texts.dice.uniform(0.0, 1.0), self._look)

    def _after(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        self.sim.after(seconds, self._live, act, *args)

    def _live(self, act: Callable[..., None], *args: Any) -> None:
        if not self.stopped:
            act(*args)

    def _look(self) -> None:
        self.looking = False
        if self.resting:
            return
        if self.inputs.stat() != self.inputs.seen:
            self.inputs.seen = self.inputs.stat()
            self._read(None)
        there = self.texts.at(self.inputs.node)
        now: Any = "gone" if there is None else "back" if there.content == RIGHT else "other"
        if there is not self.inputs.file and now != self.said:
            self.said = now
            self._say(Moved(PATH, now))

    def _read(self, counters: Counters | None) -> None:
        whole = self.inputs.digest()
        if self.inputs.part.whole and whole != self.inputs.part.whole:
            self.stopped = True
            self._say(Changed(f"{PATH} was written to in place: its bytes differ"))
            return
        self.inputs.part = identity(self.inputs.file.content)
        if counters is not None:
            self._say(Checked(counters, self.inputs.part))

    def _say(self, finding: Finding) -> None:
        self.found.append(finding)
        self.sim.poke()


class SimReading(Reading):
    """The worker's own, over files of the world."""

    def __init__(self, sim: SimDevice) -> None:
        super().__init__(sim.name, sim.tell, sim.poke)
        self.sim = sim

    def _open(self, job: Job) -> Any:
        return SimCorpus(SimOpened(self.sim.world, self.sim.node.name), SimEvaluation(job))

    def _look_at(self, corpus: Any) -> Any:
        return SimWatch(self.sim, corpus.inputs)
