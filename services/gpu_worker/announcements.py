"""Owns what the scheduler is told of an instance: that it is ready, and that it is not there any more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
from whimbrel.wire.codec import error_reply
from whimbrel.wire.messages import InstanceBecameReady, InstanceEnded, Message

from services.gpu_worker import metrics
from services.gpu_worker.config import WorkerConfig
from services.gpu_worker.core.instance import Instance

log = structlog.get_logger()


class Announcements:
    """`tell` publishes a message to the scheduler; `epoch` is this worker's life."""

    def __init__(self, config: WorkerConfig, *, epoch: int, tell: Callable[[Message], Awaitable[None]]) -> None:
        self._config = config
        self._epoch = epoch
        self._tell = tell

    async def became_ready(self, instance: Instance) -> None:
        unhidden = instance.unhidden
        metrics.BIND_SECONDS.observe(unhidden.bind_s)
        log.info(
            "instance_became_ready",
            instance_id=instance.instance_id,
            model_id=instance.model_id,
            skeleton_s=round(unhidden.skeleton_s, 4),
            bind_s=round(unhidden.bind_s, 4),
        )
        await self._tell(
            InstanceBecameReady(
                instance_id=instance.instance_id,
                model_id=instance.model_id,
                server_id=self._config.server_id,
                slot=self._config.slot,
                worker_epoch=self._epoch,
                skeleton_s=unhidden.skeleton_s,
                bind_s=unhidden.bind_s,
            )
        )

    async def ended(self, instance: Instance) -> None:
        code = None if instance.error is None else instance.error.code
        log.info("instance_ended", instance_id=instance.instance_id, model_id=instance.model_id, code=code)
        await self._tell(
            InstanceEnded(
                instance_id=instance.instance_id,
                model_id=instance.model_id,
                server_id=self._config.server_id,
                slot=self._config.slot,
                error=None if instance.error is None else error_reply(instance.error),
            )
        )
