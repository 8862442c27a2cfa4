"""The walls of the house (docs/design.md): who may import whom, and what start-up may not cost."""

from __future__ import annotations

import subprocess
import sys
from configparser import ConfigParser
from copy import deepcopy
from pathlib import Path

import grimp
import pytest

from tests.helpers.allowed import AllowedContract

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "numpy", "scipy", "textual", "rich", "aiohttp", "zmq", "asyncio")


def loaded_by(module: str) -> frozenset[str]:
    """Top-level modules in a fresh interpreter after it imported ``module``."""
    code = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return frozenset(done.stdout.split())


def test_import_contracts() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """Who imports whom."""
    return grimp.build_graph("oobleckd", include_external_packages=True, cache_dir=None)


def allowed_contracts() -> dict[str, AllowedContract]:
    """The contracts that name what is allowed, by the last part of their section."""
    parser = ConfigParser()
    parser.read(ROOT / ".importlinter")
    prefix = "importlinter:contract:"
    sections = {name.removeprefix(prefix): parser[name] for name in parser.sections() if prefix in name}
    session = {"root_packages": ["oobleckd"]}
    return {
        name: AllowedContract(
            name, session, {key: said.split() for key, said in section.items() if key not in {"name", "type"}}
        )
        for name, section in sections.items()
        if section["type"] == "allowed"
    }


PLANTED = {
    "worker": [("oobleckd.worker.training.executor", "oobleckd.core.decide")],
    "round_machine": [
        ("oobleckd.worker.round_machine.machine", "torch"),
        ("oobleckd.worker.round_machine.machine", "time"),
        ("oobleckd.worker.round_machine.tasks", "random"),
        ("oobleckd.worker.round_machine.commit", "socket"),
        ("oobleckd.worker.round_machine.exchange", "oobleckd.worker.sums"),
        ("oobleckd.worker.round_machine.tasks", "oobleckd.planner.schedules.dispatch"),
        ("oobleckd.worker.round_machine.machine", "oobleckd.host.settings"),
    ],
    "console": [("oobleckd.console.app", "oobleckd.core.run")],
    "ctl": [("oobleckd.ctl.cluster", "oobleckd.worker.runtime.errors")],
    "daemon": [("oobleckd.daemon.app", "oobleckd.client")],
    "simulator": [("oobleckd.simulator.world", "oobleckd.worker.sums")],
    "client": [("oobleckd.client", "oobleckd.core.run")],
    "sinks": [("oobleckd.sinks", "oobleckd.daemon.app"), ("oobleckd.sinks", "oobleckd.core.state")],
    "prepare": [("oobleckd.prepare", "oobleckd.daemon.app")],
    "tokens": [("oobleckd.tokens", "socket"), ("oobleckd.tokens", "oobleckd.prepare")],
    "host": [("oobleckd.host.settings", "oobleckd.core.run")],
    "core": [("oobleckd.core.run", "time"), ("oobleckd.core.run", "oobleckd.host.settings")],
    "protocol": [
        ("oobleckd.protocol.job", "socket"),
        ("oobleckd.protocol.job", "oobleckd.planner.schedules"),
    ],
    "draw": [("oobleckd.draw.times", "random"), ("oobleckd.draw.times", "oobleckd.protocol.job")],
    "report": [("oobleckd.report.page", "socket"), ("oobleckd.report.panels", "oobleckd.client")],
    "words": [("oobleckd.words", "oobleckd.planner.plan"), ("oobleckd.words", "time")],
    "planner": [("oobleckd.planner.plan", "time"), ("oobleckd.planner.plan", "oobleckd.protocol.job")],
}
"""Contract -> imports that it must not let pass."""


@pytest.mark.parametrize("name", sorted(allowed_contracts()))
def test_a_planted_import_breaks_its_contract(name: str, graph: grimp.ImportGraph) -> None:
    contract = allowed_contracts()[name]
    assert contract.check(graph, verbose=False).kept
    planted = deepcopy(graph)
    for importer, imported in PLANTED[name]:
        if not imported.startswith("oobleckd."):
            planted.add_module(imported, is_squashed=True)
        assert {importer, imported} <= planted.modules, "there are modules of these names"
        planted.add_import(importer=importer, imported=imported, line_number=1, line_contents="planted")
    found = contract.check(planted, verbose=False).metadata["found"]
    assert sorted((importer, imported) for importer, imported, _ in found) == sorted(PLANTED[name])


@pytest.mark.parametrize("module", ["oobleckd", "oobleckd.protocol.job", "oobleckd.protocol.jobviews"])
def test_light_modules_load_nothing_heavy(module: str) -> None:
    assert loaded_by(module).isdisjoint(HEAVY)


def test_the_daemon_s_loop_leaves_scipy_to_the_pool() -> None:
    """50 MB, in a process that needs little more for thousands of nodes."""
    assert "scipy" not in loaded_by("oobleckd.daemon.app")


def test_the_pure_packages_load_no_sockets_and_no_torch() -> None:
    assert loaded_by("oobleckd.core.events, oobleckd.planner.plan, oobleckd.protocol.codec").isdisjoint(
        {"asyncio", "socket", "zmq", "torch", "aiohttp"}
    )


def test_the_round_machine_loads_nothing_heavy() -> None:
    assert loaded_by("oobleckd.worker.round_machine.machine").isdisjoint({*HEAVY, "socket", "random"})


def test_the_agent_loads_no_torch() -> None:
    assert loaded_by("oobleckd.worker.agent.main").isdisjoint(
        {"torch", "transformers", "numpy", "safetensors"}
    )
