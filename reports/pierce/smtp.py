"""The route by e-mail: SMTP, encrypted and with a verified certificate unless the server is this machine."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from email.errors import MessageError
from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import formatdate
from typing import TYPE_CHECKING, Literal

from spikeprof.analyzers.cache_pierce.model import Alert
from spikeprof.profiler.errors import UsageError
from spikeprof.reports.kernel_names import clip, printable
from spikeprof.reports.pierce import texts
from spikeprof.reports.pierce.routes import RouteError, notice_id, system_reason

if TYPE_CHECKING:
    from aiosmtplib import SMTP

ANSWER_S = 10.0
Security = Literal["starttls", "tls", "none"]


@dataclass(frozen=True, slots=True)
class MailServer:
    """Where mail is handed in. ``security``: starttls (port 587 as a rule), tls from the start (465), or none.

    ``none`` is for a server on this machine alone. Raises UsageError for it anywhere else.
    """

    host: str
    port: int
    security: Security = "starttls"
    user: str = ""
    password: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.security == "none" and not _is_loopback(self.host):
            raise UsageError(
                f"mail to {self.host} would travel in clear text: use starttls or tls, or a server on this machine"
            )
        if bool(self.user) != bool(self.password):
            raise UsageError("a mail user needs a password, and a password a user")


class SmtpRoute:
    """Mails every notice from ``sender`` to ``recipients``. Raises UsageError for addresses that are none.

    A recipient that is put off (greylisting) gets the notice later, those who have it do not get it again.
    """

    def __init__(self, server: MailServer, sender: str, recipients: Sequence[str]) -> None:
        self.name = f"smtp {server.host}:{server.port}"
        self._server = server
        self._sender, self._recipients = _address(sender), [_address(r) for r in recipients]
        if not recipients:
            raise UsageError("a mail needs at least one recipient")
        self._put_off: dict[str, list[str]] = {}

    async def send(self, alert: Alert) -> None:
        """Mail one notice over a connection of its own."""
        import aiosmtplib

        security = self._server.security
        client = aiosmtplib.SMTP(
            hostname=self._server.host,
            port=self._server.port,
            use_tls=security == "tls",
            start_tls=security == "starttls",
            tls_context=ssl.create_default_context(),
            timeout=ANSWER_S,
        )
        identity = notice_id(alert)
        try:
            await self._greet(client)
            refused = await self._hand_in(client, alert, self._put_off.get(identity, self._recipients))
        finally:
            client.close()
        self._put_off.pop(identity, None)
        if later := [address for address, (code, _) in refused.items() if code < 500]:
            self._put_off[identity] = later
        if refused:
            text = "; ".join(f"{address}: {_answer(*answer)}" for address, answer in refused.items())
            raise RouteError(f"not every recipient was taken: {text}", again=bool(later))

    async def close(self) -> None:
        """Nothing is kept open."""

    async def _greet(self, client: SMTP) -> None:
        import aiosmtplib

        try:
            await client.connect()
            if self._server.user:
                await client.login(self._server.user, self._server.password)
        except aiosmtplib.SMTPAuthenticationError as e:
            raise RouteError(
                f"user or password not accepted: {_answer(e.code, e.message)}", again=e.code < 500
            ) from None
        except (aiosmtplib.SMTPException, OSError, ValueError) as e:
            raise RouteError(f"cannot reach it: {_why(e)}", again=True) from None

    async def _hand_in(self, client: SMTP, alert: Alert, recipients: Sequence[str]) -> dict[str, tuple[int, str]]:
        """Recipients that were not taken, with the server's answer. Raises RouteError where none was."""
        import aiosmtplib

        refused: dict[str, tuple[int, str]] = {}
        try:
            await client.mail(self._sender)
            for address in recipients:
                try:
                    await client.rcpt(address)
                except aiosmtplib.SMTPRecipientRefused as e:
                    refused[address] = (e.code, e.message)
            if len(refused) == len(recipients):
                return refused
        except aiosmtplib.SMTPResponseException as e:
            raise RouteError(f"refused: {_answer(e.code, e.message)}", again=e.code < 500) from None
        except (aiosmtplib.SMTPException, OSError) as e:
            raise RouteError(f"the connection broke: {_why(e)}", again=True) from None
        try:
            await client.data(self._message(alert).as_bytes())
        except aiosmtplib.SMTPResponseException as e:
            raise RouteError(f"refused: {_answer(e.code, e.message)}", again=e.code < 500) from None
        except (aiosmtplib.SMTPException, OSError) as e:
            raise RouteError(f"sent, but no answer came: {_why(e)}", again=False, unclear=True) from None
        return refused

    def _message(self, alert: Alert) -> EmailMessage:
        message = EmailMessage()
        message["Subject"] = clip(texts.summary(alert), 180)
        message["From"] = self._sender
        message["To"] = ", ".join(self._recipients)
        message["Date"] = formatdate()
        message["Message-ID"] = f"<{notice_id(alert)}@cache-pierce-detector.invalid>"
        message["Auto-Submitted"] = "auto-generated"  # RFC 3834: nobody's holiday answer comes back
        message.set_content(texts.message(alert))
        return message


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(text: str) -> str:
    try:
        parsed = Address(addr_spec=text)
    except (ValueError, IndexError, MessageError) as error:
        raise UsageError(f"{printable(text)!r} is no mail address: write name@example.com") from error
    if not parsed.domain or not text.isprintable():
        raise UsageError(f"{printable(text)!r} is no mail address: write name@example.com")
    return text


def _answer(code: int, message: str) -> str:
    return f"{code} {clip(printable(' '.join(message.split())), 120)}"


def _why(error: Exception) -> str:
    return system_reason(error) or clip(printable(str(error)), 120) or type(error).__name__
