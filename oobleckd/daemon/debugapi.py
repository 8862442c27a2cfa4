"""What somebody asks who looks for a fault of the daemon itself: where its threads and tasks stand, and what
it counts.

Owns the route and what is in the answer. Only who may act may ask: stacks show more than the views do.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import asdict

from aiohttp import web

from oobleckd import __version__
from oobleckd.daemon import answers, busy
from oobleckd.daemon.peers import may_act, peer_of
from oobleckd.daemon.refusal import Refusal
from oobleckd.daemon.service import Service
from oobleckd.protocol.watch import DebugView


class DebugApi:
    """Handlers over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        """The one there is."""
        return [web.get("/v1/debug", self.debug)]

    async def debug(self, request: web.Request) -> web.StreamResponse:
        """The daemon as it stands."""
        assert request.transport is not None
        peer, group = peer_of(request.transport.get_extra_info("socket")), self._service.config.group
        if not may_act(peer, group):
            hint = f"ask to be added to the group {group}, or use sudo"
            raise Refusal(403, "forbidden", f"{peer} may not look inside the daemon", hint)
        return answers.whole(_debug_view(self._service))


def _debug_view(service: Service) -> DebugView:
    loop = service.loop
    return DebugView(
        version=__version__,
        python=sys.version,
        up_s=service.clock.now() - service.started_at,
        threads=dict(_threads()),
        tasks=dict(_tasks()),
        counters={
            "events": loop.num_events,
            "loop_longest_us": round(1e6 * busy.longest_s()),
            "records_read": service.journal.num_read,
            "manifest_errors": loop.num_manifest_errors,
            "half_open_dropped": service.hub.half_open.num_dropped,
            "refused_keys": service.hub.num_refused_keys,
            **asdict(service.hub.counters),
            **asdict(service.hub.heartbeats.counters),
            "datagram_beats": service.hub.heartbeats.counters.datagram_heartbeats,  # its first name
        },
        journal=str(service.journal.path),
        trouble=service.journal.trouble,
    )


def _threads() -> Iterator[tuple[str, tuple[str, ...]]]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():  # noqa: SLF001 - what it is for, says its documentation
        yield names.get(ident, str(ident)), tuple(traceback.format_stack(frame))


def _tasks() -> Iterator[tuple[str, tuple[str, ...]]]:
    for task in asyncio.all_tasks():
        stack = (line for frame in task.get_stack() for line in traceback.format_stack(frame, limit=1))
        yield task.get_name(), tuple(stack)
