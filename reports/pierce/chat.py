"""What webhooks of chat robots take and answer: one template per kind, and plain JSON for everything else.

The formats are those of each product's public documentation of "incoming webhooks" or "custom robots". Robots of
DingTalk, Feishu and WeCom answer 200 to what they refuse, too, and say so in the body.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec

from spikeprof.analyzers.cache_pierce.model import Alert
from spikeprof.reports.pierce import texts
from spikeprof.reports.pierce.records import record

#: Angle brackets make mentions and links in chats: a hostile key must not call everybody.
_SLACK_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
_BRACKETS = str.maketrans({"<": "‹", ">": "›"})


@dataclass(frozen=True, slots=True)
class Template:
    """One kind of receiver. ``body`` makes the JSON from a notice; ``max_bytes`` is what the text may take.

    ``codes``: keys of the answer that hold 0 when it was taken. ``busy``: their values that ask to try again later.
    ``repeatable``: whether the receiver can tell a repetition (by ``Idempotency-Key``), so that an attempt whose
    answer was lost may be made again.
    """

    body: Callable[[Alert, int], dict[str, Any]]
    max_bytes: int
    codes: tuple[str, ...] = ()
    busy: tuple[int, ...] = ()
    repeatable: bool = False

    def refusal(self, answer: bytes) -> tuple[int, str] | None:
        """(code, reason) where the body of a 2xx answer is a refusal; None where it was taken."""
        if not self.codes:
            return None
        try:
            found = msgspec.json.decode(answer, type=dict[str, Any])
        except msgspec.MsgspecError:
            return (0, "the answer is not JSON: is this the webhook of such a robot?")
        code = next((found[key] for key in self.codes if isinstance(found.get(key), int)), None)
        if code == 0:
            return None
        reason = found.get("errmsg") or found.get("msg") or found.get("StatusMessage") or "no reason given"
        return (code or 0, str(reason))


def _plain(alert: Alert, _max_bytes: int) -> dict[str, Any]:
    return record(alert)


def _slack(alert: Alert, max_bytes: int) -> dict[str, Any]:
    return {"text": clipped(texts.message(alert).translate(_SLACK_ESCAPES), max_bytes)}


def _text(alert: Alert, max_bytes: int) -> dict[str, Any]:
    return {"msgtype": "text", "text": {"content": clipped(texts.message(alert).translate(_BRACKETS), max_bytes)}}


def _feishu(alert: Alert, max_bytes: int) -> dict[str, Any]:
    return {"msg_type": "text", "content": {"text": clipped(texts.message(alert).translate(_BRACKETS), max_bytes)}}


#: Limits of a text message: Slack 40,000 characters, DingTalk 20,000 bytes, Feishu 20 KB, WeCom 2,048 bytes.
TEMPLATES: Mapping[str, Template] = {
    "json": Template(_plain, 0, repeatable=True),
    "slack": Template(_slack, 12_000),
    "dingtalk": Template(_text, 15_000, ("errcode",), busy=(-1, 130101)),
    "feishu": Template(_feishu, 15_000, ("code", "StatusCode"), busy=(9499, 11232)),
    "wecom": Template(_text, 2_000, ("errcode",), busy=(-1, 45009)),
}

#: Templates whose receivers take a signature.
SIGNED = ("json", "dingtalk", "feishu")


def clipped(text: str, max_bytes: int) -> str:
    """The text in at most so many bytes of UTF-8, cut between characters."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return text
    return data[: max_bytes - 3].decode("utf-8", "ignore") + "…"


def signed(template: str, secret: str, now_s: float, body: dict[str, Any]) -> tuple[bytes, dict[str, str], str]:
    """The body as JSON with what the template's receiver wants as signature: (body, headers, addition to the query).

    json: ``X-Signature-256: sha256=HMAC(secret, body)``. dingtalk: ``timestamp`` in ms and ``sign`` in the query,
    HMAC-SHA256 of ``timestamp\\nsecret`` with the secret as key. feishu: both in the body, the key being
    ``timestamp\\nsecret`` and the message empty.
    """
    if not secret:
        return msgspec.json.encode(body, enc_hook=str), {}, ""
    if template == "dingtalk":
        stamp = f"{now_s * 1000:.0f}"
        sign = _digest(secret, f"{stamp}\n{secret}")
        return msgspec.json.encode(body), {}, f"timestamp={stamp}&sign={quote(sign, safe='')}"
    if template == "feishu":
        stamp = f"{now_s:.0f}"
        return msgspec.json.encode({"timestamp": stamp, "sign": _digest(f"{stamp}\n{secret}", ""), **body}), {}, ""
    data = msgspec.json.encode(body, enc_hook=str)
    return data, {"X-Signature-256": "sha256=" + hmac.new(secret.encode(), data, hashlib.sha256).hexdigest()}, ""


def _digest(key: str, message: str) -> str:
    return base64.b64encode(hmac.new(key.encode(), message.encode(), hashlib.sha256).digest()).decode()
