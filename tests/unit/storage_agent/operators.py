"""What operators ask of one storage agent, by request and reply."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import pytest
from whimbrel.wire.errors import WhimbrelError
from whimbrel.wire.ids import new_id
from whimbrel.wire.messages import Ack, Message, PrefetchEnded, PrefetchModel, ResidentModel, Tier

from tests.unit.storage_agent.harness import CHUNK_BYTES, PATIENCE_S, SERVER, Harness, a_config, publish

M = TypeVar("M", bound=Message)


async def ask(agent: Harness, message: Message, kind: type[M]) -> M:
    reply = await agent.bus.request(agent.bus.subjects.to_agent(SERVER, message), message, timeout_s=PATIENCE_S)
    assert isinstance(reply, kind)
    return reply


async def refusal(agent: Harness, message: Message) -> WhimbrelError:
    with pytest.raises(WhimbrelError) as caught:
        await ask(agent, message, Message)
    return caught.value


async def begin(
    agent: Harness, model_id: str, digest: str, tier: Tier, *, is_pinned: bool = False, task_id: str | None = None
) -> PrefetchModel:
    command = PrefetchModel(
        task_id=task_id or new_id("task"), model_id=model_id, checkpoint_digest=digest, tier=tier, is_pinned=is_pinned
    )
    await ask(agent, command, Ack)
    return command


async def end_of(agent: Harness, command: PrefetchModel) -> PrefetchEnded:
    return await agent.until(PrefetchEnded, lambda end: end.task_id == command.task_id)


async def prefetch(agent: Harness, model_id: str, digest: str, tier: Tier, *, is_pinned: bool = False) -> PrefetchEnded:
    end = await end_of(agent, await begin(agent, model_id, digest, tier, is_pinned=is_pinned))
    assert end.error is None
    return end


async def resident(agent: Harness, model_id: str) -> ResidentModel:
    beat = await agent.heartbeat_with(lambda _: True)
    (model,) = [model for model in beat.resident if model.model_id == model_id]
    return model


async def until_quiet(agent: Harness) -> None:
    """No byte moves any more, also not to the SSD, for which neither loads nor prefetches to DRAM wait."""
    tasks = list(agent.service._parts.fillings._tasks)
    if tasks:
        await asyncio.wait(tasks)


def tiers_of(end: PrefetchEnded) -> list[Tier]:
    return [report.tier for report in end.reports]


def models(agent_config_home: Path, names: Iterable[str], size_bytes: int = 5 * CHUNK_BYTES) -> dict[str, str]:
    config = a_config(agent_config_home)
    return {name: publish(config, name, seed=n, size_bytes=size_bytes) for n, name in enumerate(names)}
