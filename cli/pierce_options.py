"""Options that the verbs of ``spikeprof pierce`` share, in groups, and how a verb takes a group."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from spikeprof.profiler.errors import UsageError

if TYPE_CHECKING:
    from spikeprof.analyzers.cache_pierce.options import Options


class FailOn(StrEnum):
    """From which severity on an alert fails the command."""

    warn = "warn"
    alert = "alert"
    critical = "critical"


class MailSecurity(StrEnum):
    """How mail travels."""

    starttls = "starttls"
    tls = "tls"
    none = "none"


SEVERITIES = tuple(FailOn)

#: What the extra `pierce` installs.
_EXTRA = ("aiosmtplib", "httpx", "prometheus_client", "rbloom", "redis", "zmq")


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What counts as usual and what as an attack."""

    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Another threshold, e.g. --set min_qps=50; again for more. Names and"
            " defaults: docs/pierce.md.",
        ),
    ] = None  # fmt: skip


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Which keys exist at all."""

    known: Annotated[
        Path | None,
        typer.Option("--known", metavar="FILE", help="Keys that exist, one a line: others are illegal."),
    ] = None
    known_learn_s: Annotated[
        float,
        typer.Option(
            "--known-learn", metavar="S", help="Learn which keys exist from look-ups that hit; use it after S seconds."
        ),
    ] = 0.0
    known_refresh_s: Annotated[
        float, typer.Option("--known-refresh", metavar="S", help="Build the filter anew every S seconds; 0 = never.")
    ] = 0.0
    known_capacity: Annotated[
        int, typer.Option("--known-capacity", metavar="N", help="Keys that the filter has room for.", min=1)
    ] = 1_000_000
    known_false_positives: Annotated[
        float,
        typer.Option(
            "--known-false-positives", metavar="SHARE", help="Share of made-up keys that it takes for known ones."
        ),
    ] = 0.001


@dataclass(frozen=True, slots=True)
class Memory:
    """Where baselines come from and go to."""

    baselines: Annotated[
        str,
        typer.Option(
            metavar="FILE|none",
            help="SQLite file that keeps baselines over restarts.",
            show_default="~/.local/state/spikeprof/pierce.sqlite",
        ),
    ] = ""
    baselines_prometheus: Annotated[
        str, typer.Option(metavar="URL", help="Read them at the start from this Prometheus, too.")
    ] = ""
    baselines_selector: Annotated[
        str, typer.Option(metavar="LABELS", help="Labels that choose the detector there, e.g. job=\"pierce\".")
    ] = ""  # fmt: skip


@dataclass(frozen=True, slots=True)
class Routing:
    """Where notices go besides the terminal. Secrets are named here and read from the environment."""

    jsonl: Annotated[
        Path | None, typer.Option("--jsonl", metavar="FILE", help="Append alerts as OpenTelemetry log records.")
    ] = None
    webhook_url_env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:KIND]",
            help="Environment variable that holds a webhook's URL; kind: json, slack, dingtalk, feishu or wecom [json]."
            " Again for more.",
        ),
    ] = None
    webhook_secret_env: Annotated[
        str, typer.Option(metavar="NAME", help="Environment variable that holds the key to sign with.")
    ] = ""
    smtp: Annotated[str, typer.Option(metavar="HOST:PORT", help="Mail alerts through this server.")] = ""
    smtp_from: Annotated[str, typer.Option(metavar="ADDRESS", help="Sender.")] = ""
    smtp_to: Annotated[list[str] | None, typer.Option(metavar="ADDRESS", help="Recipient; again for more.")] = None
    smtp_user: Annotated[str, typer.Option(metavar="NAME", help="User to log in as.")] = ""
    smtp_password_env: Annotated[
        str, typer.Option(metavar="NAME", help="Environment variable that holds the password.")
    ] = ""
    smtp_security: Annotated[MailSecurity, typer.Option(help="none is for a server on this machine alone.")] = (
        MailSecurity.starttls
    )
    metrics_port: Annotated[
        int | None,
        typer.Option(metavar="N", help="Serve Prometheus /metrics on this port; 0 = a free one.", min=0, max=65535),
    ] = None
    metrics_host: Annotated[str, typer.Option(metavar="HOST", help="Address to serve metrics on.")] = "127.0.0.1"
    flush_s: Annotated[
        float, typer.Option("--flush", metavar="S", help="How long the end waits for notices on their way.", min=0)
    ] = 10.0


@dataclass(frozen=True, slots=True)
class Showing:
    """What is shown, and how the command ends."""

    redact: Annotated[bool, typer.Option("--redact", help="Show hashes in place of keys, everywhere.")] = False
    redact_secret_env: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Environment variable with the key of these hashes, to compare between runs."
        ),
    ] = ""
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page at the end.")] = None
    fail_on: Annotated[
        FailOn | None,
        typer.Option("--fail-on", help="Exit with 1 when there was an alert of this severity or above."),
    ] = None

    def check_page(self) -> None:
        """Refuse before the start a page that could not be written at the end. Raises OutputError."""
        from spikeprof.cli import outputs

        if self.html is not None:
            outputs.check(self.html, outputs.is_html_report)


@dataclass(frozen=True, slots=True)
class Length:
    """How long a live source is watched."""

    seconds: Annotated[float, typer.Option(metavar="S", help="End after S seconds; 0 = at Ctrl-C.", min=0)] = 0.0


@dataclass(frozen=True, slots=True)
class Watching:
    """What everything that goes on takes, whatever its source."""

    thresholds: Thresholds = field(default_factory=Thresholds)
    memory: Memory = field(default_factory=Memory)
    routing: Routing = field(default_factory=Routing)
    showing: Showing = field(default_factory=Showing)
    length: Length = field(default_factory=Length)


def takes_groups(verb: Callable[..., int]) -> Callable[..., int]:
    """The verb with every parameter that is a group of options, or of groups, spelled out as those options."""
    parameters = list(inspect.signature(verb, eval_str=True).parameters.values())
    groups = {p.name: p.annotation for p in parameters if is_dataclass(p.annotation)}
    spelled = [q for p in parameters for q in (_options_of(groups[p.name]) if p.name in groups else [p])]
    required = [p for p in spelled if p.default is p.empty]
    signature = inspect.Signature(
        [p.replace(kind=p.KEYWORD_ONLY) for p in (*required, *(p for p in spelled if p.default is not p.empty))]
    )

    @functools.wraps(verb)
    def spelled_out(**values: Any) -> int:
        _require_extra()
        made = {name: _made(group, values) for name, group in groups.items()}
        return verb(**values, **made)

    spelled_out.__signature__ = signature  # type: ignore[attr-defined]
    spelled_out.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()} | {"return": int}
    del spelled_out.__wrapped__  # its annotations would be looked at instead
    return spelled_out


def _require_extra() -> None:
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        raise UsageError(f"this needs {', '.join(missing)}: pip install 'spikeprof[pierce]'")


def _options_of(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for one in fields(group):
        if is_dataclass(hints[one.name]):
            yield from _options_of(hints[one.name])
        else:
            default = inspect.Parameter.empty if one.default is MISSING else one.default
            kind = inspect.Parameter.KEYWORD_ONLY
            yield inspect.Parameter(one.name, kind, default=default, annotation=hints[one.name])


def _made(group: Any, values: dict[str, Any]) -> Any:
    """The group of these values, which are taken out."""
    hints = get_type_hints(group)
    return group(
        **{name: _made(hint, values) if is_dataclass(hint) else values.pop(name) for name, hint in hints.items()}
    )


def detector_options(settings: Sequence[str] | None) -> Options:
    """The detector's options with ``NAME=VALUE`` applied. Raises UsageError for unknown names and odd values."""
    from spikeprof.analyzers.cache_pierce.options import Options

    usual: Mapping[str, Any] = {option.name: option.default for option in fields(Options)}
    chosen: dict[str, Any] = {}
    for setting in settings or ():
        name, _, text = setting.partition("=")
        if name not in usual:
            raise UsageError(f"--set {setting}: there is no threshold {name!r}; there are {', '.join(usual)}")
        try:
            value = type(usual[name])(text.replace("_", ""))
        except ValueError:
            kind = "a whole number" if isinstance(usual[name], int) else "a number"
            raise UsageError(f"--set {setting}: write {kind}, as in --set {name}={usual[name]}") from None
        if not math.isfinite(value):
            raise UsageError(f"--set {setting}: the value must be finite")
        chosen[name] = value
    return Options(**chosen)


def address(text: str, option: str) -> tuple[str, int]:
    """``HOST:PORT`` (IPv6 in brackets) as both. Raises UsageError."""
    host, colon, port = text.rpartition(":")
    if colon and port.isascii() and port.isdecimal() and int(port) <= 65535 and host:
        return host.removeprefix("[").removesuffix("]"), int(port)
    raise UsageError(f"{option} {text}: write HOST:PORT, as in {option} 127.0.0.1:6379")
