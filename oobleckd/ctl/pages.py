"""Where the pages lie that a sentence names: "docs/job-toml.md" is a file of the source, which who has
installed a wheel does not have beside the prompt.

Owns the folder of the pages that are installed. Names stay as they are where they can be opened as they are.
"""

from __future__ import annotations

import re
from pathlib import Path

import oobleckd

HOME = Path(oobleckd.__file__).parent
_PAGE = re.compile(r"\bdocs/[a-z0-9/-]+\.md\b")


def located(text: str) -> str:
    """``text`` with the pages that it names as files that are there."""
    return _PAGE.sub(lambda found: _place(found[0]), text) if "docs/" in text else text


def _place(name: str) -> str:
    installed = HOME / name
    return str(installed) if not Path(name).exists() and installed.exists() else name
