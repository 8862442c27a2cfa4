"""The verb ``simulate``: what it prints, what it refuses, what it may not load.

``python -m tests.unit.ctl.test_simulate`` writes simulate.json, the shape of its document, anew.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner, Result

from oobleckd.ctl.main import main
from oobleckd.protocol.job import PolicyName
from tests.unit.test_imports import ROOT

GOLDEN = Path(__file__).with_name("simulate.json")
EXAMPLE = str(ROOT / "examples" / "gpt2-stdlib.toml")
SHORT = (EXAMPLE, "--nodes", "7", "--mtbf", "2m", "--repair", "5m", "--duration", "10m", "--jobs", "1")


def ctl(*words: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *words], catch_exceptions=False)


def simulated(*words: str) -> Any:
    result = ctl(*words, "-o", "json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refused(*words: str, code: int = 2) -> str:
    result = ctl(*words)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "error: " in result.stderr
    assert "hint: " in result.stderr
    return result.stderr


def shape(value: Any) -> Any:
    """Keys and kinds of values, without the numbers."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return (
        "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
    )


def document() -> Any:
    return shape(simulated(*SHORT, "--policy", "bamboo,oobleck", "--seeds", "2"))


def test_the_document_is_what_scripts_rely_on() -> None:
    assert document() == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_all_policies_meet_the_same_failures() -> None:
    found = simulated(*SHORT, "--policy", "all", "--seeds", "2")
    assert (found["apiVersion"], found["kind"]) == ("oobleck/v1", "Simulation")
    able = [name for name in get_args(PolicyName) if name != "bamboo"]  # redundant layers need nine nodes
    assert [line["policy"] for line in found["policies"]] == able
    for line in found["policies"]:
        assert [run["seed"] for run in line["runs"]] == [0, 1]
        assert line["useful"] + sum(line["lost"].values()) == pytest.approx(1.0)
        assert 0 < line["of_oracle"] <= 1.0
        assert line["of_ideal"] > 0
        assert line["on_demand"]["dollars"] > line["spot"]["dollars"] > 0


def test_a_policy_that_cannot_run_is_a_row_with_its_reason(tmp_path: Path) -> None:
    reason = "gpt2-stdlib never began to train: fault_tolerance.f = 2 needs 3 copies of every layer: 9 nodes"
    [unable] = simulated(*SHORT, "--policy", "bamboo,oobleck")["unable"]
    assert (unable["policy"], unable["costs"], unable["seed"]) == ("bamboo", "ours", 0)
    assert unable["problem"].startswith(reason)
    assert unable["hint"] == "simulate more nodes, or for longer"
    picture = tmp_path / "picture.svg"
    result = ctl(*SHORT, "--policy", "bamboo,oobleck", "--plot", str(picture))
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("bamboo ")]
    assert rows[0] == ["bamboo", *["-"] * 7]
    assert f"bamboo cannot run: {reason}" in result.stdout
    assert "without bamboo: cannot run here" in result.stderr
    assert picture.exists()


def test_where_nobody_can_run_it_fails() -> None:
    assert "needs 3 copies of every layer: 9 nodes" in refused(*SHORT, "--policy", "bamboo", code=1)
    words = (EXAMPLE, "--nodes", "1", "--mtbf", "1h", "--policy", "oobleck,bamboo")
    assert "never began to train" in refused(*words, code=1)


def test_the_same_call_prints_the_same() -> None:
    assert ctl(*SHORT, "-o", "json").stdout == ctl(*SHORT, "-o", "json").stdout


def test_tables() -> None:
    result = ctl(*SHORT, "--policy", "oobleck,slipstream", "--price", "2", "--spot-price", "0.5")
    assert result.exit_code == 0, result.stderr
    text = result.stdout
    assert "gpt2-stdlib on 7 nodes, one CPU core estimated from its data sheet" in text
    assert "a node fails every 2 min on average, each back after 5 min on average; one run of 10 min" in text
    assert "At $2.000 on demand and $0.500 spot for a node hour (as given):" in text
    for word in ("ORACLE", "REDONE", "NODE HOURS", "slipstream"):
        assert word in text


@pytest.mark.parametrize(
    ("words", "said", "on_demand", "spot"),
    [
        (("--price", "3"), ("At $3.000 on demand and $0.034 spot for a node hour (on demand as given, "
                           "c6i.large on the spot market):"), True, True),
        (("--spot-price", "3"), ("At $0.085 on demand and $3.000 spot for a node hour (c6i.large on demand, "
                                "spot as given):"), True, True),
        (("--device", "h200", "--price", "3"), ("At $3.000 on demand and - spot for a node hour (as given; "
                                               "nobody knows the other one):"), True, False),
        (("--device", "h200", "--spot-price", "3"), ("At - on demand and $3.000 spot for a node hour (as "
                                                    "given; nobody knows the other one):"), False, True),
    ],
)  # fmt: skip
def test_one_price_alone(words: tuple[str, ...], said: str, on_demand: bool, spot: bool) -> None:
    assert said in ctl(*SHORT, "--policy", "oobleck", *words).stdout
    [line] = simulated(*SHORT, "--policy", "oobleck", *words)["policies"]
    assert (line["on_demand"] is not None, line["spot"] is not None) == (on_demand, spot)


def test_what_was_computed_is_said_though_the_picture_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("oobleckd.simulator.plot.draw", fails)
    result = ctl(*SHORT, "--policy", "oobleck", "--plot", str(tmp_path / "picture.png"))
    assert (result.exit_code, "NODE HOURS" in result.stdout) == (1, True)
    assert "No space left" in result.stderr


def test_a_trace_that_names_its_nodes(tmp_path: Path) -> None:
    trace = tmp_path / "own.csv"
    trace.write_text("".join(f"0,join,n{i}\n" for i in range(7)) + "300,fail,n3\n", encoding="utf-8")
    result = ctl(EXAMPLE, "--nodes", "9", "--trace", str(trace), "--policy", "oobleck")
    assert "begins with nodes of its own, 7 of them: --nodes is not used" in result.stderr


def test_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "bad-day.csv"
    trace.write_text(
        "60,fail,node-3\n120,leave,node-1,30\n300,join,node-3\n600,join,node-1\n", encoding="utf-8"
    )
    found = simulated(EXAMPLE, "--nodes", "7", "--trace", str(trace), "--duration", "15m")
    assert (found["failures"], found["num_nodes"], found["duration_s"]) == ("bad-day", 7, 900.0)
    assert found["policies"][0]["losses"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "say what fails"),
        (("--mtbf", "1h"), "--mtbf needs --nodes"),
        (("--nodes", "7", "--mtbf", "soon"), "'soon' is no time"),
        (("--nodes", "7", "--mtbf", "0s"), "'0s' is no time"),
        (("--nodes", "7", "--mtbf", "1h", "--policy", "hope"), "no policy 'hope'"),
        (("--nodes", "7", "--mtbf", "1h", "--policy", ","), "no name"),
        (("--nodes", "7", "--mtbf", "1h", "--costs", "free"), "no costs 'free'"),
        (("--nodes", "7", "--mtbf", "1h", "--instance", "free"), "no price of 'free'"),
        (("--nodes", "7", "--mtbf", "1h", "--plot", "picture.doc"), "picture.doc is no .png"),
        (
            ("--nodes", "7", "--mtbf", "1h", "--plot", "no-folder/picture.PNG"),
            "cannot write no-folder/picture.PNG",
        ),
        (("--trace", "none.csv"), "none.csv: No such file"),
        (("--trace", "none.csv", "--mtbf", "1h"), "a trace says by itself who fails"),
        (("--trace", "none.csv", "--seed", "3"), "a trace says by itself who fails"),
        (("--nodes", "7", "--mtbf", "1h", "--device", "abacus"), "no device 'abacus'"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], said: str) -> None:
    assert said in refused(EXAMPLE, *words)


def test_too_few_nodes() -> None:
    said = refused(EXAMPLE, "--nodes", "1", "--mtbf", "1h", code=1)
    assert "never began to train" in said


def test_other_verbs_load_none_of_it() -> None:
    code = (
        "import sys, oobleckd.ctl.main, oobleckd.ctl.simulate; print(*{name.partition('.')[0] for name "
        "in "
        "sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert set(done.stdout.split()).isdisjoint(
        {"torch", "textual", "aiohttp", "zmq", "scipy", "numpy", "matplotlib", "rich"}
    )


def test_a_picture(tmp_path: Path) -> None:
    for ending, begins in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        picture = tmp_path / f"picture{ending}"
        assert ctl(*SHORT, "--policy", "oobleck,slipstream", "--plot", str(picture)).exit_code == 0
        assert picture.read_bytes().startswith(begins)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(document(), indent=1) + "\n", encoding="utf-8")
