"""Makes plans in processes of their own, so that a long one never delays a heartbeat.

Owns the processes: warmed at start, made anew when one dies (and the request repeated once), gone with the
daemon however that ends. When the second process dies over it too, a plan after a loss is made in a thread of
the daemon, from the templates and sizes that there are: recovery outranks the loop's punctuality. Owns no
plan: requests and answers are the core's, the work is ``oobleckd.planner.policies``. Templates that were
prepared are kept, so that ``adapt`` after a loss starts at once; and after every plan the sizes for fewer
nodes are computed ahead, a few at a time, so that nobody waits long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from oobleckd.core.events import MakePlan, Planned
from oobleckd.core.questions import LossQuestion, StepQuestion
from oobleckd.core.samples import Sample
from oobleckd.daemon import poolwork
from oobleckd.daemon.past import PastText
from oobleckd.host import urgency
from oobleckd.host.orphans import end_with_parent
from oobleckd.planner.plan import Template
from oobleckd.planner.policy import ROLLING_BACK, PlanError, Setup, Situation
from oobleckd.planner.sizing.catalogue import Catalogue
from oobleckd.protocol.watch import ImpactView

_MAX_PREPARED = 16
# From the top down and after a plan: the next loss comes first, and a recovery waits behind a tenth of a
# second of it at most. (D-planner-006)
_AHEAD = 32  # numbers of nodes a call: some 0.1 s
# A plan takes 2 ms and waited for a core that trains up to three times, 5 to 12 ms in the median; one that
# is searched for half a second must not stand in training's way. (D-recovery-020)
_URGENT_S = (
    0.05  # most plans take 1 to 5 ms; one that is searched for longer leaves the processor to training again
)
_WRITER = "QueueFeederThread"  # as multiprocessing calls it
_NICER_BY = 5  # what is not waited for leaves the processor to the loop, and to training on this host
_log = logging.getLogger(__name__)

Result = TypeVar("Result")
LOST = (BrokenProcessPool, MemoryError)
Key = tuple[str, Setup]


@dataclass(slots=True)
class _Prepared:
    """What is kept of a policy and a setup, ``packed`` the templates for the pool; ``filling``: the catalogue
    is being filled.
    """

    setup: bytes
    packed: bytes
    templates: tuple[Template, ...]
    catalogue: Catalogue
    filling: bool = False


class _Lane:
    """A pool of one process, made anew when that is lost."""

    def __init__(self, nicer_by: int, on_trouble: Callable[[str], None], *, urgent: bool = False) -> None:
        self.num_rebuilt = 0
        self._nicer_by = nicer_by
        self._on_trouble = on_trouble
        self._urgent = urgent
        self._pool = self._new_pool()

    def warm(self) -> None:
        """Have the process started and the planner imported there, without waiting for it."""
        others = set(threading.enumerate())
        started = self._pool.submit(os.getpid)
        if urgency.hurries():
            started.add_done_callback(lambda _: _hasten(others, urgent=self._urgent))

    def close(self) -> None:
        """End the process; what is under way is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Run it there, once more if the process is lost over it. Raises one of LOST."""
        try:
            return await self._once(function, *arguments)
        except LOST:
            return await self._once(function, *arguments)

    async def _once(self, function: Callable[..., Result], *arguments: object) -> Result:
        pool = self._pool
        try:
            return await asyncio.wrap_future(pool.submit(function, *arguments))
        except LOST:
            self._rebuild(pool)
            raise

    def _rebuild(self, broken: ProcessPoolExecutor) -> None:
        # Several requests may meet the same broken pool; one of them replaces it.
        if self._pool is broken:
            self._on_trouble(
                "a process of the planner was lost (killed, or out of memory): it is made anew, and its "
                "plan once more; sizes that were computed ahead still serve"
            )
            self.num_rebuilt += 1
            broken.shutdown(wait=False)
            self._pool = self._new_pool()
            self.warm()

    def _new_pool(self) -> ProcessPoolExecutor:
        # spawn: the daemon has threads, and a fork of those may hang.
        context = multiprocessing.get_context("spawn")
        beginning = (self._nicer_by, self._urgent)
        return ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=beginning)


class Planning:
    """The pool: a process for plans after a loss, so that these wait for nothing, and one for all else.

    ``warm`` starts both; ``plan`` may be called any number of times at once.
    """

    def __init__(self, on_trouble: Callable[[str], None] = _log.warning) -> None:
        self.num_invalid = 0  # plans whose orders could not be run
        self._on_trouble = on_trouble
        # A plan after a loss waits for nothing, not even for the tenth of a second of a catalogue's call.
        # (D-daemon-005)
        self._urgent = _Lane(0, self._trouble, urgent=urgency.hurries())
        self._patient = _Lane(_NICER_BY, self._trouble)
        self._prepared: dict[Key, _Prepared] = {}
        self._ahead: set[asyncio.Task[None]] = set()
        self._looking = asyncio.Lock()  # who watches waits for who watches, and training for none of them

    @property
    def num_rebuilt(self) -> int:
        """Processes lost and made anew."""
        return self._urgent.num_rebuilt + self._patient.num_rebuilt

    def warm(self) -> None:
        """Have the processes started and the planner imported there, without waiting for it."""
        self._urgent.warm()
        self._patient.warm()

    async def plan(self, request: MakePlan) -> Planned:
        """The answer to ``request``. Never raises: what goes wrong is a sentence in the answer."""
        try:
            setup = await self._chosen(request) if request.others else request.setup
            prepared = await self._prepare(request.policy, setup)
            templates = prepared.templates
            if request.situation is None:
                taken = setup if request.others else None
                return Planned(request.ticket, templates=templates, setup=taken)
            num_nodes = len(set(request.situation.nodes))
            known = prepared.catalogue.look_up(num_nodes)
            sizes = known.sizes if known else ()
            situation = poolwork.pack(request.situation)
            proposal = poolwork.proposal_of(
                await self._adapt(request.policy, prepared.setup, prepared.packed, situation, sizes)
            )
        except PlanError as error:
            return Planned(request.ticket, error=error.problem, hint=error.hint)
        except LOST as error:
            return _failed(
                request, f"the planner's process was lost twice over it: {str(error) or 'out of memory'}"
            )
        except Exception as error:  # noqa: BLE001 - a task's boundary: a fault of the planner must not stop the daemon
            _log.exception("planner: %s", request)
            return _failed(request, f"the planner failed: {type(error).__name__}: {error}")
        if proposal.invalid:
            self.num_invalid += 1
            self._trouble(
                "the planner made an order of ops that cannot be run, and left it out: devices do whatever "
                "is ready, for the same bits in longer steps; this is a fault of oobleckd: "
                f"{proposal.invalid}"
            )
        if request.policy not in ROLLING_BACK:  # those choose shapes in another way, at once
            self._plan_ahead(prepared, num_nodes)
        return Planned(request.ticket, templates=templates, proposal=proposal)

    async def impact(self, question: LossQuestion, setup: Setup) -> ImpactView:
        """What would follow a loss, as ``setup`` has the job. Raises PlanError, and one of LOST where the
        process is lost twice over it.
        """
        prepared = await self._prepare(question.policy, setup)
        known = prepared.catalogue.look_up(len(set(question.situation.nodes)))
        sizes = known.sizes if known else ()
        asked = poolwork.pack(question)
        # Whoever looks must not keep a plan after a loss waiting, which has the other process for itself.
        # (D-watching-008)
        async with self._looking:
            return poolwork.impact_of(
                await self._patient.run(poolwork.impact, prepared.setup, prepared.packed, asked, sizes)
            )

    async def best_s(self, policy: str, setup: Setup, situation: Situation) -> float:
        """What a step takes, in seconds, with the plan that is made from nothing for ``situation``. Raises
        PlanError, and one of LOST.
        """
        prepared = await self._prepare(policy, setup)
        known = prepared.catalogue.look_up(len(set(situation.nodes)))
        sizes, asked = known.sizes if known else (), poolwork.pack(situation)
        async with self._looking:
            return await self._patient.run(
                poolwork.best_s, policy, prepared.setup, prepared.packed, asked, sizes
            )

    async def schedule(self, question: StepQuestion) -> bytes:
        """A step as modelled, as JSON. Raises PlanError, ScheduleError, and one of LOST."""
        asked = poolwork.pack(question)
        async with self._looking:
            return await self._patient.run(poolwork.schedule, asked)

    async def sampled(self, sample: Sample) -> bytes:
        """A step as devices told of it, as JSON. Raises one of LOST."""
        asked = poolwork.pack(sample)
        async with self._looking:
            return await self._patient.run(poolwork.sampled, asked)

    async def past(self, path: Path, at: float, span_s: float) -> PastText:
        """What the file at ``path`` knows of a moment, as JSON. Raises PastError, and one of LOST."""
        async with self._looking:
            return await self._patient.run(poolwork.past, path, at, span_s)

    async def planned_ahead(self) -> None:
        """Wait until nothing is being computed ahead."""
        while self._ahead:
            await asyncio.wait(self._ahead)

    def close(self) -> None:
        """End the processes; plans under way are dropped."""
        for task in self._ahead:
            task.cancel()
        self._urgent.close()
        self._patient.close()

    def pids(self) -> tuple[int, ...]:
        """Process numbers of the pool."""
        return tuple(
            sorted(child.pid for child in multiprocessing.active_children() if child.pid is not None)
        )

    async def _chosen(self, request: MakePlan) -> Setup:
        setups = (request.setup, *request.others)
        packed = tuple(map(poolwork.pack, setups))
        return setups[await self._patient.run(poolwork.chosen, request.policy, packed, request.num_nodes)]

    async def _prepare(self, policy: str, setup: Setup) -> _Prepared:
        key = (policy, setup)
        if key not in self._prepared:
            asked = poolwork.pack(setup)
            packed = await self._patient.run(poolwork.prepare, policy, asked)
            templates = poolwork.templates_of(packed)
            while len(self._prepared) >= _MAX_PREPARED:
                self._prepared.pop(next(iter(self._prepared)))
            n0 = min(template.num_nodes for template in templates)
            self._prepared[key] = _Prepared(asked, packed, templates, Catalogue(n0))
        return self._prepared[key]

    def _plan_ahead(self, prepared: _Prepared, num_nodes: int) -> None:
        """Begin to fill the catalogue for up to ``num_nodes`` nodes, unless that is under way."""
        if prepared.filling or not prepared.catalogue.missing(num_nodes):
            return
        prepared.filling = True
        task = asyncio.create_task(self._fill(prepared, num_nodes))
        self._ahead.add(task)
        task.add_done_callback(self._ahead.discard)

    async def _fill(self, prepared: _Prepared, num_nodes: int) -> None:
        """Fill the catalogue. What cannot be computed ahead is computed when it is needed."""
        try:
            while numbers := prepared.catalogue.missing(num_nodes)[:_AHEAD]:
                made = await self._patient.run(poolwork.ahead, prepared.setup, prepared.packed, numbers)
                prepared.catalogue.add(made)
        except Exception:  # noqa: BLE001 - a task's boundary: the next plan tries again
            _log.exception("planner: sizes for up to %d nodes ahead", num_nodes)
        finally:
            prepared.filling = False

    def _trouble(self, text: str) -> None:
        self._on_trouble(text)

    async def _adapt(self, *arguments: object) -> bytes:
        """The proposal, wherever it can be made."""
        try:
            return await self._urgent.run(_at_once, poolwork.adapt, *arguments)
        except LOST:
            self._trouble("the planner's process was lost twice over one plan: the daemon makes it itself")
            # A recovery that fails is worse than a loop that is late for some milliseconds. (D-daemon-004)
            return await asyncio.to_thread(poolwork.adapt, *arguments)  # type: ignore[arg-type]


def _failed(request: MakePlan, problem: str) -> Planned:
    return Planned(request.ticket, error=problem, hint="this is a fault of oobleckd; the log has more")


def _hasten(others: Collection[threading.Thread], *, urgent: bool) -> None:
    """Make urgent the threads through which a plan passes on its way to the process and back: the calling
    one, which gives out work and has the results, and the one that writes to the queue. Those of the patient
    lane hold the interpreter's lock, too.
    """
    set_urgent = urgency.hurry if urgent else urgency.hurry_behind
    set_urgent()
    for thread in threading.enumerate():
        if thread.name == _WRITER and thread not in others and thread.native_id is not None:
            set_urgent(thread.native_id)


def _at_once(function: Callable[..., Result], *arguments: object) -> Result:
    """Run it in the process for plans after a loss: before ordinary programs, for as long as that
    is short.
    """
    with urgency.hurried_for(_URGENT_S):
        return function(*arguments)


def _begin(nicer_by: int, urgent: bool) -> None:
    """In each process: leave Ctrl-C to the daemon, and end with it even if it was killed."""
    with contextlib.suppress(
        OSError
    ):  # a sandbox may forbid it: then its plans take the processor that they get
        os.nice(nicer_by)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    poolwork.load()
    end_with_parent()
    if urgent:
        urgency.hurry()
