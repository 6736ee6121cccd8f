"""A link between network namespaces that delays and loses packets below the kernel's own TCP. Linux, as root.

It consists of two tun devices, one of them in a namespace of its own, and a thread that carries, delays and drops
packets between them. This is what netem does, but works on kernels without it, too.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import selectors
import struct
import subprocess
import threading
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MTU = 1500
_DEVICE = Path("/dev/net/tun")
_numbers = count()


@dataclass(frozen=True)
class Air:
    """What happens to packets, each way."""

    delay: float = 0.0
    """Seconds."""
    jitter: float = 0.0
    """Most additional seconds; packets may overtake each other."""
    loss: float = 0.0
    """Chance that a packet is lost."""


class Link:
    """A namespace that only this link connects. `near` and `far` are the addresses of its ends."""

    def __init__(self, seed: int = 0) -> None:
        number = next(_numbers)
        self.namespace = f"outrider-{os.getpid()}-{number}"
        net = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.near, self.far = f"{net}.{4 * number + 1}", f"{net}.{4 * number + 2}"
        self.air = Air()
        self.num_harmed = 0
        """Number of packets that were late or lost."""
        self._random = random.Random(seed)
        self._names = [f"och{os.getpid() % 100000}.{number}{end}" for end in "ab"]
        self._devices: list[int] = []
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._forward, name="link", daemon=True)

    @staticmethod
    def possible() -> bool:
        """Whether this machine and user can have a link."""
        if os.geteuid() != 0 or not os.access(_DEVICE, os.W_OK):
            return False
        name = f"outrider-{os.getpid()}-try"
        try:
            _ip("netns", "add", name)
            _ip("netns", "del", name)
        except (OSError, subprocess.CalledProcessError):
            return False
        return True

    @property
    def path(self) -> str:
        """The namespace's file."""
        return f"/run/netns/{self.namespace}"

    def __enter__(self) -> Link:
        near, far = self._names
        try:
            _ip("netns", "add", self.namespace)
            self._devices = [_open_tun(name) for name in self._names]
            _ip("link", "set", far, "netns", self.namespace)
            _ip("addr", "add", self.near, "peer", self.far, "dev", near)
            _ip("link", "set", near, "up")
            _ip("-n", self.namespace, "addr", "add", self.far, "peer", self.near, "dev", far)
            for device in ("lo", far):
                _ip("-n", self.namespace, "link", "set", device, "up")
        except BaseException:
            self._clear()
            raise
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        os.write(self._stopped, b".")
        self._thread.join()
        self._clear()

    def _clear(self) -> None:
        for device in (*self._devices, self._stop, self._stopped):
            os.close(device)
        subprocess.run(["ip", "netns", "del", self.namespace], capture_output=True, check=False)

    def _forward(self) -> None:
        """Carry packets until told to stop."""
        under_way: list[tuple[float, int, int, bytes]] = []
        order = count()
        other = dict(zip(self._devices, reversed(self._devices), strict=True))
        with selectors.DefaultSelector() as ready:
            for device in (*self._devices, self._stop):
                ready.register(device, selectors.EVENT_READ)
            while True:
                timeout = max(under_way[0][0] - time.monotonic(), 0.0) if under_way else None
                for key, _ in ready.select(timeout):
                    if key.fd == self._stop:
                        return
                    packet = os.read(key.fd, _MTU + 64)
                    air = self.air
                    self.num_harmed += air != Air()
                    if self._random.random() < air.loss:
                        continue
                    due = time.monotonic() + air.delay + air.jitter * self._random.random()
                    heapq.heappush(under_way, (due, next(order), other[key.fd], packet))
                while under_way and under_way[0][0] <= time.monotonic():
                    _, _, device, packet = heapq.heappop(under_way)
                    os.write(device, packet)


def _open_tun(name: str) -> int:
    device = os.open(_DEVICE, os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
