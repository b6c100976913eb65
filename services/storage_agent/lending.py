"""Owns what is lent to workers: a lease file for each instance, and the chunks that it maps until the lease ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import structlog
from whimbrel.wire.errors import Unavailable

from services.storage_agent.core.residency import DramCopy
from services.storage_agent.leases import LeaseFiles

log = structlog.get_logger()


class Lending:
    """The leases of one server. `hold` and `let_go` change who holds a copy, by holder name."""

    def __init__(
        self,
        pool_path: Path,
        *,
        hold: Callable[[DramCopy, str], None],
        let_go: Callable[[int, str], None],
        on_change: Callable[[], None],
    ) -> None:
        self._files = LeaseFiles(pool_path)
        self._hold = hold
        self._let_go = let_go
        self._on_change = on_change
        self._copies: dict[str, int] = {}
        self._attaching: set[str] = set()

    def lend(self, copy: DramCopy, instance_id: str) -> Path:
        """A lease file for an instance that is about to use the copy. It counts as held until `settle`."""
        chunks = tuple(chunk for partition in copy.partitions() for chunk in partition)
        path = self._files.create(instance_id, chunks)
        self._hold(copy, holder_of(instance_id))
        self._copies[instance_id] = copy.copy_id
        self._attaching.add(instance_id)
        return path

    def is_lent(self, instance_id: str) -> bool:
        return instance_id in self._copies

    def is_held(self, instance_id: str) -> bool:
        """Whether the worker has taken the lease."""
        return self._files.is_held(instance_id)

    def settle(self, instance_id: str) -> None:
        """The worker has answered: from now on the lock of the lease file alone says whether it has the instance."""
        self._attaching.discard(instance_id)
        self._on_change()

    def sharing(self, instance_id: str) -> AbstractContextManager[None]:
        """While the worker's memory is written to. Raises Unavailable when the worker is gone."""
        if instance_id not in self._copies:
            raise Unavailable(what=f"instance {instance_id}, whose worker is gone,")
        return self._files.shared(instance_id)

    def copied(self, instance_id: str) -> None:
        """The instance has its own copy of the bytes, on GPUs: the chunks are free, the lease tells of its life. Raises
        Unavailable when the worker is gone meanwhile."""
        if instance_id not in self._copies:
            raise Unavailable(what=f"instance {instance_id}, whose worker is gone,")
        self._files.forget_chunks(instance_id)
        self._let_go(self._copies[instance_id], holder_of(instance_id))

    def attached(self) -> tuple[str, ...]:
        """The instances that a worker has."""
        return tuple(instance_id for instance_id in self._copies if instance_id not in self._attaching)

    def sweep(self) -> None:
        """End every lease that no worker holds any more."""
        for instance_id in self.attached():
            if self._files.end_if_free(instance_id):
                self._let_go(self._copies.pop(instance_id), holder_of(instance_id))
                log.info("lease_ended", instance_id=instance_id)
                self._on_change()

    def close(self) -> None:
        """Let go of the files; workers keep their locks, and the names stay until the pool is retired."""
        self._files.close()


def holder_of(instance_id: str) -> str:
    """The name under which an instance holds chunks."""
    return f"instance {instance_id}"
