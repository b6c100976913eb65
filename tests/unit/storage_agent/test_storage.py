"""The small parts of the agent: configuration, digests, the probe, leases, outcomes and progress."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import ckptio
import pytest
from whimbrel.chassis.config import ConfigError, from_env
from whimbrel.chassis.testing import InMemoryHub
from whimbrel.wire.errors import InvalidRequest, QueueFull
from whimbrel.wire.messages import ImportModel

from services.storage_agent.checkpoints import OpenCheckpoints, open_checkpoint
from services.storage_agent.config import AgentConfig
from services.storage_agent.core.chunks import CheckpointKey
from services.storage_agent.imports import JOBS_MAX, ImportJobs
from services.storage_agent.leases import LeaseFiles, retire, take_over
from services.storage_agent.outcomes import Outcomes
from services.storage_agent.probing import choose, probe_ssd
from services.storage_agent.progress import Progress
from services.storage_agent.repository import Repository
from tests.unit.storage_agent.harness import CHUNK_BYTES, a_config, publish

ROOT = Path(__file__).parents[3]

ENVIRON = {
    "WB_SERVER_ID": "gpu-1",
    "WB_REPOSITORY_URL": "file:///models",
    "WB_SSD_DIR": "/ssd",
    "WB_POOL_PATH": "/dev/shm/pool",
}


# --- configuration ---


def test_the_configuration_comes_from_the_environment_with_sizes_a_person_can_write() -> None:
    config = from_env(AgentConfig, ENVIRON | {"WB_POOL_BYTES": "100MiB", "WB_SSD_BYTES": "2GiB"})
    assert config.server_id == "gpu-1"
    assert config.ssd_dir == Path("/ssd")
    assert config.ssd_bytes == 2 * 1024**3
    assert config.chunk_count == 6, "whole chunks of 16 MiB"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WB_SERVER_ID", "a.b"),
        ("WB_POOL_BYTES", "1MiB"),
        ("WB_SSD_BYTES", "0"),
        ("WB_CHUNK_SIZE_BYTES", "4097"),
        ("WB_CHUNK_SIZE_BYTES", "1024"),
        ("WB_READER_THREADS", "0"),
        ("WB_READER_THREADS", "65"),
        ("WB_SSD_BYTES_PER_S_MAX", "-1"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        from_env(AgentConfig, ENVIRON | {name: value})


def test_a_process_without_its_settings_says_which_one_is_missing() -> None:
    """The message of a misconfigured start is one line that a person can act on."""
    command = [sys.executable, "-m", "services.storage_agent"]
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("WB_SERVER_ID: is not set")


# --- digests ---


def test_the_digest_of_a_checkpoint_is_its_content_and_not_where_it_came_from(home: Path) -> None:
    config = a_config(home)
    first, again, other = (publish(config, name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    sources = {ckptio.read_manifest(home / "repository" / name).source.name for name in "ab"}
    assert len(sources) == 2
    assert first == again != other


def test_open_checkpoints_are_bounded_and_forget_the_least_recently_used(home: Path) -> None:
    config = a_config(home)
    opened = OpenCheckpoints(checkpoints_max=2)
    keys = [CheckpointKey(model_id=name, checkpoint_digest=publish(config, name)) for name in "abc"]
    for key in keys[:2]:
        opened.put(open_checkpoint(home / "repository" / key.model_id, key.model_id))
    assert opened.get(keys[0]) is not None
    opened.put(open_checkpoint(home / "repository" / "c", "c"))
    assert opened.get(keys[1]) is None
    assert opened.get(keys[0]) is not None
    opened.forget(keys[0])
    assert opened.get(keys[0]) is None


# --- the probe ---


def test_the_probe_measures_a_disk_and_leaves_nothing(tmp_path: Path, home: Path) -> None:
    """E6: bandwidth is learned, never a constant; the probe is the first guess."""
    with ckptio.ChunkPool.create(None, 8 * 65536, 65536) as pool:
        for directory in (tmp_path, home):  # with direct I/O, and on a file system that may refuse it
            for size_bytes in (0, 4 * 65536, 1024 * 1024):  # less than a chunk, and more than the pool
                probe = probe_ssd(directory, pool, 65536, 1, size_bytes)
                assert probe.bandwidth_bytes_per_s > 0
                assert list(directory.iterdir()) == []
                assert pool.free_chunks == 8


@pytest.mark.parametrize(
    ("direct_s", "buffered_s", "is_direct", "bandwidth"),
    [(1.0, 1.0, True, 100.0), (1.1, 1.0, True, 100 / 1.1), (2.0, 1.0, False, 100.0), (1.0, 9.0, True, 100.0)],
)
def test_direct_reads_are_given_up_only_for_a_clear_gain(
    direct_s: float, buffered_s: float, is_direct: bool, bandwidth: float
) -> None:
    """L3, L9: direct I/O is the rule, for its predictability; what the device shows decides."""
    probe = choose(100, direct_s=direct_s, buffered_s=buffered_s)
    assert (probe.is_direct, probe.bandwidth_bytes_per_s) == (is_direct, pytest.approx(bandwidth))


# --- leases ---


def locked(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def test_a_lease_ends_only_when_nobody_holds_it(home: Path) -> None:
    leases = LeaseFiles(home / "pool")
    path = leases.create("inst-1", (1, 2))
    assert path.parent == home, "beside the pool"
    holders = [locked(path), locked(path)]
    for holder in holders:
        assert not leases.end_if_free("inst-1")
        os.close(holder)
    assert leases.end_if_free("inst-1")
    assert not path.exists()


def test_a_lease_cannot_be_lost_by_deleting_its_file(home: Path) -> None:
    leases = LeaseFiles(home / "pool")
    path = leases.create("inst-1", (1,))
    holder = locked(path)
    path.unlink()
    assert not leases.end_if_free("inst-1")
    os.close(holder)
    assert leases.end_if_free("inst-1")


def test_an_instance_id_is_never_a_path(home: Path) -> None:
    with pytest.raises(InvalidRequest):
        LeaseFiles(home / "pool").create("../inst", (1,))


def test_the_pool_of_a_killed_agent_keeps_only_what_a_living_worker_maps(home: Path) -> None:
    page = 4096
    path = home / "pool"
    path.write_bytes(b"x" * 8 * page)
    leases = LeaseFiles(path)
    held, free = leases.create("inst-held", (1, 6)), leases.create("inst-free", (2, 3))
    leases.close()
    (home / "pool.lease.torn").write_bytes(b"abc")
    holder, mapped = locked(held), os.open(path, os.O_RDONLY)
    take_over(path, page)
    kept = [os.pread(mapped, page, n * page) == b"x" * page for n in range(8)]
    assert [number for number, is_kept in enumerate(kept) if is_kept] == [1, 6]
    assert os.fstat(mapped).st_blocks * 512 == 2 * page, "the rest of the memory is given back"
    assert list(home.iterdir()) == []
    assert not free.exists()
    os.close(holder)
    os.close(mapped)


def test_the_pool_of_an_agent_that_lives_is_not_taken(home: Path) -> None:
    path = home / "pool"
    with (
        ckptio.ChunkPool.create(path, CHUNK_BYTES, CHUNK_BYTES),
        pytest.raises(FileExistsError, match="another storage agent"),
    ):
        take_over(path, CHUNK_BYTES)
    assert not path.exists(), "the owner removed it, not we"


def test_leases_without_a_pool_are_removed(home: Path) -> None:
    (home / "pool.lease.inst-1").touch()
    take_over(home / "pool", 4096)
    assert list(home.iterdir()) == []


def test_a_lease_that_was_cut_short_says_nothing(home: Path) -> None:
    path = home / "pool"
    path.write_bytes(b"x" * 4096)
    lease = home / "pool.lease.inst-1"
    lease.write_bytes(b"abc")
    holder = locked(lease)
    with path.open("r+b") as file:
        retire(file.fileno(), path, 4096)
    assert path.read_bytes() == bytes(4096)
    os.close(holder)


# --- outcomes and jobs ---


def test_only_the_last_outcomes_are_remembered() -> None:
    outcomes: Outcomes[int] = Outcomes(outcomes_max=2)
    for number in range(3):
        outcomes.remember(f"task-{number}", number)
    assert [outcomes.get(f"task-{number}") for number in range(3)] == [None, 1, 2]


async def test_a_full_import_queue_refuses_the_next_job(home: Path) -> None:
    jobs = ImportJobs(
        server_id="server-0",
        bus=InMemoryHub().bus(),
        repository=Repository(f"file://{home}"),
        chunk_size_bytes=CHUNK_BYTES,
        staging_dir=home / "staging",
        on_change=lambda: None,
    )
    commands = [
        ImportModel(job_id=f"job-{n}", model_id="m", source="/s", scheduler_epoch=1) for n in range(JOBS_MAX + 1)
    ]
    for command in commands[:-1]:
        jobs.submit(command)
    with pytest.raises(QueueFull):
        jobs.submit(commands[-1])
    jobs.submit(commands[0])
    assert jobs.job_ids() == tuple(command.job_id for command in commands[:-1])
    jobs.close()


# --- progress ---


async def test_progress_is_told_when_it_changes_and_not_otherwise() -> None:
    progress: Progress[str] = Progress("queued")
    told: list[tuple[str, int, int]] = []
    was_told = asyncio.Event()

    async def publish_progress(*latest: object) -> None:
        told.append(latest)  # type: ignore[arg-type]
        was_told.set()

    telling = asyncio.create_task(progress.tell(publish_progress))
    await asyncio.sleep(0)
    progress.set("loading", 1, 4)
    progress.set("loading", 2, 4)
    await asyncio.wait_for(was_told.wait(), 20)
    telling.cancel()
    await asyncio.wait([telling])
    assert told == [("loading", 2, 4)]
    assert progress.stage == "loading"
