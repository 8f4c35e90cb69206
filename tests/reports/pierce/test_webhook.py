from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import socket
import ssl
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from reports.pierce import made

from spikeprof.analyzers.cache_pierce.model import Alert
from spikeprof.profiler.errors import UsageError
from spikeprof.reports.pierce import chat, webhook
from spikeprof.reports.pierce.dispatcher import Dispatcher, DispatchOptions
from spikeprof.reports.pierce.routes import RouteError, notice_id
from spikeprof.reports.pierce.webhook import WebhookRoute

HOSTILE = made.alert(pattern='<at user_id="all">{n}', keys=("<!channel> `x`", "a\x1b[2Jb\r\nBcc: x"))


def post(url: str, template: str = "json", secret: str = "", alert: Alert | None = None) -> None:
    async def run() -> None:
        route = WebhookRoute(url, template, secret)
        try:
            await route.send(alert or made.alert())
        finally:
            await route.close()

    asyncio.run(run())


def refusal(url: str, template: str = "json") -> RouteError:
    with pytest.raises(RouteError) as caught:
        post(url, template)
    assert "T0PSECRETPATH" not in str(caught.value)
    return caught.value


def test_plain_json_is_a_log_record_with_an_id_against_repetition() -> None:
    with made.http_sink(made.HttpSink()) as sink:
        post(sink.url)
    (body,) = sink.bodies
    assert body["severity_text"] == "ALERT"
    assert body["severity_number"] == 17
    assert body["timestamp"] == "2026-11-30T17:01:05.000000Z"
    assert body["attributes"]["cache_pierce.evidence.miss_share"] == 0.972
    assert body["attributes"]["cache_pierce.evidence.miss_share.limit"] == 0.09
    assert sink.headers[0]["Idempotency-Key"] == notice_id(made.alert())


@pytest.mark.parametrize(
    ("template", "text_of", "answer"),
    [
        ("slack", lambda body: body["text"], b"ok"),
        ("dingtalk", lambda body: body["text"]["content"], b'{"errcode":0,"errmsg":"ok"}'),
        ("feishu", lambda body: body["content"]["text"], b'{"code":0,"msg":"success"}'),
        ("wecom", lambda body: body["text"]["content"], b'{"errcode":0,"errmsg":"ok"}'),
    ],
)
def test_chat_robots_get_text_that_calls_nobody(template: str, text_of: object, answer: bytes) -> None:
    with made.http_sink(made.HttpSink([(200, answer, {})])) as sink:
        post(sink.url, template)
        post(sink.url, template, alert=HOSTILE)
    first, second = (text_of(body) for body in sink.bodies)  # type: ignore[operator]
    assert first.startswith("ALERT: Cache penetration: user:{n}: Miss rate 97.2 % (limit 9.0 %, usually 3.0 %)")
    assert "What to do: " in first
    assert "<" not in second
    assert ">" not in second
    assert "\x1b" not in second


def test_messages_are_cut_to_what_the_robot_takes() -> None:
    long = made.alert(keys=tuple("é" * 200 + str(i) for i in range(5)), pattern="p{n}")
    body = chat.TEMPLATES["wecom"].body(long, 500)
    assert len(body["text"]["content"].encode()) <= 500
    assert body["text"]["content"].endswith("…")


@pytest.mark.parametrize(
    ("template", "answer", "is_tried_again"),
    [
        ("dingtalk", b'{"errcode":310000,"errmsg":"keywords not in content"}', False),
        ("dingtalk", b'{"errcode":130101,"errmsg":"send too fast"}', True),
        ("feishu", b'{"code":19021,"msg":"sign match fail"}', False),
        ("feishu", b'{"code":9499,"msg":"too many request"}', True),
        ("wecom", b'{"errcode":93000,"errmsg":"invalid webhook url"}', False),
        ("wecom", b'{"errcode":45009,"errmsg":"api freq out of limit"}', True),
        ("wecom", b"<html>", False),
    ],
)
def test_a_robot_that_refuses_with_200_is_heard(template: str, answer: bytes, is_tried_again: bool) -> None:
    with made.http_sink(made.HttpSink([(200, answer, {})])) as sink:
        error = refusal(sink.url, template)
    assert error.again is is_tried_again


@pytest.mark.parametrize(
    ("status", "is_tried_again"), [(500, True), (503, True), (429, True), (400, False), (404, False), (302, False)]
)
def test_states_of_http(status: int, is_tried_again: bool) -> None:
    headers = {"Retry-After": "7", "Location": "http://127.0.0.1:9/elsewhere"}
    with made.http_sink(made.HttpSink([(status, b"no T0PSECRETPATH \x1b[31mhere", headers)])) as sink:
        error = refusal(sink.url)
    assert error.again is is_tried_again
    assert error.wait_s == 7
    assert f"HTTP {status}" in str(error)
    assert "\x1b" not in str(error)
    assert len(sink.bodies) == 1  # a redirect is not followed


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        error = refusal(f"http://127.0.0.1:{free.getsockname()[1]}/T0PSECRETPATH")
    assert error.again
    assert "refused" in str(error)


@pytest.mark.parametrize(("template", "is_tried_again"), [("json", True), ("slack", False)])
def test_an_answer_that_never_comes(template: str, is_tried_again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "ANSWER_S", 0.2)
    with made.http_sink(made.HttpSink()) as sink:
        sink.hold.clear()
        error = refusal(sink.url, template)
    assert (error.again, error.unclear) == (is_tried_again, not is_tried_again)


def test_certificates_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = made.certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with made.http_sink(made.HttpSink(), context) as sink:
        error = refusal(sink.url)
        assert error.again
        assert "certificate was not accepted" in str(error)
        assert sink.bodies == []
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        post(sink.url)
        assert len(sink.bodies) == 1


def test_signatures() -> None:
    with made.http_sink(made.HttpSink([(200, b'{"errcode":0,"code":0}', {})])) as sink:
        post(sink.url, "json", "s3cret")
        post(sink.url, "dingtalk", "s3cret")
        post(sink.url, "feishu", "s3cret")
    expected = "sha256=" + hmac.new(b"s3cret", sink.raw[0], hashlib.sha256).hexdigest()
    assert sink.headers[0]["X-Signature-256"] == expected
    query = parse_qs(urlsplit(sink.paths[1]).query)
    message = f"{query['timestamp'][0]}\ns3cret".encode()
    assert base64.b64decode(query["sign"][0]) == hmac.new(b"s3cret", message, hashlib.sha256).digest()
    stamp = sink.bodies[2]["timestamp"]
    key = f"{stamp}\ns3cret".encode()
    assert base64.b64decode(sink.bodies[2]["sign"]) == hmac.new(key, b"", hashlib.sha256).digest()
    assert len(stamp) == 10


@pytest.mark.parametrize(
    "url", ["", "T0PSECRET", "ftp://h/T0PSECRET", "https:///T0PSECRET", "http://h:99999/T0PSECRET"]
)
def test_what_is_no_address_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        WebhookRoute(url)
    assert "T0PSECRET" not in str(caught.value)


def test_a_secret_where_no_signature_is_known() -> None:
    with pytest.raises(UsageError, match="take no signature"):
        WebhookRoute("https://example.com/x", "slack", "secret")


def test_the_name_holds_the_host_alone() -> None:
    route = WebhookRoute("https://robot:pass@hooks.example.com:8443/T0PSECRETPATH?key=T0PSECRET", "slack")
    assert route.name == "webhook slack at hooks.example.com:8443"
    assert not route.is_clear_text


def test_delivered_through_the_dispatcher_once_after_two_refusals() -> None:
    answers = [(503, b"", {}), (500, b"", {}), (200, b"ok", {})]
    said: list[str] = []

    async def run(url: str) -> None:
        options = DispatchOptions(first_wait_s=0.01)
        dispatcher = Dispatcher([WebhookRoute(url, "slack")], said.append, options)
        dispatcher.start()
        dispatcher.submit(made.alert())
        async with asyncio.timeout(5):
            while dispatcher.waiting_count:
                await asyncio.sleep(0.01)
        dispatcher.submit(made.alert())
        assert await dispatcher.close(1) == 0

    with made.http_sink(made.HttpSink(list(answers))) as sink:
        asyncio.run(run(sink.url))
    assert len(sink.bodies) == 3
    assert len(said) == 2
    assert not any("T0PSECRETPATH" in text for text in said)
