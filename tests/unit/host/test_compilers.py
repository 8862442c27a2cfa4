"""Which C++ compiler there is, and why there may be none."""

from __future__ import annotations

from pathlib import Path

from oobleckd.host.compilers import cxx_version, no_cxx


def program(folder: Path, text: str) -> dict[str, str]:
    """An environment whose compiler is this shell script."""
    file = folder / "cxx"
    file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    file.chmod(0o755)
    return {"CXX": str(file)}


def test_its_version_is_the_first_line_of_what_it_says(tmp_path: Path) -> None:
    environ = program(tmp_path, "echo 'g++ (Debian) 12.2.0'; echo more")
    assert cxx_version(environ) == "g++ (Debian) 12.2.0"
    (tmp_path / "Python.h").touch()
    assert no_cxx(environ, tmp_path) == ""


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    gone = {"CXX": str(tmp_path / "gone")}
    assert cxx_version(gone) == ""
    assert no_cxx(gone) == f"CXX = '{tmp_path / 'gone'}' is no C++ compiler"
    assert cxx_version(program(tmp_path, "exit 3")) == ""
    assert no_cxx(program(tmp_path, "echo 1"), tmp_path) == f"there is no {tmp_path / 'Python.h'}"
