"""Verbs against prepared answers: what is printed where, what is asked, how it ends."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from oobleckd.ctl.main import OTHER_TOOLS, VERBS, Verbs, main
from oobleckd.protocol.api import API_VERSION, Problem
from oobleckd.protocol.changes import Change
from oobleckd.protocol.incidentviews import IncidentView, PhaseView
from oobleckd.protocol.jobviews import (
    PipelineView,
    ProgressView,
    StepTimes,
    TemplateView,
    TroubleView,
)
from oobleckd.protocol.nodeviews import LayerRange
from oobleckd.protocol.requests import Accepted
from tests.helpers.api_server import job_spec, job_view, node_view
from tests.unit.ctl.conftest import Ctl

INCIDENT = IncidentView(
    id="inc-1", job="job-1", cause="signal 9", nodes=("node-2",), at=100.0, epoch=2, step=7, open=False,
    phases=(PhaseView("detect", 0.0, 0.002), PhaseView("plan", 0.002, 0.01)), total_s=0.4,
    reason="shrink pipeline 0", copied_bytes=3 << 20, layer_gradients=5, step_layer_gradients=40,
    committed_s=0.1,
)  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_loads_and_explains_itself(ctl: Ctl, verb: str) -> None:
    result = ctl(verb, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


def test_the_main_module_is_light() -> None:
    code = "import sys, oobleckd.ctl.main; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "textual", "aiohttp", "zmq", "numpy", "rich", "msgspec"}.isdisjoint(done.stdout.split())


@pytest.mark.parametrize("verb", ["get", "submit", "plan", "wait", "verify", "events", "up", "down"])
def test_no_verb_loads_what_is_heavy(verb: str) -> None:
    assert isinstance(main, Verbs)
    code = (
        f"import sys; from oobleckd.ctl.main import main; main.get_command(None, {verb!r});"
        "print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "textual", "aiohttp", "zmq", "numpy", "rich"}.isdisjoint(done.stdout.split())


# --------------------------------------------------------------------------- showing


def test_get_prints_tables(ctl: Ctl) -> None:
    stages = (LayerRange("node-1/0", 0, 4), LayerRange("node-2/0", 4, 5))
    ctl.api.jobs = [job_view()]
    ctl.api.nodes = [
        node_view("node-1", layers=stages[:1]),
        node_view("node-2", state="lost", reason="signal 9"),
    ]
    ctl.api.pipelines = [PipelineView(0, ("node-1", "node-2"), stages, (0, 1))]
    ctl.api.templates = [TemplateView(2, ((0, 4), (4, 5)), 0.02, 0.01, (1 << 20, 1 << 21), 1)]
    ctl.api.incidents = [INCIDENT]
    said = {
        what: ctl("get", what).stdout for what in ("jobs", "nodes", "pipelines", "templates", "incidents")
    }
    assert "job-1  small  done   3/3" in said["jobs"]
    assert "1 of 1" in said["jobs"]
    assert "signal 9" in said["nodes"]
    assert "node-1/0: 0-3, node-2/0: 4" in said["pipelines"]
    assert "2 MiB" in said["templates"]
    assert "shrink pipeline 0" in said["incidents"]


HALF = ProgressView(
    elapsed_s=7500.0, left_s=9180.0, tokens=1_230_000_000, total_tokens=2_735_000_000, passes=3.4,
    tokens_per_s=831_898.0, flops_per_token=4.54e9, peak_flops=9.89e15, peak_of="NVIDIA H100 SXM, bf16",
    mfu=0.3819, goodput=0.973,
    params=46_702_792_704, active_params=12_879_925_248,
    step_times=StepTimes(
        count=1000, p50_s=0.98, p95_s=1.2, p99_s=2.0, max_s=8.5, edges_s=(8.5,), counts=(1000,),
        slowest="node-3/0", slowest_factor=1.04,
    ),
)  # fmt: skip


def test_how_far_a_job_is_and_how_fast(ctl: Ctl) -> None:
    ctl.api.jobs = [job_view(state="running", finished_at=None, step=1, progress=HALF)]
    [head, row] = ctl("get", "jobs").stdout.splitlines()
    for column, cell in (("TOKENS/S", "831,898"), ("ELAPSED", "125m"), ("ETA", "153m")):
        assert row[head.index(column) :].startswith(cell)
    said = ctl("describe", "job", "small").stdout
    for line in (
        "progress:       33% in 2 h 5 min, about 2 h 33 min left",
        "tokens:         1.23 B of 2.73 B, 3.4 passes over the data",
        "model:          46.7 B parameters, 12.9 B active",
        "throughput:     10.0 samples/s, 831,898 tokens/s",
        "MFU:            38.2%: 3.78 PFLOP/s of 9.89 PFLOP/s (NVIDIA H100 SXM, bf16)",
        "goodput:        97.3% of its devices' time",
        "step time:      p50 980 ms, p95 1.2 s, p99 2 s, at most 8.5 s (newest 1,000 steps)",
        "slowest device: node-3/0, 1.04 times its peers' median for its work",
    ):
        assert line in said.splitlines()


def test_what_is_not_known_of_its_progress_is_not_said(ctl: Ctl) -> None:
    ctl.api.jobs = [job_view(state="running", finished_at=None, progress=ProgressView(elapsed_s=3.0))]
    assert "3s       -    " in ctl("get", "jobs").stdout
    said = ctl("describe", "job", "small").stdout
    assert "progress:       100% in 3 s, time left not known yet" in said
    assert not any(word in said for word in ("MFU", "tokens", "goodput", "slowest"))


def test_of_a_job_that_is_over_speed_is_that_of_all_its_time(ctl: Ctl) -> None:
    over = msgspec.structs.replace(HALF, left_s=0.0)
    ctl.api.jobs = [job_view(progress=over)]
    said = ctl("describe", "job", "small").stdout
    assert "100% in 2 h 5 min\n" in said
    assert "831,898 tokens/s in the mean" in said
    assert "125m     -    " in ctl("get", "jobs").stdout


def test_a_vacant_place_is_said_so(ctl: Ctl) -> None:
    stages = (LayerRange("node-1/0", 0, 4), LayerRange("node-2/0", 4, 5))
    ctl.api.pipelines = [PipelineView(0, ("node-1", "node-2"), stages, (0, 1), ("node-2/0",))]
    assert "node-1/0: 0-3, node-2/0: 4 (vacant)" in ctl("get", "pipelines").stdout


def test_what_devices_compute_again_is_said(ctl: Ctl) -> None:
    stages = (LayerRange("node-1/0", 0, 4), LayerRange("node-2/0", 4, 5))
    pipeline = PipelineView(0, ("node-1", "node-2"), stages, (0, 1), recompute={"node-1/0": "blocks"})
    ctl.api.pipelines = [pipeline]
    assert "node-1/0: 0-3 (blocks again), node-2/0: 4" in ctl("get", "pipelines").stdout
    for wanted, expected in (
        ("auto", "recompute:      auto: none on 1 device, blocks on 1 device"),
        ("selective", "recompute:      selective"),
    ):
        spec = job_spec()
        spec = msgspec.structs.replace(
            spec, schedule=msgspec.structs.replace(spec.schedule, recompute=wanted)
        )
        ctl.api.jobs = [job_view(spec=spec, pipelines=(pipeline,))]
        assert expected in ctl("describe", "job", "small").stdout
    ctl.api.jobs = [job_view(pipelines=(pipeline,))]
    assert "recompute:" not in ctl("describe", "job", "small").stdout


def test_json_is_versioned_and_round_trips(ctl: Ctl) -> None:
    ctl.api.incidents = [INCIDENT]
    found = ctl.json("get", "incidents")
    assert (found["apiVersion"], found["kind"]) == (API_VERSION, "IncidentList")
    assert msgspec.convert(found["items"][0], IncidentView) == INCIDENT
    one = ctl.json("describe", "incident", "inc-1")
    assert (one["apiVersion"], one["kind"], one["id"]) == (API_VERSION, "Incident", "inc-1")


def test_describe(ctl: Ctl) -> None:
    ctl.api.jobs = [job_view(state="running", reason="all is well")]
    ctl.api.nodes = [node_view("node-1")]
    ctl.api.incidents = [INCIDENT]
    job = ctl("describe", "job", "small").stdout
    assert "running: all is well" in job
    assert "inc-1" in job
    assert "node-1/0 (cpu, pid 1)" in ctl("describe", "node", "node-1").stdout
    ctl.api.nodes = [node_view("node-1", traits=({"device": "cpu", "transformers": "5.23.0"},))]
    said = ctl("describe", "node", "node-1").stdout
    assert said.splitlines()[-1].split() == ["transformers", "5.23.0"]
    incident = ctl("describe", "incident", "inc-1").stdout
    assert "5 of 40 layer-gradients" in incident
    assert "detect" in incident
    missing = ctl("describe", "node", "node-9")
    assert missing.exit_code == 3
    assert missing.stderr == "error: no node 'node-9'\nhint: known: node-1\n"


def test_events_and_story(ctl: Ctl) -> None:
    ctl.api.nodes = [node_view("node-1")]
    ctl.api.changes = [
        Change(1, 100.0, "node", "info", "node-1 joined", ("node:node-1",), msgspec.Raw(b'{"pid":7}')),
        Change(2, 101.0, "incident", "error", "node-1 is lost", ("node:node-1", "incident:inc-1")),
        Change(3, 102.0, "step", "info", "step 8", ("job:job-1",)),
    ]
    lines = ctl("events").stdout.splitlines()
    assert len(lines) == 3
    assert "error: node-1 is lost" in lines[1]
    documents = [json.loads(line) for line in ctl("events", "-o", "json").stdout.splitlines()]
    assert [document["seq"] for document in documents] == [1, 2, 3]
    assert len(ctl("story", "node-1").stdout.splitlines()) == 2
    assert ctl("story", "node/node-1").stdout == ctl("story", "node-1").stdout
    assert len(ctl("story", "incident:inc-1").stdout.splitlines()) == 1
    assert ctl("story", "node:x").exit_code == 3


def test_status(ctl: Ctl) -> None:
    assert "now:       idle" in ctl("status").stdout
    assert ctl.json("status")["version"] == "0.1.0"


# --------------------------------------------------------------------------- acting


def test_submit_sends_the_job(ctl: Ctl, job_file: Callable[..., Path]) -> None:
    ctl.api.jobs = [job_view(state="deploying")]
    result = ctl("submit", str(job_file()))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "job-1\n", "queued\n")
    path, body = ctl.api.asked[0]
    assert path == "/v1/jobs"
    assert body["job"]["train"]["steps"] == 3


def test_submit_resume(ctl: Ctl, job_file: Callable[..., Path], tmp_path: Path) -> None:
    ctl("submit", str(job_file()), "--resume")
    ctl("submit", str(job_file()), f"--resume={tmp_path}")
    assert [body["resume"] for _, body in ctl.api.asked] == ["latest", str(tmp_path)]
    assert ctl("submit", str(job_file()), "--resume=/nowhere").exit_code == 2


def test_submit_dry_run_asks_nothing(ctl: Ctl, job_file: Callable[..., Path]) -> None:
    result = ctl("submit", str(job_file()), "--dry-run")
    assert result.exit_code == 0
    assert "3 of 4 sequences of 8 tokens" in result.stdout
    assert not ctl.api.asked


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model]\nlayers = 3\n", ["model.layers: unknown key", "known keys"]),
        ("[fault_tolerance]\npolcy = 'oobleck'\n", ["unknown key", "did you mean 'policy'?"]),
        ('[data]\nsource = "text"\npath = "/nowhere"\n', ["data.path", "/nowhere does not exist"]),
        ("[train\n", ["is no TOML"]),
    ],
)
def test_submit_names_what_is_wrong(
    ctl: Ctl, job_file: Callable[..., Path], text: str, words: list[str]
) -> None:
    result = ctl("submit", str(job_file(text)))
    assert result.exit_code == 2
    assert not result.stdout
    assert all(word in result.stderr for word in words), result.stderr
    assert not ctl.api.asked


def test_submit_wait_ends_as_the_job_ends(ctl: Ctl, job_file: Callable[..., Path]) -> None:
    ctl.api.jobs = [job_view(state="failed", reason="too big a model", step=1)]
    result = ctl("submit", str(job_file()), "--wait")
    assert result.exit_code == 1
    assert "error: small failed at step 1\nhint: too big a model" in result.stderr
    ctl.api.jobs = [job_view()]
    assert ctl("submit", str(job_file()), "--wait").exit_code == 0


@pytest.mark.parametrize(
    ("words", "path", "body"),
    [
        (("pause", "small"), "/v1/jobs/small/pause", {}),
        (("resume", "small"), "/v1/jobs/small/resume", {}),
        (("cancel", "small"), "/v1/jobs/small/cancel", {}),
        (("drain", "node-1", "--reason", "disk"), "/v1/nodes/node-1/drain", {"reason": "disk"}),
        (("undrain", "node-1"), "/v1/nodes/node-1/undrain", {"reason": ""}),
        (("forget-node", "node-1"), "/v1/nodes/node-1", {}),
        (
            ("kill-node", "node-1"),
            "/v1/nodes/node-1/kill",
            {"how": "sigkill", "at": "", "round": -1, "seconds": 0.0, "times": 1.0},
        ),
        (
            ("kill-node", "node-1", "--how", "sigstop", "--for", "3"),
            "/v1/nodes/node-1/kill",
            {"how": "sigstop", "at": "", "round": -1, "seconds": 3.0, "times": 1.0},
        ),
        (
            ("kill-node", "node-1", "--how", "device", "--at", "reduce", "--round", "4"),
            "/v1/nodes/node-1/kill",
            {"how": "device", "at": "reduce", "round": 4, "seconds": 0.0, "times": 1.0},
        ),
        (
            ("kill-node", "node-1", "--at", "commit"),
            "/v1/nodes/node-1/kill",
            {"how": "device", "at": "commit", "round": -1, "seconds": 0.0, "times": 1.0},
        ),
        (
            ("kill-node", "node-1", "--how", "slow=2.5"),
            "/v1/nodes/node-1/kill",
            {"how": "slow", "at": "", "round": -1, "seconds": 0.0, "times": 2.5},
        ),
    ],
)
def test_acts(ctl: Ctl, words: tuple[str, ...], path: str, body: dict[str, Any]) -> None:
    assert ctl(*words).exit_code == 0
    assert ctl.api.asked == [(path, body)]


def test_several_nodes_die_at_once(ctl: Ctl) -> None:
    assert ctl("kill-node", "node-1", "node-2").exit_code == 0
    assert [path for path, _ in ctl.api.asked] == ["/v1/nodes/node-1/kill", "/v1/nodes/node-2/kill"]
    assert ctl("kill-node").exit_code == 2


def test_checkpoint_waits_for_its_folder(ctl: Ctl) -> None:
    ctl.api.jobs = [job_view(state="running", checkpoint="/a")]

    def act(_path: str, _body: dict[str, Any]) -> Accepted:
        ctl.api.jobs = [job_view(state="running", checkpoint="/b")]
        return Accepted("job-1", "asked")

    ctl.api.on_act = act
    assert ctl("checkpoint", "small", "--wait").stdout == "/b\n"


def test_a_checkpoint_that_cannot_be_written_is_not_waited_for(ctl: Ctl) -> None:
    """It says why at once, and so does describe; older trouble is no answer to this question."""
    old = TroubleView("node-1/0 cannot write: full", tries=2)
    ctl.api.jobs = [job_view(state="running", checkpoint="/a", checkpoint_trouble=old)]

    def act(_path: str, _body: dict[str, Any]) -> Accepted:
        new = TroubleView("node-2/0 cannot write: Read-only file system", tries=3)
        ctl.api.jobs = [job_view(state="running", checkpoint="/a", checkpoint_trouble=new)]
        return Accepted("job-1", "asked")

    ctl.api.on_act = act
    result = ctl("checkpoint", "small", "--wait")
    assert result.exit_code == 1
    assert "node-2/0 cannot write: Read-only file system" in result.stderr
    assert "tries again" in result.stderr
    assert "no checkpoint" in ctl("describe", "job", "small").stdout


# --------------------------------------------------------------------------- waiting and failing


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("step=3", 0),
        ("step=4", 3),
        ("state=done", 0),
        ("state=paused", 3),
        ("recovered", 0),
        ("incidents=1", 3),
    ],
)
def test_wait_on_a_job_that_is_done(ctl: Ctl, what: str, code: int) -> None:
    ctl.api.jobs = [job_view()]
    assert ctl("wait", "small", "--for", what).exit_code == code


def test_wait_times_out_while_a_recovery_is_open(ctl: Ctl) -> None:
    ctl.api.jobs = [job_view(state="running", incidents=1)]
    ctl.api.incidents = [msgspec.structs.replace(INCIDENT, open=True)]
    for what in ("recovered", "incidents=1"):
        result = ctl("wait", "small", "--for", what, "--timeout", "0.01")
        assert result.exit_code == 124
        assert "it is running at step 3" in result.stderr
    ctl.api.incidents = [INCIDENT]
    assert ctl("wait", "small", "--for", "recovered").exit_code == 0
    assert ctl("wait", "small", "--for", "incidents=1").exit_code == 0


@pytest.mark.parametrize("what", ["state=happy", "step=x", "dinner", "recovered=1"])
def test_wait_for_what_nobody_knows(ctl: Ctl, what: str) -> None:
    assert ctl("wait", "small", "--for", what).exit_code == 2


@pytest.mark.parametrize(("status", "code"), [(404, 3), (403, 5), (409, 5), (422, 2), (503, 1)])
def test_problems_of_the_daemon(ctl: Ctl, status: int, code: int) -> None:
    ctl.api.problem = Problem("no", status, "it cannot be", "try tomorrow")
    result = ctl("pause", "small")
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr == "error: it cannot be\nhint: try tomorrow\n"


def test_no_daemon(ctl: Ctl) -> None:
    result = ctl("get", "jobs", "--socket", "/nowhere/s")
    assert result.exit_code == 4
    assert result.stderr.startswith("error: no daemon: /nowhere/s does not exist\nhint: start it")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            PermissionError(13, "Permission denied", "/x"),
            "error: /x: Permission denied\nhint: see whether this user",
        ),
        (KeyError("x"), "error: a fault of oobleckctl: KeyError: 'x'\nhint: OOBLECK_TRACEBACK=1"),
    ],
)
def test_no_traceback_reaches_a_user(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def fail(*_args: Any) -> None:
        raise error

    monkeypatch.delenv("OOBLECK_TRACEBACK")
    monkeypatch.setattr("oobleckd.client.Client.control", fail)
    result = ctl("pause", "small")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(said)


def test_usage(ctl: Ctl) -> None:
    result = ctl("gte")
    assert result.exit_code == 2
    assert "did you mean 'get'?" in result.stderr
    assert ctl("kill-node", "node-1", "--round", "3").exit_code == 2
    unknown = ctl("kill-node", "node-1", "--at", "bakward")
    assert unknown.exit_code == 2
    assert "'backward'" in unknown.stderr
    assert ctl("kill-node", "node-1", "--how", "sigstop", "--at", "backward").exit_code == 2
    for how in ("slow=x", "slow=0.5", "slow=nan", "sigkill=3", "slw"):
        assert ctl("kill-node", "node-1", "--how", how).exit_code == 2, how
    assert ctl("get", "cheese").stderr.startswith("error: ")


# --------------------------------------------------------------------------- what is submitted


def test_set_changes_what_the_file_says(ctl: Ctl, job_file: Callable[..., Path]) -> None:
    ctl.api.jobs = [job_view(state="deploying")]
    words = ("train.steps=10", "fault_tolerance.policy=bamboo", "optimizer.betas=[0.9, 0.95]", "train.seed=1",
             "train.seed=2", 'name="other"')  # fmt: skip
    assert ctl("submit", str(job_file()), *(f"--set={word}" for word in words)).exit_code == 0
    job = ctl.api.asked[0][1]["job"]
    assert (job["train"]["steps"], job["train"]["seed"], job["name"]) == (10, 2, "other")
    assert (job["fault_tolerance"]["policy"], job["optimizer"]["betas"]) == ("bamboo", [0.9, 0.95])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("train.steps=x", "--set train.steps=x: train.steps: "),
        ("train.stps=3", "--set train.stps=3: train.stps: unknown key\nhint: did you mean 'steps'?"),
        ("train.steps=0", "--set train.steps=0: train.steps: "),
        ("train.micro_batch=3", "--set train.micro_batch=3: train.micro_batch: 3 does not divide"),
        ("name.first=3", "--set name.first=3: name.first: name is no table"),
        ("train.steps", "--set train.steps: is no KEY=VALUE"),
        ("=3", "--set =3: is no KEY=VALUE"),
        ("data.source[0].path=x", "is no KEY=VALUE"),
    ],
)
def test_what_set_says_wrong_is_named_by_its_flag(
    ctl: Ctl, job_file: Callable[..., Path], change: str, said: str
) -> None:
    result = ctl("submit", str(job_file()), "--set", change)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not ctl.api.asked


@pytest.mark.usefixtures("based")
@pytest.mark.parametrize(("more", "code", "said"), [("", 0, ""), ("[trai]\n", 2, "error: -: trai: unknown")])
def test_a_job_comes_by_stdin(
    ctl: Ctl, job_file: Callable[..., Path], more: str, code: int, said: str
) -> None:
    """Of a socket too, as sshd gives one, which cannot be opened by its name."""
    ctl.api.jobs = [job_view(state="deploying")]
    words = ["--socket", str(ctl.socket), "submit", "-", "--set", "name=piped", "--no-wait"]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(job_file(more).read_bytes())
        ours.shutdown(socket.SHUT_WR)
        done = subprocess.run(
            [sys.executable, "-P", "-m", "oobleckd.ctl.main", *words],
            stdin=theirs,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert [body["job"]["name"] for _, body in ctl.api.asked] == (["piped"] if not more else [])


@pytest.mark.parametrize("words", OTHER_TOOLS.values())
def test_what_is_named_instead_of_another_tools_verb_is_there(ctl: Ctl, words: str) -> None:
    verb, *more = words.split()
    assert ctl(verb, "--help").exit_code == 0
    told = ctl(verb, "--help").stdout
    assert all(word in told for word in more)


def leaves(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Verbs, and the verbs of those that have such."""
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command)
    for each in command.list_commands(context):
        found = command.get_command(context, each)
        assert found is not None
        yield from leaves(found, f"{name} {each}".strip())


def test_every_verb_that_prints_data_prints_documents_too() -> None:
    """A script for a shell is no data."""
    without = {
        name
        for name, command in leaves(main, "")
        if not any({"-o", "--output"} <= set(parameter.opts) for parameter in command.params)
    }
    assert without == {"completion"}


def test_a_format_of_documents_has_errors_that_are_documents(ctl: Ctl) -> None:
    for how in ("json", "jsonl"):
        told = json.loads(ctl("get", "job", "nobody", "-o", how).stderr)
        assert (told["kind"], told["code"]) == ("Error", 3)
