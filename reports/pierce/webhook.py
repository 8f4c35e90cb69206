"""The route to a webhook: JSON over HTTPS, for programs and for chat robots."""

from __future__ import annotations

import email.utils
import ssl
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from spikeprof.analyzers.cache_pierce.model import Alert
from spikeprof.profiler.errors import UsageError
from spikeprof.reports.kernel_names import clip, printable
from spikeprof.reports.pierce import chat
from spikeprof.reports.pierce.routes import RouteError, notice_id, system_reason

if TYPE_CHECKING:
    import httpx

CONNECT_S = 5.0
ANSWER_S = 10.0
_ANSWER_BYTES = 64 * 1024
_BUSY = (408, 425, 429)  # and every 5xx: the receiver says that it did not take it
_MAX_WAIT_S = 600.0  # what a receiver may ask for in Retry-After


class WebhookRoute:
    """Posts to ``url``, which is secret: what names this route shows its host alone.

    ``template`` is a key of ``chat.TEMPLATES``; ``secret`` signs where the template's receivers know signatures.
    Certificates are verified against the system's authorities (``SSL_CERT_FILE`` adds one's own); redirects are not
    followed. Raises UsageError for what is no http or https URL, and for a secret that the template cannot use.
    """

    def __init__(self, url: str, template: str = "json", secret: str = "") -> None:
        import httpx

        host = _host(url)
        if not host:
            raise UsageError("the webhook's address is no http:// or https:// URL (it is not shown: it may be secret)")
        if secret and template not in chat.SIGNED:
            raise UsageError(f"webhooks of kind {template} take no signature: leave the secret out")
        self.name = f"webhook {template} at {host}"
        self.is_clear_text = urlsplit(url).scheme == "http"
        self._url, self._kind, self._secret = url, template, secret
        self._template = chat.TEMPLATES[template]
        # A connection of its own for every notice: on one kept open, an answer that fails to come says nothing about
        # whether the request was read.
        self._client = httpx.AsyncClient(
            verify=ssl.create_default_context(),
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            limits=httpx.Limits(max_keepalive_connections=0),
            headers={"User-Agent": "cache_pierce_detector", "Content-Type": "application/json; charset=utf-8"},
        )

    async def send(self, alert: Alert) -> None:
        """Post one notice."""
        import httpx

        body = self._template.body(alert, self._template.max_bytes)
        data, headers, query = chat.signed(self._kind, self._secret, time.time(), body)
        if self._template.repeatable:
            headers["Idempotency-Key"] = notice_id(alert)
        url = f"{self._url}{'&' if '?' in self._url else '?'}{query}" if query else self._url
        try:
            async with self._client.stream("POST", url, content=data, headers=headers) as response:
                answer = await _read(response)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, httpx.WriteError, httpx.WriteTimeout) as e:
            raise RouteError(f"cannot reach it: {_why(e)}", again=True) from None
        except (httpx.HTTPError, OSError) as e:
            again = self._template.repeatable
            raise RouteError(f"sent, but no whole answer came: {_why(e)}", again=again, unclear=not again) from None
        self._judge(response, answer)

    async def close(self) -> None:
        """Close the client."""
        await self._client.aclose()

    def _judge(self, response: httpx.Response, answer: bytes) -> None:
        status = response.status_code
        if not 200 <= status < 300:
            says = clip(printable(answer.decode("utf-8", "replace")), 80).strip()
            about = f"; it says: {says}" if says and status not in range(300, 400) else ""
            again = status in _BUSY or status >= 500
            text = f"HTTP {status} {printable(response.reason_phrase)}".rstrip()
            raise RouteError(text + self._hidden(about), again=again, wait_s=_asked_wait_s(response))
        refusal = self._template.refusal(answer)
        if refusal:
            code, reason = refusal
            text = f"refused with code {code}: {clip(printable(reason), 120)}"
            raise RouteError(self._hidden(text), again=code in self._template.busy)

    def _hidden(self, text: str) -> str:
        """The text without the secret parts of the URL, should the receiver repeat them."""
        parts = urlsplit(self._url)
        pieces = [*parts.path.split("/"), *parts.query.replace("&", "=").split("="), parts.password, self._secret]
        for piece in pieces:
            if piece and len(piece) >= 6:
                text = text.replace(piece, "…")
        return text


def _host(url: str) -> str:
    """Host and port of an http or https URL, without user and password; empty for anything else."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return ""
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable() or " " in url:
        return ""
    return printable(parts.hostname) + port


def _why(error: Exception) -> str:
    """What went wrong, in words that hold no URL."""
    import httpx

    if isinstance(error, httpx.TimeoutException):
        return f"nothing within {CONNECT_S if isinstance(error, httpx.ConnectTimeout) else ANSWER_S:g} s"
    return system_reason(error) or type(error).__name__


async def _read(response: httpx.Response) -> bytes:
    """The answer's body, of a large one its beginning."""
    answer = b""
    async for piece in response.aiter_bytes():
        answer += piece
        if len(answer) >= _ANSWER_BYTES:
            break
    return answer[:_ANSWER_BYTES]


def _asked_wait_s(response: httpx.Response) -> float:
    """Retry-After in seconds, given as such or as a date; 0 where there is none."""
    text = response.headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdecimal():
        return min(float(text), _MAX_WAIT_S)
    try:
        asked = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError):
        return 0.0
    return min(max(asked, 0.0), _MAX_WAIT_S)
