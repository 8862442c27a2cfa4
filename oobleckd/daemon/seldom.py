"""What anybody can bring about from outside is logged now and then, with how often it came about.

Owns when. Who is refused can ask again at once, and a line for each time would fill the disk.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from oobleckd.daemon.limits import Limit

EVERY_S = 60.0
AT_ONCE = 10


@dataclass(slots=True)
class Seldom:
    """Lines of one kind: some at once, then one each ``EVERY_S`` seconds. ``num_unsaid``: since the last."""

    log: logging.Logger
    num_unsaid: int = 0
    _limit: Limit = field(default_factory=lambda: Limit(1.0 / EVERY_S, AT_ONCE))

    def warn(self, text: str, *args: object) -> None:
        """Say it, or count it."""
        self._say(logging.WARNING, text % args, exc_info=False)

    def exception(self, text: str, *args: object) -> None:
        """The same of the exception that is being handled."""
        self._say(logging.ERROR, text % args, exc_info=True)

    def _say(self, level: int, text: str, *, exc_info: bool) -> None:
        if self._limit.take("", time.monotonic()):
            self.num_unsaid += 1
            return
        unsaid, self.num_unsaid = self.num_unsaid, 0
        more = f" ({unsaid} more like it before)" if unsaid else ""
        self.log.log(level, "%s%s", text, more, exc_info=exc_info)
