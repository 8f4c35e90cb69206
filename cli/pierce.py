"""``spikeprof pierce``: watch the look-ups of a cache for penetration. One function per source of look-ups."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from spikeprof.cli.inputs import BETWEEN_HELP
from spikeprof.cli.pierce_options import FailOn, Knowledge, Routing, Showing, Thresholds, Watching, takes_groups

pierce = typer.Typer(
    name="pierce",
    help="Alert on cache penetration: look-ups of keys that are in no cache and in no store behind it.",
    short_help="Alert on cache penetration.",
    epilog="Exit codes: 0 done, 1 --fail-on was met, 2 wrong command line, 3 unreadable input, 4 unwritable output.",
    add_completion=False,
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
    ttl_keys: Annotated[
        int,
        typer.Option(metavar="N", help="Ask the Redis how long N of the entries found every 50 ms still live.", min=0),
    ] = 0,
    redis_user: Annotated[str, typer.Option(metavar="NAME", help="User for --known-scan and --ttl-keys.")] = "",
    redis_password_env: Annotated[
        str, typer.Option(metavar="NAME", help="Environment variable that holds the password of that user.")
    ] = "",
    reply_timeout: Annotated[
        float, typer.Option(metavar="S", help="Refuse a client that waits longer for an answer; 0 = never.", min=0)
    ] = 0.0,
    *,
    knowledge: Knowledge,
    watching: Watching,
) -> int:
    """Stand in front of a Redis and watch what clients look up; bytes pass unchanged.

    Example: cache_pierce_detector proxy --listen 127.0.0.1:6380 --upstream 127.0.0.1:6379
    """
    from spikeprof.cli import pierce_live

    wanted = pierce_live.ProxyWanted(
        listen=listen,
        upstream=upstream,
        tls=tls,
        tls_ca=tls_ca,
        tls_name=tls_name,
        tenant=tenant.value,
        hash_fields=hash_fields,
        known_scan=known_scan,
        guard_nil=guard_nil,
        guard_limit=guard_limit,
        user=redis_user,
        password_env=redis_password_env,
        ttl_keys=ttl_keys,
        reply_timeout_s=reply_timeout,
    )
    return pierce_live.proxy(wanted, knowledge, watching)


@pierce.command("monitor", short_help="Watch a Redis by MONITOR, without a proxy.")
@takes_groups
def monitor(
    redis: Annotated[str, typer.Option("--redis", metavar="HOST:PORT", help="The Redis to watch.")] = "127.0.0.1:6379",
    redis_user: Annotated[str, typer.Option(metavar="NAME", help="User that may run MONITOR and INFO.")] = "",
    redis_password_env: Annotated[
        str, typer.Option(metavar="NAME", help="Environment variable that holds the password.")
    ] = "",
    every: Annotated[float, typer.Option(metavar="S", help="Ask for hits and misses this often.", min=0.01)] = 0.1,
    *,
    knowledge: Knowledge,
    watching: Watching,
) -> int:
    """Watch a Redis by MONITOR and INFO, without a proxy: a quick look, which costs the server throughput.

    MONITOR shows no replies: where hits and misses mix, which key missed is an estimate. The proxy knows.
    """
    from spikeprof.cli import pierce_live

    return pierce_live.monitor(redis, redis_user, redis_password_env, every, knowledge, watching)


@pierce.command("engine", short_help="Watch the prefix cache of vLLM or SGLang.")
@takes_groups
def engine(
    zmq: Annotated[
        str, typer.Option("--zmq", metavar="ENDPOINT", help="KV-cache events: the engine's PUB socket.")
    ] = "",
    zmq_replay: Annotated[
        str, typer.Option("--zmq-replay", metavar="ENDPOINT", help="The engine's socket that replays missed events.")
    ] = "",
    events: Annotated[
        Path | None, typer.Option("--events", metavar="FILE", help="Recorded events, one batch of JSON a line.")
    ] = None,
    metrics: Annotated[
        str, typer.Option("--metrics", metavar="URL", help="Scrape hit and query counters, without keys.")
    ] = "",
    every: Annotated[float, typer.Option(metavar="S", help="Scrape this often.", min=0.05)] = 1.0,
    *,
    watching: Watching,
) -> int:
    """Watch the prefix cache of vLLM or SGLang, for prompts that defeat it. Name one of --zmq, --events, --metrics.

    Example: cache_pierce_detector engine --zmq tcp://127.0.0.1:5557
    """
    from spikeprof.cli import pierce_engine

    wanted = pierce_engine.EngineWanted(zmq, zmq_replay, events, metrics, every)
    return pierce_engine.engine(wanted, watching)


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
    watching: Watching,
) -> int:
    """Watch a file of JSON lines as it grows, like tail -F; rotation is followed."""
    from spikeprof.cli import pierce_live

    return pierce_live.follow(path, from_start, knowledge, watching)


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


@pierce.command("trace", short_help="Look for jumps of L2 misses in a recorded trace.")
@takes_groups
def trace(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A trace folder with counters.", show_default=False)],
    between: Annotated[str, typer.Option(metavar="BEGIN,END", help=BETWEEN_HELP)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    fail_on: Annotated[
        FailOn | None,
        typer.Option(
            "--fail-on", help="Exit with 1 on an alert of this severity or above, or where none was possible."
        ),
    ] = None,
    *,
    thresholds: Thresholds,
) -> int:
    """Look for kernels whose L2 misses jump over their baseline in a recorded trace; no GPU needed.

    The start of a program is such a jump: leave it out with --between.
    Record one with: spikeprof run --counters=l2_sectors_count,l2_hit_sectors_count -- PROGRAM
    """
    from spikeprof.cli import pierce_trace

    return pierce_trace.trace(path, between, as_json, fail_on.value if fail_on else "", thresholds)
