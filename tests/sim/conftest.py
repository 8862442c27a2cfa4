"""What all simulated worlds run under."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from oobleckd.planner.schedules import routed
from oobleckd.planner.schedules.jobshop import Orders, Shop

SHARE = 10
"""Of the time in which orders are sought: a third of all that worlds took, and none of them asks how good the
orders are (``tests/unit/planner`` does).
"""


@pytest.fixture(scope="session", autouse=True)
def _orders_are_sought_briefly() -> Iterator[None]:
    whole = routed.best_orders

    def brief(
        shop: Shop, effort: int, begun: Sequence[Orders], *, staggered: bool
    ) -> tuple[float, Orders | None]:
        return whole(shop, effort // SHARE, begun, staggered=staggered)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routed, "best_orders", brief)
        yield
