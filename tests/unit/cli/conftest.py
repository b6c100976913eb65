"""A real router between scripted peers, for commands that are run as a user runs them."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from tests.support.cluster import whimbrel
from tests.unit.router.conftest import Bench, bench_maker
from tests.unit.router.model_files import byte_level_tokenizer, write_model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    root: Path = tmp_path_factory.mktemp("repository")
    tokenizer: Tokenizer = byte_level_tokenizer()
    write_model(root / "tiny", tokenizer)
    async with bench_maker(tmp_path_factory.mktemp("cache"), root, tokenizer)() as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def bench(module_bench: Bench) -> Bench:
    await module_bench.reset()
    module_bench.scheduler.servers = ("server-0",)
    return module_bench


async def command(bench: Bench, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it against the router of the bench."""
    return await asyncio.to_thread(whimbrel, *arguments, "--url", bench.service.url, check=False)
