"""What a store says of its disk, collected."""

from __future__ import annotations

import threading

WAIT_S = 120.0


class Troubles:
    """To be called with each trouble, by any thread; a test can wait for them."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._condition = threading.Condition()

    def __call__(self, text: str) -> None:
        with self._condition:
            self.said.append(text)
            self._condition.notify_all()

    def wait_for(self, number: int) -> None:
        """Until so many were said."""
        with self._condition:
            assert self._condition.wait_for(lambda: len(self.said) >= number, WAIT_S)
