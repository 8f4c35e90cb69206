"""From the command line and the environment to routes. Secrets are read here, and shown nowhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spikeprof.cli.pierce_options import Routing, address
from spikeprof.profiler.errors import UsageError

if TYPE_CHECKING:
    from spikeprof.reports.pierce.routes import Route


def secret(name: str, option: str) -> str:
    """The value of the environment variable that an option names. Raises UsageError where it is not set or empty."""
    value = os.environ.get(name, "").strip()
    if not value:
        raise UsageError(f"{option} {name}: the environment variable {name} is not set: export it before the start")
    return value


def make_routes(routing: Routing, say: Callable[[str], None]) -> list[Route]:
    """The routes that were asked for, in the order of the help. Raises UsageError, OutputError."""
    routes: list[Route] = []
    if routing.jsonl is not None:
        from spikeprof.reports.pierce.jsonl import JsonlRoute

        routes.append(JsonlRoute(routing.jsonl))
    routes += _webhooks(routing, say)
    routes += _mail(routing)
    return routes


def _webhooks(routing: Routing, say: Callable[[str], None]) -> list[Any]:
    if not routing.webhook_url_env:
        if routing.webhook_secret_env:
            raise UsageError("--webhook-secret-env needs a webhook: name one with --webhook-url-env")
        return []
    from spikeprof.reports.pierce.chat import TEMPLATES
    from spikeprof.reports.pierce.webhook import WebhookRoute

    key = secret(routing.webhook_secret_env, "--webhook-secret-env") if routing.webhook_secret_env else ""
    routes = []
    for text in routing.webhook_url_env:
        name, _, kind = text.partition(":")
        if kind not in ("", *TEMPLATES):
            raise UsageError(f"--webhook-url-env {name}: there is no kind {kind!r}; there are {', '.join(TEMPLATES)}")
        route = WebhookRoute(secret(name, "--webhook-url-env"), kind or "json", key)
        if route.is_clear_text:
            say(f"note: {route.name}: the address begins with http://, notices travel in clear text")
        routes.append(route)
    return routes


def _mail(routing: Routing) -> list[Any]:
    if not routing.smtp:
        if routing.smtp_to or routing.smtp_from or routing.smtp_user or routing.smtp_password_env:
            raise UsageError("mail needs a server: name one with --smtp HOST:PORT")
        return []
    from spikeprof.reports.pierce.smtp import MailServer, SmtpRoute

    host, port = address(routing.smtp, "--smtp")
    if not routing.smtp_from or not routing.smtp_to:
        raise UsageError("--smtp needs --smtp-from and --smtp-to")
    password = secret(routing.smtp_password_env, "--smtp-password-env") if routing.smtp_password_env else ""
    server = MailServer(host, port, routing.smtp_security.value, routing.smtp_user, password)
    return [SmtpRoute(server, routing.smtp_from, routing.smtp_to)]
