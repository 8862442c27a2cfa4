"""What every test runs under: one thread per process, no network, and no clock in Hypothesis."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# Before anything imports torch or transformers. Started programs inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# A fault of ours is to be seen where it is.
os.environ["OOBLECK_TRACEBACK"] = "1"
# A user's own cluster must not be what a test talks to.
os.environ.pop("OOBLECK_SOCKET", None)
os.environ.pop("OOBLECK_STATE", None)

settings.register_profile("ours", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ours")


_CLUSTERS = ("demo", "devices_live", "export", "faults", "nodes_live", "recovery", "roads", "twin", "up")
_LIVE = ("tests/host/", *(f"tests/loopback/test_{name}.py" for name in _CLUSTERS))


class _LiveTogether(LoadScopeScheduling):
    """Tests with real clusters run one after another, in one of the processes that ``make test`` starts."""

    def _split_scope(self, nodeid: str) -> str:
        return "live" if nodeid.startswith(_LIVE) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return _LiveTogether(config, log)
