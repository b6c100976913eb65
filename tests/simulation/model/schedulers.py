"""Owns the modelled scheduler: the real controller, its store, and the lives of leaders."""

from __future__ import annotations

from collections.abc import Iterable

from whimbrel.wire.messages import (
    AgentHeartbeat,
    ErrorReply,
    GetRoutesReply,
    Message,
    ModelState,
    PlaceModelReply,
    PrepareInstance,
    RouterHeartbeat,
    Scaling,
    Tier,
    WorkerHeartbeat,
)
from whimbrel.wire.records import Forget, InstanceRecord, InstanceState, ModelRecord, Record, ResumeRecord

from services.scheduler.core.controller import Controller
from services.scheduler.core.ready import Arrived, Event, Outgoing, Reply, Tick, ToRouter
from services.scheduler.core.settings import Settings
from tests.simulation.model.answers import (
    MODEL_ID,
    OPERATOR,
    ROUTER,
    Call,
    PlaceAnswered,
    RoutesAnswered,
    Sent,
)
from tests.simulation.model.workers import SIZE_BYTES, SLOT

SETTINGS = Settings()
SOURCE_ID = "ins-0"
WALL_S = 1.7e9


class Ids:
    """Counts, in each life anew."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.count = 0

    def __call__(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}-{self.epoch}.{self.count}"


def first_records(*, seconds_per_token: float) -> list[Record]:
    """One model, ready on the first server."""
    model = ModelRecord(
        model_id=MODEL_ID,
        state=ModelState.READY,
        source="/models/m",
        job_id="",
        checkpoint_digest=MODEL_ID,
        size_bytes=SIZE_BYTES,
        parameter_count=SIZE_BYTES // 2,
        architecture="ModelForCausalLM",
        model_config=b"{}",
        created_at_s=0.0,
        keep_alive_s=None,
        scaling=Scaling(min_instances=0, max_instances=1, target_concurrency=8),
        partition_bytes=(SIZE_BYTES,),
    )
    source = InstanceRecord(
        instance_id=SOURCE_ID,
        model_id=MODEL_ID,
        checkpoint_digest=MODEL_ID,
        server_id="a",
        slot=SLOT,
        state=InstanceState.READY,
        task_id="task-0",
        source_tier=Tier.DRAM,
        estimate_s=0.0,
        stages=None,
    )
    resume = ResumeRecord(
        model_id=MODEL_ID,
        device="cpu",
        seconds_per_token=seconds_per_token,
        overhead_s=0.0,
        covariance=(0.0, 0.0, 0.0, 0.0),
        observations=1,
        token_s=0.1,
        token_observations=1,
    )
    return [model, source, resume]


class ModelScheduler:
    """`epoch` is that of the leader, or of the last one while nobody leads."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.epoch = 0
        self.store = {(record.table, record.key()): record for record in records}
        self.controller: Controller | None = None
        self.out: list[Sent] = []
        self._lead(0.0)

    # What the model checker does.

    @property
    def is_alive(self) -> bool:
        return self.controller is not None

    def hear(self, message: Message | Call, now: float) -> None:
        if isinstance(message, Call):
            self._step([Arrived(message=message.message, reply_to=message.reply_to)], now)
        else:
            self._step([Arrived(message=message)], now)

    def kill(self, now: float) -> None:
        self.controller = None

    def hear_and_die(self, message: Message | Call, now: float) -> None:
        """The step becomes durable, and is never spoken."""
        said = len(self.out)
        self.hear(message, now)
        del self.out[said:]
        self.controller = None

    def take_over(self, now: float) -> None:
        if self.controller is None:
            self._lead(now)

    def tick(
        self,
        now: float,
        heartbeats: tuple[AgentHeartbeat | WorkerHeartbeat | RouterHeartbeat, ...],
    ) -> None:
        self._step([*(Arrived(message=heartbeat) for heartbeat in heartbeats), Tick()], now)

    def check(self) -> None:
        """What must hold in every state: slots have one owner, and records are the state."""
        if self.controller is None:
            return
        cluster = self.controller.cluster
        owners = [slot.owner for slot in cluster.slots() if slot.owner is not None]
        assert len(owners) == len(set(owners)), "an instance owns two slots"
        for instance in cluster.instances.values():
            assert cluster.slot_of(instance).owner == instance.instance_id, "an instance without its slot"
        assert cluster.durable() == self.store, "the store holds something else"

    def check_end(self) -> None:
        """No migration goes on, nothing is kept for one, and who is there serves."""
        assert self.controller is not None
        cluster = self.controller.cluster
        assert not cluster.migrations, "a migration goes on for ever"
        assert not cluster.reservations, "slots are kept for nobody"
        for instance in cluster.instances.values():
            assert not instance.is_migrating, f"{instance.instance_id} is migrating for ever"
            assert instance.is_open, f"{instance.instance_id} takes no request any more"
            assert not instance.demand, f"{instance.instance_id} has requests that are over"

    @property
    def is_over(self) -> bool:
        """Whether no migration goes on, and no instance comes or goes."""
        if self.controller is None:
            return False
        cluster = self.controller.cluster
        states = {instance.state for instance in cluster.instances.values()}
        return not cluster.migrations and states <= {InstanceState.READY}

    # Lives and steps.

    def _lead(self, now: float) -> None:
        self.epoch += 1
        self.controller = Controller(
            records=list(self.store.values()),
            settings=SETTINGS,
            epoch=self.epoch,
            now=now,
            new_id=Ids(self.epoch),
        )

    def _step(self, events: list[Event], now: float) -> None:
        assert self.controller is not None
        ready = self.controller.step(events, now=now, wall_s=WALL_S)
        for record in ready.records:
            if isinstance(record, Forget):
                self.store.pop((record.forgotten_table, record.forgotten_key), None)
            else:
                self.store[record.table, record.key()] = record
        # Decisions with their reasons, and what is told of those that are over, are for people.
        self.controller.cluster.decisions.clear()
        self.controller.cluster.ended_migrations.clear()
        for outgoing in ready.messages:
            self._say(outgoing)

    def _say(self, outgoing: Outgoing) -> None:
        message, to = outgoing.message, outgoing.to
        if isinstance(message, PrepareInstance):
            return  # the modelled worker builds no skeleton
        if isinstance(to, Reply):
            self._answer(to.reply_to, message)
        elif isinstance(to, ToRouter):
            self.out.append((ROUTER, message))
        else:
            self.out.append((to.server_id, message))

    def _answer(self, reply_to: str, message: Message) -> None:
        if isinstance(message, GetRoutesReply):
            self.out.append((ROUTER, RoutesAnswered(reply=message)))
            return
        if reply_to == OPERATOR:
            # One that was repeated may come when there is nothing to move any more.
            return
        request_id, _, epoch = reply_to.partition("/")
        if isinstance(message, PlaceModelReply):
            answer = PlaceAnswered(request_id=request_id, epoch=int(epoch), reply=message)
        else:
            assert isinstance(message, ErrorReply)
            answer = PlaceAnswered(request_id=request_id, epoch=int(epoch), error=message)
        self.out.append((ROUTER, answer))
