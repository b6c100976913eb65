"""The contract of the store, held by the Redis one and by its in-memory twin alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial

import pytest
import redis.asyncio
from structlog.testing import capture_logs
from whimbrel.chassis import store
from whimbrel.chassis.config import ConfigError
from whimbrel.chassis.servers import RedisServer
from whimbrel.chassis.store import Claim, RedisStore, Store
from whimbrel.chassis.testing import InMemoryData, InMemoryStore
from whimbrel.wire.codec import encode_record
from whimbrel.wire.errors import ProtocolError, StaleEpoch, Unavailable
from whimbrel.wire.messages import JobStage, JobStatus, Tier
from whimbrel.wire.records import BandwidthRecord, Forget, JobRecord, Record

PATIENCE_S = 20.0

Home = InMemoryData | RedisServer
MakeStore = Callable[[], Awaitable[Store]]


@pytest.fixture(params=["memory", "redis"])
def home(request: pytest.FixtureRequest) -> Home:
    """Where records live; stores of one home see the same ones."""
    return InMemoryData() if request.param == "memory" else request.getfixturevalue("redis_server")


@pytest.fixture(params=["memory", "redis"])
def mortal_home(request: pytest.FixtureRequest) -> Home:
    return InMemoryData() if request.param == "memory" else request.getfixturevalue("own_redis_server")


async def connect(home: Home, at_end: AsyncExitStack, cluster: str) -> Store:
    if isinstance(home, InMemoryData):
        made: Store = InMemoryStore(home)
    else:
        made = await RedisStore.connect(home.url, cluster=cluster)
    at_end.push_async_callback(made.close)
    return made


@pytest.fixture
def make_store(home: Home, at_end: AsyncExitStack, cluster: str) -> MakeStore:
    return partial(connect, home, at_end, cluster)


async def raw_redis(server: RedisServer, at_end: AsyncExitStack) -> redis.asyncio.Redis:
    client = redis.asyncio.Redis.from_url(server.url)
    at_end.push_async_callback(client.aclose)
    return client


async def write_bytes(home: Home, at_end: AsyncExitStack, cluster: str, table: str, key: str, value: bytes) -> None:
    """What another version, or a person at a console, could leave behind."""
    if isinstance(home, InMemoryData):
        home.tables[table][key] = value
    else:
        await (await raw_redis(home, at_end)).hset(f"{{{cluster}}}:{table}", key, value)


def a_job(job_id: str, done_bytes: int = 0) -> JobRecord:
    status = JobStatus(job_id=job_id, model_id="org/m", stage=JobStage.CONVERTING, done_bytes=done_bytes)
    return JobRecord(job=status, source="/models/m", server_id="s1", updated_at_s=1.5)


def a_bandwidth(server_id: str) -> BandwidthRecord:
    return BandwidthRecord(
        server_id=server_id, tier=Tier.SSD, seconds_per_byte=1e-9, variance=0.0, overhead_s=0.01, observations=3
    )


def in_order(records: Sequence[Record]) -> list[Record]:
    return sorted(records, key=lambda record: (record.table, record.key()))


async def test_what_was_appended_is_loaded_by_the_next_life(make_store: MakeStore) -> None:
    """P2: a scheduler that starts reads exactly what the one before it recorded."""
    first = await make_store()
    await first.open()
    records = [a_job("a"), a_job("b"), a_bandwidth("s1")]
    await first.append(records)
    await first.close()

    second = await make_store()
    await second.open()

    assert in_order(await second.load()) == in_order(records)


async def test_an_empty_store_loads_nothing(make_store: MakeStore) -> None:
    assert await (await make_store()).load() == []


async def test_the_last_record_of_a_key_wins_also_within_a_step(make_store: MakeStore) -> None:
    opened = await make_store()
    await opened.open()

    await opened.append([a_job("a", done_bytes=1), a_job("a", done_bytes=2)])
    await opened.append(
        [a_job("a", done_bytes=3), a_job("b", done_bytes=4), Forget(forgotten_table="jobs", forgotten_key="b")]
    )

    assert await opened.load() == [a_job("a", done_bytes=3)]


async def test_a_forgotten_key_is_gone_and_may_come_back(make_store: MakeStore) -> None:
    opened = await make_store()
    await opened.open()
    await opened.append([a_job("a"), a_bandwidth("a")])

    await opened.append([Forget(forgotten_table="jobs", forgotten_key="a")])
    assert await opened.load() == [a_bandwidth("a")]

    await opened.append([Forget(forgotten_table="jobs", forgotten_key="a"), a_job("a", done_bytes=7)])
    assert in_order(await opened.load()) == in_order([a_bandwidth("a"), a_job("a", done_bytes=7)])


async def test_appending_nothing_is_nothing(make_store: MakeStore) -> None:
    opened = await make_store()
    await opened.open()
    await opened.append([])
    assert await opened.load() == []


async def test_every_opener_gets_a_higher_epoch(make_store: MakeStore) -> None:
    stores = [await make_store() for _ in range(3)]
    epochs = [await each.open() for each in stores] + [await stores[0].open()]
    assert epochs == sorted(set(epochs))


async def test_whoever_opened_earlier_is_refused_and_changes_nothing(make_store: MakeStore) -> None:
    """P1: fencing. A scheduler that was only slow, not dead, cannot overwrite what its successor decided."""
    old, new = await make_store(), await make_store()
    old_epoch = await old.open()
    await old.append([a_job("a", done_bytes=1)])
    new_epoch = await new.open()

    with pytest.raises(StaleEpoch) as refused:
        await old.append([a_job("a", done_bytes=99), Forget(forgotten_table="jobs", forgotten_key="a")])

    assert (refused.value.epoch, refused.value.current_epoch) == (old_epoch, new_epoch)
    assert await new.load() == [a_job("a", done_bytes=1)]
    await new.append([a_job("a", done_bytes=2)])
    assert await new.load() == [a_job("a", done_bytes=2)]


async def test_a_store_that_was_not_opened_cannot_append(make_store: MakeStore) -> None:
    with pytest.raises(AssertionError):
        await (await make_store()).append([a_job("a")])


async def test_readers_see_whole_steps_only(make_store: MakeStore) -> None:
    writer, reader = await make_store(), await make_store()
    await writer.open()
    keys = [f"k{n}" for n in range(20)]
    await writer.append([a_job(key, done_bytes=0) for key in keys])

    async def write() -> None:
        for step in range(1, 50):
            await writer.append([a_job(key, done_bytes=step) for key in keys])

    async with asyncio.TaskGroup() as group:
        writing = group.create_task(write())
        while not writing.done():
            steps = {record.job.done_bytes for record in await reader.load() if isinstance(record, JobRecord)}
            assert len(steps) == 1
            await asyncio.sleep(0)


async def test_the_journal_has_one_entry_a_step_and_is_bounded(
    make_store: MakeStore, home: Home, at_end: AsyncExitStack, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "JOURNAL_ENTRIES_MAX", 200)
    if isinstance(home, InMemoryData):
        home.journal = type(home.journal)(maxlen=200)
    opened = await make_store()
    epoch = await opened.open()

    await opened.append([a_job("a"), Forget(forgotten_table="bandwidths", forgotten_key="s1/ssd")])
    if isinstance(home, InMemoryData):
        assert len(home.journal) == 1
    else:
        ((_, entry),) = await (await raw_redis(home, at_end)).xrange(f"{{{cluster}}}:journal")
        assert entry == {b"epoch": b"%d" % epoch, b"keys": b"jobs/a -bandwidths/s1/ssd"}

    for n in range(400):
        await opened.append([a_job("a", done_bytes=n)])

    if isinstance(home, InMemoryData):
        assert len(home.journal) == 200
    else:
        # Redis trims whole nodes of 100 entries: cheap, and never more than one node over.
        assert 200 <= await (await raw_redis(home, at_end)).xlen(f"{{{cluster}}}:journal") <= 300


@pytest.mark.parametrize(
    "value", [b"", b"\xc1 rubbish", encode_record(a_job("a"))[:-1]], ids=["empty", "rubbish", "cut"]
)
async def test_a_value_that_cannot_be_decoded_is_an_error_that_names_table_and_key(
    make_store: MakeStore, home: Home, at_end: AsyncExitStack, cluster: str, value: bytes
) -> None:
    opened = await make_store()
    await opened.open()
    await write_bytes(home, at_end, cluster, "jobs", "job-7", value)

    with pytest.raises(ProtocolError, match=r"table 'jobs', key 'job-7'"):
        await opened.load()


async def test_a_record_under_another_key_is_an_error_that_names_both(
    make_store: MakeStore, home: Home, at_end: AsyncExitStack, cluster: str
) -> None:
    opened = await make_store()
    await opened.open()
    await write_bytes(home, at_end, cluster, "jobs", "job-7", encode_record(a_job("job-8")))

    with pytest.raises(ProtocolError, match=r"table 'jobs', key 'job-7' of the store holds 'jobs'/'job-8'"):
        await opened.load()


# --- the lease ---


async def test_one_of_several_gets_the_lease_and_the_others_hear_who(make_store: MakeStore) -> None:
    """P2: one scheduler leads."""
    stores = [await make_store() for _ in range(5)]

    claims = await asyncio.gather(*(each.acquire(f"s{n}", 10.0) for n, each in enumerate(stores)))

    (winner,) = [claim for claim in claims if claim.is_ours]
    others = [claim for claim in claims if not claim.is_ours]
    assert len(others) == 4
    assert {claim.leader for claim in others} == {winner.leader}
    assert {claim.found_epoch for claim in others} == {winner.epoch}
    assert all(1.0 < claim.left_s <= 10.0 for claim in others)


async def test_a_lease_that_is_not_renewed_runs_out_and_the_next_leader_fences_the_last(make_store: MakeStore) -> None:
    """P1, P2"""
    old, new = await make_store(), await make_store()
    first = await old.acquire("old", 0.2)
    await old.append([a_job("a", done_bytes=1)])

    second = await claimed(new, "new")

    assert second.epoch > first.epoch == second.found_epoch
    for refused in (old.renew("old", 0.2), old.append([a_job("a", done_bytes=99)])):
        with pytest.raises(StaleEpoch) as stale:
            await refused
        assert (stale.value.epoch, stale.value.current_epoch) == (first.epoch, second.epoch)
    await old.release()
    assert not (await old.acquire("old", 0.2)).is_ours, "only the holder releases"
    assert await new.load() == [a_job("a", done_bytes=1)]


async def claimed(store: Store, name: str, ttl_s: float = 10.0) -> Claim:
    async with asyncio.timeout(PATIENCE_S):
        claim = await store.acquire(name, ttl_s)
        while not claim.is_ours:
            await asyncio.sleep(claim.left_s)
            claim = await store.acquire(name, ttl_s)
    return claim


async def test_a_renewed_lease_does_not_run_out(make_store: MakeStore) -> None:
    holder, other = await make_store(), await make_store()
    await holder.acquire("holder", 0.1)
    for ttl_s in (30.0, 60.0):
        await holder.renew("holder", ttl_s)
        await asyncio.sleep(0.15)
        claim = await other.acquire("other", 1.0)
        assert not claim.is_ours, "it would have run out by now"
        assert ttl_s / 2 < claim.left_s <= ttl_s, "from now on, not from when it was taken"


async def test_a_lease_that_ran_out_and_that_nobody_took_is_held_again(make_store: MakeStore) -> None:
    holder, other = await make_store(), await make_store()
    claim = await holder.acquire("holder", 0.01)
    await asyncio.sleep(0.05)
    await holder.append([a_job("a")])  # fencing is by epoch, and that is still ours

    await holder.renew("holder", 10.0)

    assert (await other.acquire("other", 1.0)).found_epoch == claim.epoch


async def test_a_released_lease_is_free_at_once(make_store: MakeStore) -> None:
    holder, other = await make_store(), await make_store()
    await holder.acquire("holder", 60.0)
    await holder.release()

    assert (await other.acquire("other", 60.0)).is_ours
    with pytest.raises(StaleEpoch):
        await holder.append([a_job("a")])


async def test_a_store_that_was_not_acquired_has_no_lease_to_renew(make_store: MakeStore) -> None:
    with pytest.raises(AssertionError):
        await (await make_store()).renew("s", 1.0)


async def test_a_store_that_lost_its_data_is_not_taken_by_whoever_knows_better(
    mortal_home: Home, at_end: AsyncExitStack, cluster: str
) -> None:
    """P2: a standby that saw a leader leaves it the time to come back and write down what it knows."""
    leader, standby = [await connect(mortal_home, at_end, cluster) for _ in range(2)]
    lead = await leader.acquire("leader", 10.0)
    assert (await standby.acquire("standby", 10.0)).found_epoch == lead.epoch
    await lose(mortal_home, at_end)

    with pytest.raises(StaleEpoch) as stale:
        await leader.renew("leader", 10.0)
    assert (stale.value.epoch, stale.value.current_epoch) == (lead.epoch, 0)
    claim = await standby.acquire("standby", 10.0, newest_epoch=lead.epoch)
    assert (claim.is_ours, claim.found_epoch, claim.leader) == (False, 0, "")

    again = await leader.acquire("leader", 10.0)
    assert again.is_ours
    assert again.found_epoch == 0
    assert again.epoch > lead.epoch, "an epoch is never given twice"


async def lose(home: Home, at_end: AsyncExitStack) -> None:
    if isinstance(home, InMemoryData):
        home.lose()
    else:
        await (await raw_redis(home, at_end)).flushall()


async def go_down(home: Home) -> None:
    if isinstance(home, InMemoryData):
        home.is_up = False
    else:
        await home.kill()


async def come_back(home: Home) -> None:
    if isinstance(home, InMemoryData):
        home.is_up = True
    else:
        await home.restart()


async def test_nothing_that_was_appended_is_lost_when_the_store_dies(
    mortal_home: Home, at_end: AsyncExitStack, cluster: str
) -> None:
    """P1: durable means on disk. Redis is killed, not stopped, after the last append returned."""
    opened = await connect(mortal_home, at_end, cluster)
    epoch = await opened.open()
    await opened.append([a_job(f"k{n}") for n in range(50)])
    for n in range(50):
        await opened.append([a_job(f"k{n}", done_bytes=n + 1)])

    await go_down(mortal_home)
    with pytest.raises(Unavailable):
        await opened.append([a_job("late")])
    with pytest.raises(Unavailable):
        await opened.load()
    with pytest.raises(Unavailable):
        await opened.renew("s", 1.0)
    with pytest.raises(Unavailable):
        await opened.acquire("s", 1.0)
    with pytest.raises(Unavailable):
        await opened.release()
    with pytest.raises(Unavailable):
        await (InMemoryStore(mortal_home) if isinstance(mortal_home, InMemoryData) else opened).open()
    await come_back(mortal_home)

    assert in_order(await opened.load()) == in_order([a_job(f"k{n}", done_bytes=n + 1) for n in range(50)])
    await opened.append([a_job("k0", done_bytes=77)])  # the same life goes on, with its epoch
    assert await (await connect(mortal_home, at_end, cluster)).open() > epoch


# --- what only the real one can suffer ---


async def test_a_store_that_lost_its_data_refuses_the_old_life_and_never_repeats_an_epoch(
    redis_server: RedisServer, at_end: AsyncExitStack, cluster: str
) -> None:
    opened = await connect(redis_server, at_end, cluster)
    epoch = await opened.open()
    await (await raw_redis(redis_server, at_end)).delete(f"{{{cluster}}}:epoch")

    with pytest.raises(StaleEpoch):
        await opened.append([a_job("a")])

    assert await opened.open() > epoch
    await opened.append([a_job("a")])


async def test_clusters_do_not_see_each_other(redis_server: RedisServer, at_end: AsyncExitStack, cluster: str) -> None:
    one, other = [await connect(redis_server, at_end, f"{cluster}{n}") for n in (1, 2)]
    await one.open()
    await other.open()
    await one.append([a_job("a")])

    assert await other.load() == []


async def test_connect_waits_for_a_server_that_comes_up_later(
    own_redis_server: RedisServer, at_end: AsyncExitStack, cluster: str
) -> None:
    await own_redis_server.kill()
    connecting = asyncio.create_task(connect(own_redis_server, at_end, cluster))
    await asyncio.sleep(0.05)
    assert not connecting.done()

    await own_redis_server.restart()

    await (await asyncio.wait_for(connecting, PATIENCE_S)).open()


@pytest.mark.parametrize("url", ["", "127.0.0.1:6379", "http://127.0.0.1"])
async def test_a_url_that_can_never_work_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="WB_REDIS_URL"):
        await RedisStore.connect(url, cluster="wb")


async def test_connect_warns_of_a_server_that_does_not_keep_what_it_is_told(
    own_redis_server: RedisServer, at_end: AsyncExitStack, cluster: str
) -> None:
    with capture_logs() as quiet:
        await connect(own_redis_server, at_end, cluster)
    await (await raw_redis(own_redis_server, at_end)).config_set("appendfsync", "everysec")

    with capture_logs() as warned:
        await connect(own_redis_server, at_end, cluster)

    assert [entry["event"] for entry in quiet] == ["redis_connected"]
    assert warned[0]["event"] == "redis_not_durable"
    assert warned[0]["settings"] == {"appendonly": "yes", "appendfsync": "everysec"}


async def test_a_server_that_refuses_to_write_is_unavailable(
    own_redis_server: RedisServer, at_end: AsyncExitStack, cluster: str
) -> None:
    opened = await connect(own_redis_server, at_end, cluster)
    await opened.open()
    client = await raw_redis(own_redis_server, at_end)
    await client.config_set("maxmemory", "100kb")

    with pytest.raises(Unavailable, match="Redis"):
        await opened.append([a_job("a")])

    await client.config_set("maxmemory", "0")
    assert await opened.load() == []
