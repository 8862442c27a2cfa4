"""Installing in stages: which one it is in is said on a pipe as well, and what pip printed when it fails."""

from __future__ import annotations

import sys

import pytest

from tools.install import PIP, Stage, dev, product, run


def test_a_stage_is_announced_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Stage(2, "torch", (sys.executable, "-c", "print('Collecting torch')")), 6) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("[2/6] torch")
    assert last.startswith("[2/6] torch")
    assert last.endswith(" s")


def test_what_a_failed_command_printed_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    command = (sys.executable, "-c", "import sys; print('no such version', file=sys.stderr); sys.exit(3)")
    assert run(Stage(3, "torch", command), 6) == 3
    assert "no such version" in capsys.readouterr().err


def test_pip_compiles_nothing() -> None:
    assert "--no-compile" in PIP
    assert all(stage.command[: len(PIP)] == PIP for stage in (*product()[-2:], *dev()))


def test_the_product_alone_needs_no_tool_of_tests() -> None:
    wanted = {word for stage in product() for word in stage.command if stage.command[: len(PIP)] == PIP}
    (tools,) = dev()
    assert any(word.startswith("pytest") for word in tools.command)
    assert not wanted & set(tools.command[len(PIP) + 2 :])
