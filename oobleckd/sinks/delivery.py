"""Runs the command of a rule, or posts to its URL, until that is done or given up.

Owns what they are told: the event as JSON, as the event stream has it, with its name as ``event``; and how
often it is tried. A command is run once: what it left undone at its exit code only it can know.
"""

from __future__ import annotations

import http.client
import logging
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec

from oobleckd.protocol.changes import Change
from oobleckd.protocol.sinks import EventRule

_FIRST_S, _LONGEST_S = 1.0, 60.0
_TOO_MANY, _SERVER_ERROR = 429, 500
_SAID = 500  # characters of what a command printed
_log = logging.getLogger(__name__)


class NotTaken(Exception):
    """The receiver did not take it. ``again``: it may later."""

    def __init__(self, problem: str, *, again: bool) -> None:
        super().__init__(problem)
        self.again = again


def deliver(rule: EventRule, event: str, change: Change, stopping: threading.Event) -> bool:
    """Do what ``rule`` says; whether it was done. Waits between tries, until ``stopping``."""
    data = told(event, change)
    if rule.command:
        return run(rule, event, change, data)
    host, wait_s = urlsplit(rule.url).hostname, _FIRST_S
    until = time.monotonic() + rule.retry_s
    body = data if rule.body == "event" else msgspec.json.encode({"text": change.text})
    while True:
        try:
            post(rule, body)
        except NotTaken as error:
            # Not the URL: its path is the secret of most webhooks.
            if not error.again or time.monotonic() + wait_s > until:
                _log.error("on_event %s: %s did not take it: %s; given up", event, host, error)
                return False
            _log.warning("on_event %s: %s: %s; again in %.0f s", event, host, error, wait_s)
            if stopping.wait(wait_s):
                return False
            wait_s = min(2 * wait_s, _LONGEST_S)
        else:
            return True


def told(event: str, change: Change) -> bytes:
    """The event as JSON."""
    return b'{"event":%b,%b' % (msgspec.json.encode(event), msgspec.json.encode(change)[1:])


def post(rule: EventRule, body: bytes) -> None:
    """One try. Raises NotTaken."""
    asked = urllib.request.Request(  # noqa: S310 - http and https alone, as the configuration's check says
        rule.url, body, {"Content-Type": "application/json", "User-Agent": "oobleckd"}
    )
    try:
        with _opener.open(asked, timeout=rule.timeout_s):
            return
    except urllib.error.HTTPError as error:
        with error:
            again = error.code >= _SERVER_ERROR or error.code == _TOO_MANY
            raise NotTaken(f"HTTP {error.code} {error.reason}", again=again) from error
    except (OSError, http.client.HTTPException) as error:
        raise NotTaken(str(getattr(error, "reason", error)) or type(error).__name__, again=True) from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A POST that is sent elsewhere becomes a GET, and an internal address may be meant: it is an error."""

    def redirect_request(self, *_: object) -> None:
        """Follow none."""


_opener = urllib.request.build_opener(_NoRedirects)


def run(rule: EventRule, event: str, change: Change, data: bytes) -> bool:
    """The command, once; whether it ended with 0 in its time. All that it started is ended with it."""
    variables = {
        "OOBLECK_EVENT": event, "OOBLECK_SEQ": str(change.seq), "OOBLECK_LEVEL": change.level,
        "OOBLECK_TEXT": change.text,
        **{f"OOBLECK_{key.upper()}": name for key, _, name in (each.partition(":") for each in change.story)},
    }  # fmt: skip
    try:
        process = subprocess.Popen(
            rule.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,
        )
    except OSError as error:
        _log.error("on_event %s: %s cannot be run: %s", event, rule.command[0], error.strerror)
        return False
    try:
        output, _ = process.communicate(data, timeout=rule.timeout_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        _log.error("on_event %s: %s did not end in %.0f s", event, rule.command[0], rule.timeout_s)
        return False
    if process.returncode:
        said = output.decode(errors="replace").strip()[-_SAID:]
        _log.error("on_event %s: %s ended with %d: %s", event, rule.command[0], process.returncode, said)
    return process.returncode == 0
