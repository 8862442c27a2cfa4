"""The list of jobs: what it says of each, and that all screens follow the one that is chosen."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from oobleckd.client import Client
from oobleckd.console.facts import Fetched, JobChosen, Wants, Watched
from oobleckd.console.feed import Feed
from oobleckd.console.model import View, fold
from oobleckd.console.widgets import jobtable
from oobleckd.console.widgets.jobtable import JobTableLook
from oobleckd.draw.lines import length, plain
from tests.helpers.api_server import serving
from tests.unit.console import build, watching
from tests.unit.console.build import NOW
from tests.unit.console.piloted import shown
from tests.unit.console.scenery import other_jobs
from tests.unit.console.test_feed import WAIT_S, Facts, api

OTHER = build.job(id="job-2", name="second", state="queued", step=0)
DONE = build.job(id="job-0", name="first", state="done", step=500)
LIVE = fold(View(), (*watching.facts(), build.fetched(jobs=(DONE, build.job(), OTHER))))


# --------------------------------------------------------------------------- the table


def test_those_at_work_come_first_then_the_queue_then_the_newest_that_ended() -> None:
    view = msgspec.structs.replace(LIVE, jobs=(*other_jobs(6), build.job()))
    states = [job.state for job in jobtable.selected(view, JobTableLook())]
    assert states == ["running", "queued", "queued", "queued", "cancelled", "failed", "done"]
    assert sorted(jobtable.places(view).values()) == [1, 2, 3]
    text = "\n".join(map(plain, jobtable.paint(view, NOW, 200, 20)))
    assert "next" in text
    assert "3rd in line" in text
    assert "3 steps in a row had a loss that is not finite" in text
    assert text.split("\n")[1].startswith("▸ "), "the one that is shown"


@pytest.mark.parametrize("width", [56, 78, 100, 118, 140, 198])
def test_rows_are_aligned_at_any_width(width: int) -> None:
    long = build.job(id="a-job-whose-name-is-much-longer-than-its-column-1", step=10**9, steps=10**10)
    view = msgspec.structs.replace(LIVE, jobs=(long, *other_jobs(20), build.job(step_s=1e9)))
    lines = jobtable.paint(view, NOW, width, 30, JobTableLook(cursor=30))
    assert max(map(length, lines)) <= width
    at = {row.index("%") for row in map(plain, lines) if "%" in row}
    assert len(at) == 1


def test_words_leave_jobs_out_and_without_any_it_is_said() -> None:
    view = msgspec.structs.replace(LIVE, jobs=(*other_jobs(6), build.job()))
    assert [job.state for job in jobtable.selected(view, JobTableLook("failed"))] == ["failed"]
    none = jobtable.paint(view, NOW, 90, 5, JobTableLook("nothing has this"))
    assert 'no job has "nothing has this"' in plain(none[0])
    assert "no job yet" in plain(jobtable.paint(View(), NOW, 90, 5)[0])


# --------------------------------------------------------------------------- the fold


def test_of_another_job_everything_begins_anew() -> None:
    view = fold(LIVE, [JobChosen(NOW, "job-2")])
    assert view.job == OTHER
    assert (view.points, view.pipelines, view.templates, view.schedule, view.goodput) == (
        (),
        (),
        (),
        None,
        None,
    )
    assert view.nodes == LIVE.nodes, "these are of no job"
    again = fold(view, [build.fetched(jobs=(DONE, build.job(), OTHER), chosen="job-2", pipelines=())])
    assert again.job == OTHER
    back = fold(again, [JobChosen(NOW, ""), build.fetched(jobs=(DONE, build.job(), OTHER))])
    assert back.job is not None
    assert back.job.id == "job-1"
    assert back.pipelines == build.PIPELINES


def test_answers_of_the_job_before_are_not_taken_for_the_other_ones() -> None:
    view = fold(LIVE, [JobChosen(NOW, "job-2")])
    late = (
        build.fetched(jobs=(DONE, build.job(), OTHER)),
        Watched(NOW, goodput=watching.goodput(), job="job-1"),
    )
    view = fold(view, late)
    assert (view.pipelines, view.templates, view.goodput) == ((), (), None)
    assert view.job == OTHER
    assert fold(view, [Watched(NOW, goodput=watching.goodput(), job="job-2")]).goodput is not None


def test_a_job_that_is_no_more_gives_its_place_to_the_one_at_work() -> None:
    view = fold(LIVE, [JobChosen(NOW, "job-2"), build.fetched(jobs=(build.job(),), chosen="job-2")])
    assert view.job is not None
    assert view.job.id == "job-1"


# --------------------------------------------------------------------------- the feed


def test_the_feed_asks_for_the_plan_of_the_job_that_is_wanted(tmp_path: Path) -> None:
    served = api(tmp_path)
    served.jobs = [build.job(), OTHER]
    served.steps["job-2"] = []
    facts = Facts()
    with serving(tmp_path / "s", served):
        feed = Feed(Client(tmp_path / "s", timeout_s=WAIT_S), facts.queue.put)
        threads = [threading.Thread(target=thread) for thread in feed.threads]
        for thread in threads:
            thread.start()
        try:
            assert facts.first(Fetched).chosen == ""
            feed.want(Wants(job="job-2", goodput=True))
            while (told := facts.first(Fetched)).chosen != "job-2" or told.templates is None:
                pass
        finally:
            feed.close()
            for thread in threads:
                thread.join(WAIT_S)
    assert told.pipelines is not None


# --------------------------------------------------------------------------- the application


@pytest.mark.asyncio
async def test_enter_switches_the_whole_console_and_a_takes_that_back() -> None:
    async with shown() as console:
        await console.tell(build.fetched(jobs=(DONE, build.job(), OTHER)))
        await console.press("9", "down", "enter")
        assert console.view.job == OTHER
        assert console.source.wanted.job == "job-2"
        for key in "12345678":
            await console.press(key)
            assert "job second queued" in console.text(), key
        await console.press("9", "a")
        assert console.view.job is not None
        assert console.view.job.id == "job-1"
        assert console.source.wanted.job == ""


@pytest.mark.asyncio
async def test_a_job_is_chosen_by_its_name_and_from_the_palette() -> None:
    async with shown() as console:
        await console.tell(build.fetched(jobs=(DONE, build.job(), OTHER)))
        await console.press("colon")
        await console.write("job second")
        assert console.view.job == OTHER
        await console.press("colon")
        await console.write("job nobody")
        assert "no job 'nobody'" in console.said()
        await console.press("ctrl+p")
        await console.pilot.press(*"Job job-0")
        await console.until_hit("job-0")
        await console.press("enter")
        await console.settle()
        assert console.view.job == DONE


@pytest.mark.asyncio
async def test_in_the_past_none_is_chosen() -> None:
    async with shown() as console:
        await console.press("t")
        await console.write("-1m")
        await console.until_past()
        console.app.choose("job-2")
        await console.settle()
        assert "the past shows the job that was at work then" in console.said()
        assert console.app.chosen == ""
