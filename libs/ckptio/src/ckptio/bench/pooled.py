"""The loader under test: a checkpoint, converted or stock, loaded into a resident pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ckptio.layout import read_layout
from ckptio.load_plan import Factors
from ckptio.loaded import Loaded
from ckptio.loader import Loader
from ckptio.plan import CHUNK_SIZE_BYTES, chunk_count
from ckptio.pool import ChunkPool


@contextmanager
def pool_for(place: Path, factors: Factors | None = None) -> Iterator[tuple[ChunkPool, Loader]]:
    """A pool, touched, just large enough for the checkpoint at `place`, and a loader into it."""
    parts = read_layout(place).index.partitions
    count = sum(chunk_count(part.padded_bytes, CHUNK_SIZE_BYTES) for part in parts)
    with (
        ChunkPool.create(None, max(count, 1) * CHUNK_SIZE_BYTES) as pool,
        Loader(pool, factors=factors) as loader,
    ):
        yield pool, loader


@contextmanager
def resident_pool(place: Path) -> Iterator[tuple[ChunkPool, Callable[[bool], Loaded]]]:
    """A pool for `place`, and the function that loads it, verified or not; its loads end with the block."""
    # The tensors' module, so that its import is not part of the first load.
    import ckptio.torch  # noqa: F401

    with pool_for(place) as (pool, loader), ExitStack() as stack:
        yield pool, lambda verify: stack.enter_context(loader.load(place, verify=verify))
