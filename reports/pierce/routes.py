"""What a route is: a way on which notices of the detector reach people and programs."""

from __future__ import annotations

import hashlib
import os
import ssl
from typing import Protocol

from spikeprof.analyzers.cache_pierce.model import Alert
from spikeprof.profiler.errors import OutputError


class RouteError(OutputError):
    """An attempt to deliver a notice failed. The message names no secret: no URL, no password.

    ``again``: whether another attempt may succeed and cannot deliver twice. ``unclear``: the notice may have arrived
    all the same (the answer was lost). ``wait_s``: how long the receiver asked to be left alone.
    """

    def __init__(self, message: str, *, again: bool, unclear: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.again = again
        self.unclear = unclear
        self.wait_s = wait_s


class Route(Protocol):
    """One way out. ``name`` is what errors and metrics call it; it holds nothing secret."""

    name: str

    async def send(self, alert: Alert) -> None:
        """Deliver one notice, or raise RouteError. Called again with the same notice only after ``again``."""
        ...

    async def close(self) -> None:
        """Give connections and files back. Raises nothing."""
        ...


def notice_id(alert: Alert) -> str:
    """The same 16 hexadecimal digits for the same notice, on every route and in every attempt."""
    parts = (alert.alert_id, alert.kind, alert.severity, alert.rule, alert.tenant, alert.pattern, repr(alert.ts_s))
    return hashlib.sha256("\0".join(parts).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def system_reason(error: BaseException) -> str:
    """What the system or the certificate check said, in the chain of causes of an error; empty where neither did."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate was not accepted ({cause.verify_message})"
        if isinstance(cause, ssl.SSLError):
            return f"TLS failed ({cause.reason or 'no reason given'})"
        if isinstance(cause, OSError) and cause.errno and cause.errno > 0:
            return os.strerror(cause.errno)
        if isinstance(cause, OSError) and cause.strerror:  # of name look-ups
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return ""
