"""Link: two hosts that are network namespaces of this machine, and a wire whose rate is chosen.

    namespace crossbow-PID-0   wire 10.77.0.1 ---- 10.77.0.2 wire   namespace crossbow-PID-1

The wire is a veth pair, which has no rate of its own. A token bucket (tc tbf) at either end gives
it one, in each direction:

- frame: the bucket sets a timer for each. With the usual 1,500 bytes at 300 Mbit/s, timers took
  0.4 of the cores, which the learners need; so frames are 16 KiB.
- burst: what a rested bucket lets through at once. A wire has none: it is one frame, the least.
- limit: how much may queue. What exceeds it is dropped, and TCP then waits for a timeout that has
  nothing to do with the rate; so it is more than sockets ever have under way.
"""

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossbow.errors import CrossbowError, InputError

MTU_BYTES = 16 * 2**10
BURST_BYTES = MTU_BYTES + 14  # a frame with its header
LIMIT_BYTES = 16 * 2**20

_CLONE_NEWNET = 0x40000000
_FOLDER = Path("/run/netns")
_PREFIX = "crossbow-"
_WIRE = "wire"


@dataclass(frozen=True)
class Link:
    """Two hosts, and the ranks on each, first those of the first."""

    namespaces: tuple[str, str]
    ranks_each: int = 1

    def environment(self, rank: int) -> dict[str, str]:
        """What a launcher would tell the rank."""
        return {
            "LOCAL_RANK": str(rank % self.ranks_each),
            "LOCAL_WORLD_SIZE": str(self.ranks_each),
            "MASTER_ADDR": _address(0),
            "GLOO_SOCKET_IFNAME": _WIRE,
        }

    def enter(self, rank: int) -> None:
        """Move this thread, and all that it starts from now on, to the rank's host."""
        handle = os.open(_FOLDER / self.namespaces[rank // self.ranks_each], os.O_RDONLY)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(handle, _CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise CrossbowError(f"can't enter a network namespace: {os.strerror(number)}")
        finally:
            os.close(handle)

    def limit(self, bytes_per_second: float | None) -> None:
        """Give the wire this rate in each direction; None takes the limit away."""
        for namespace in self.namespaces:
            if bytes_per_second is None:
                if self._queue(namespace)["kind"] == "tbf":
                    _call("tc", "-n", namespace, "qdisc", "del", "dev", _WIRE, "root")
                continue
            rate = ("rate", f"{bytes_per_second:.0f}bps")
            bucket = (*rate, "burst", f"{BURST_BYTES}", "limit", f"{LIMIT_BYTES}")
            _call("tc", "-n", namespace, "qdisc", "replace", "dev", _WIRE, "root", "tbf", *bucket)

    def sent(self) -> list[int]:
        """Bytes that each host has sent so far, as its interface counts them."""
        shown = [_read("ip", "-n", n, "-s", "-j", "link", "show", _WIRE) for n in self.namespaces]
        return [interfaces[0]["stats64"]["tx"]["bytes"] for interfaces in shown]

    def dropped(self) -> int:
        """Frames that the buckets dropped since they were set up."""
        return sum(self._queue(namespace)["drops"] for namespace in self.namespaces)

    def _queue(self, namespace: str) -> dict[str, Any]:
        queues: list[dict[str, Any]] = _read(
            "tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", _WIRE
        )
        return queues[0]


def why_not() -> str | None:
    """What keeps this machine from having such hosts, if anything does."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    return None


@contextmanager
def linked_hosts() -> Iterator[Link]:
    """Make two hosts; remove them afterwards, whatever happens."""
    obstacle = why_not()
    if obstacle:
        raise InputError(obstacle)
    _remove_stale()
    first, second = (f"{_PREFIX}{os.getpid()}-{host}" for host in (0, 1))
    try:
        for namespace in (first, second):
            _call("ip", "netns", "add", namespace)
        pair = (_WIRE, "netns", first, "type", "veth", "peer", "name", _WIRE, "netns", second)
        _call("ip", "link", "add", *pair)
        for host, namespace in enumerate((first, second)):
            _call("ip", "-n", namespace, "addr", "add", f"{_address(host)}/30", "dev", _WIRE)
            _call("ip", "-n", namespace, "link", "set", _WIRE, "mtu", f"{MTU_BYTES}")
            for interface in ("lo", _WIRE):
                _call("ip", "-n", namespace, "link", "set", interface, "up")
        yield Link((first, second))
    finally:
        for namespace in (first, second):
            _remove(namespace)


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _remove_stale() -> None:
    """Remove namespaces whose maker was killed before it could."""
    for path in _FOLDER.glob(f"{_PREFIX}*-[01]"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            _remove(path.name)


def _remove(namespace: str) -> None:
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CrossbowError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _read(*command: str) -> Any:
    return json.loads(_call(*command))
