"""What the worker's tests are arranged with: requests, sequences, and checkpoints lent by a real pool."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ckptio
from ckptio.manifest import partition_file
from whimbrel.wire.codec import pack_tokens
from whimbrel.wire.messages import AttachInstance, PartitionChunks, Sampling, StartInference

from services.gpu_worker.core.sequence import Sequence

GREEDY = Sampling(temperature=0.0)


def a_request(
    request_id: str = "req-1",
    *,
    prompt: Many[int] = (5, 6, 7),
    output: Many[int] = (),
    output_tokens_max: int = 4,
    **changes: Any,
) -> StartInference:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "epoch": 1,
        "router_id": "router-a",
        "router_epoch": 10,
        "instance_id": "inst-1",
        "model_id": "m",
        "tokens": pack_tokens([*prompt, *output]),
        "prompt_tokens": len(prompt),
        "output_tokens_max": output_tokens_max,
        "stop_tokens": (),
        "sampling": GREEDY,
    }
    return StartInference(**(fields | changes))


def a_sequence(now: float = 0.0, **fields: Any) -> Sequence:
    return Sequence(a_request(**fields), now)


@dataclass
class Lender:
    """Stands for the storage agent of one server: a pool on tmpfs, and leases beside it."""

    pool: ckptio.ChunkPool
    directory: Path
    reader: ckptio.Reader
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def lend(
        self,
        checkpoint: Path,
        instance_id: str = "inst-1",
        model_id: str = "m",
        *,
        agent_epoch: int = 1,
        devices: Many[str] = (),
    ) -> AttachInstance:
        """Read the checkpoint into the pool and lend it under a new lease; `devices` are those of its partitions."""
        index = ckptio.read_index(checkpoint)
        partitions = []
        for number, part in enumerate(index.partitions):
            chunks = self.pool.allocate(self.pool.chunks_for(part.padded_bytes))
            path = checkpoint / partition_file(number)
            self.reader.read(self.pool, path, chunks, part.padded_bytes, digests=part.digests)
            device = devices[number] if devices else "cpu"
            partitions.append(PartitionChunks(size_bytes=part.padded_bytes, chunks=pack_tokens(chunks), device=device))
        lease = self.directory / f"pool.lease.{next(self.numbers)}"
        lease.touch()
        return AttachInstance(
            instance_id=instance_id,
            model_id=model_id,
            agent_epoch=agent_epoch,
            checkpoint_path=str(checkpoint),
            index_digest=ckptio.read_manifest(checkpoint).index_digest,
            pool_path=str(self.pool.path),
            lease_path=str(lease),
            chunk_size_bytes=self.pool.chunk_size_bytes,
            partitions=tuple(partitions),
        )
