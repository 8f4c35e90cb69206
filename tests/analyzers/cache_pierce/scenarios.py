"""Labelled traffic: what a cache saw, and which alerts it should have led to.

Hits and misses come from a simulated cache with times to live and a delay until a missed key is filled; nothing here
knows the detector's thresholds, except where a label says from when on true rates pass the rule's limits. Each scenario
is a function of a random generator and of look-ups per second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from spikeprof.profiler.lookups import Lookups, lookups

T0_S = 1_700_000_000.0
WARM_S = 330.0  # before anything happens: over five minutes
BLOCK_S = 2.0


@dataclass(frozen=True)
class Expected:
    """One incident: an alert of ``rule`` must come within ``within_s`` of ``start_s``; more until ``end_s`` are of it.

    ``tenant`` None: any.
    """

    rule: str
    start_s: float
    end_s: float
    within_s: float = 2.0
    tenant: str | None = ""
    delay_from_s: float | None = None  # what delays are counted from, where it is not the start


@dataclass
class Scenario:
    """Look-ups in the order in which they arrive, and what should be said about them. Times are seconds after T0_S."""

    name: str
    ts_s: np.ndarray
    arrival_s: np.ndarray
    keys: np.ndarray  # objects
    hits: np.ndarray
    ttls_s: np.ndarray
    tenants: np.ndarray
    expected: tuple[Expected, ...] = ()
    known: list[str] | None = None  # keys that exist, where the detector is told
    restart_s: float | None = None  # the detector is started anew then, with its baselines
    also: frozenset[str] = field(default_factory=frozenset)  # rules that may fire with the incident as well

    def blocks(self, block_s: float = BLOCK_S) -> Iterator[tuple[float, Lookups]]:
        """Blocks of look-ups in order of arrival, each with the time of arrival at which it ends."""
        order = np.argsort(self.arrival_s, kind="stable")
        arrival = self.arrival_s[order]
        bounds = np.arange(0.0, arrival[-1] + block_s, block_s)
        cuts = np.searchsorted(arrival, bounds)
        for end_s, first, last in zip(bounds[1:], cuts[:-1], cuts[1:], strict=True):
            part = order[first:last]
            if len(part):
                yield (
                    float(end_s),
                    lookups(
                        T0_S + self.ts_s[part], self.keys[part].tolist(), self.hits[part], self.ttls_s[part],
                        self.tenants[part].tolist(),
                    ),
                )  # fmt: skip


Rng = np.random.Generator
Wave = Callable[[np.ndarray], np.ndarray]


def arrivals(
    rng: Rng, qps: float, start_s: float, end_s: float, wave: Wave | None = None, burst: float = 0.15
) -> np.ndarray:
    """Times of a Poisson process whose rate wanders by ``burst`` from second to second, times ``wave`` of time."""
    seconds = np.arange(start_s, end_s, 1.0)
    rate = qps * rng.gamma(1 / burst**2, burst**2, len(seconds))
    if wave is not None:
        rate *= wave(seconds + 0.5)
    counts = rng.poisson(rate)
    times = np.repeat(seconds, counts) + rng.random(int(counts.sum()))
    return np.sort(times[times < end_s])


@dataclass
class Cache:
    """A cache with times to live in front of a store in which keys below ``exists`` are."""

    ttl_s: float
    fill_s: float = 0.03
    entries: dict[object, tuple[float, float]] = field(default_factory=dict)

    def look_up(
        self, rng: Rng, ts_s: np.ndarray, keys: np.ndarray, exists: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Hits, and the time that hit entries had left, of look-ups in order of time."""
        hits, left_s = np.zeros(len(ts_s), bool), np.full(len(ts_s), np.nan)
        lives = self.ttl_s * rng.uniform(0.8, 1.2, len(ts_s))
        entries, fill_s = self.entries, self.fill_s
        for i, (t, key, there, life) in enumerate(
            zip(ts_s.tolist(), keys.tolist(), exists.tolist(), lives.tolist(), strict=True)
        ):
            entry = entries.get(key)
            if entry is not None and t < entry[1]:
                if t >= entry[0]:
                    hits[i], left_s[i] = True, entry[1] - t
            elif there:
                entries[key] = (t + fill_s, t + fill_s + life)
        return hits, left_s


def popular(rng: Rng, count: int, keys_count: int, skew: float = 1.1) -> np.ndarray:
    """``count`` picks of ids below ``keys_count``, few of them often."""
    weights = 1 / np.arange(1, keys_count + 1) ** skew
    return rng.choice(keys_count, count, p=weights / weights.sum())


@dataclass
class Traffic:
    """Look-ups put together from several sources, and run through one cache."""

    rng: Rng
    cache: Cache
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, str]] = field(default_factory=list)

    def add(self, ts_s: np.ndarray, keys: list[str], exists: bool | np.ndarray = True, tenant: str = "") -> None:
        """Add look-ups."""
        there = np.broadcast_to(np.asarray(exists), len(ts_s))
        self.parts.append((ts_s, np.array(keys, object), there, tenant))

    def usual(
        self,
        qps: float,
        start_s: float,
        end_s: float,
        prefix: str = "user:",
        tenant: str = "",
        wave: Wave | None = None,
        keys_count: int = 3000,
        first_id: int = 0,
        missing_share: float = 0.01,
    ) -> None:
        """Everyday look-ups: popular and rare ids, and a few that do not exist."""
        ts_s = arrivals(self.rng, qps, start_s, end_s, wave)
        ids = popular(self.rng, len(ts_s), keys_count) + first_id
        there = self.rng.random(len(ts_s)) >= missing_share
        ids = np.where(there, ids, self.rng.integers(10**7, 10**8, len(ts_s)))
        self.add(ts_s, [f"{prefix}{i}" for i in ids.tolist()], there, tenant)

    def attack(
        self, qps: float, start_s: float, end_s: float, make: Callable[[int], list[str]], tenant: str = "",
        wave: Wave | None = None,
    ) -> None:  # fmt: skip
        """Look-ups of keys that exist nowhere."""
        ts_s = arrivals(self.rng, qps, start_s, end_s, wave, burst=0.05)
        self.add(ts_s, make(len(ts_s)), False, tenant)

    def done(self, name: str, flush_s: tuple[float, ...] = (), **more: object) -> Scenario:
        """Everything in order of time, through the cache, which is emptied at ``flush_s``."""
        ts_s = np.concatenate([part[0] for part in self.parts])
        order = np.argsort(ts_s, kind="stable")
        ts_s = ts_s[order]
        keys = np.concatenate([part[1] for part in self.parts])[order]
        there = np.concatenate([part[2] for part in self.parts])[order]
        tenants = np.concatenate([np.full(len(part[0]), part[3], object) for part in self.parts])[order]
        hits, left_s = [], []
        cuts = [0, *np.searchsorted(ts_s, flush_s).tolist(), len(ts_s)]
        named = keys if len(set(tenants.tolist())) == 1 else tenants + "/" + keys
        for first, last in pairwise(cuts):
            if first:
                self.cache.entries.clear()
            found = self.cache.look_up(self.rng, ts_s[first:last], named[first:last], there[first:last])
            hits.append(found[0])
            left_s.append(found[1])
        return Scenario(
            name,
            ts_s,
            ts_s.copy(),
            keys,
            np.concatenate(hits),
            np.concatenate(left_s),
            tenants,
            **more,  # type: ignore[arg-type]
        )


def random_ids(rng: Rng, prefix: str = "user:") -> Callable[[int], list[str]]:
    return lambda count: [f"{prefix}{i}" for i in rng.integers(10**9, 10**12, count).tolist()]


def random_words(rng: Rng, prefix: str = "user:") -> Callable[[int], list[str]]:
    """Keys that fold to no common pattern."""
    return lambda count: [prefix + "".join(map(chr, word)) for word in rng.integers(97, 123, (count, 9)).tolist()]


def random_hex(rng: Rng, prefix: str) -> Callable[[int], list[str]]:
    return lambda count: [prefix + word.tobytes().hex() for word in rng.integers(0, 256, (count, 16), np.uint8)]


def traffic(rng: Rng, qps: float, ttl_s: float | None = None) -> Traffic:
    """A cache whose usual miss rate is a few to some fifteen per cent, whatever the rate of look-ups."""
    return Traffic(rng, Cache(ttl_s if ttl_s is not None else float(rng.uniform(6e4, 2e5)) / qps))


def strength(rng: Rng) -> float:
    """Attack look-ups over usual ones."""
    return float(rng.uniform(1.8, 8.0))


def onset(rng: Rng) -> float:
    return WARM_S + float(rng.uniform(0, 10))


def steady(rng: Rng, qps: float) -> Scenario:
    flow = traffic(rng, qps)
    flow.usual(qps, 0, 480)
    return flow.done("steady")


def diurnal(rng: Rng, qps: float) -> Scenario:
    """A day in a quarter of an hour: rates by a factor of four."""
    flow = traffic(rng, qps)
    phase = rng.uniform(0, 2 * np.pi)
    flow.usual(qps, 0, 1000, wave=lambda t: 1 + 0.6 * np.sin(2 * np.pi * t / 900 + phase))
    return flow.done("diurnal")


def flash_sale(rng: Rng, qps: float) -> Scenario:
    """Many times as many look-ups, most of a few items, half of which were never looked up before."""
    flow = traffic(rng, qps)
    start = onset(rng)
    flow.usual(qps, 0, start + 60, "item:")
    ts_s = arrivals(rng, qps * rng.uniform(3, 8), start, start + 60, lambda t: np.clip((t - start) / 3, 0.2, 1))
    ids = np.where(rng.random(len(ts_s)) < 0.5, popular(rng, len(ts_s), 200) + 50_000, popular(rng, len(ts_s), 3000))
    flow.add(ts_s, [f"item:{i}" for i in ids.tolist()])
    return flow.done("flash sale")


def deploy_flush(rng: Rng, qps: float) -> Scenario:
    """The cache is emptied; in half of the cases clients retry meanwhile, so that look-ups are three times as many."""
    flow = traffic(rng, qps)
    start = onset(rng)
    flow.usual(qps, 0, start + 90)
    if rng.random() < 0.5:
        flow.usual(qps * 2.2, start, start + 30, missing_share=0.01)
    return flow.done("deploy flush", flush_s=(start,))


def deploy_version(rng: Rng, qps: float) -> Scenario:
    """A deploy changes a number in all keys, which so are new to everybody; look-ups stay, or triple for a while."""
    flow = traffic(rng, qps)
    start = onset(rng)
    flow.usual(qps, 0, start, "v1:user:")
    flow.usual(qps, start, start + 90, "v2:user:")
    if rng.random() < 0.5:
        flow.usual(qps * 2.2, start, start + 20, "v2:user:")
    return flow.done("deploy of a key version")


def slow_store(rng: Rng, qps: float) -> Scenario:
    """The store behind is slow for a while after a flush: missed keys are filled seconds later, and clients retry."""
    flow = traffic(rng, qps)
    start = onset(rng)
    flow.usual(qps, 0, start + 60)
    flow.usual(qps * float(rng.uniform(1.5, 3)), start, start + 15)
    made = flow.done("slow store", flush_s=(start,))
    made.hits[(made.ts_s >= start) & (made.ts_s < start + rng.uniform(5, 12))] = False
    made.ttls_s[~made.hits] = np.nan
    return made


def slow_ramp(rng: Rng, qps: float) -> Scenario:
    """Random keys, ever more of them over several minutes."""
    flow = traffic(rng, qps)
    start, length = onset(rng), float(rng.uniform(240, 480))
    times = strength(rng) + 1.0
    end = start + length + 30
    flow.usual(qps, 0, end)
    flow.attack(qps * times, start, end, random_ids(rng), wave=lambda t: np.clip((t - start) / length, 0, 1))
    # look-ups pass 2.5 times the usual when the attack makes 1.5 times it; by then most look-ups miss
    passed = start + length * 1.5 / times
    return flow.done(
        "slow ramp", expected=(Expected("penetration", start + 5, end, passed - start - 5 + 30, delay_from_s=passed),)
    )


def weak_attack(rng: Rng, qps: float, times: float) -> Scenario:
    """Random keys that make look-ups ``times`` what they were before: near the limit of the rule, 2.5."""
    flow = traffic(rng, qps)
    start = onset(rng)
    flow.usual(qps, 0, start + 40)
    flow.attack(qps * (times - 1), start, start + 30, random_ids(rng))
    return flow.done("weak attack", expected=(Expected("penetration", start, start + 30),))


def random_keys(rng: Rng, qps: float) -> Scenario:
    """Distributed random keys: ids of the usual form, or words that fold to nothing."""
    flow = traffic(rng, qps)
    start = onset(rng)
    make = random_ids(rng) if rng.random() < 0.6 else random_words(rng)
    flow.usual(qps, 0, start + 60)
    flow.attack(qps * strength(rng), start, start + 30, make)
    return flow.done("distributed random keys", expected=(Expected("penetration", start, start + 30),))


def known_keys(rng: Rng, qps: float) -> Scenario:
    """Keys that exist nowhere, while the detector knows which exist: over 100 per second, over several patterns."""
    flow = traffic(rng, qps)
    start = onset(rng)
    flow.usual(qps, 0, start + 50, missing_share=0.005)
    per_s = float(rng.uniform(150, 600))
    for prefix in ("user:", "cart:", "sess:"):
        flow.attack(per_s / 3, start, start + 30, random_ids(rng, prefix))
    known = [f"user:{i}" for i in range(3000)]
    fires = Expected("illegal-keys", start, start + 30, tenant=None)
    return flow.done("illegal keys", expected=(fires,), known=known, also=frozenset({"penetration"}))


def hot_missing_key(rng: Rng, qps: float) -> Scenario:
    """One key that does not exist, looked up a few times per second."""
    flow = traffic(rng, qps)
    start = onset(rng)
    flow.usual(qps, 0, start + 80)
    per_s = float(rng.uniform(4, 20))
    flow.attack(per_s, start, start + 70, lambda count: ["user:99999999"] * count)
    return flow.done("one hot missing key", expected=(Expected("hot-missing-key", start, start + 80, 40.0),))


def ttl_stampede(rng: Rng, qps: float) -> Scenario:
    """The popular keys expire together, are slow to be filled, and clients retry at once."""
    fill_s = float(rng.uniform(0.5, 3.0))
    flow = traffic(rng, qps)
    start = onset(rng)
    flow.usual(qps, 0, start + 60)
    ts_s = arrivals(rng, qps * rng.uniform(2, 4), start, start + fill_s + 0.5)
    flow.add(ts_s, [f"user:{i}" for i in popular(rng, len(ts_s), 100).tolist()])
    made = flow.done("TTL stampede")
    expired = (made.ts_s >= start) & (made.ts_s < start + fill_s)
    ids = np.array([int(key[5:]) for key in made.keys.tolist()])
    made.hits[expired & (ids < 200)] = False
    made.ttls_s[~made.hits] = np.nan
    return made


def poisoned_prefixes(rng: Rng, qps: float) -> Scenario:
    """Blocks of prompts of an engine: shared prefixes hit, what is each prompt's own misses; then random prompts."""
    flow = traffic(rng, qps, ttl_s=3600.0)
    start = onset(rng)
    blocks = 8
    prompts_s = arrivals(rng, qps / blocks, 0, start + 60)
    shared = popular(rng, len(prompts_s), 400)
    own = rng.binomial(blocks, float(rng.uniform(0.1, 0.3)), len(prompts_s))
    ts_s = np.repeat(prompts_s, blocks) + np.tile(np.arange(blocks) * 1e-4, len(prompts_s))
    names = [
        f"kv:{(prompt * 1000 + at) * 0x9E3779B97F4A7C15 % 2**64:016x}"
        if at < blocks - fresh
        else f"kv:{rng.bytes(8).hex()}"
        for prompt, fresh in zip(shared.tolist(), own.tolist(), strict=True)
        for at in range(blocks)
    ]
    flow.add(ts_s, names)
    flow.attack(
        qps * float(rng.uniform(4, 9)),
        start,
        start + 30,
        lambda count: [f"kv:{rng.bytes(8).hex()}" for _ in range(count)],
    )
    return flow.done("poisoned prefixes", expected=(Expected("penetration", start, start + 30),))


def mixed_tenants(rng: Rng, qps: float) -> Scenario:
    """One of four tenants is attacked, while another has a sale; a third is quiet."""
    flow = traffic(rng, qps)
    start = onset(rng)
    for tenant, share in (("a", 1.0), ("b", 1.5), ("c", 0.05), ("d", 0.5)):
        flow.usual(qps * share, 0, start + 60, tenant=tenant)
    flow.usual(qps * 6, start, start + 30, tenant="b", missing_share=0.01)
    flow.attack(qps * strength(rng), start, start + 30, random_ids(rng), tenant="a")
    return flow.done("mixed tenants", expected=(Expected("penetration", start, start + 30, tenant="a"),))


def clock_skew(rng: Rng, qps: float) -> Scenario:
    """Two sources whose clocks differ by up to four seconds, and one look-up from the year 2096; attacked or not."""
    flow = traffic(rng, qps)
    start = onset(rng)
    skew_s = float(rng.uniform(1, 4))
    flow.usual(qps, 0, start + 60)
    is_attacked = rng.random() < 0.6
    if is_attacked:
        flow.attack(qps * strength(rng), start, start + 30, random_ids(rng))
    made = flow.done("clock skew")
    behind = rng.random(len(made.ts_s)) < 0.5
    made.ts_s = np.where(behind, made.ts_s - skew_s, made.ts_s)
    made.ts_s[len(made.ts_s) // 2] += 4e9
    if is_attacked:
        # the slower source's look-ups are dated back by the skew, and come as much later to complete their cells
        made.expected = (
            Expected("penetration", start - skew_s, start + 30 + skew_s, 2.0 + 2 * skew_s, delay_from_s=start),
        )
    return made


def restart(rng: Rng, qps: float) -> Scenario:
    """The detector is started anew; in half of the cases an attack begins shortly after, before it could learn."""
    flow = traffic(rng, qps)
    at = onset(rng)
    start = at + float(rng.uniform(3, 20))
    flow.usual(qps, 0, at + 80)
    expected: tuple[Expected, ...] = ()
    if rng.random() < 0.5:
        flow.attack(qps * strength(rng), start, start + 30, random_ids(rng))
        expected = (Expected("penetration", start, start + 30),)
    return flow.done("restart", expected=expected, restart_s=at)


def new_pattern(rng: Rng, qps: float) -> Scenario:
    """A new feature goes live: a pattern never seen before, with more look-ups than all others together."""
    flow = traffic(rng, qps)
    start = onset(rng)
    flow.usual(qps, 0, start + 150)
    flow.usual(qps * float(rng.uniform(1, 4)), start, start + 150, "wishlist:")
    return flow.done("legitimate new pattern")


def new_users(rng: Rng, qps: float) -> Scenario:
    """A surge of users never seen: each key misses once, and is looked up a few times within the second."""
    flow = traffic(rng, qps)
    start = onset(rng)
    flow.usual(qps, 0, start + 60)
    each = int(rng.integers(3, 8))
    first_s = arrivals(rng, qps * rng.uniform(2, 5) / each, start, start + 40)
    ts_s = np.concatenate([first_s, *(first_s + rng.uniform(0.05, 0.8, len(first_s)) for _ in range(each - 1))])
    flow.add(ts_s, [f"user:{i}" for i in np.tile(np.arange(len(first_s)) + 500_000, each).tolist()])
    return flow.done("surge of new users")


def sale_and_attack(rng: Rng, qps: float) -> Scenario:
    """A sale has tripled the look-ups for a minute when random keys come on top."""
    flow = traffic(rng, qps)
    start = onset(rng)
    flow.usual(qps, 0, start + 120, "item:")
    flow.usual(qps * 2, start, start + 120, "item:")
    flow.attack(qps * 3 * strength(rng), start + 60, start + 90, random_ids(rng, "item:"))
    return flow.done("attack during a sale", expected=(Expected("penetration", start + 60, start + 90),))


def missing_ids(rng: Rng, qps: float) -> Scenario:
    """A fixed list of ids that do not exist, again and again."""
    flow = traffic(rng, qps)
    start = onset(rng)
    flow.usual(qps, 0, start + 60)
    ids = rng.integers(10**9, 10**10, 300)
    flow.attack(
        qps * strength(rng), start, start + 30, lambda count: [f"user:{i}" for i in rng.choice(ids, count).tolist()]
    )
    return flow.done("repeated missing ids", expected=(Expected("penetration", start, start + 30),))


def quiet_pattern(rng: Rng, qps: float) -> Scenario:
    """A pattern with hardly any look-ups has some more that miss, among busy ones."""
    flow = traffic(rng, qps)
    start = onset(rng)
    flow.usual(qps, 0, start + 60)
    flow.usual(0.5, 0, start + 60, "admin:", keys_count=20)
    flow.attack(float(rng.uniform(3, 8)), start, start + 20, random_ids(rng, "admin:"))
    return flow.done("quiet pattern")


def cold_start(rng: Rng, qps: float) -> Scenario:
    """The detector and the cache start empty at once, and a tenant is added a little later."""
    flow = traffic(rng, qps)
    flow.usual(qps, 0, 200)
    flow.usual(qps * 3, 90, 200, tenant="new")
    return flow.done("cold start")


SCENARIOS: tuple[Callable[[Rng, float], Scenario], ...] = (
    steady, diurnal, flash_sale, deploy_flush, deploy_version, slow_store, slow_ramp, random_keys, known_keys,
    hot_missing_key, ttl_stampede, poisoned_prefixes, mixed_tenants, clock_skew, restart, new_pattern, new_users,
    sale_and_attack, missing_ids, quiet_pattern, cold_start,
)  # fmt: skip
