"""Owns the life of the instance in this worker's slot.

Two things come together, in any order: the *skeleton* (the model without its weights, built from its configuration) and
the *chunks* (the mapped bytes, which may still be on their way). When both are there the tensors are bound; when the
bytes are verified as well, the model is activated: the first time that anybody touches them.

    skeleton being built:   PREPARING (no chunks yet), ATTACHED (chunks mapped)
    skeleton built:         PREPARED (no chunks yet), BINDING, BOUND (bytes on their way), ACTIVATING, READY
    going away:             DRAINING (running requests end), UNLOADING (tensors dropped, chunks unmapped)

Rule 1: legality is in `TRANSITIONS` and nowhere else; a pair that is missing there raises `IllegalTransition`.
Rule 2: work runs in one thread, first in first out, so an unload ordered during other work simply comes after it. What
that work says when it ends is legal in UNLOADING, and changes nothing.
Rule 3: repeated commands are normal on a bus; the methods of `Instance` absorb them before they become events.
Rule 4: chunks that belong to an agent which is gone are filled by nobody. While the instance loads, those of its next
life replace them: tensors are bound again, and what was verified does not count. The shell drops what work on replaced
chunks says when it ends, so `TensorsBound` and `ModelActivated` are always about the chunks that are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto

from whimbrel.wire.errors import Conflict, InstanceGone, StaleEpoch, WhimbrelError
from whimbrel.wire.messages import WorkerState

from services.gpu_worker.core.instance_events import (
    BytesVerified,
    ChunksMapped,
    ChunksReplaced,
    ConfigArrived,
    DrainAsked,
    Emptied,
    Event,
    ModelActivated,
    SkeletonBuilt,
    TensorsBound,
    UnloadAsked,
    WorkFailed,
)


class State(StrEnum):
    EMPTY = auto()
    PREPARING = auto()
    PREPARED = auto()
    ATTACHED = auto()
    BINDING = auto()
    BOUND = auto()
    ACTIVATING = auto()
    READY = auto()
    DRAINING = auto()
    UNLOADING = auto()


TRANSITIONS: dict[State, dict[type[Event], State]] = {
    State.EMPTY: {ConfigArrived: State.PREPARING, ChunksMapped: State.ATTACHED},
    State.PREPARING: {
        SkeletonBuilt: State.PREPARED,
        ChunksMapped: State.ATTACHED,
        WorkFailed: State.UNLOADING,
        UnloadAsked: State.UNLOADING,
    },
    State.PREPARED: {ChunksMapped: State.BINDING, UnloadAsked: State.UNLOADING},
    State.ATTACHED: {
        SkeletonBuilt: State.BINDING,
        ChunksReplaced: State.ATTACHED,
        BytesVerified: State.ATTACHED,
        WorkFailed: State.UNLOADING,
        UnloadAsked: State.UNLOADING,
    },
    State.BINDING: {
        TensorsBound: State.BOUND,
        ChunksReplaced: State.BINDING,
        BytesVerified: State.BINDING,
        WorkFailed: State.UNLOADING,
        UnloadAsked: State.UNLOADING,
    },
    State.BOUND: {
        BytesVerified: State.ACTIVATING,
        ChunksReplaced: State.BINDING,
        UnloadAsked: State.UNLOADING,
    },
    State.ACTIVATING: {
        ChunksReplaced: State.BINDING,
        ModelActivated: State.READY,
        WorkFailed: State.UNLOADING,
        UnloadAsked: State.UNLOADING,
    },
    State.READY: {DrainAsked: State.DRAINING, UnloadAsked: State.UNLOADING},
    State.DRAINING: {UnloadAsked: State.UNLOADING},
    State.UNLOADING: {
        SkeletonBuilt: State.UNLOADING,
        TensorsBound: State.UNLOADING,
        ModelActivated: State.UNLOADING,
        WorkFailed: State.UNLOADING,
        Emptied: State.EMPTY,
    },
}


class Work(StrEnum):
    """What the shell has to do next."""

    BUILD = auto()
    BIND = auto()
    ACTIVATE = auto()
    ANNOUNCE = auto()
    UNLOAD = auto()
    TELL_END = auto()


# What an event makes necessary, by the state that it comes in. Moves that are not here need nothing.
WORK: dict[tuple[State, type[Event]], Work] = {
    (State.EMPTY, ConfigArrived): Work.BUILD,
    (State.EMPTY, ChunksMapped): Work.BUILD,
    (State.PREPARED, ChunksMapped): Work.BIND,
    (State.ATTACHED, SkeletonBuilt): Work.BIND,
    (State.BINDING, ChunksReplaced): Work.BIND,
    (State.BOUND, ChunksReplaced): Work.BIND,
    (State.ACTIVATING, ChunksReplaced): Work.BIND,
    (State.BOUND, BytesVerified): Work.ACTIVATE,
    (State.ACTIVATING, ModelActivated): Work.ANNOUNCE,
    (State.UNLOADING, Emptied): Work.TELL_END,
    **{
        (state, event): Work.UNLOAD
        for state, row in TRANSITIONS.items()
        for event, target in row.items()
        if target is State.UNLOADING and state is not State.UNLOADING
    },
}

WORKER_STATES: dict[State, WorkerState] = {
    State.EMPTY: WorkerState.EMPTY,
    State.PREPARING: WorkerState.LOADING,
    State.PREPARED: WorkerState.LOADING,
    State.ATTACHED: WorkerState.LOADING,
    State.BINDING: WorkerState.LOADING,
    State.BOUND: WorkerState.LOADING,
    State.ACTIVATING: WorkerState.LOADING,
    State.READY: WorkerState.READY,
    State.DRAINING: WorkerState.DRAINING,
    State.UNLOADING: WorkerState.DRAINING,
}

# States in which the chunks are mapped.
MAPPED = frozenset({State.ATTACHED, State.BINDING, State.BOUND, State.ACTIVATING, State.READY, State.DRAINING})

# States in which requests may run.
SERVING = frozenset({State.READY, State.DRAINING})

# States of an instance on its way out, which takes nothing new.
LEAVING = frozenset({State.DRAINING, State.UNLOADING})


class IllegalTransition(Exception):
    """An event that cannot happen in this state: the code that sent it is wrong."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"{type(event).__name__} in state {state}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unhidden:
    """Seconds of the worker's own work after the last byte was verified: what loading did not hide (L6)."""

    skeleton_s: float
    bind_s: float


class Instance:
    """One life of one instance, from its first command to the empty slot. `now` is in monotonic seconds."""

    def __init__(self, instance_id: str, model_id: str) -> None:
        self.instance_id = instance_id
        self.model_id = model_id
        self.state = State.EMPTY
        self.error: WhimbrelError | None = None
        # The agent's life that the chunks belong to; 0 before there are any.
        self._agent_epoch = 0
        self._verified_at: float | None = None
        self._built_at: float | None = None
        self._ready_at: float | None = None

    @property
    def is_loading(self) -> bool:
        return WORKER_STATES[self.state] is WorkerState.LOADING

    @property
    def unhidden(self) -> Unhidden:
        """How long the worker kept everybody waiting once the bytes were there. Only for a ready instance."""
        assert self._verified_at is not None
        assert self._built_at is not None
        assert self._ready_at is not None
        bound_from = max(self._verified_at, self._built_at)
        return Unhidden(skeleton_s=bound_from - self._verified_at, bind_s=self._ready_at - bound_from)

    def prepare(self, now: float) -> Work | None:
        """The scheduler's PrepareInstance; a repetition changes nothing."""
        return self.on(ConfigArrived(), now) if self.state is State.EMPTY else None

    def wants_chunks(self, agent_epoch: int) -> bool:
        """Whether an AttachInstance of this agent's life is news: the first, or one of a later life while loading.

        Raises InstanceGone when the instance is on its way out, StaleEpoch when the agent has a successor.
        """
        if self.state in LEAVING:
            raise InstanceGone(instance_id=self.instance_id)
        if self.state not in MAPPED:
            return True
        if agent_epoch < self._agent_epoch:
            raise StaleEpoch(epoch=agent_epoch, current_epoch=self._agent_epoch)
        return self.is_loading and agent_epoch > self._agent_epoch

    def attach(self, agent_epoch: int, now: float) -> Work | None:
        """The chunks that this agent's life lent, which were wanted, are mapped."""
        event = ChunksReplaced() if self.state in MAPPED else ChunksMapped()
        self._agent_epoch = agent_epoch
        return self.on(event, now)

    def verify(self, now: float) -> Work | None:
        """The agent's ActivateInstance. Raises InstanceGone when no chunks are mapped: this worker was started anew
        after the agent attached, so the load has to begin again."""
        if self.state not in MAPPED or self.state is State.DRAINING:
            raise InstanceGone(instance_id=self.instance_id)
        return self.on(BytesVerified(), now) if self._verified_at is None else None

    def unload(self, now: float, *, is_idle: bool, may_drain: bool) -> Work | None:
        """The scheduler's UnloadInstance: an idle or loading instance goes at once, a busy one drains if it may.

        Raises Conflict for a busy one that may not.
        """
        if self.state is State.UNLOADING:
            return None
        if self.is_loading or is_idle:
            return self.on(UnloadAsked(), now)
        if self.state is State.DRAINING:
            return None
        if not may_drain:
            raise Conflict(reason=f"instance {self.instance_id!r} has requests; ask again, or drain it")
        return self.on(DrainAsked(), now)

    def end_of_requests(self, now: float) -> Work | None:
        """The last request has ended: a draining instance goes."""
        return self.on(UnloadAsked(), now) if self.state is State.DRAINING else None

    def on(self, event: Event, now: float) -> Work | None:
        """Move on; the answer is what has to be done now. Raises IllegalTransition."""
        work = self._enter(event)
        match event:
            case BytesVerified():
                self._verified_at = now
            case ChunksReplaced():
                self._verified_at = None
            case SkeletonBuilt():
                self._built_at = now
            case WorkFailed(error=error) if work is Work.UNLOAD:
                self.error = error
            case TensorsBound() if self.state is State.BOUND and self._verified_at is not None:
                # The agent was faster than the skeleton: its news was kept until now.
                return self._enter(BytesVerified())
            case ModelActivated():
                self._ready_at = now
            case _:
                pass
        return work

    def _enter(self, event: Event) -> Work | None:
        state = TRANSITIONS[self.state].get(type(event))
        if state is None:
            raise IllegalTransition(self.state, event)
        work = WORK.get((self.state, type(event)))
        self.state = state
        return work
