"""Owns the store: durable records behind a fencing epoch, the lease of who leads, and how Redis keeps both (P1, P2)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import urlsplit

import redis.asyncio
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.exceptions import RedisError, ResponseError

from whimbrel.chassis import redis_scripts, telemetry
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """How an attempt to lead ended: `epoch` is ours, or 0 when we don't lead. `found_epoch` is what the store had
    before (0 when nothing); then `leader` leads for `left_s` more, unless the lease is free."""

    epoch: int
    found_epoch: int
    leader: str
    left_s: float

    @property
    def is_ours(self) -> bool:
        return self.epoch > 0


class Store(Protocol):
    """The state of record. One writer at a time: whoever took the last epoch."""

    async def open(self) -> int:
        """Take a new epoch, higher than any before, without asking for the lease; earlier openers are refused."""
        ...

    async def acquire(self, name: str, ttl_s: float, *, newest_epoch: int = 0) -> Claim:
        """Take the lease for `ttl_s` and with it a new epoch, as `open` does, when nobody has it.

        A store whose epoch is below `newest_epoch` has lost what was written: then nothing is taken.
        """
        ...

    async def renew(self, name: str, ttl_s: float) -> None:
        """Hold the lease for `ttl_s` from now, also when it had run out and nobody took it.

        Raises StaleEpoch when somebody took a new epoch, with a lower `current_epoch` when the store lost its data.
        """

    async def release(self) -> None:
        """Whoever waits for the lease may have it now; without a lease of ours nothing happens."""

    async def append(self, records: Sequence[Record]) -> None:
        """All of them or none, durable when it returns.

        Raises StaleEpoch when somebody took an epoch after us (or the store lost its data), Unavailable when it cannot
        be reached; in that case the records may or may not have been written, and appending them again is harmless.
        """

    async def load(self) -> list[Record]:
        """The current value of every key; raises ProtocolError that names table and key when one is not ours."""
        ...

    async def close(self) -> None: ...


class RedisStore:
    """Tables are hashes `{cluster}:<table>`; `{cluster}:journal` is a bounded stream with one entry per step;
    `{cluster}:lease` names the scheduler that leads, and expires.

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
        self._lease_key = f"{{{cluster}}}:lease"
        self._journal_key = f"{{{cluster}}}:journal"
        self._table_keys = {table: f"{{{cluster}}}:{table}" for table in TABLES}
        self._open = client.register_script(redis_scripts.OPEN)
        self._acquire = client.register_script(redis_scripts.ACQUIRE)
        self._renew = client.register_script(redis_scripts.RENEW)
        self._release = client.register_script(redis_scripts.RELEASE)
        self._append = client.register_script(redis_scripts.APPEND)

    async def open(self) -> int:
        self._epoch = int(await _reach(self._open(keys=[self._epoch_key], args=[self._epoch])))
        return self._epoch

    async def acquire(self, name: str, ttl_s: float, *, newest_epoch: int = 0) -> Claim:
        arguments: list[str | int] = [self._epoch, name, _milliseconds(ttl_s), newest_epoch]
        epoch, found, leader, left_ms = await _reach(self._acquire(keys=self._lease_keys, args=arguments))
        self._epoch = epoch or self._epoch
        return Claim(epoch=epoch, found_epoch=found, leader=leader.decode(errors="replace"), left_s=left_ms / 1000)

    async def renew(self, name: str, ttl_s: float) -> None:
        assert self._epoch, "acquire the lease before renewing it"
        arguments: list[str | int] = [self._epoch, name, _milliseconds(ttl_s)]
        self._check(await _reach(self._renew(keys=self._lease_keys, args=arguments)))

    async def release(self) -> None:
        await _reach(self._release(keys=self._lease_keys, args=[self._epoch]))

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
        self._check(stored_epoch)

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

    @property
    def _lease_keys(self) -> list[str]:
        return [self._epoch_key, self._lease_key]

    def _check(self, stored_epoch: int) -> None:
        if stored_epoch != redis_scripts.IS_OURS:
            raise StaleEpoch(epoch=self._epoch, current_epoch=int(stored_epoch))

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


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}:{parts.port}{parts.path}"
