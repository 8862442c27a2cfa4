"""The C++ compiler of this machine, as torch's compiler would take it. A leaf: torch is never imported.

Owns which program that is (``CXX``, or g++), its version, and why there is none that could be used. Python's
headers count: what is compiled is a module of Python's.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path

INSTALL = "install g++ and Python's headers (Debian: apt install g++ python3-dev), or set CXX"
_ASK_S = 10.0


def cxx_version(environ: Mapping[str, str] = os.environ) -> str:
    """What the compiler says it is, in a line, such as "g++ (Debian 12.2.0-14) 12.2.0"; "" where there is
    none.
    """
    try:
        program = environ.get("CXX", "g++")
        said = subprocess.run(
            [program, "--version"], capture_output=True, text=True, check=True, timeout=_ASK_S
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(said.splitlines()), "").strip()


def no_cxx(environ: Mapping[str, str] = os.environ, headers: Path | None = None) -> str:
    """Why nothing can be compiled here; "" where it can. ``headers``: the folder of Python's."""
    if not cxx_version(environ):
        named = environ.get("CXX")
        return f"CXX = {named!r} is no C++ compiler" if named else "there is no C++ compiler (g++)"
    folder = Path(sysconfig.get_path("include")) if headers is None else headers
    return "" if (folder / "Python.h").is_file() else f"there is no {folder / 'Python.h'}"
