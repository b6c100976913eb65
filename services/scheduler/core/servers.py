"""Owns what is known of the machines: servers, their slots, their load queues, and the routers."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from whimbrel.wire.messages import AgentHeartbeat, Tier, WorkerHeartbeat, WorkerState
from whimbrel.wire.records import BandwidthRecord, ServerRecord

from services.scheduler.core.bandwidth import prior
from services.scheduler.core.estimates import PathSpeed, path_speeds
from services.scheduler.core.queues import PathQueues
from services.scheduler.core.residency import Residency, Resident
from services.scheduler.core.views import Shape, SlotView

# What a worker says of a slot that maps models from the pool, instead of copying them to a device.
HOST_DEVICE = "cpu"


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """A GPU slot and the worker process on it.

    `owner` is the instance that owns the slot by our records; `occupant` the one that the worker has, as far as we
    know; `reserved_for` the model that waits for this slot to become free.
    """

    server_id: str
    slot: int
    seen_s: float
    is_alive: bool = True
    heartbeat: WorkerHeartbeat | None = None
    owner: str | None = None
    occupant: str | None = None
    reserved_for: str | None = None
    #: The slot whose worker holds this one's memory for `occupant`, an instance on several GPUs.
    held_through: int | None = None
    #: What placement sees of it.
    view: SlotView = field(init=False)
    unload_sent_s: float = -inf

    def __post_init__(self) -> None:
        self.view = SlotView(self.slot)

    @property
    def is_free(self) -> bool:
        """A worker that is alive, has nothing and does not stop: an instance could be loaded there."""
        if self.owner is not None or self.occupant is not None or self.reserved_for is not None:
            return False
        if self.heartbeat is None or not self.is_alive:
            return False
        # A worker that drains, and has nothing, is about to stop.
        return self.heartbeat.state is not WorkerState.DRAINING or self.heartbeat.instance_id is not None

    @property
    def is_host(self) -> bool:
        """Whether models are mapped here from the server's pool; assumed until its worker says otherwise."""
        return self.heartbeat is None or self.heartbeat.device == HOST_DEVICE

    def hear(self, heartbeat: WorkerHeartbeat) -> None:
        """Take over what its worker says of itself."""
        known = self.heartbeat
        self.heartbeat = heartbeat
        if known is None or is_other_device(known, heartbeat):
            self.view = SlotView(self.slot, 0 if self.is_host else heartbeat.memory_size_bytes)


def is_other_device(known: WorkerHeartbeat, heartbeat: WorkerHeartbeat) -> bool:
    """Whether models fit another way than before."""
    return (known.device, known.memory_size_bytes) != (heartbeat.device, heartbeat.memory_size_bytes)


@dataclass(slots=True, kw_only=True, eq=False)
class Server:
    """A machine: its storage agent, its slots, its load queues and what was learned of its tiers.

    `instances` are those whose bytes lie in its pool;
    `capacity_bytes` is the largest model that could be here: it passes through the SSD and stays in the pool.
    """

    server_id: str
    seen_s: float
    is_alive: bool = False
    heartbeat: AgentHeartbeat | None = None
    slots: dict[int, Slot] = field(default_factory=dict)
    queues: PathQueues = field(default_factory=PathQueues)
    bandwidths: dict[Tier, BandwidthRecord] = field(default_factory=dict)
    instances: dict[str, None] = field(default_factory=dict)
    residency: Residency = field(default_factory=Residency)
    #: What operators decided about it; None when nothing ever was.
    record: ServerRecord | None = None
    is_drain_told: bool = False
    capacity_bytes: int = 0
    #: Whether its slots map models from the pool.
    is_host: bool = True
    _speeds: dict[Tier, PathSpeed] | None = None
    _known_speeds: dict[Tier, PathSpeed] = field(default_factory=dict)

    def speeds(self) -> dict[Tier, PathSpeed]:
        """How fast its paths are, worked out once for what is known now."""
        if self._speeds is None:
            known = self._known_speeds
            speeds = path_speeds(self.server_id, self.bandwidths, self.probe_bytes_per_s)
            # What did not change stays the same object, so that what was made from it can be seen to hold.
            self._speeds = {tier: known[tier] if known.get(tier) == speed else speed for tier, speed in speeds.items()}
            self._known_speeds = self._speeds
        return self._speeds

    def learn(self, record: BandwidthRecord) -> None:
        """What is known of a tier from now on."""
        self.bandwidths[record.tier] = record
        self._speeds = None

    def bandwidth(self, tier: Tier) -> BandwidthRecord:
        """What is known of a tier, be it only a prior."""
        return self.bandwidths.get(tier) or prior(self.server_id, tier, self.probe_bytes_per_s)

    @property
    def is_cordoned(self) -> bool:
        return self.record is not None and self.record.is_cordoned

    @property
    def is_stopping(self) -> bool:
        """Whether its agent is about to end."""
        return self.is_alive and self.heartbeat is not None and self.heartbeat.is_stopping

    @property
    def takes_jobs(self) -> bool:
        """Whether its agent can be given work that is not about this server's slots."""
        return self.heartbeat is not None and not self.is_stopping

    @property
    def takes_loads(self) -> bool:
        """Whether models are placed there."""
        return not (self.is_cordoned or self.is_stopping)

    @property
    def is_draining(self) -> bool:
        return self.record is not None and self.record.is_draining

    def reshape(self) -> None:
        """Its slots, or their devices, are others."""
        self.is_host = all(slot.is_host for slot in self.slots.values())

    def shape(self) -> Shape:
        """How large it is, whatever is on it."""
        memories = sorted((slot.view.memory_bytes for slot in self.slots.values()), reverse=True)
        return Shape(self.is_host, self.capacity_bytes, tuple(memories))

    @property
    def probe_bytes_per_s(self) -> float:
        return 0.0 if self.heartbeat is None else self.heartbeat.probe_bandwidth_bytes_per_s

    def forget(self) -> None:
        """It has been away for so long that it counts no more."""
        self.heartbeat = None
        self.capacity_bytes = 0

    def hear(self, heartbeat: AgentHeartbeat) -> bool:
        """Take over what the agent says of itself: the truth about its tiers. False when some of it was missed."""
        if heartbeat.probe_bandwidth_bytes_per_s != self.probe_bytes_per_s:
            self._speeds = None
        self.heartbeat = heartbeat
        self.capacity_bytes = min(heartbeat.pool_size_bytes, heartbeat.ssd_size_bytes)
        return self.residency.hear(heartbeat)

    def resident(self, checkpoint: tuple[str, str]) -> Resident | None:
        """What it has of a checkpoint (id and digest)."""
        return self.residency.entries.get(checkpoint)


@dataclass(slots=True, kw_only=True, eq=False)
class Router:
    """A router; `epoch` 0 while only its requests were heard. `counted` are the instances it says it uses."""

    router_id: str
    seen_s: float
    epoch: int = 0
    counted: dict[str, None] = field(default_factory=dict)
