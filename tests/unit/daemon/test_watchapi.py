"""The handlers for who watches, over a simulated world's core: what they answer, refuse, and do not compute
twice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from oobleckd.core import view
from oobleckd.core.questions import LossQuestion, StepQuestion
from oobleckd.core.samples import Sample
from oobleckd.daemon import http, poolwork, watchapi
from oobleckd.daemon.history import History
from oobleckd.daemon.past import PastStore, PastText
from oobleckd.daemon.planning import LOST
from oobleckd.daemon.recorder import Recorder
from oobleckd.planner.policy import PlanError, Setup, Situation
from oobleckd.protocol.api import Items
from oobleckd.protocol.watch import (
    Bundle,
    GoodputView,
    ImpactView,
    LayerView,
    Past,
    SampledSteps,
    ScheduleView,
)
from tests.helpers.simjobs import make_job
from tests.helpers.world import World


class Inline:
    """The planner's pool, in this process."""

    def __init__(self, world: World) -> None:
        self.world, self.asked, self.error = world, 0, None

    async def impact(self, question: LossQuestion, setup: Setup) -> ImpactView:
        self._count()
        pack = poolwork.pack
        templates = self.world.job().templates
        return poolwork.impact_of(poolwork.impact(pack(setup), pack(templates), pack(question), ()))

    async def schedule(self, question: StepQuestion) -> bytes:
        self._count()
        return poolwork.schedule(poolwork.pack(question))

    async def sampled(self, sample: Sample) -> bytes:
        return poolwork.sampled(poolwork.pack(sample))

    async def past(self, path: Path, at: float, span_s: float) -> PastText:
        return poolwork.past(path, at, span_s)

    async def best_s(self, policy: str, setup: Setup, situation: Situation) -> float:
        self._count()
        pack = poolwork.pack
        templates = self.world.job().templates
        return poolwork.best_s(policy, pack(setup), pack(templates), pack(situation), ())

    def _count(self) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error


class Asker:
    """A client of the handlers over ``world``."""

    def __init__(self, world: World, client: TestClient[Any, Any], service: Any) -> None:
        self.world, self.client, self.service = world, client, service

    async def get(self, path: str, shape: Any) -> Any:
        response = await self.client.get(path)
        data = await response.read()
        assert response.status == 200, data
        return msgspec.json.decode(data, type=shape)

    async def refused(self, path: str) -> tuple[int, str]:
        response = await self.client.get(path)
        problem = msgspec.json.decode(await response.read())
        assert response.content_type == "application/problem+json"
        assert problem["hint"], problem
        return response.status, problem["detail"]


@asynccontextmanager
async def serving(world: World, folder: Path | None = None) -> AsyncIterator[Asker]:
    assert world.machine is not None
    core = world.machine.core
    made = None
    if folder is not None:
        store = PastStore(folder, 2**26, 86400.0, lambda _text: None)
        made = Recorder(store, core, lambda: view.status(core), lambda: world.now)
        made.start()
    clock = SimpleNamespace(now=lambda: world.now)
    service: Any = SimpleNamespace(
        core=core,
        planning=Inline(world),
        recorder=made,
        clock=clock,
        history=History(1000),
        journal=world.daemon.disk,
    )
    app = web.Application(middlewares=[http._problems])
    app.add_routes(watchapi.WatchApi(service).routes())
    async with TestClient(TestServer(app)) as client:
        yield Asker(world, client, service)
    if made is not None:
        await made.close()


def running(**spec: Any) -> World:
    world = World(1, 6)
    world.run_for(1.0)
    world.submit(make_job(**{"steps": 400, "memory": 350} | spec))
    world.until_step(25)
    return world


@pytest.mark.asyncio
async def test_schedules() -> None:
    world = running()
    async with serving(world) as asker:
        known = await asker.get("/v1/schedules", SampledSteps)
        assert (known.job, known.steps) == ("job-1", (1, 11, 21))
        newest = await asker.get("/v1/schedule", ScheduleView)
        assert (newest.step, newest.measured) == (21, True)
        older = await asker.get("/v1/schedule?job=job&step=11", ScheduleView)
        assert older.step == 11
        modelled = await asker.get("/v1/schedule?step=11&modelled=1", ScheduleView)
        assert (modelled.step, modelled.measured) == (11, False)
        again = await asker.get("/v1/schedule?modelled=1", ScheduleView)
        assert again.lanes == modelled.lanes
        assert again.step == world.job().counters.step + 1
        assert asker.service.planning.asked == 1, "the same plan is simulated once"
        status, detail = await asker.refused("/v1/schedule?step=12")
        assert (status, detail) == (404, "step 12 of job-1 was not told op by op, or is too long ago")
        assert (await asker.refused("/v1/schedule?step=x"))[0] == 422


@pytest.mark.asyncio
async def test_layers_goodput_and_what_would_follow() -> None:
    world = running()
    async with serving(world) as asker:
        layers = await asker.get("/v1/layers", Items[LayerView])
        assert [each.copies for each in layers.items] == [3] * 6
        spent = await asker.get("/v1/jobs/job/goodput", GoodputView)
        assert spent.total_s > 0
        found = await asker.get("/v1/impact?nodes=n02,n03", ImpactView)
        assert found.nodes == ("n02", "n03")
        assert await asker.get("/v1/blast?nodes=n02,n03", ImpactView) == found  # its first name
        assert (await asker.refused("/v1/impact?nodes=n02,x"))[1] == "no node x"
        assert (await asker.refused("/v1/impact"))[0] == 422
        assert (await asker.refused("/v1/impact?job=none&nodes=n02"))[0] == 404


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", ["adaptive", "slipstream", "oobleck"])
async def test_with_nodes_gone_no_plan_is_the_best_of_all_that_joined(policy: str) -> None:
    world = running(policy=policy)
    async with serving(world) as asker:
        whole = await asker.get("/v1/jobs/job/goodput", GoodputView)
        assert whole.best_plan_nodes == 6
        assert whole.plan_step_s == pytest.approx(whole.best_plan_step_s, rel=0.05)
        assert whole.best_step_s == pytest.approx(whole.step_s, rel=0.02)  # messages take more or less
        assert 0 < whole.best_at <= world.now
        world.kill("n02")
        world.kill("n05")
        world.run(lambda: bool(world.incidents()) and not any(each.open for each in world.incidents()))
        world.until_step(world.job().counters.step + 25)
        found = await asker.get("/v1/jobs/job/goodput", GoodputView)
        assert found.best_plan_nodes == 6, "those that are gone count"
        assert found.best_plan_step_s == pytest.approx(whole.best_plan_step_s)
        assert found.plan_step_s > 1.2 * found.best_plan_step_s
        assert found.best_step_s == whole.best_step_s
        assert found.of_fault_free == pytest.approx(found.best_step_s / found.step_s)
        asked = asker.service.planning.asked
        await asker.get("/v1/jobs/job/goodput", GoodputView)
        assert asker.service.planning.asked == asked, "nothing is computed twice"


@pytest.mark.asyncio
async def test_where_no_plan_can_be_made_the_measured_figures_are_told() -> None:
    world = running()
    async with serving(world) as asker:
        asker.service.planning.error = PlanError("no room", "more memory")
        found = await asker.get("/v1/jobs/job/goodput", GoodputView)
        assert (found.best_plan_step_s, found.best_plan_nodes) == (0.0, 0)
        assert found.best_step_s > 0


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "status"), [(PlanError("no room", "more memory"), 409), (LOST[0]("gone"), 503)]
)
async def test_a_planner_that_cannot_say(error: Exception, status: int) -> None:
    world = running()
    async with serving(world) as asker:
        asker.service.planning.error = error
        assert (await asker.refused("/v1/impact?nodes=n02"))[0] == status
        assert (await asker.refused("/v1/schedule?modelled=1"))[0] == status


@pytest.mark.asyncio
async def test_nothing_is_deployed() -> None:
    world = World(1, 1)
    world.run_for(1.0)
    async with serving(world) as asker:
        assert (await asker.get("/v1/layers", Items[LayerView])).items == ()
        assert (await asker.refused("/v1/schedules"))[1] == "no job is active"
        world.submit(make_job(steps=20, memory=350))
        world.run_for(2.0)
        assert (await asker.refused("/v1/schedule"))[1] == "no step of job-1 was told op by op yet"
        assert (await asker.refused("/v1/schedule?modelled=1"))[0] == 409
        assert (await asker.refused("/v1/impact?nodes=n01"))[0] == 409
        assert (await asker.refused("/v1/past"))[1] == "the past is not kept"


@pytest.mark.asyncio
async def test_a_job_that_is_over() -> None:
    world = running(steps=30)
    world.until_state("done")
    async with serving(world) as asker:
        assert (await asker.refused("/v1/impact?job=job&nodes=n01"))[0] == 409
        assert (await asker.get("/v1/layers?job=job", Items[LayerView])).items == ()
        assert (await asker.get("/v1/schedule?job=job", ScheduleView)).step == 21
        spent = await asker.get("/v1/jobs/job/goodput", GoodputView)
        assert spent.total_s == pytest.approx(spent.useful_s + sum(spent.lost_s.values()))


@pytest.mark.asyncio
async def test_the_past_and_an_incident_of_it(tmp_path: Path) -> None:
    world = running()
    async with serving(world, tmp_path) as asker:
        began, seen = world.now, len(world.daemon.changes)
        world.run_for(0.5)
        world.kill("n02")
        world.run(lambda: bool(world.incidents()) and not world.incidents()[0].open)
        for change in world.daemon.changes[seen:]:
            asker.service.recorder.add(change)
        past = await asker.get(f"/v1/past?at={began}&span=600", Past)
        assert past.snapshot.at == began
        assert [change.seq for change in past.changes] == [c.seq for c in world.daemon.changes[seen:]]
        bundle = await asker.get("/v1/incidents/inc-1/bundle", Bundle)
        assert (bundle.version, bundle.incident.id) == (1, "inc-1")
        assert bundle.past.snapshot.at <= bundle.incident.at
        assert (await asker.refused("/v1/incidents/inc-9/bundle"))[0] == 404
        assert (await asker.refused("/v1/past?span=1e9"))[0] == 422
        assert (await asker.refused("/v1/past?at=inf"))[0] == 422


@pytest.mark.asyncio
async def test_an_incident_that_is_too_long_ago(tmp_path: Path) -> None:
    world = running()
    world.kill("n02")
    world.run(lambda: bool(world.incidents()) and not world.incidents()[0].open)
    async with serving(world, tmp_path) as asker:
        status, detail = await asker.refused("/v1/incidents/inc-1/bundle")
        assert (status, detail) == (404, "what happened around inc-1 is no longer kept")
