"""Owns what is known of a running load, and words about it: where its bytes are, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from whimbrel.wire.codec import pack_tokens
from whimbrel.wire.messages import LoadProgressed, PartitionChunks, Tier, WaitStage

from services.storage_agent.core.chunks import Layout
from services.storage_agent.core.path import Crossed
from services.storage_agent.core.residency import DramCopy
from services.storage_agent.core.tasks import LoadTask
from tests.simulation.clock import Job, Promise

if TYPE_CHECKING:
    from tests.simulation.agents import SimAgent


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """What a running load has done so far, and so what has to be undone when it fails."""

    task: LoadTask
    job: Job | None = None
    copy: DramCopy | None = None
    filling: Job | None = None
    slot_turn: Promise[None] | None = None
    path_turn: Promise[None] | None = None
    source: Tier = Tier.DRAM
    is_lent: bool = False
    is_ending: bool = False
    crossed: dict[Tier, Crossed] = field(default_factory=dict)

    @property
    def holder(self) -> str:
        return f"task {self.task.task_id}"


def tell_progress(agent: SimAgent, task: LoadTask, stage: WaitStage, done_bytes: int, total_bytes: int) -> None:
    agent.tell_scheduler(
        LoadProgressed(
            task_id=task.task_id,
            server_id=agent.server_id,
            stage=stage,
            done_bytes=done_bytes,
            total_bytes=total_bytes,
        )
    )


def partitions(layout: Layout, copy: DramCopy, device: str) -> tuple[PartitionChunks, ...]:
    return tuple(
        PartitionChunks(size_bytes=size_bytes, chunks=pack_tokens(chunks), device=device)
        for size_bytes, chunks in zip(layout.partition_bytes, copy.partitions(), strict=True)
    )
