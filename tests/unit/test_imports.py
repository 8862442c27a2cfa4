"""The walls of the house (docs/design.md): who may import whom, and what start-up may not cost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("module", ["oobleckd", "oobleckd.protocol.job", "oobleckd.protocol.api"])
def test_light_modules_load_nothing_heavy(module: str) -> None:
    assert loaded_by(module).isdisjoint(HEAVY)


def test_the_daemon_s_loop_leaves_scipy_to_the_pool() -> None:
    """50 MB, in a process that needs little more for thousands of nodes."""
    assert "scipy" not in loaded_by("oobleckd.daemon.app")


def test_the_pure_packages_load_no_sockets_and_no_torch() -> None:
    assert loaded_by("oobleckd.core.events, oobleckd.planner.plan, oobleckd.protocol.codec").isdisjoint(
        {"asyncio", "socket", "zmq", "torch", "aiohttp"}
    )


def test_the_agent_loads_no_torch() -> None:
    assert loaded_by("oobleckd.worker.agent.main").isdisjoint(
        {"torch", "transformers", "numpy", "safetensors"}
    )
