"""Recorded look-ups with an attack in them, written by hand into JSON lines."""

from __future__ import annotations

import json
import random
from pathlib import Path

#: 2026-11-30 17:00:00 UTC
START_S = 1796058000.0


def write_events(
    path: Path, seconds: int = 200, attack: tuple[int, int] = (140, 170), seed: int = 7, broken: int = 0
) -> None:
    """Steady traffic of 140 look-ups/s; during the attack 300 more per second of users that do not exist.

    Of 80 ``user:{n}`` and 60 ``tenant shop cart:{n}:items`` look-ups per second 3 % miss.
    """
    draw = random.Random(seed)
    lines = []
    for second in range(seconds):
        events = [("", f"user:{draw.randrange(2000)}", draw.random() > 0.03) for _ in range(80)]
        events += [("shop", f"cart:{draw.randrange(500)}:items", draw.random() > 0.03) for _ in range(60)]
        if attack[0] <= second < attack[1]:
            events += [("", f"user:{draw.randrange(10**9, 10**10)}", False) for _ in range(300)]
        draw.shuffle(events)
        for number, (tenant, key, hit) in enumerate(events):
            event: dict[str, object] = {"ts": START_S + second + number / len(events), "key": key, "hit": hit}
            event |= {"ttl": 250 + draw.random() * 100} if hit else {}
            lines.append(json.dumps(event | ({"tenant": tenant} if tenant else {})))
    for number in range(broken):
        lines.insert(number * 97, '{"ts": 1, "key": ')
    path.write_text("\n".join(lines) + "\n")
