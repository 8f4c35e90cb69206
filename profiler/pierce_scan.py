"""All keys of a Redis, by SCAN: for the filter of known keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spikeprof.profiler.errors import InputError
from spikeprof.profiler.lookups import text_of

TIMEOUT_S = 10.0
_AT_ONCE_COUNT = 1000  # keys that the server looks at per call: about a millisecond of its time


def scan(
    host: str, port: int, user: str = "", password: str = "", *, tls: bool = False, tls_ca: Path | None = None
) -> Iterator[str]:
    """Every key of every database, some perhaps twice, as look-ups write them. Raises InputError.

    ``tls``: verified against ``tls_ca``, or the system's authorities.

    Keys written while it runs may be left out, as SCAN has it.
    """
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    try:
        with redis.Redis(
            host,
            port,
            username=user or None,
            password=password or None,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 1),
            single_connection_client=True,  # or SELECT would hold for another connection than SCAN
            ssl=tls,
            ssl_ca_certs=str(tls_ca) if tls_ca else None,
        ) as client:
            numbers = sorted(int(name.removeprefix("db")) for name in client.info("keyspace"))
            for number in numbers:
                client.execute_command("SELECT", number)
                for key in client.scan_iter(count=_AT_ONCE_COUNT):
                    yield text_of(key)
    except redis.RedisError as error:
        raise InputError(
            f"the keys of the Redis at {host}:{port} cannot be read ({error}); name a user that may run SCAN, SELECT "
            "and INFO, or use --known FILE"
        ) from error
