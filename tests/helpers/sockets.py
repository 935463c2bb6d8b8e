"""Which sockets a process of this machine listens on, and what answers there."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

_LISTENING = "0A"


def listening_ports(pid: int) -> list[int]:
    """Returns the TCP ports that a process listens on, over IPv4 or IPv6."""
    own = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            own.add(os.readlink(fd))
    ports = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENING and f"socket:[{inode}]" in own:
                ports.append(int(local.rpartition(":")[2], 16))
    return ports


def stores_at(addresses: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Returns the addresses where a store of torch.distributed lets another process set and get a key.

    A peer that is no store may leave the client waiting without end. Every client gets three times as long as one that
    connects to a real store at the same time, and a second at least.
    """
    host = "127.0.0.1"
    real = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    clients = {
        address: context.Process(target=_set_and_get, args=address) for address in (*addresses, (host, real.port))
    }
    began_s = time.monotonic()
    for client in clients.values():
        client.start()
    own = clients.pop((host, real.port))
    own.join(60)
    assert own.exitcode == 0, "the real store does not answer"
    time.sleep(max(1.0, 2.0 * (time.monotonic() - began_s)))
    for client in clients.values():
        client.kill()
    for client in clients.values():
        client.join()
    return [address for address, client in clients.items() if client.exitcode == 0]


def _set_and_get(host: str, port: int) -> None:
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)
    store.set("key", "value")
    assert store.get("key") == b"value"
