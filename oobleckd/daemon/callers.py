"""Who asks the API, what they may do, and how often.

Owns the rule: on the unix socket the kernel says who it is (``peers``), on TCP a token (``tokens``), without
which nothing at all is answered there. Who may act may read. Everybody has a bucket of their own, so nobody
can use up another one's.
"""

from __future__ import annotations

import logging
import math
import socket
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from oobleckd.daemon import tokens
from oobleckd.daemon.limits import Limit
from oobleckd.daemon.peers import may_act, peer_of
from oobleckd.daemon.refusal import Refusal
from oobleckd.daemon.seldom import Seldom
from oobleckd.daemon.tokens import Token

_log = logging.getLogger(__name__)
READING = frozenset({"GET", "HEAD"})
_LEAST_S = 0.05
_SHOWN = 200  # characters of a path that was refused
_HOW_TO_GET_IN = "make one with `oobleckctl token NAME`, and send it as Authorization: Bearer"


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who asks; ``name`` is what the audit has. ``acts``: whether they may, which is looked up where
    they want to. ``ours``: root, or the daemon's own user, on this machine.
    """

    name: str
    acts: bool
    ours: bool = False


def _allowance(factor: float) -> tuple[Limit, Limit]:
    """Bytes of answers, and seconds of the loop, for each caller."""
    return Limit(factor * 8 * 2**20, factor * 64 * 2**20), Limit(factor * 0.1, factor * 1.0)


@dataclass(slots=True)
class Callers:
    """``group``: of the unix socket, whose members act. ``tokens``: of TCP."""

    group: str
    tokens: tuple[Token, ...] = ()
    reads: Limit = field(default_factory=lambda: Limit(per_s=1000.0, burst=4000.0))
    acts: Limit = field(default_factory=lambda: Limit(per_s=20.0, burst=200.0))
    strangers: Limit = field(default_factory=lambda: Limit(per_s=5.0, burst=20.0))
    # What somebody asked for is paid for afterwards, in bytes and in time: how often they ask says little of
    # what it costs. (D-service-020)
    others: tuple[Limit, Limit] = field(default_factory=lambda: _allowance(1.0))
    ours: tuple[Limit, Limit] = field(default_factory=lambda: _allowance(8.0))
    refused: Seldom = field(default_factory=lambda: Seldom(_log))

    def admit(self, request: web.Request, now: float, mono_s: float) -> Caller:
        """Who asks, if they may ask this now. ``now``: POSIX seconds; ``mono_s``: of a clock that nobody
        sets. Raises Refusal.
        """
        acting = request.method not in READING
        caller = self._caller(request, now, mono_s, acting=acting)
        if acting and not caller.acts:
            said = request.raw_path[:_SHOWN]
            self.refused.warn("refused %s %s: %s may not act", request.method, said, caller.name)
            raise Refusal(403, "forbidden", f"{caller.name} may read, but not act", self._how_to_act(request))
        wait_s = (self.acts if acting else self.reads).take(caller.name, mono_s)
        if not acting:
            wait_s = max(wait_s, *(each.owes_s(caller.name, mono_s) for each in self._allowed(caller)))
        if wait_s:
            raise _too_often(caller.name, wait_s)
        return caller

    def spent(self, caller: Caller, seconds: float, num_bytes: int, mono_s: float) -> None:
        """What an answer did cost: seconds of the loop and bytes."""
        for limit, cost in zip(self._allowed(caller), (num_bytes, seconds), strict=True):
            limit.charge(caller.name, cost, mono_s)

    def _allowed(self, caller: Caller) -> tuple[Limit, Limit]:
        return self.ours if caller.ours else self.others

    def _caller(self, request: web.Request, now: float, mono_s: float, *, acting: bool) -> Caller:
        if request.transport is None:
            raise web.HTTPBadRequest(reason="the connection is gone")
        sock = request.transport.get_extra_info("socket")
        if sock.family == socket.AF_UNIX:
            peer = peer_of(sock)
            return Caller(str(peer), acting and may_act(peer, self.group), peer.ours)
        return self._bearer(request, now, mono_s)

    def _bearer(self, request: web.Request, now: float, mono_s: float) -> Caller:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        found = tokens.find(self.tokens, given.strip()) if scheme.lower() == "bearer" else None
        if found is not None and now < found.expires_at:
            return Caller(f"token {found.name}", found.role == "act")
        wait_s = self.strangers.take(request.remote or "", mono_s)
        if wait_s:
            raise _too_often(request.remote or "somebody", wait_s)
        said = request.raw_path[:_SHOWN]
        self.refused.warn("refused %s %s of %s: no token that is good", request.method, said, request.remote)
        if found is not None:
            raise _unknown(f"the token {found.name} has expired")
        raise _unknown("a token is needed here, and this is none that is known")

    def _how_to_act(self, request: web.Request) -> str:
        if "Authorization" in request.headers:
            return "make a token with `oobleckctl token NAME --role act`"
        return f"ask to be added to the group {self.group}, or use sudo"


def _unknown(why: str) -> Refusal:
    return Refusal(401, "unauthorized", why, _HOW_TO_GET_IN, {"WWW-Authenticate": "Bearer"})


def _too_often(name: str, wait_s: float) -> Refusal:
    seconds = math.ceil(wait_s)
    said = f"ask again in {seconds} s"
    refusal = Refusal(429, "too many requests", f"{name} asks too often", said, {"Retry-After": str(seconds)})
    refusal.problem = msgspec.structs.replace(refusal.problem, retry_s=max(wait_s, _LEAST_S))
    return refusal
