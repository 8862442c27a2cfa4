"""Metrics of devices and cards: base units, no sample of what nobody knows, and alerts that go by them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from oobleckd.core.events import FiguresHeard, Heard
from oobleckd.daemon import devicemetrics, metrics
from oobleckd.daemon.config import Config
from oobleckd.daemon.service import open_service
from oobleckd.protocol.agentmessages import FiguresTold
from oobleckd.protocol.nodeviews import DeviceFigures
from oobleckd.protocol.parts import CardReport
from oobleckd.protocol.xids import meaning
from tests.helpers.agents import hello

ALERTS = Path(__file__).parents[3] / "examples" / "observability" / "alerts.yml"
CARD = DeviceFigures(
    "n1/0",
    1.0,
    5,
    30,
    40,
    80,
    "NVIDIA H100",
    0.97,
    650.5,
    700.0,
    64,
    1755,
    1980,
    ("power limit",),
    3,
    0,
    (31,),
)


def samples(families: list[Metric]) -> dict[str, float]:
    """Every sample, by its name and labels."""
    return {
        f"{each.name.removeprefix('oobleck_device_')}{tuple(each.labels.values())}": each.value
        for family in families
        for each in family.samples
    }


def test_a_card_in_base_units() -> None:
    found = samples(list(devicemetrics.families([CARD], {("n1/0", 31): 77.5})))
    assert found == {
        "memory_bytes('n1/0', 'used')": 30.0,
        "memory_bytes('n1/0', 'planned')": 40.0,
        "memory_bytes('n1/0', 'total')": 80.0,
        "rss_bytes('n1/0',)": 5.0,
        "utilisation_ratio('n1/0',)": 0.97,
        "power_watts('n1/0',)": 650.5,
        "power_limit_watts('n1/0',)": 700.0,
        "temperature_celsius('n1/0',)": 64.0,
        "clock_hertz('n1/0',)": 1.755e9,
        "clock_max_hertz('n1/0',)": 1.98e9,
        "throttled('n1/0', 'power limit')": 1.0,
        "ecc_errors_total('n1/0', 'corrected')": 3.0,
        "ecc_errors_total('n1/0', 'uncorrected')": 0.0,
        "xid_timestamp_seconds('n1/0', '31')": 77.5,
    }


def test_what_a_device_does_not_say_has_no_sample() -> None:
    assert samples(list(devicemetrics.families([DeviceFigures("n1/0", 1.0, 5)], {}))) == {
        "rss_bytes('n1/0',)": 5.0
    }
    idle = DeviceFigures("n1/0", 1.0, utilisation=0.0)
    assert samples(list(devicemetrics.families([idle], {}))) == {"utilisation_ratio('n1/0',)": 0.0}


@pytest.mark.asyncio
async def test_what_a_node_told_is_in_the_daemon_s_text(tmp_path: Path) -> None:
    service = open_service(
        Config(state_dir=str(tmp_path), curve=False, endpoint="tcp://127.0.0.1:0", replay_mb=0)
    )
    service.machine.handle(Heard("n1", hello("n1")), 1.0)
    told = FiguresTold("incarnation.1", (CARD,), (CardReport("n1/0", 77.5, xid=79),))
    service.machine.handle(FiguresHeard("n1", told), 2.0)
    text = (await metrics.render(service)).decode()
    await service.close()
    found = samples(list(text_string_to_metric_families(text)))
    assert found["power_watts('n1/0',)"] == 650.5
    assert found["xid_timestamp_seconds('n1/0', '79')"] == 77.5
    assert text.count("# TYPE oobleck_device_memory_bytes gauge") == 1


def test_the_alert_on_xids_leaves_out_those_that_are_warnings() -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    (rule,) = [rule for rule in rules if rule["alert"] == "OobleckCardError"]
    (left_out,) = re.findall(r'xid!~"([\d|]+)"', rule["expr"])
    assert [int(xid) for xid in left_out.split("|")] == [
        xid for xid in range(1000) if meaning(xid).level == "warn"
    ]
