"""What the Redis proxy costs: redis-benchmark directly and through it, in turn, medians of several rounds.

Server, proxy and load share this machine's cores, so that the proxy's share of them is part of what is measured.
Throughput is that of 50 clients, latency the median of one client's GETs, since the median at 50 clients says how long
the queue is. CPU is the proxy's own time per request: it stays comparable where others use the cores, too. Needs
redis-server and redis-benchmark; with uvloop installed, the proxy runs on it.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from spikeprof.profiler.collectors.pierce.proxy import Address, Proxy
from spikeprof.profiler.lookups import Lookups

HOST = "127.0.0.1"
#: (name, arguments of redis-benchmark): 10,000 possible keys, none of them there.
LOADS = (
    ("GET, 50 clients, pipeline 1", ("-c", "50", "-n", "REQUESTS", "-t", "get", "-r", "10000")),
    ("GET, 50 clients, pipeline 16", ("-c", "50", "-n", "REQUESTS", "-t", "get", "-r", "10000", "-P", "16")),
    ("SET, 50 clients, pipeline 1", ("-c", "50", "-n", "REQUESTS", "-t", "set", "-r", "10000")),
)
LATENCY = ("-c", "1", "-n", "SOME", "-t", "get", "-r", "10000")


def main() -> int:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=100_000, help="requests of each run at 50 clients")
    parser.add_argument("--loop", choices=("auto", "asyncio", "uvloop"), default="auto")
    parser.add_argument("--detect", action="store_true", help="the whole `spikeprof pierce proxy`, not the proxy alone")
    parser.add_argument("--flood", type=int, default=0, metavar="N", help="then N GETs of random keys, for its memory")
    parser.add_argument("--serve", nargs=2, type=int, metavar=("LISTEN", "UPSTREAM"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(*options.serve, options.loop)
    if not (shutil.which("redis-server") and shutil.which("redis-benchmark")):
        print("pierce_proxy: needs redis-server and redis-benchmark (Debian: apt-get install redis)", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory() as folder:
        upstream, listen = free_port(), free_port()
        server = ["redis-server", "--port", str(upstream), "--bind", HOST, "--save", "", "--dir", folder]
        proxy = [sys.executable, __file__, "--loop", options.loop, "--serve", str(listen), str(upstream)]
        if options.detect:
            ends = ["--listen", f"{HOST}:{listen}", "--upstream", f"{HOST}:{upstream}"]
            proxy = [sys.executable, "-m", "spikeprof", "pierce", "proxy", *ends, "--baselines", "none"]
        children = [subprocess.Popen(server, stdout=subprocess.DEVNULL)]
        try:
            wait_for(upstream)
            children.append(subprocess.Popen(proxy, stdout=subprocess.PIPE, text=True))
            wait_for(listen)
            measure(upstream, listen, options.rounds, options.requests, children[-1].pid)
            if options.flood:
                words = ["-c", "50", "-P", "16", "-n", str(options.flood), "-t", "get", "-r", "1000000000000"]
                print(f"{options.flood:,} GETs of random keys: {run(listen, words)[0]:,.0f}/s")
            print(f"the proxy's highest memory: {highest_mb(children[-1].pid):.0f} MB")
            print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores at the end")
        finally:
            for child in reversed(children):
                child.send_signal(signal.SIGTERM)
                said, _ = child.communicate(timeout=20)
                print(said or "", end="")
    return 0


def measure(upstream: int, listen: int, rounds: int, requests: int, proxy_pid: int) -> None:
    """Each load on both ports in turn, as often as there are rounds."""
    print(
        f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores at the beginning; medians of {rounds} rounds"
    )
    print(f"{'load':<32}{'direct':>14}{'proxy':>14}{'proxy / direct':>18}{'proxy CPU':>14}")
    for name, arguments in LOADS:
        words = [str(requests) if word == "REQUESTS" else word for word in arguments]
        pairs, began_s = [], cpu_s(proxy_pid)
        for _ in range(rounds):
            pairs.append((run(upstream, words)[0], run(listen, words)[0]))
        each_us = (cpu_s(proxy_pid) - began_s) / (rounds * requests) * 1e6
        direct, through = (statistics.median(column) for column in zip(*pairs, strict=True))
        share = statistics.median(after / before for before, after in pairs)
        print(f"{name:<32}{direct:>12,.0f}/s{through:>12,.0f}/s{share:>17.0%}{each_us:>11.1f} µs")
    words = [str(max(1, requests // 10)) if word == "SOME" else word for word in LATENCY]
    pairs = [(run(upstream, words)[1], run(listen, words)[1]) for _ in range(rounds)]
    direct, through = (statistics.median(column) for column in zip(*pairs, strict=True))
    added = statistics.median(after - before for before, after in pairs)
    print(f"{'GET, 1 client: median latency':<32}{direct:>11.3f} ms{through:>11.3f} ms{added:>+12.3f} ms more")


def run(port: int, arguments: list[str]) -> tuple[float, float]:
    """Requests per second and median latency in milliseconds of one run."""
    command = ["redis-benchmark", "-h", HOST, "-p", str(port), "--csv", *arguments]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (row,) = csv.DictReader(text.splitlines())
    return float(row["rps"]), float(row["p50_latency_ms"])


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def highest_mb(pid: int) -> float:
    """The highest resident set of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1000


def serve(listen: int, upstream: int, loop: str) -> int:
    """The proxy, until SIGTERM; then what it counted."""
    factory = None
    if loop != "asyncio":
        try:
            import uvloop

            factory = uvloop.new_event_loop
        except ImportError:
            if loop == "uvloop":
                raise
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(until_terminated(listen, upstream))
    return 0


async def until_terminated(listen: int, upstream: int) -> None:
    """Serve, and count what is handed over."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, done.set)
    proxy = Proxy(Address(HOST, listen), Address(HOST, upstream), nothing)
    await proxy.start()
    await done.wait()
    await proxy.close()
    usage = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
    counts = proxy.counts
    print(
        f"proxy on {type(loop).__module__}: {counts.lookups:,} look-ups seen, {counts.dropped_lookups:,} dropped, "
        f"{counts.unread_bytes:,} bytes not looked into, {int(usage) / 1024:.0f} MiB at most"
    )


async def nothing(_: Lookups) -> None:
    """A receiver that takes no time."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def wait_for(port: int) -> None:
    """Until someone listens."""
    until_s = time.monotonic() + 15
    while time.monotonic() < until_s:
        try:
            socket.create_connection((HOST, port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise TimeoutError(f"nobody listens on port {port}")


if __name__ == "__main__":
    sys.exit(main())
