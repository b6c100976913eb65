"""Owns the views of all live servers, made anew only for those that something happened to, and where to look first.

A model is cheapest to load where some of it is already, nearly always. So the servers that hold some of a checkpoint
are kept by checkpoint, and a floor of what loading all of it from the repository costs on any server. A policy looks at
the holders first, and at the others only if the floor is below the best of them: the answer is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from whimbrel.wire.messages import Tier

from services.scheduler.core import sights
from services.scheduler.core.views import Nearness, ServerView

if TYPE_CHECKING:
    from services.scheduler.core.cluster import Cluster


class Overview:
    """`doubt` says that a server may look different; `views` are what they look like."""

    def __init__(self) -> None:
        self.nearness = Nearness()
        self._doubted: dict[str, None] = {}
        self._open: dict[str, None] = {}
        self._views: tuple[ServerView, ...] | None = ()

    def doubt(self, server_id: str) -> None:
        """The server may look different from now on."""
        self._doubted[server_id] = None

    def view(self, cluster: Cluster, server_id: str) -> ServerView | None:
        """One server as it is now; None when it does not live."""
        if server_id in self._doubted:
            del self._doubted[server_id]
            self._look(cluster, server_id)
            self._views = None
        return self.nearness.views.get(server_id)

    def has_open(self, cluster: Cluster) -> bool:
        """Whether any server has a slot that is free or could be freed at once. It looks at no more servers than that
        takes: seldom at any, while some are open and most are as they were."""
        if not self._open.keys() <= self._doubted.keys():
            return True
        return any(self._is_open_now(cluster, server_id) for server_id in list(self._doubted))

    def _is_open_now(self, cluster: Cluster, server_id: str) -> bool:
        self.view(cluster, server_id)
        return server_id in self._open

    def views(self, cluster: Cluster) -> tuple[ServerView, ...]:
        """All live servers as they are now."""
        if self._doubted:
            for server_id in self._doubted:
                self._look(cluster, server_id)
            self._doubted.clear()
            self._views = None
        if self._views is None:
            self._views = tuple(self.nearness.views.values())
        return self._views

    def _look(self, cluster: Cluster, server_id: str) -> None:
        server = cluster.servers[server_id]
        near = self.nearness
        before = near.views.get(server_id)
        if not server.is_alive:
            near.views.pop(server_id, None)
            near.price(server_id, None)
            self._open.pop(server_id, None)
            self._rehold(before, None, server_id)
            return
        view = near.views[server_id] = sights.look(cluster, server)
        near.price(server_id, view.speeds[Tier.REMOTE])
        if (view.free_slots or view.idle) and view.takes_loads:
            self._open[server_id] = None
        else:
            self._open.pop(server_id, None)
        self._rehold(before, view, server_id)

    def _rehold(self, before: ServerView | None, after: ServerView | None, server_id: str) -> None:
        old = {} if before is None else before.residency
        new = {} if after is None else after.residency
        if old is new:
            return
        holders = self.nearness.holders
        for checkpoint in old.keys() - new.keys():
            del holders[checkpoint][server_id]
            if not holders[checkpoint]:
                del holders[checkpoint]
        for checkpoint in new.keys() - old.keys():
            holders.setdefault(checkpoint, {})[server_id] = None
