"""``spikeprof pierce``: watch the look-ups of a cache for penetration. One function per source of look-ups."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from spikeprof.cli.pierce_options import (
    Knowledge,
    Length,
    Memory,
    Routing,
    Showing,
    Thresholds,
    takes_groups,
)

pierce = typer.Typer(
    name="pierce",
    help="Alert on cache penetration: look-ups of keys that are in no cache and in no store behind it.",
    short_help="Alert on cache penetration.",
    epilog="Exit codes: 0 done, 1 --fail-on was met, 2 wrong command line, 3 unreadable input, 4 unwritable output.",
    rich_markup_mode=None,
)


@pierce.callback(invoke_without_command=True)
def _root(context: typer.Context) -> int:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        return 2
    return 0


class Tenant(StrEnum):
    """What names the tenant of a look-up."""

    none = "none"
    user = "user"
    db = "db"


@pierce.command("proxy", short_help="Stand in front of a Redis and watch what clients look up.")
@takes_groups
def proxy(
    upstream: Annotated[str, typer.Option("--upstream", metavar="HOST:PORT", help="The Redis behind it.")],
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where clients connect.")
    ] = "127.0.0.1:6380",
    tls: Annotated[
        bool, typer.Option("--upstream-tls", help="Speak TLS to the Redis; its certificate is verified.")
    ] = False,
    tls_ca: Annotated[
        Path | None,
        typer.Option("--upstream-ca", metavar="FILE", help="Authorities to verify it against [the system's]."),
    ] = None,
    tls_name: Annotated[
        str, typer.Option("--upstream-name", metavar="NAME", help="Name in its certificate, where it is not the host.")
    ] = "",
    tenant: Annotated[
        Tenant, typer.Option(help="What names the tenant: the user of AUTH, or the database.")
    ] = Tenant.none,
    hash_fields: Annotated[bool, typer.Option("--hash-fields", help="Look-ups in hashes count per field.")] = False,
    known_scan: Annotated[
        bool, typer.Option("--known-scan", help="Learn which keys exist by SCAN of the Redis, before the start.")
    ] = False,
    guard_nil: Annotated[
        bool,
        typer.Option("--guard-nil", help="Answer nil at once for keys that the filter of known keys does not know."),
    ] = False,
    guard_limit: Annotated[
        float | None,
        typer.Option("--guard-limit", metavar="N", help="Hold a pattern under an alert to N look-ups/s.", min=0.001),
    ] = None,
    *,
    knowledge: Knowledge,
    thresholds: Thresholds,
    memory: Memory,
    routing: Routing,
    showing: Showing,
    length: Length,
) -> int:
    """Stand in front of a Redis and watch what clients look up; bytes pass unchanged.

    Example: cache_pierce_detector proxy --listen 127.0.0.1:6380 --upstream 127.0.0.1:6379
    """
    from spikeprof.cli import pierce_live

    wanted = pierce_live.ProxyWanted(
        listen, upstream, tls, tls_ca, tls_name, tenant.value, hash_fields, known_scan, guard_nil, guard_limit
    )
    return pierce_live.proxy(wanted, knowledge, thresholds, memory, routing, showing, length)


@pierce.command("follow", short_help="Watch a file of JSON lines as it grows, like tail -F.")
@takes_groups
def follow(
    path: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Events {ts, key, hit, ttl?, tenant?}, one a line.", show_default=False),
    ],
    from_start: Annotated[bool, typer.Option("--from-start", help="Read what is in it already, too.")] = False,
    *,
    knowledge: Knowledge,
    thresholds: Thresholds,
    memory: Memory,
    routing: Routing,
    showing: Showing,
    length: Length,
) -> int:
    """Watch a file of JSON lines as it grows, like tail -F; rotation is followed."""
    from spikeprof.cli import pierce_live

    return pierce_live.follow(path, from_start, knowledge, thresholds, memory, routing, showing, length)


@pierce.command("replay", short_help="Say which alerts would have fired over recorded events.")
@takes_groups
def replay(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Events {ts, key, hit, ttl?, tenant?}, one a line; - = standard input.",
            show_default=False,
        ),
    ],
    speed: Annotated[str, typer.Option(metavar="max|N", help="As fast as it goes, or N times real time.")] = "max",
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    *,
    knowledge: Knowledge,
    thresholds: Thresholds,
    routing: Routing,
    showing: Showing,
) -> int:
    """Say which alerts would have fired over recorded events: the way to tune thresholds.

    Nothing is kept for the next run. Example: cache_pierce_detector replay events.jsonl --set qps_ratio=2
    """
    from spikeprof.cli import pierce_replay

    return pierce_replay.replay(path, speed, as_json, knowledge, thresholds, routing, showing)
