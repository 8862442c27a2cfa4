"""``logs`` of a node that is elsewhere, and what ``describe node`` shows of its devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oobleckd.ctl.local import Home
from oobleckd.protocol.api import Problem
from oobleckd.protocol.nodeviews import DeviceFigures, NodeLogView
from tests.helpers.api_server import node_view
from tests.unit.ctl.conftest import Ctl


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A cluster of this machine that was there once."""
    monkeypatch.setenv("OOBLECK_STATE", str(tmp_path / "state"))
    return Home(tmp_path / "state")


def test_the_agent_of_a_node_that_is_elsewhere_is_asked(ctl: Ctl) -> None:
    ctl.api.watched["log"] = NodeLogView("node-7", ("one", "two"), complete=True)
    result = ctl("logs", "node-7", "-n", "2")
    assert (result.stdout, result.stderr, result.exit_code) == ("one\ntwo\n", "", 0)
    assert ctl.api.queries == [("/v1/nodes/node-7/log", {"lines": ["2"]})]
    ctl("logs", "node-7", "-n", "5000")
    assert ctl.api.queries[-1][1] == {"lines": ["1000"]}, "more is not kept"
    documents = [json.loads(line) for line in ctl("logs", "node-7", "-o", "json").stdout.splitlines()]
    assert [(each["source"], each["text"]) for each in documents] == [("node-7", "one"), ("node-7", "two")]


def test_who_names_a_daemon_means_its_nodes(ctl: Ctl, home: Home) -> None:
    home.logs.mkdir(parents=True)
    home.log("node-7").write_text("of another cluster\n")
    ctl.api.watched["log"] = NodeLogView("node-7", ("mine",), complete=True)
    assert ctl("logs", "node-7").stdout == "mine\n"
    assert ctl("logs", "node-7", "--state", str(home.state / "x")).exit_code == 3, "a folder is a folder"


def test_where_devices_print_elsewhere_it_says_so(ctl: Ctl) -> None:
    ctl.api.watched["log"] = NodeLogView("node-7", ("one",), complete=False)
    result = ctl("logs", "node-7")
    assert result.stdout == "one\n"
    assert "node-7" in result.stderr


def test_a_log_that_is_elsewhere_is_not_followed(ctl: Ctl) -> None:
    ctl.api.watched["log"] = NodeLogView("node-7", ("one",), complete=True)
    result = ctl("logs", "node-7", "-f")
    assert (result.stdout, result.exit_code) == ("", 2)


@pytest.mark.parametrize(("status", "code"), [(404, 3), (503, 1)])
def test_what_the_daemon_refuses_is_an_error(ctl: Ctl, status: int, code: int) -> None:
    ctl.api.problem = Problem("no", status, "node-7 is not here", "look elsewhere")
    assert ctl("logs", "node-7").exit_code == code


def test_figures_are_a_table_without_what_nobody_knows(ctl: Ctl) -> None:
    cpu = DeviceFigures("n/0", 1.0, rss_bytes=2**30, used_bytes=2**30, total_bytes=2**34)
    ctl.api.nodes = [node_view("n", figures=(cpu,)), node_view("m")]
    shown = ctl("describe", "node", "n").stdout.splitlines()
    assert [line.split() for line in shown[-2:]] == [
        ["DEVICE", "MEMORY", "RSS"],
        ["n/0", "1", "GiB", "of", "16", "GiB", "1", "GiB"],
    ]
    assert "MEMORY" not in ctl("describe", "node", "m").stdout


def test_figures_of_a_card(ctl: Ctl) -> None:
    card = DeviceFigures(
        "n/0", 1.0, 2**30, 30 * 2**30, 40 * 2**30, 80 * 2**30, "NVIDIA H100", 0.97, 650.5, 700.0, 64, 1755,
        1980, ("power limit",), 3, 1, (31,),
    )  # fmt: skip
    quiet = DeviceFigures("n/1", 1.0, ecc_corrected=0, ecc_uncorrected=0, utilisation=0.0)
    ctl.api.nodes = [node_view("n", figures=(card, quiet))]
    shown = ctl("describe", "node", "n").stdout
    assert "30 GiB of 80 GiB, planned 40 GiB" in shown
    assert "97%" in shown
    assert "650 of 700 W" in shown or "651 of 700 W" in shown
    assert "64 °C" in shown
    assert "1755 of 1980 MHz (power limit)" in shown
    assert "XID 31, 1 uncorrected (ECC), 3 corrected (ECC)" in shown
    last = shown.splitlines()[-1].split("  ")
    assert [cell.strip() for cell in last if cell.strip()] == [
        "n/1", "-", "-", "-", "0%", "-", "-", "-", "0 memory errors",
    ]  # fmt: skip
