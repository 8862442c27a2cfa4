"""What somebody who watches asks over HTTP: schedules, layers, goodput, what would follow, the past,
incidents as files.

Owns routes and refusals. Views are the core's; what takes long is computed in the planner's pool, where the
past is read and written out, too, so that nobody who looks delays a heartbeat.
"""

from __future__ import annotations

from itertools import islice
from typing import TypeVar

import msgspec
from aiohttp import web

from oobleckd import __version__
from oobleckd.core import view, watching
from oobleckd.core.questions import StepQuestion
from oobleckd.core.run import Run
from oobleckd.core.samples import Sample
from oobleckd.core.state import JobRecord
from oobleckd.daemon import answers, paging, stepstore
from oobleckd.daemon.lanes import LOST
from oobleckd.daemon.past import PastError, PastText
from oobleckd.daemon.refusal import Refusal
from oobleckd.daemon.service import Service
from oobleckd.daemon.turns import Few
from oobleckd.planner.policy import PlanError
from oobleckd.planner.schedule import ScheduleError
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.watch import BUNDLE_VERSION, GoodputView, SampledSteps
from oobleckd.words import being, plain

AROUND_S = 10.0
"""Of the past before an incident and after it, in its bundle."""
STEPS_BEFORE, CHANGES_BEFORE = 600, 200
"""Of what came before a moment of the past: as many as a console shows."""
SPAN_S = 60.0
MAX_SPAN_S = 600.0
_DEPLOYED = "`oobleckctl get jobs` shows whether it runs"
_KEPT = 8
Kept = TypeVar("Kept")
_FAULTS: tuple[type[Exception], ...] = (PlanError, ScheduleError, *LOST)
_UNSAID: tuple[type[Exception], ...] = (Refusal, *_FAULTS)


class WatchApi:
    """Handlers over one service. ``modelled``: fields of the last schedules that were simulated, ``best``:
    seconds of a step with the best plans, both by what was asked.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._modelled: dict[tuple[object, ...], dict[str, msgspec.Raw]] = {}
        self._best: dict[tuple[object, ...], float] = {}
        self._few = Few()

    def routes(self) -> list[web.RouteDef]:
        """All of them, to be read by everybody."""
        return [
            web.get("/v1/schedules", self.schedules),
            web.get("/v1/schedule", self.schedule),
            web.get("/v1/layers", self.layers),
            web.get("/v1/jobs/{job}/goodput", self.goodput),
            web.get("/v1/jobs/{job}/routers", self.routers),
            web.get("/v1/impact", self.impact),
            web.get("/v1/blast", self.impact),  # its first name
            web.get("/v1/past", self.past),
            web.get("/v1/incidents/{incident}/bundle", self.bundle),
        ]

    # ------------------------------------------------------------------- schedules

    async def schedules(self, request: web.Request) -> web.StreamResponse:
        """The steps of ``job`` (or of the active one) whose op times are known."""
        job = self._asked(request)
        steps = {sample.counters.step + 1 for sample in self._service.core.samples.of(job.id)}
        return answers.whole(SampledSteps(job.id, tuple(sorted(steps))))

    async def schedule(self, request: web.Request) -> web.StreamResponse:
        """``step`` of ``job`` (without one the newest) as it was, or with ``modelled`` as the
        planner has it.
        """
        step, job = answers.number(request, "step") or 0, self._asked(request)
        sample = self._service.core.samples.step(job.id, step)
        if answers.flag(request, "modelled"):
            self._few.enter(request)
            return answers.written(msgspec.json.encode(await self._simulated(job, sample if step else None)))
        if sample is None:
            raise self._not_sampled(job, step)
        self._few.enter(request)
        try:
            return answers.written(await self._service.planning.sampled(sample))
        except LOST as error:
            raise _unplanned(error) from error

    def _not_sampled(self, job: JobRecord, step: int) -> Refusal:
        known = [sample.counters.step + 1 for sample in self._service.core.samples.of(job.id)]
        if not known:
            return Refusal(
                404, "not-found", f"no step of {job.id} was told op by op yet", "ask again in a few seconds"
            )
        return Refusal(
            404,
            "not-found",
            f"step {step} of {job.id} was not told op by op, or is too long ago",
            f"known are some from {min(known)} to {max(known)}",
        )

    async def _simulated(self, job: JobRecord, sample: Sample | None) -> dict[str, msgspec.Raw]:
        """The fields of the schedule, of the moment of ``sample`` or of now."""
        question = watching.step_question(self._service.core, job, sample)
        if question is None:
            raise Refusal(409, "conflict", f"{job.id} is not deployed: it has no schedule", _DEPLOYED)
        key = (job.id, question.layout.epoch, question.dead, _detoured_at(question))
        if key not in self._modelled:
            try:
                made = await self._service.planning.schedule(question)
            except _FAULTS as error:
                raise _unplanned(error) from error
            _make_room(self._modelled)
            self._modelled[key] = msgspec.json.decode(made, type=dict[str, msgspec.Raw])
        now = {"step": question.step, "epoch": question.epoch, "at": question.at}
        return {
            **self._modelled[key],
            **{name: msgspec.Raw(msgspec.json.encode(value)) for name, value in now.items()},
        }

    # ------------------------------------------------------------------- layers and time

    async def layers(self, request: web.Request) -> web.StreamResponse:
        """Who holds each layer of ``job``, or of the active one."""
        job = answers.asked_or_active(self._service, request)
        return paging.page(
            request, list(watching.layer_views(job)) if job is not None else [], lambda each: each
        )

    async def routers(self, request: web.Request) -> web.StreamResponse:
        """By layer what the job's routers came to in its newest step, and the tokens of each expert."""
        job = answers.find_job(self._service, request.match_info["job"])
        found = view.router_views(self._service.core, job, tokens=True)
        return paging.page(request, list(found), lambda each: each)

    async def goodput(self, request: web.Request) -> web.StreamResponse:
        """Where the time of the job's devices went."""
        job = answers.find_job(self._service, request.match_info["job"])
        self._few.enter(request)
        return answers.whole(await self._with_plans(job, watching.goodput_view(self._service.core, job)))

    async def _with_plans(self, job: JobRecord, found: GoodputView) -> GoodputView:
        """``found`` with what steps take as modelled: now, where peers compute for the dead, and with the
        best plan of all nodes that joined.
        """
        # A share of plans beside a measured rate read as an equation, green with nodes dead: now each is told
        # beside its like, and the best plan is one for whoever joined. (D-watching-017)
        everybody = watching.all_joined(self._service.core, job)
        if everybody is None or job.setup is None or not found.plan_step_s:
            return found
        plan_step_s, num_nodes = found.plan_step_s, len(everybody.nodes)
        key = (job.id, job.epoch, everybody.nodes, tuple(sorted(everybody.zones.items())))
        policy, setup = job.spec.fault_tolerance.policy, job.setup
        try:
            if job.dead and job.layout is not None:
                span = (await self._simulated(job, None))["span_s"]
                plan_step_s = max(plan_step_s, msgspec.json.decode(span, type=float))
            if key not in self._best:
                _make_room(self._best)
                self._best[key] = await self._service.planning.best_s(policy, setup, everybody)
        except _UNSAID:  # a share that nobody can say is no reason to say nothing
            return found
        # A plan around what is there may be modelled as faster than one from nothing: then it is the best.
        best_s = min(self._best[key], plan_step_s)
        return msgspec.structs.replace(
            found, plan_step_s=plan_step_s, best_plan_step_s=best_s, best_plan_nodes=num_nodes
        )

    # ------------------------------------------------------------------- what would follow

    async def impact(self, request: web.Request) -> web.StreamResponse:
        """What would follow if ``nodes`` (names with commas between) died now."""
        job, core = self._asked(request), self._service.core
        nodes = [name for name in request.query.get("nodes", "").split(",") if name]
        if not nodes:
            raise Refusal(422, "invalid", "nodes is missing", "name nodes, with commas between them")
        if unknown := watching.unknown_nodes(core, job, nodes):
            raise Refusal(
                404, "not-found", f"no node {', '.join(unknown)}", "`oobleckctl get nodes` lists them"
            )
        question = watching.loss_of(core, self._run_of(job), nodes)
        if question is None or job.setup is None:
            raise Refusal(409, "conflict", f"{job.id} is not deployed: nothing of it can be lost", _DEPLOYED)
        self._few.enter(request)
        try:
            return answers.whole(await self._service.planning.impact(question, job.setup))
        except _FAULTS as error:
            raise _unplanned(error) from error

    def _run_of(self, job: JobRecord) -> Run:
        run = self._service.core.run
        if run is None or run.job is not job:
            raise Refusal(
                409, "conflict", f"{job.id} {being(job.state)}: nothing of it can be lost", _DEPLOYED
            )
        return run

    # ------------------------------------------------------------------- the past

    async def past(self, request: web.Request) -> web.StreamResponse:
        """The state at ``at`` (POSIX seconds; without it now) and what came within ``span``
        seconds after it.
        """
        at = answers.seconds(request, "at", self._service.clock.now())
        span_s = answers.seconds(request, "span", SPAN_S)
        if not 0 <= span_s <= MAX_SPAN_S:
            raise Refusal(
                422,
                "invalid",
                f"span = {plain(span_s)} is too long",
                f"ask for 0 to {MAX_SPAN_S:.0f} s at once",
            )
        self._few.enter(request)
        return answers.written(await self._whole(await self._read(at, span_s)))

    async def bundle(self, request: web.Request) -> web.StreamResponse:
        """An incident with the past around it, as a file."""
        name = request.match_info["incident"]
        found = {each.id: each for each in view.incident_views(self._service.core)}
        if name not in found:
            raise Refusal(404, "not-found", f"no incident {name}", "`oobleckctl get incidents` lists them")
        self._few.enter(request)
        past = await self._read(*_around(found[name]))
        if past.begins > found[name].at:
            raise Refusal(
                404,
                "not-found",
                f"what happened around {name} is no longer kept",
                "replay_mb and replay_h in [daemon] say how much is",
            )
        made_by = f"oobleckd {__version__}"
        parts = {"version": BUNDLE_VERSION, "made_by": made_by, "incident": found[name]}
        head = msgspec.json.encode(parts)
        return answers.written(b'%s,"past":%s}' % (head[:-1], await self._whole(past)))

    async def _read(self, at: float, span_s: float) -> PastText:
        recorder = self._service.recorder
        if recorder is None:
            raise Refusal(404, "not-found", "the past is not kept", "set replay_mb in [daemon]")
        await recorder.reach()
        try:
            return await self._service.planning.past(recorder.store.path, at, span_s)
        except PastError as error:
            raise Refusal(404, "not-found", error.problem, error.hint) from error
        except LOST as error:
            raise _unplanned(error) from error

    # Added when a moment is asked for: the journal has them, and copies in every snapshot would be most of
    # its bytes. (D-watching-009)
    async def _whole(self, past: PastText) -> bytes:
        """With the newest steps of the job that was active, none that a rollback took, and changes before
        the snapshot, without ordinary steps, which are among the steps.
        """
        job, first = self._service.core.state.jobs.get(past.job), max(0, past.step - STEPS_BEFORE)
        steps = await stepstore.read(self._service.journal, job, first, past.step - first) if job else []
        told = [view.step_view(step) for step in steps if step.at <= past.at]
        before = (
            change for _, change in reversed(self._service.history.ring)
            if change.seq <= past.seq and change.at <= past.at
            and not (change.kind == "step" and change.level == "info")
        )  # fmt: skip
        return past.whole(told, list(islice(before, CHANGES_BEFORE))[::-1])

    # ------------------------------------------------------------------- below

    def _asked(self, request: web.Request) -> JobRecord:
        job = answers.asked_or_active(self._service, request)
        if job is None:
            raise Refusal(
                404, "not-found", "no job is active", "name a job; `oobleckctl get jobs` lists them"
            )
        return job


def _make_room(kept: dict[tuple[object, ...], Kept]) -> None:
    """Drop the oldest of what is kept."""
    while len(kept) >= _KEPT:
        kept.pop(next(iter(kept)))


def _around(incident: IncidentView) -> tuple[float, float]:
    """From when on, and for how many seconds."""
    return incident.at - AROUND_S, min(MAX_SPAN_S, incident.total_s + 2 * AROUND_S)


def _detoured_at(question: StepQuestion) -> int:
    """What tells detours apart: the attempt that their routes are."""
    routes = question.detours.standing(question.round) if question.detours is not None else ()
    return routes[0].attempt if routes else -1


def _unplanned(error: Exception) -> Refusal:
    if isinstance(error, LOST):
        return Refusal(503, "unavailable", "the planner's process was lost over it", "its log has more")
    hint = error.hint if isinstance(error, PlanError) else ""
    return Refusal(409, "conflict", f"there is no plan: {error}", hint)
