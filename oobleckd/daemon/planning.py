"""Makes plans in processes of their own, so that a long one never delays a heartbeat.

Owns which process makes which plan (``lanes``), and what is done without any: when a second process dies
over it too, a plan after a loss is made in a thread of the daemon, from the templates and sizes that there
are: recovery outranks the loop's punctuality. Owns no plan: requests and answers are the core's, the work is
``oobleckd.planner.policies``. Templates that were prepared are kept, so that ``adapt`` after a loss starts at
once; and after every plan the sizes for fewer nodes are computed ahead, a few at a time, so that nobody waits
long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from oobleckd.core.events import MakePlan, Planned
from oobleckd.core.questions import LossQuestion, StepQuestion
from oobleckd.core.samples import Sample
from oobleckd.daemon import poolwork
from oobleckd.daemon.lanes import LOST, Lane, PlanForker
from oobleckd.daemon.past import PastText
from oobleckd.daemon.planforker import LaneOrder
from oobleckd.host import urgency
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
_NICER_BY = 5  # what is not waited for leaves the processor to the loop, and to training on this host
_log = logging.getLogger(__name__)

Result = TypeVar("Result")
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


class Planning:
    """The pool: a process for plans after a loss, so that these wait for nothing, and one for all else.

    ``warm`` starts both; ``plan`` may be called any number of times at once.
    """

    def __init__(self, on_trouble: Callable[[str], None] = _log.warning) -> None:
        self.num_invalid = 0  # plans whose orders could not be run
        self._on_trouble = on_trouble
        # A plan after a loss waits for nothing, not even for the tenth of a second of a catalogue's call.
        # (D-daemon-005)
        self._forker = PlanForker()
        self._urgent = Lane(self._forker, LaneOrder(urgent=urgency.hurries()), self._lost)
        self._patient = Lane(self._forker, LaneOrder(_NICER_BY), self._lost)
        self._prepared: dict[Key, _Prepared] = {}
        self._ahead: set[asyncio.Task[None]] = set()
        self._looking = asyncio.Lock()  # who watches waits for who watches, and training for none of them

    @property
    def num_rebuilt(self) -> int:
        """Processes lost and made anew."""
        return self._urgent.num_lost + self._patient.num_lost

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
        for lane in (self._urgent, self._patient):
            lane.close()
        self._forker.close()

    def pids(self) -> tuple[int, ...]:
        """Process numbers: of who forks, and of those that plan."""
        return tuple(pid for pid in (self._forker.pid, self._urgent.pid, self._patient.pid) if pid)

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

    def _lost(self) -> None:
        self._trouble(
            "a process of the planner was lost (killed, or out of memory): it is made anew, and its "
            "plan once more; sizes that were computed ahead still serve"
        )

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


def _at_once(function: Callable[..., Result], *arguments: object) -> Result:
    """Run it in the process for plans after a loss: before ordinary programs, for as long as that
    is short.
    """
    with urgency.hurried_for(_URGENT_S):
        return function(*arguments)
