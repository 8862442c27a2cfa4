"""Artifacts: what a kind of layer of a job was compiled to (``train.compile``), as one file that travels.

Owns the form of their keys, and how much of one there may be. What is in one, and whose it is, the worker
says (``oobleckd.worker.artifacts``); daemon and agents carry the bytes, and look at none.
"""

from __future__ import annotations

import re

PART_BYTES = 1 << 18
"""Of one message: short enough that heartbeats and orders do not wait for it."""
MAX_BYTES = 1 << 28
"""Of an artifact: some 100 times what a kind of layer takes on a CPU."""
_KEY = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def is_key(text: str) -> bool:
    """Whether ``text`` is a key: digests of who compiles (torch, compiler, CPU or card) and of what. So none
    leads out of a folder.
    """
    return _KEY.fullmatch(text) is not None


def is_sha256(text: str) -> bool:
    """Whether ``text`` is a checksum."""
    return _SHA256.fullmatch(text) is not None
