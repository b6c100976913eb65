"""Owns what agents, workers and routers of a simulated cluster share: their heart, and whom they obey."""

from __future__ import annotations

from whimbrel.chassis.heartbeat import BEAT_GAP_S_MIN, HEARTBEAT_S
from whimbrel.wire.errors import StaleEpoch
from whimbrel.wire.messages import Message

from tests.simulation.network import Listener, Network

#: Where commands to the scheduler go, whichever leads.
SCHEDULER = ("leader",)


class Peer(Listener):
    """A process with a heartbeat that goes to `heard_by`, and also when something changed."""

    heard_by: tuple[str, ...] = ("scheduler",)

    def __init__(self, network: Network, name: tuple[str | int, ...], epoch: int) -> None:
        super().__init__(network.clock, name)
        self.network = network
        self.epoch = epoch
        self.scheduler_epoch = 0
        self._is_beat_due = False
        network.join(self)
        self.every(HEARTBEAT_S, self._beat)

    @property
    def now(self) -> float:
        return self.clock.now

    def heartbeat(self) -> Message:
        raise AssertionError("every peer has a heartbeat of its own")

    def beat(self) -> None:
        """Soon; several at once are one."""
        if not self._is_beat_due:
            self._is_beat_due = True
            self.clock.after(BEAT_GAP_S_MIN, self, self._beat)

    def _beat(self) -> None:
        self._is_beat_due = False
        self.network.broadcast(self, self.heard_by, self.heartbeat())

    def tell_scheduler(self, message: Message) -> None:
        """One way, to whichever leads."""
        self.network.send(self, SCHEDULER, message)

    def obey(self, scheduler_epoch: int) -> None:
        """Raise StaleEpoch for a command of a scheduler that has a successor."""
        if scheduler_epoch < self.scheduler_epoch:
            raise StaleEpoch(epoch=scheduler_epoch, current_epoch=self.scheduler_epoch)
        self.scheduler_epoch = scheduler_epoch
