"""Everything of ours is imported as ``oobleckd.…``: a second name would be a second copy of every class."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import oobleckd
from tests.conftest import bare_names

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("console", "planner", "worker")


def test_no_bare_name_is_imported() -> None:
    assert bare_names(sys.modules) == []


def test_bare_names_are_found() -> None:
    assert bare_names({"worker", "planner.plan", "oobleckd.worker", "tests.unit.console"}) == [
        "planner.plan",
        "worker",
    ]


@pytest.mark.parametrize("name", LINKED)
def test_the_linter_knows_them(name: str) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert name in settings["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]


def test_only_oobleckd_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["setuptools"]["packages"]["find"]["include"] == ["oobleckd*"]


@pytest.mark.parametrize("name", LINKED)
def test_a_checkout_without_links_says_so_in_one_sentence(name: str, tmp_path: Path) -> None:
    """There git writes where a link leads into a file of its name; an installation made of that
    has nothing.
    """
    copy = tmp_path / "oobleckd"
    copy.mkdir()
    shutil.copy(Path(oobleckd.__file__), copy)
    for other in LINKED:
        (copy / other).mkdir()
    (copy / name).rmdir()
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", "import oobleckd"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        said = done.stderr.splitlines()[-1]
        assert said.startswith(
            f"ImportError: {copy / name} is no folder: this copy of oobleckd comes from a checkout without"
        )
        (copy / name).write_text(f"../{name}")
