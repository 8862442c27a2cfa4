"""What all simulated worlds run under."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from oobleckd.planner.schedules import routed
from oobleckd.planner.schedules.jobshop import Orders, Shop

SHARE = 10
"""Of the time in which orders are sought: a third of all that worlds took, and none of them asks how good the
orders are (``tests/unit/planner`` does).
"""
_WHOLE = routed.best_orders


def _brief(
    shop: Shop, effort: int, begun: Sequence[Orders], *, staggered: bool
) -> tuple[float, Orders | None]:
    return _WHOLE(shop, effort // SHARE, begun, staggered=staggered)


@pytest.fixture(autouse=True)
def _orders_are_sought_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed, "best_orders", _brief)
