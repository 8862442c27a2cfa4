"""What somebody who watches is told: layers, goodput, schedules, what would follow, an incident as a file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from oobleckd.protocol.changes import Change
from oobleckd.protocol.incidentviews import RejectedView
from oobleckd.protocol.jobviews import PipelineView, StepView
from oobleckd.protocol.nodeviews import LayerRange
from oobleckd.protocol.watch import (
    Bundle,
    GoodputView,
    ImpactView,
    LaneView,
    LayerView,
    OpView,
    Past,
    ScheduleView,
    Snapshot,
)
from tests.helpers.api_server import Api, job_view, node_view, status_view
from tests.unit.ctl.conftest import Ctl
from tests.unit.ctl.test_verbs import INCIDENT

LAYERS = [LayerView(0, 2, ("node-1/0", "node-2/0")), LayerView(1, 1, ("node-1/0",))]
GOODPUT = GoodputView(
    "job-1", 100.0, 80.0, {"detect": 1.0, "plan": 1.0, "reconfigure": 0.0, "copy": 3.0, "redone": 5.0,
    "degraded": 0.0, "waiting": 0.0, "bubble": 10.0}, 0.75,
    step_s=0.4, best_step_s=0.3, best_at=100.0, plan_step_s=0.2, best_plan_step_s=0.1, best_plan_nodes=3,
)  # fmt: skip
SCHEDULE = ScheduleView(
    "job-1", 7, 2, 100.0, measured=True, span_s=4.0,
    lanes=(
        LaneView("node-1/0", 0, (0,), (OpView("F", 0, 0, 0.0, 1.0), OpView("B", 0, 0, 3.0, 4.0), OpView("U",
        -1, -1, 4.0, 4.0)), 0.5),
        LaneView("node-2/0", 0, (1,), (), 0.0, dead=True),
        LaneView("node-3/0", 1, (1,), (OpView("F", 1, 0, 1.0, 2.0, "node-2/0", again=True), OpView("B", 1, 0,
        2.0, 3.0, "node-2/0")), 0.5),
    ),
)  # fmt: skip
IMPACT = ImpactView(
    "job-1", ("node-2",), (), 0, stops=False, stall_s=0.25, throughput=0.5, copied_bytes=3 << 20, copy_s=0.1,
    can_lose=0,
    plan=(PipelineView(0, ("node-1",), (LayerRange("node-1/0", 0, 2),), (0, 1)),), reason="shrink pipeline 0",
    rejected=(RejectedView("plan all anew", 2.0, "1 s more"),),
)  # fmt: skip


def snapshot(at: float = 90.0) -> Snapshot:
    return Snapshot(
        at, 4, status_view(Path("/a")), (job_view(),), (node_view("node-1"),), (), (), (INCIDENT,)
    )


BUNDLE = Bundle(
    1, "oobleckd 0.1.0", INCIDENT,
    Past(50.0, 110.0, snapshot(), (Change(5, 100.0, "incident", "warn", "inc-1: signal 9", ("incident:inc-1",
    )),)),
)  # fmt: skip


def watched(api: Api) -> None:
    """Something to look at."""
    api.jobs, api.layers = [job_view()], LAYERS
    api.watched = {"goodput": GOODPUT, "schedule": SCHEDULE, "impact": IMPACT, "bundle": BUNDLE}


def test_layers_and_goodput(ctl: Ctl) -> None:
    watched(ctl.api)
    assert "0      2       node-1/0, node-2/0" in ctl("get", "layers").stdout
    said = ctl("get", "goodput")
    assert ["copy", "3", "s", "3.0%"] in [line.split() for line in said.stdout.splitlines()]
    assert "a step takes 400 ms, the best so far 300 ms, at 1970-01-01 " in said.stderr
    assert "50.0% of the best one of all 3 nodes that joined" in said.stderr
    ctl.api.jobs = []
    assert ctl("get", "goodput").exit_code == 3


def test_goodput_is_of_the_job_that_runs(ctl: Ctl) -> None:
    watched(ctl.api)
    ctl.api.jobs = [job_view(id="job-1", finished_at=None, state="running"), job_view(id="job-2")]
    ctl("get", "goodput")
    assert ctl.api.queries[-1][0] == "/v1/jobs/job-1/goodput"


def test_a_schedule_is_drawn(ctl: Ctl) -> None:
    watched(ctl.api)
    said = ctl("describe", "schedule", "small", "--step", "7").stdout
    fields = {name: text.strip() for name, _, text in (line.partition(":") for line in said.splitlines())}
    assert fields["step"] == "7 of job-1, generation 2, measured"
    assert fields["lost"] == "node-2/0"
    assert fields["re-routed"] == "2 ops of node-2/0 by node-3/0"
    assert fields["done again"] == "1 op"
    assert "0: node-1/0 (0)  0░" in said
    assert ctl.api.queries[-1] == ("/v1/schedule", {"job": ["job-1"], "step": ["7"]})
    ctl("describe", "schedule", "small", "--modelled")
    assert ctl.api.queries[-1] == ("/v1/schedule", {"job": ["job-1"], "modelled": ["1"]})
    assert ctl("describe", "job", "small", "--modelled").exit_code == 2


def test_what_would_follow(ctl: Ctl) -> None:
    watched(ctl.api)
    said = ctl("what-if", "--without", "node-2,node-3", "--without", "node-4")
    assert said.exit_code == 0
    assert "none: every layer has a copy left" in said.stdout
    assert "50.0% of now" in said.stdout
    assert "3 MiB in 100 ms" in said.stdout
    assert "plan all anew" in said.stdout
    assert ctl.api.queries[-1] == ("/v1/impact", {"nodes": ["node-2,node-3,node-4"]})
    ctl("what-if", "small", "--without", "node-2")
    assert ctl.api.queries[-1] == ("/v1/impact", {"job": ["job-1"], "nodes": ["node-2"]})
    assert ctl("what-if", "--without", ",").exit_code == 2
    assert ctl("what-if").exit_code == 2


def test_a_loss_that_stops_the_job_is_said_so(ctl: Ctl) -> None:
    watched(ctl.api)
    ctl.api.watched["impact"] = msgspec.structs.replace(
        IMPACT, stops=True, plan=(), rejected=(), lost_layers=(0, 1, 2, 5), steps_back=3
    )
    said = ctl("what-if", "--without", "node-2")
    assert said.exit_code == 3
    assert "0-2, 5" in said.stdout
    assert "3 steps, to the last checkpoint" in said.stdout
    assert "error: job-1 would stop" in said.stderr


def test_an_incident_as_a_file(ctl: Ctl, tmp_path: Path) -> None:
    watched(ctl.api)
    file = tmp_path / "inc-1.json"
    old = ctl("export-incident", "inc-1", "-o", str(file))
    assert (old.exit_code, old.stdout) == (0, f"{file}\n")
    assert "-o FILE is --to FILE now" in old.stderr
    assert ctl.json("export-incident", "inc-1", "--to", str(file))["kind"] == "IncidentExport"
    said = ctl("export-incident", "inc-1", "--to", str(file))
    assert (said.exit_code, said.stdout) == (0, f"{file}\n")
    assert "1 change" in said.stderr
    assert msgspec.json.decode(file.read_bytes(), type=Bundle) == BUNDLE
    assert ctl("export-incident", "inc-1", "--to", "/nowhere/x").exit_code == 1
    assert ctl("export-incident", "inc-1").exit_code == 2


@pytest.mark.parametrize(
    "words", [("get", "layers"), ("describe", "schedule", "small"), ("what-if", "--without", "x")]
)
def test_what_is_not_there(ctl: Ctl, words: tuple[str, ...]) -> None:
    ctl.api.jobs = [job_view()]
    found = ctl(*words)
    assert found.exit_code == (0 if words == ("get", "layers") else 3)


def test_steps(ctl: Ctl) -> None:
    """The newest few where nobody says which."""
    watched(ctl.api)
    ctl.api.steps["job-1"] = [
        StepView(step, 2.0, (2.0).hex(), 1.0, 0.1, 8, "x", "applied", 1, 9.0, 0.25) for step in range(1, 31)
    ]

    def shown(*asked: str) -> list[int]:
        return [int(line.split()[0]) for line in ctl("get", "steps", *asked).stdout.splitlines()[1:]]

    assert shown() == shown("job-1") == list(range(11, 31))
    assert shown("job-1", "--last", "3") == [28, 29, 30]
    assert shown("job-1", "--since", "9") == list(range(9, 31))
    assert shown("--since", "29", "--last", "9") == [29, 30]
    assert ctl("get", "jobs", "--last", "3").exit_code == 2
    assert ctl("get", "nodes", "job-1").exit_code == 3
