"""The forms of ``get``: kubectl's habits, choosing and sorting by fields, and every way to print a list."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import yaml

from oobleckd.ctl.get.kinds import KINDS, ItemsWanted, kind_of
from oobleckd.ctl.get.watching import ChangedItems
from oobleckd.protocol.changes import Change
from oobleckd.protocol.jobviews import StepView
from tests.helpers.api_server import job_view, node_view
from tests.unit.ctl.conftest import Ctl
from tests.unit.ctl.test_verbs import INCIDENT


@pytest.fixture
def full(ctl: Ctl) -> Ctl:
    """Two jobs, three nodes, an incident, and steps with floats that are long."""
    ctl.api.jobs = [
        job_view(id="job-1", submitted_at=0.0),
        job_view(id="job-2", name="big", state="running", finished_at=None, loss=None, submitted_at=9.0),
    ]
    ctl.api.nodes = [
        node_view("node-10", state="lost", zone="b", reason='signal 9, "hard"'),
        node_view("node-9", zone="a"),
        node_view("node-1", zone="a"),
    ]
    ctl.api.incidents = [INCIDENT]
    ctl.api.steps["big"] = [
        StepView(step, 1 / 3, (1 / 3).hex(), 1.0, 0.1, 8, "x", "applied", 1, 9.0, 0.25) for step in (1, 2)
    ]
    return ctl


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("get job", ["job-1", "job-2"]),
        ("get j", ["job-1", "job-2"]),
        ("get jobs small", ["job-1"]),
        ("get job job-2", ["job-2"]),
        ("get job/big", ["job-2"]),
        ("get jobs small big", ["job-1", "job-2"]),
        ("get JOBS", ["job-1", "job-2"]),
        ("get no", ["node-10", "node-9", "node-1"]),
        ("get nodes -l state=lost", ["node-10"]),
        ("get nodes -l state!=lost,zone=a", ["node-9", "node-1"]),
        ("get nodes --field-selector zone==b", ["node-10"]),
        ("get nodes -l devices=node-9/0", ["node-9"]),
        ("get nodes --sort-by name", ["node-1", "node-9", "node-10"]),
        ("get nodes --sort-by=.name", ["node-1", "node-9", "node-10"]),
        ("get nodes --sort-by -name", ["node-10", "node-9", "node-1"]),
        ("get jobs --sort-by loss", ["job-1", "job-2"]),
        ("get jobs -l spec.train.steps=3 --sort-by -submitted_at", ["job-2", "job-1"]),
        ("get inc", ["inc-1"]),
        ("get incidents -l job=job-1 -o wide", ["inc-1"]),
        ("get step big", ["1", "2"]),
        ("get incidents --job small", ["inc-1"]),
        ("get jobs,nodes", ["ID", "job-1", "job-2", "NAME", "node-10", "node-9", "node-1"]),
        ("get job/small node/node-1", ["ID", "job-1", "NAME", "node-1"]),
        ("get all", ["ID", "job-1", "job-2", "NAME", "node-10", "node-9", "node-1", "ID", "inc-1"]),
    ],
)
def test_kubectls_habits(full: Ctl, words: str, said: list[str]) -> None:
    result = full(*words.split(), *(() if said[0] == "ID" else ("--no-headers",)))
    assert result.exit_code == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines() if line] == said


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("get jobs nobody", 3, "no job 'nobody'\nhint: known: job-1, job-2"),
        ("get job/nobody", 3, "no job 'nobody'"),
        ("get pods", 2, "no kind 'pods'"),
        ("get jbo", 2, "did you mean 'jobs'?"),
        ("get events", 2, "no kind 'events'\nhint: `oobleckctl events` shows what happens"),
        ("get device node-1/0", 2, "`oobleckctl describe node NODE` shows its devices"),
        ("get jobs,nodes job-1", 2, "names are of one kind"),
        ("get jobs node/node-1", 2, "KIND/NAME stands alone"),
        ("get job/small node-1", 2, "'node-1' is no KIND/NAME"),
        ("get steps big small", 2, "too many words: small"),
        ("get nodes -l sate=lost", 2, "-l: no field 'sate'; did you mean 'state'?"),
        ("get nodes -l lost", 2, "-l cannot read 'lost'"),
        ("get nodes --sort-by nam", 2, "did you mean 'name'?"),
        ("get goodput --sort-by job", 2, "of lists"),
        ("get nodes --last 3", 2, "--since and --last are of steps and evaluations, not of nodes"),
        ("get jobs,nodes -o csv", 2, "-o csv prints one table"),
        ("get jobs,nodes -w", 2, "--watch is of one kind"),
        ("get node nobody -w", 3, "no node 'nobody'"),
        ("get steps nobody -w", 3, "nothing is at"),
        ("get", 2, "KIND [NAME...] is missing"),
        ("get pipelines --job nobody", 3, "nobody"),
        ("get nodes --job big", 2, "--job is of what a job has, not of nodes"),
        ("get steps big --job small", 2, "the job of steps is said twice: big, --job small"),
    ],
)
def test_what_cannot_be_says_one_clear_thing(full: Ctl, words: str, code: int, said: str) -> None:
    result = full(*words.split())
    assert (result.exit_code, result.stdout) == (code, "")
    assert said in result.stderr


def test_who_is_found_is_shown_though_another_is_not(full: Ctl) -> None:
    result = full("get", "jobs", "small", "nobody", "--no-headers")
    assert (result.exit_code, result.stdout.split()[0]) == (3, "job-1")
    assert "no job 'nobody'" in result.stderr


def test_one_by_name_is_a_document_and_more_are_a_list(full: Ctl) -> None:
    assert full.json("get", "job", "small")["kind"] == "Job"
    assert full.json("get", "job/small")["id"] == "job-1"
    assert [job["id"] for job in full.json("get", "job", "small", "big")["items"]] == ["job-1", "job-2"]
    several = full.json("get", "jobs,nodes")
    assert (several["kind"], [each["kind"] for each in several["items"]]) == ("List", ["JobList", "NodeList"])


@pytest.mark.parametrize("words", ["get jobs", "get job small", "describe job small", "status", "get nodes"])
def test_yaml_says_what_json_says(full: Ctl, words: str) -> None:
    result = full(*words.split(), "-o", "yaml")
    assert result.exit_code == 0
    assert yaml.safe_load(result.stdout) == full.json(*words.split())


def test_yaml_does_nothing_to_a_terminal(full: Ctl) -> None:
    full.api.nodes = [node_view("node-1", reason="\x1b[2J ü \u202e")]
    text = full("get", "nodes", "-o", "yaml").stdout
    assert text.isascii()
    assert "\x1b" not in text
    assert yaml.safe_load(text)["items"][0]["reason"] == "\x1b[2J ü \u202e"


@pytest.mark.parametrize("kind", ["pipelines", "templates", "layers"])
def test_the_plan_of_a_job_is_asked_for_by_its_id(full: Ctl, kind: str) -> None:
    for name, asked in (("big", "job-2"), ("job/small", "job-1")):
        assert full("get", kind, "--job", name).exit_code == 0
        assert full.api.queries[-1] == (f"/v1/{kind}", {"job": [asked]})
    count = len(full.api.queries)
    assert full("get", kind).exit_code == 0
    assert len(full.api.queries) == count, "of the one that is deployed"


def test_incidents_and_steps_of_a_job_by_the_option(full: Ctl) -> None:
    assert full("get", "incidents", "--job", "big", "--no-headers").stdout == ""
    full.api.steps["job-2"] = full.api.steps["big"]
    named = full("get", "steps", "big", "-o", "name")
    assert full("get", "steps", "--job", "big", "-o", "name").stdout == named.stdout != ""


def test_names_and_lines(full: Ctl) -> None:
    assert full("get", "nodes", "-o", "name").stdout.split() == ["node/node-10", "node/node-9", "node/node-1"]
    lines = [json.loads(line) for line in full("get", "jobs", "-o", "jsonl").stdout.splitlines()]
    assert [(line["kind"], line["id"]) for line in lines] == [("Job", "job-1"), ("Job", "job-2")]


def test_csv_has_exact_numbers(full: Ctl) -> None:
    rows = list(csv.DictReader(io.StringIO(full("get", "steps", "big", "-o", "csv").stdout)))
    assert [float(row["loss"]) for row in rows] == [1 / 3, 1 / 3]
    assert [row["step"] for row in rows] == ["1", "2"]
    nodes = list(csv.DictReader(io.StringIO(full("get", "nodes", "-o", "csv").stdout)))
    assert nodes[0]["reason"] == 'signal 9, "hard"'
    assert nodes[0]["devices"] == "node-10/0"
    full.api.nodes = []
    assert full("get", "nodes", "-o", "csv").stdout.startswith("name,state,")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.plural)
def test_help_lists_every_form(ctl: Ctl, kind: object) -> None:
    told = ctl("get", "--help").stdout
    assert all(word in told for word in (kind.plural, kind.singular, *kind.short))  # type: ignore[attr-defined]


def test_nothing_there_is_said_beside_the_table(ctl: Ctl) -> None:
    result = ctl("get", "incidents")
    assert (result.exit_code, result.stderr) == (0, "no incidents\n")


# --------------------------------------------------------------------------- watching


def test_what_only_gets_older_has_not_changed() -> None:
    changed = ChangedItems(kind_of("no"))
    one, two = node_view("node-1"), node_view("node-2")
    assert changed.of([one, two]) == [one, two]
    assert changed.of([node_view("node-1", heartbeat_age_s=0.7), two]) == []
    lost = node_view("node-1", state="lost")
    assert changed.of([lost, two]) == [lost]
    assert changed.of([lost]) == []
    assert changed.gone() == ["node-2"]


def test_steps_that_are_done_again_are_seen_again() -> None:
    changed = ChangedItems(kind_of("steps"))
    steps = [StepView(n, 2.0, "", 1.0, 0.1, 8, "x", "applied", 1, 9.0, 0.25) for n in range(1, 400)]
    changed.of(steps)
    assert changed.next_wanted(ItemsWanted(("job-1",))) == ItemsWanted(("job-1",), 199)
    again = StepView(390, 2.0, "", 1.0, 0.1, 8, "x", "applied", 2, 11.0, 0.25)
    assert changed.of([*steps[198:389], again]) == [again]


@pytest.mark.parametrize("how", ["table", "json", "csv", "name"])
def test_rows_are_printed_as_they_change(ctl: Ctl, how: str) -> None:
    """Until Ctrl-C, which ends it with 130."""
    ctl.api.nodes = [node_view("node-1"), node_view("node-2")]
    next_one = threading.Event()

    def follow() -> Iterator[Change]:
        next_one.wait()
        ctl.api.nodes = [node_view("node-1"), node_view("node-2", state="lost")]
        yield Change(1, 1.0, "node", "warn", "node-2 is lost", ())
        threading.Event().wait()

    ctl.api.follow = follow
    words = ["--socket", str(ctl.socket), "get", "nodes", "-w", "--no-headers", "-o", how]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "oobleckd.ctl.main", *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        first = [process.stdout.readline() for _ in range(2)]
        next_one.set()
        changed = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    assert ["node-1" in first[0], "node-2" in first[1], "node-2" in changed] == [True] * 3
    assert ("lost" in changed) == (how != "name")
