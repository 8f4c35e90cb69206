from __future__ import annotations

import asyncio
import email
import email.policy
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest
from reports.pierce import made

from spikeprof.analyzers.cache_pierce.model import Alert
from spikeprof.profiler.errors import UsageError
from spikeprof.reports.pierce import smtp
from spikeprof.reports.pierce.routes import RouteError
from spikeprof.reports.pierce.smtp import MailServer, SmtpRoute

controllers = pytest.importorskip("aiosmtpd.controller", reason="aiosmtpd is not installed (extra `test`)")
from aiosmtpd.smtp import AuthResult, LoginPassword  # noqa: E402

PASSWORD = "T0PSECRET-pass"


class Sink:
    """Keeps mail; refuses recipients as told: {address: answers, one for each time}."""

    def __init__(self) -> None:
        self.mails: list[tuple[list[str], EmailMessage]] = []
        self.refused: dict[str, list[str]] = {}
        self.data_answer = "250 kept"
        self.users: list[bytes] = []

    async def handle_RCPT(self, server: Any, session: Any, envelope: Any, address: str, options: Any) -> str:
        if self.refused.get(address):
            return self.refused[address].pop(0)
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        if self.data_answer == "hang":
            await asyncio.sleep(30)
        message = email.message_from_bytes(envelope.content, policy=email.policy.default)
        if self.data_answer.startswith("250"):
            self.mails.append((list(envelope.rcpt_tos), message))  # type: ignore[arg-type]
        return self.data_answer

    def authenticate(self, server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
        good = isinstance(data, LoginPassword) and data.password == PASSWORD.encode()
        if good:
            self.users.append(data.login)
        return AuthResult(success=good, handled=False)


@contextmanager
def mail_sink(sink: Sink, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    extra = {"tls_context": tls, "require_starttls": True, "authenticator": sink.authenticate} if tls else {}
    controller = controllers.Controller(sink, hostname="127.0.0.1", port=port, **extra)
    controller.start()
    try:
        yield port
    finally:
        controller.stop()


def mail(route: SmtpRoute, alert: Alert | None = None) -> None:
    asyncio.run(route.send(alert or made.alert()))


def local(port: int, *recipients: str) -> SmtpRoute:
    return SmtpRoute(MailServer("127.0.0.1", port, "none"), "pierce@example.com", recipients or ("ops@example.com",))


def test_a_mail_arrives() -> None:
    sink = Sink()
    with mail_sink(sink) as port:
        mail(local(port, "ops@example.com", "boss@example.com"))
    ((recipients, message),) = sink.mails
    assert recipients == ["ops@example.com", "boss@example.com"]
    assert message["Subject"].startswith("ALERT: Cache penetration: user:{n}: Miss rate 97.2 %")
    assert message["From"] == "pierce@example.com"
    assert message["Auto-Submitted"] == "auto-generated"
    text = message.get_content()
    assert "Look-ups 1,250/s (limit 775/s, usually 310/s)" in text
    assert "user:901" in text
    assert "What to do" in text


def test_a_hostile_key_makes_no_header_and_ends_no_mail() -> None:
    sink = Sink()
    hostile = made.alert(pattern="x\r\nBcc: everybody@example.com", keys=("\r\n.\r\nMAIL FROM:<x>", "é中😀"))
    with mail_sink(sink) as port:
        mail(local(port), hostile)
    ((recipients, message),) = sink.mails
    assert recipients == ["ops@example.com"]
    assert message["Bcc"] is None
    assert "é中😀" in message.get_content()


def test_starttls_with_password_and_a_verified_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = made.certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    sink = Sink()
    with mail_sink(sink, context) as port:
        server = MailServer("127.0.0.1", port, "starttls", "robot", PASSWORD)
        route = SmtpRoute(server, "pierce@example.com", ["ops@example.com"])
        with pytest.raises(RouteError, match="certificate was not accepted") as caught:
            mail(route)
        assert caught.value.again
        assert sink.users == []  # the password was not sent to a server that nobody vouches for
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        mail(route)
        wrong = SmtpRoute(MailServer("127.0.0.1", port, "starttls", "robot", "wrong"), "a@example.com", ["b@c.d"])
        with pytest.raises(RouteError, match="not accepted: 535") as caught:
            mail(wrong)
        assert not caught.value.again
    assert (len(sink.mails), sink.users) == (1, [b"robot"])
    assert PASSWORD not in repr(server)


def test_a_server_without_starttls_gets_nothing() -> None:
    sink = Sink()
    with mail_sink(sink) as port:
        route = SmtpRoute(MailServer("127.0.0.1", port, "starttls"), "a@example.com", ["b@example.com"])
        with pytest.raises(RouteError, match="cannot reach it"):
            mail(route)
    assert sink.mails == []


def test_a_recipient_that_is_put_off_gets_it_later_and_the_others_once() -> None:
    sink = Sink()
    sink.refused = {"late@example.com": ["450 4.2.0 greylisted"]}
    with mail_sink(sink) as port:
        route = local(port, "ops@example.com", "late@example.com")
        with pytest.raises(RouteError, match=r"late@example\.com: 450") as caught:
            mail(route)
        assert caught.value.again
        mail(route)
    assert [recipients for recipients, _ in sink.mails] == [["ops@example.com"], ["late@example.com"]]
    assert sink.mails[0][1]["Message-ID"] == sink.mails[1][1]["Message-ID"]


def test_a_recipient_that_does_not_exist_is_told_and_not_tried_again() -> None:
    sink = Sink()
    sink.refused = {"nobody@example.com": ["550 no such user"]}
    with mail_sink(sink) as port, pytest.raises(RouteError, match="550 no such user") as caught:
        mail(local(port, "ops@example.com", "nobody@example.com"))
    assert not caught.value.again
    assert len(sink.mails) == 1


@pytest.mark.parametrize(("answer", "is_tried_again"), [("452 disk full", True), ("554 spam", False)])
def test_refused_mail(answer: str, is_tried_again: bool) -> None:
    sink = Sink()
    sink.data_answer = answer
    with mail_sink(sink) as port, pytest.raises(RouteError, match=answer[:3]) as caught:
        mail(local(port))
    assert caught.value.again is is_tried_again


def test_an_answer_that_never_comes_is_unclear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smtp, "ANSWER_S", 0.3)
    sink = Sink()
    sink.data_answer = "hang"
    with mail_sink(sink) as port, pytest.raises(RouteError) as caught:
        mail(local(port))
    assert (caught.value.again, caught.value.unclear) == (False, True)


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(RouteError, match="cannot reach it") as caught:
        mail(local(port))
    assert caught.value.again


def test_what_is_refused_before_the_start() -> None:
    with pytest.raises(UsageError, match="clear text"):
        MailServer("mail.example.com", 25, "none")
    with pytest.raises(UsageError, match="needs a password"):
        MailServer("mail.example.com", 587, "starttls", "robot")
    server = MailServer("mail.example.com", 587)
    for bad in ("", "nobody", "a@b\r\nBcc: c@d", "@example.com"):
        with pytest.raises(UsageError, match="no mail address"):
            SmtpRoute(server, bad, ["a@example.com"])
    with pytest.raises(UsageError, match="at least one recipient"):
        SmtpRoute(server, "a@example.com", [])
