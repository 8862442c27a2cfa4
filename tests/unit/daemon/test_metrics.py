"""Metrics as Prometheus reads them; dashboard and alerts name nothing that there is not."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from oobleckd import __version__
from oobleckd.core.entries import StepEntry
from oobleckd.core.events import Heard
from oobleckd.core.run import Run, StageTraffic
from oobleckd.core.state import JobRecord
from oobleckd.daemon import metrics
from oobleckd.daemon.config import Config
from oobleckd.daemon.service import Service, open_service
from oobleckd.protocol.agentmessages import Hello
from oobleckd.protocol.messages import PROTOCOL, StepDone
from oobleckd.protocol.parts import Counters, Notice, Outcome, RouterFigures
from tests.helpers.simjobs import make_job

EXAMPLES = Path(__file__).parents[3] / "examples" / "observability"
_WORD = re.compile(r"\b((?:oobleck|process)_\w+|up)\b")


async def scraped(folder: Path) -> dict[str, Metric]:
    """The families of a daemon with one node, which has notice of its end."""
    service = open_service(
        Config(state_dir=str(folder), curve=False, endpoint="tcp://127.0.0.1:0", replay_mb=0)
    )
    hello = Hello(PROTOCOL, "n1", "life", "host", ready=True, devices=(), notice=Notice("SIGTERM", 20.0))
    service.machine.handle(Heard("n1", hello), service.clock.now())
    text = (await metrics.render(service)).decode()
    await service.close()
    assert text.endswith("\n")
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(family: Metric, **labels: str) -> float:
    (found,) = [sample.value for sample in family.samples if labels.items() <= sample.labels.items()]
    return found


@pytest.mark.asyncio
async def test_names_and_types_keep_to_the_conventions(tmp_path: Path) -> None:
    families = await scraped(tmp_path)
    for name, family in families.items():
        assert family.documentation, f"{name} has no help"
        assert family.type in {"gauge", "counter", "histogram"}, name
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name), name
        assert not re.search(r"_(ms|millis|minutes|mb|kb|percent)(_|$)", name), f"{name}: base units alone"
    assert all(
        sample.name.endswith("_total")
        for family in families.values()
        if family.type == "counter"
        for sample in family.samples
    )


@pytest.mark.asyncio
async def test_what_is_counted(tmp_path: Path) -> None:
    families = await scraped(tmp_path)
    assert value(families["oobleck_build_info"], version=__version__) == 1.0
    assert value(families["oobleck_nodes"], state="drained") == 1.0
    assert value(families["oobleck_nodes_leaving"]) == 1.0
    assert value(families["process_resident_memory_bytes"]) > 2**20
    assert value(families["oobleck_recovery_phase_seconds"], phase="detect") == 0.0


def train(service: Service, **done: Any) -> JobRecord:
    """A job of 100 steps of 64 tokens each, of which 40 are committed, in a service that does not run."""
    core = service.machine.core
    spec = make_job(steps=100)
    job = JobRecord("job-1", spec, 0.0, "init", Counters(), Counters(40, 40, 40), state="running", **done)
    job.step_s.extend([0.5] * 20)
    core.now, core.state.jobs["job-1"] = 130.0, job
    return job


async def rendered(service: Service) -> dict[str, Metric]:
    text = (await metrics.render(service)).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


@pytest.mark.asyncio
async def test_progress_of_a_job(tmp_path: Path) -> None:
    service = open_service(
        Config(state_dir=str(tmp_path), curve=False, endpoint="tcp://127.0.0.1:0", replay_mb=0)
    )
    job = train(service, deployed_at=100.0)
    families = await rendered(service)
    assert value(families["oobleck_job_tokens"], job="job-1") == 40 * 64
    assert value(families["oobleck_job_tokens_per_second"], job="job-1") == 128.0
    assert value(families["oobleck_job_eta_seconds"], job="job-1") == 30.0
    assert value(families["oobleck_job_elapsed_seconds"], job="job-1") == 30.0
    assert families["oobleck_job_mfu_ratio"].samples == [], "nobody knows the peak"
    # It went back to a checkpoint.
    job.counters, job.steps_lost, job.samples_lost = Counters(45, 25, 25), 15, 15 * 8
    assert value((await rendered(service))["oobleck_job_tokens"], job="job-1") == 40 * 64
    job.state, job.finished_at = "cancelled", 120.0
    families = await rendered(service)
    assert families["oobleck_job_eta_seconds"].samples == []
    assert value(families["oobleck_job_elapsed_seconds"], job="job-1") == 20.0
    await service.close()


@pytest.mark.asyncio
async def test_load_of_experts_by_layer(tmp_path: Path) -> None:
    service = open_service(
        Config(state_dir=str(tmp_path), curve=False, endpoint="tcp://127.0.0.1:0", replay_mb=0)
    )
    job = train(service)
    figures = {1: RouterFigures(1.5, 2.0, 1.25, 0), 12: RouterFigures(math.nan, 4.0, 3.0, 2)}
    done = StepDone(
        "n1/0", "job-1", 1, Counters(39, 39, 39), "applied", 1.0, 1.0, 0.1, 8, "x", 0.1, 0.1,
        routers=figures, experts={1: (5, 3), 12: (8, 0)},
    )  # fmt: skip
    service.machine.core.routers.take(done, 14)
    families = await rendered(service)
    assert value(families["oobleck_job_expert_load_ratio"], job="job-1", layer="1") == 1.25
    assert value(families["oobleck_job_experts_idle"], layer="12") == 2.0
    assert value(families["oobleck_job_router_z_loss"], layer="12") == 4.0
    assert [s.labels["layer"] for s in families["oobleck_job_router_aux_loss"].samples] == ["1"]
    job.state, job.finished_at = "done", 140.0
    assert (await rendered(service))["oobleck_job_expert_load_ratio"].samples == []
    await service.close()


@pytest.mark.asyncio
async def test_gradients_sent_by_device(tmp_path: Path) -> None:
    service = open_service(
        Config(state_dir=str(tmp_path), curve=False, endpoint="tcp://127.0.0.1:0", replay_mb=0)
    )
    assert (await rendered(service))["oobleck_job_gradient_bytes"].samples == []
    service.machine.core.run = Run(train(service), gradients={"n1/0": (14, 5600), "n2/0": (7, 280)})
    families = await rendered(service)
    assert value(families["oobleck_job_gradient_bytes"], job="job-1", device="n1/0") == 5600
    assert value(families["oobleck_job_gradient_messages"], job="job-1", device="n2/0") == 7
    assert families["oobleck_job_gathered_bytes"].samples == []
    await service.close()


@pytest.mark.asyncio
async def test_what_devices_of_a_stage_have_of_each_other(tmp_path: Path) -> None:
    service = open_service(
        Config(state_dir=str(tmp_path), curve=False, endpoint="tcp://127.0.0.1:0", replay_mb=0)
    )
    service.machine.core.run = Run(train(service), in_stage={"n1/0": StageTraffic(800, 400, 0.5)})
    families = await rendered(service)
    of = {"job": "job-1", "device": "n1/0"}
    assert value(families["oobleck_job_gathered_bytes"], **of) == 800
    assert value(families["oobleck_job_shard_gradient_bytes"], **of) == 400
    assert value(families["oobleck_job_gather_wait_seconds"], **of) == 0.5
    await service.close()


@pytest.mark.asyncio
async def test_steps_are_a_histogram_of_all_that_go_into_the_journal(tmp_path: Path) -> None:
    service = open_service(
        Config(state_dir=str(tmp_path), curve=False, endpoint="tcp://127.0.0.1:0", replay_mb=0)
    )

    def step(outcome: Outcome, step_s: float) -> StepEntry:
        return StepEntry("job-1", Counters(), outcome, 1, 1.0, 1.0, 1.0, 8, "", step_s, 9.0, 1)

    done = [step("applied", 0.01), step("skipped", 0.3), step("repeated", 9.0), step("applied", 1000.0)]
    service.loop.step_seconds.note(done)
    took = (await rendered(service))["oobleck_job_step_duration_seconds"]
    counts = {s.labels["le"]: s.value for s in took.samples if s.name.endswith("_bucket")}
    assert (counts["0.01"], counts["0.25"], counts["0.5"], counts["250"]) == (1, 1, 2, 2)
    assert counts["+Inf"] == 3
    assert [s.value for s in took.samples if s.name.endswith(("_count", "_sum"))] == [3, 1000.31]
    await service.close()


@pytest.mark.asyncio
async def test_however_many_ask_the_text_is_made_once_in_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = open_service(
        Config(state_dir=str(tmp_path), curve=False, endpoint="tcp://127.0.0.1:0", replay_mb=0)
    )
    now, made = 0.0, 0

    async def render(_service: Service) -> bytes:
        nonlocal made
        made += 1
        await asyncio.sleep(0)
        return b"%d" % made

    monkeypatch.setattr(metrics, "render", render)
    scrapes = metrics.Scrapes(service, lambda: now)
    assert set(await asyncio.gather(*(scrapes.text() for _ in range(50)))) == {b"1"}
    now = metrics.FRESH_S
    assert set(await asyncio.gather(*(scrapes.text() for _ in range(50)))) == {b"2"}
    await service.close()


def expressions() -> Iterator[str]:
    """Every query of the dashboard and of the alerts."""
    board: dict[str, Any] = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]
    for group in yaml.safe_load((EXAMPLES / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


@pytest.mark.asyncio
async def test_dashboard_and_alerts_ask_for_what_there_is(tmp_path: Path) -> None:
    families = await scraped(tmp_path)
    known = {"up"}  # Prometheus's own
    for name, family in families.items():
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(
            family.type, ("",)
        )
        known |= {name + suffix for suffix in suffixes}
    asked = {name for expression in expressions() for name in _WORD.findall(expression)}
    assert len(asked) > 20
    assert asked <= known, sorted(asked - known)


def test_panels_are_told_apart_and_lie_side_by_side() -> None:
    board = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)), "two panels overlap"
    assert max(x for x, _ in cells) < 24
