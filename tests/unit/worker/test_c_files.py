"""The C files of the worker: what they include is known to whoever compiles and packs them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[3]


def _included(source: str) -> set[str]:
    """Files of ours that ``source`` includes, by their paths from the root."""
    names = re.findall(r'^#include "(.+)"', (ROOT / source).read_text(encoding="utf-8"), re.MULTILINE)
    return {str((ROOT / source).parent.joinpath(name).resolve().relative_to(ROOT)) for name in names}


def test_a_header_that_changes_compiles_its_includers_anew_and_is_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``depends`` is both to setuptools; make asks itself whether to install again."""
    said: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", said.update)
    runpy.run_path(str(ROOT / "setup.py"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    made_of = re.search(r"^\.venv/product: (.+)$", makefile, re.MULTILINE)
    assert made_of is not None
    for extension in said["ext_modules"]:
        included = set().union(*map(_included, extension.sources))
        assert included == {"worker/runtime/cpu.h"} == set(extension.depends)
        assert {*included, *extension.sources} <= set(made_of[1].split())
