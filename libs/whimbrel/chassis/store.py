"""Owns the store: durable records behind a fencing epoch, and how Redis keeps them (P1, P2)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import urlsplit

import redis.asyncio
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.exceptions import RedisError, ResponseError

from whimbrel.chassis import telemetry
from whimbrel.chassis.config import ConfigError
from whimbrel.wire.codec import RECORDS, decode_record, encode_record
from whimbrel.wire.errors import ProtocolError, StaleEpoch, Unavailable
from whimbrel.wire.records import Forget, Record

log = structlog.get_logger()

T = TypeVar("T")

TABLES = tuple(sorted({record.table for record in RECORDS.values() if record.table}))

# Some hours of decisions of a busy cluster; enough to see what led to what, small enough to forget about.
JOURNAL_ENTRIES_MAX = 10_000
# An fsync of a loaded disk can take a second; a Redis that is silent for longer is as good as away.
ANSWER_S_MAX = 5.0
CONNECT_S_MAX = 2.0
# One more try at once: the first command after Redis restarted finds a dead connection.
RETRIES_MAX = 1
RETRY_GAP_S = 0.02
# One writer needs one; the rest is for reading beside it.
CONNECTIONS_MAX = 8
# Between tries to connect at start.
CONNECT_GAP_S_MIN = 0.1
CONNECT_GAP_S_MAX = 2.0

APPEND_S = telemetry.histogram("whimbrel_store_append_seconds", "Time until a step's records were durable.")

# The epoch never goes back, even when Redis has lost its data: it is at least the time in microseconds.
_OPEN = """
local time = redis.call('TIME')
local epoch = math.max(tonumber(redis.call('GET', KEYS[1]) or '0') + 1, time[1] * 1000000 + time[2])
redis.call('SET', KEYS[1], string.format('%.0f', epoch))
return epoch
"""

# ARGV: our epoch, journal bound, journal text, then table number, key, value ('' forgets) for each record.
# Answers -1 when it is done, or the stored epoch when that is not ours; then nothing has changed.
_APPEND = """
local stored = redis.call('GET', KEYS[1]) or '0'
if stored ~= ARGV[1] then return tonumber(stored) end
for i = 4, #ARGV, 3 do
  local table_key = KEYS[2 + tonumber(ARGV[i])]
  if ARGV[i + 2] == '' then
    redis.call('HDEL', table_key, ARGV[i + 1])
  else
    redis.call('HSET', table_key, ARGV[i + 1], ARGV[i + 2])
  end
end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'epoch', ARGV[1], 'keys', ARGV[3])
return -1
"""


_APPENDED = -1


class Store(Protocol):
    """The state of record. One writer at a time: whoever opened last."""

    async def open(self) -> int:
        """Take a new epoch, higher than any before; from now on earlier openers are refused."""
        ...

    async def append(self, records: Sequence[Record]) -> None:
        """All of them or none, durable when it returns.

        Raises StaleEpoch when somebody opened after us (or the store lost its data), Unavailable when it cannot be
        reached; in that case the records may or may not have been written, and appending them again is harmless.
        """

    async def load(self) -> list[Record]:
        """The current value of every key; raises ProtocolError that names table and key when one is not ours."""
        ...

    async def close(self) -> None: ...


class RedisStore:
    """Tables are hashes `{cluster}:<table>`; `{cluster}:journal` is a bounded stream with one entry per step.

    The braces keep all keys of a cluster in one slot of a Redis Cluster.
    """

    @classmethod
    async def connect(cls, url: str, *, cluster: str) -> RedisStore:
        """Returns once connected, however long that takes; raises ConfigError for a URL that can never work."""
        try:
            client = redis.asyncio.Redis.from_url(
                url,
                socket_timeout=ANSWER_S_MAX,
                socket_connect_timeout=CONNECT_S_MAX,
                max_connections=CONNECTIONS_MAX,
                protocol=2,
                retry=Retry(ConstantBackoff(RETRY_GAP_S), RETRIES_MAX),
                client_name=f"whimbrel-{cluster}",
            )
        except ValueError as cause:
            raise ConfigError("WB_REDIS_URL", f"{url!r} is no Redis URL ({cause}); write redis://host:port/0") from None
        store = cls(client, cluster=cluster)
        gap_s = CONNECT_GAP_S_MIN
        while True:
            try:
                await store._warn_when_not_durable()
                break
            except Unavailable as cause:
                log.warning("redis_away", url=_without_secrets(url), reason=str(cause.__cause__), retry_s=gap_s)
                await asyncio.sleep(gap_s)
                gap_s = min(CONNECT_GAP_S_MAX, gap_s * 2)
        log.info("redis_connected", url=_without_secrets(url))
        return store

    def __init__(self, client: redis.asyncio.Redis, *, cluster: str) -> None:
        self._client = client
        self._epoch = 0
        self._epoch_key = f"{{{cluster}}}:epoch"
        self._journal_key = f"{{{cluster}}}:journal"
        self._table_keys = {table: f"{{{cluster}}}:{table}" for table in TABLES}
        self._open = client.register_script(_OPEN)
        self._append = client.register_script(_APPEND)

    async def open(self) -> int:
        self._epoch = int(await _reach(self._open(keys=[self._epoch_key])))
        return self._epoch

    async def append(self, records: Sequence[Record]) -> None:
        assert self._epoch, "open the store before appending"
        if not records:
            return
        journal: list[str] = []
        changes: list[bytes | str | int] = []
        for record in records:
            table, value = (
                (record.forgotten_table, b"") if isinstance(record, Forget) else (record.table, encode_record(record))
            )
            changes += [TABLES.index(table) + 1, record.key(), value]
            journal.append(f"{'' if value else '-'}{table}/{record.key()}")
        keys = [self._epoch_key, self._journal_key, *self._table_keys.values()]
        arguments = [self._epoch, JOURNAL_ENTRIES_MAX, " ".join(journal), *changes]
        with APPEND_S.time():
            stored_epoch = await _reach(self._append(keys=keys, args=arguments))
        if stored_epoch != _APPENDED:
            raise StaleEpoch(epoch=self._epoch, current_epoch=int(stored_epoch))

    async def load(self) -> list[Record]:
        pipeline = self._client.pipeline(transaction=True)
        for table_key in self._table_keys.values():
            pipeline.hgetall(table_key)
        tables = await _reach(pipeline.execute())
        return [
            decode_value(table, key.decode(errors="replace"), value)
            for table, values in zip(self._table_keys, tables, strict=True)
            for key, value in values.items()
        ]

    async def close(self) -> None:
        await self._client.aclose()

    async def _warn_when_not_durable(self) -> None:
        """Whimbrel's promise that nothing recorded is lost holds only with these two settings."""
        await _reach(cast(Awaitable[Any], self._client.ping()))
        wanted = {"appendonly": "yes", "appendfsync": "always"}
        try:
            found = {name: await self._client.config_get(name) for name in wanted}
        except ResponseError as cause:
            log.warning("redis_durability_unknown", reason=str(cause), needed=wanted)
            return
        except (RedisError, OSError) as cause:
            raise Unavailable(what="Redis") from cause
        settings = {name: str(answer.get(name)) for name, answer in found.items()}
        if settings != wanted:
            log.warning("redis_not_durable", settings=settings, needed=wanted)


async def _reach(work: Awaitable[T]) -> T:
    """Await a command; whatever keeps Redis from doing it is Unavailable, with the reason as its cause."""
    try:
        return await work
    except (RedisError, OSError, TimeoutError) as cause:
        raise Unavailable(what=f"Redis ({type(cause).__name__})") from cause


def decode_value(table: str, key: str, value: bytes) -> Record:
    """The record stored under `key` of `table`; raises ProtocolError that names both when it is not that."""
    try:
        record = decode_record(value)
    except ProtocolError as cause:
        reason = f"table {table!r}, key {key!r} of the store: {cause.reason}"
        raise ProtocolError(size_bytes=len(value), reason=reason) from cause
    if (record.table, record.key()) != (table, key):
        reason = f"table {table!r}, key {key!r} of the store holds {record.table!r}/{record.key()!r}"
        raise ProtocolError(size_bytes=len(value), reason=reason)
    return record


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}:{parts.port}{parts.path}"
