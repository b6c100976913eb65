"""Owns who leads: the lease in the store, how a standby waits for it, and how a leader keeps it (P2)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import NoReturn

import structlog
from whimbrel.chassis import telemetry
from whimbrel.chassis.store import Claim, Store
from whimbrel.wire.errors import Unavailable

from services.scheduler.recovery import persist

log = structlog.get_logger()

# A leader that died is followed after this time. If it were shorter, a disk that stalls would cost a leader its place.
LEASE_S = 2.0
# Three renewals may fail before the lease runs out.
RENEW_S = 0.5
# How often a standby asks whether the lease is free: one read.
ASK_S = 0.25
# When the store has lost its data, the leader knows what was in it. It notices within two renewals, also when it has to
# connect again first; a standby that knows that there was one lets it go first.
EMPTIED_GRACE_S = 2.0
# At the end nobody waits long for the store: the lease runs out by itself.
RELEASE_S_MAX = 1.0

IS_LEADER = telemetry.gauge("whimbrel_scheduler_is_leader", "1 for the scheduler that decides, 0 for one that waits.")


class Lease:
    """The lease as one scheduler sees it. `leader` is who leads as far as we know, "" at first.

    By our own clock it runs out no later than in the store, so whoever speaks only while `until_held` lets it never
    speaks beside a successor; what is on its way then is refused by its epoch.
    """

    def __init__(self, store: Store, name: str, *, on_away: Callable[[bool], None]) -> None:
        self.leader = ""
        self._store = store
        self._name = name
        self._on_away = on_away
        self._newest_epoch = 0
        self._until_s = 0.0
        self._held = asyncio.Event()
        self._lapsed = asyncio.Event()
        self._lapsed.set()

    async def acquire(self, *, is_sure: bool = False) -> Claim:
        """Wait until we lead. `is_sure` does not shrink from a store that lost its data: we know what was in it."""
        lost_s: float | None = None
        while True:
            newest_epoch = 0 if is_sure else self._newest_epoch
            claim = await persist(lambda: self._claim(newest_epoch), what="taking the lease", on_away=self._on_away)  # noqa: B023
            if claim.is_ours:
                return claim
            is_lost = claim.found_epoch < newest_epoch and not claim.leader
            if not is_lost:
                lost_s = None
                self._newest_epoch = max(self._newest_epoch, claim.found_epoch)
                self._follow(claim.leader)
            elif lost_s is None:
                lost_s = time.monotonic()
                log.warning("store_lost_its_data", waits_s=EMPTIED_GRACE_S)
            elif time.monotonic() - lost_s >= EMPTIED_GRACE_S:
                self._newest_epoch = 0
                continue
            await asyncio.sleep(ASK_S)

    async def keep(self) -> NoReturn:
        """Renew for ever. Raises StaleEpoch when somebody else leads, or when the store lost its data."""
        while True:
            await asyncio.sleep(RENEW_S)
            asked_s = time.monotonic()
            try:
                # A store that does not answer must not keep us from noticing that our time is over.
                async with asyncio.timeout(None if self._lapsed.is_set() else max(0.0, self._until_s - asked_s)):
                    await self._store.renew(self._name, LEASE_S)
            except (Unavailable, TimeoutError) as error:
                self._on_away(True)
                if time.monotonic() >= self._until_s and not self._lapsed.is_set():
                    log.warning("lease_lapsed", reason=str(error) or "the store does not answer")
                    self._lapse()
            else:
                self._on_away(False)
                self._hold(asked_s)

    async def until_held(self) -> None:
        """Returns at once while the lease is ours for sure, otherwise when it is again."""
        while time.monotonic() >= self._until_s:
            self._lapse()
            await self._held.wait()

    async def until_lapsed(self) -> None:
        """Returns when it is not sure any more that the lease is ours."""
        await self._lapsed.wait()

    def lose(self) -> None:
        """We don't lead any more."""
        self._lapse()
        self.leader = ""
        IS_LEADER.set(0)

    async def release(self) -> None:
        """Let a standby lead at once; without a lease, or without the store, nothing happens."""
        self.lose()
        with contextlib.suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(RELEASE_S_MAX):
                await self._store.release()

    async def _claim(self, newest_epoch: int) -> Claim:
        asked_s = time.monotonic()
        claim = await self._store.acquire(self._name, LEASE_S, newest_epoch=newest_epoch)
        if claim.is_ours:
            self._newest_epoch = claim.epoch
            self.leader = self._name
            self._hold(asked_s)
            IS_LEADER.set(1)
            log.info("lease_taken", epoch=claim.epoch, found_epoch=claim.found_epoch)
        return claim

    def _follow(self, leader: str) -> None:
        if leader and leader != self.leader:
            log.info("standing_by", leader=leader)
            self.leader = leader

    def _hold(self, asked_s: float) -> None:
        self._until_s = asked_s + LEASE_S
        self._lapsed.clear()
        self._held.set()

    def _lapse(self) -> None:
        self._until_s = 0.0
        self._held.clear()
        self._lapsed.set()
