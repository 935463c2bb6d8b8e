"""Where ranks go: from a cluster's free cores and GPUs to seats."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import ray

from rayvec.distributed.rank_actor import Seat
from rayvec.errors import ConfigError

__all__ = ["Room", "Wish", "find_seats", "seat_ranks"]

_PLACE_S = 10.0
_LOOK_AGAIN_S = 0.25


@dataclass(frozen=True, slots=True)
class Wish:
    """What ranks need of a node.

    Attributes:
        num_cpus: Cores that each claims.
        num_gpus: GPUs that each claims.
        per_node: The most ranks of a node; None for as many as there is room for.
        nodes: Ids of the nodes that may be used; None for all.
        avoid_nodes: Ids of nodes that may not be used.
    """

    num_cpus: int
    num_gpus: int
    per_node: int | None = None
    nodes: Collection[str] | None = None
    avoid_nodes: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Room:
    """A node and how many ranks it has room for."""

    node_id: str
    host: str
    places: int


def seat_ranks(rooms: Sequence[Room], num_ranks: int) -> list[Seat]:
    """Seats ranks on as few nodes as possible, since those of one node sum fastest; of equal nodes the first is taken.

    Raises:
        ConfigError: There is not enough room.

    >>> [seat.host for seat in seat_ranks([Room("a", "10.0.0.1", 1), Room("b", "10.0.0.2", 2)], 3)]
    ['10.0.0.2', '10.0.0.2', '10.0.0.1']
    """
    if sum(room.places for room in rooms) < num_ranks:
        raise ConfigError(
            "Every rank has cores, and with CUDA a GPU, that nobody else has claimed.",
            expected=f"room for {num_ranks} rank(s)",
            got=", ".join(f"{room.host}: room for {room.places}" for room in rooms) or "no node that may be used",
            remedy="Ask for fewer ranks or threads, make the group before environments claim all cores, "
            "or pass num_cpus=0",
        )
    chosen: list[tuple[Room, int]] = []
    left = num_ranks
    while left:
        unused = [room for room in rooms if room not in [taken for taken, _ in chosen]]
        enough = [room for room in unused if room.places >= left]
        room = enough[0] if enough else max(unused, key=lambda room: room.places)
        chosen.append((room, min(left, room.places)))
        left -= chosen[-1][1]
    seats: list[Seat] = []
    for node, (room, count) in enumerate(chosen):
        seats += [
            Seat(len(seats) + k, num_ranks, room.node_id, room.host, k, count, node, len(chosen)) for k in range(count)
        ]
    return seats


def find_seats(num_ranks: int, wish: Wish) -> list[Seat]:
    """Seats ranks on the connected cluster; waits for at most 10 s for claims just given back to come free.

    Raises:
        ConfigError: There is not enough room.
    """
    deadline = time.monotonic() + _PLACE_S
    while True:
        try:
            return seat_ranks(_rooms(wish), num_ranks)
        except ConfigError:
            if wish.num_gpus and not ray.cluster_resources().get("GPU"):
                raise ConfigError(
                    "device='cuda' needs a GPU for each rank.",
                    expected=f"{num_ranks} GPU(s) in the cluster",
                    got="none",
                    remedy="Pass device='cpu', or add nodes with GPUs",
                ) from None
            if time.monotonic() >= deadline:
                raise
        time.sleep(_LOOK_AGAIN_S)


def _rooms(wish: Wish) -> list[Room]:
    """Returns the nodes that may be used, the driver's own first."""
    from ray._private.state import available_resources_per_node

    here = ray.get_runtime_context().get_node_id()
    free = available_resources_per_node()
    rooms = []
    for node in ray.nodes():
        node_id, total = node["NodeID"], node["Resources"]
        allowed = node["Alive"] and (wish.nodes is None or node_id in wish.nodes) and node_id not in wish.avoid_nodes
        if not allowed or not total.get("CPU"):
            continue
        left = free.get(node_id, {})
        places = int(left.get("CPU", 0) // wish.num_cpus) if wish.num_cpus else int(total["CPU"])
        if wish.num_gpus:
            places = min(places, int(left.get("GPU", 0) // wish.num_gpus))
        rooms.append(Room(node_id, node["NodeManagerAddress"], min(places, wish.per_node or places)))
    return sorted(rooms, key=lambda room: (room.node_id != here, room.node_id))
