"""Keys replaced by keyed hashes, in everything that leaves the detector: alerts, live table, metrics, page.

A pattern is kept where something in it was folded (``user:{n}``), for then it is no key; one without a placeholder is
a whole key and is hashed as such. Tenants are kept.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import replace

from spikeprof.analyzers.cache_pierce.model import EVERY, Alert, Snapshot
from spikeprof.analyzers.cache_pierce.patterns import ANY

_DIGITS = 12
_PLACEHOLDERS = ("{n}", "{hex}", "{token}", "{uuid}", ANY)  # a key may hold other braces: Redis's hash tags


class Redactor:
    """Hashes with ``secret``: the same key has the same hash as long as the secret stays the same.

    Without one a random secret is made, and no hash can be compared with those of another run.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret or secrets.token_bytes(32)

    def key(self, key: str) -> str:
        """``key#`` and 12 hexadecimal digits of HMAC-SHA256."""
        digest = hmac.new(self._secret, key.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
        return f"key#{digest[:_DIGITS]}"

    def pattern(self, pattern: str) -> str:
        """The pattern, hashed where it is a whole key."""
        was_folded = any(placeholder in pattern for placeholder in _PLACEHOLDERS)
        return pattern if was_folded or pattern in ("", EVERY) else self.key(pattern)

    def alert(self, alert: Alert) -> Alert:
        """The alert without keys."""
        return replace(
            alert,
            pattern=self.pattern(alert.pattern),
            keys=tuple(self.key(key) for key in alert.keys),
            top=tuple(replace(share, pattern=self.pattern(share.pattern)) for share in alert.top),
        )

    def snapshot(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot without keys."""
        return replace(
            snapshot,
            rows=tuple(replace(row, pattern=self.pattern(row.pattern)) for row in snapshot.rows),
            hot_keys=tuple(
                replace(hot, key=self.key(hot.key), pattern=self.pattern(hot.pattern)) for hot in snapshot.hot_keys
            ),
            active=tuple(self.alert(alert) for alert in snapshot.active),
        )
