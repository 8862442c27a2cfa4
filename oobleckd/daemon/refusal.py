"""An answer of the API that is no success. Owns its shape; whoever refuses says why."""

from __future__ import annotations

from oobleckd.protocol.api import Problem


class Refusal(Exception):
    """Becomes problem+json of ``status``, with ``headers`` besides."""

    def __init__(
        self, status: int, title: str, detail: str, hint: str = "", headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.problem = Problem(title, status, detail, hint)
        self.headers = headers or {}
