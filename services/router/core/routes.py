"""Owns the route table (R1): model to instances, and how many requests of this router run on each (M2, M3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec
from whimbrel.wire.messages import InstanceActivity, Route, RouteState

K = TypeVar("K")


class RouteTable:
    """Instances by model and by worker. A draining instance keeps its requests and gets no new one."""

    def __init__(self) -> None:
        self._routes: dict[str, Route] = {}
        self._of_model: dict[str, dict[str, Route]] = {}
        self._of_worker: dict[tuple[str, int], dict[str, Route]] = {}
        self._active: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._routes)

    def __contains__(self, instance_id: object) -> bool:
        return instance_id in self._routes

    def add(self, route: Route) -> None:
        """Learn a route, or its new state. One that is known already keeps its place."""
        if self._routes.get(route.instance_id) == route:
            return
        self.remove(route.instance_id)
        self._routes[route.instance_id] = route
        self._of_model.setdefault(route.model_id, {})[route.instance_id] = route
        self._of_worker.setdefault((route.server_id, route.slot), {})[route.instance_id] = route

    def expect(self, route: Route) -> None:
        """A request of ours goes on there before the scheduler has told of it: no new one is sent there yet."""
        if route.instance_id not in self._routes:
            self.add(msgspec.structs.replace(route, state=RouteState.DRAINING))

    def remove(self, instance_id: str) -> Route | None:
        """Forget a route. Requests counted on it stay counted until they are released."""
        route = self._routes.pop(instance_id, None)
        if route is not None:
            _drop(self._of_model, route.model_id, instance_id)
            _drop(self._of_worker, (route.server_id, route.slot), instance_id)
        return route

    def choose(self, model_id: str, can_use: Callable[[str], bool] = lambda _: True) -> Route | None:
        """The ready instance of the model with the fewest requests of ours, the oldest of equals; None: no such one."""
        usable = [
            route
            for route in self._of_model.get(model_id, {}).values()
            if route.state is RouteState.READY and can_use(route.instance_id)
        ]
        return min(usable, key=lambda route: self._active.get(route.instance_id, 0), default=None)

    def on_worker(self, server_id: str, slot: int) -> list[Route]:
        """The instances that are said to be on this worker."""
        return list(self._of_worker.get((server_id, slot), {}).values())

    def acquire(self, instance_id: str) -> None:
        """One more request of ours runs there."""
        self._active[instance_id] = self._active.get(instance_id, 0) + 1

    def release(self, instance_id: str) -> None:
        """One fewer."""
        assert self._active.get(instance_id, 0) > 0, f"{instance_id} was released more often than acquired"
        self._active[instance_id] -= 1
        if self._active[instance_id] == 0:
            del self._active[instance_id]

    def activity(self, running: Iterable[InstanceActivity] = ()) -> tuple[InstanceActivity, ...]:
        """Requests per instance, as the heartbeat says it, with the sums of what each of the `running` ones says."""
        prompt_tokens: dict[str, int] = {}
        running_s: dict[str, float] = {}
        for one in running:
            prompt_tokens[one.instance_id] = prompt_tokens.get(one.instance_id, 0) + one.prompt_tokens
            running_s[one.instance_id] = running_s.get(one.instance_id, 0.0) + one.running_s
        return tuple(
            InstanceActivity(
                instance_id=key,
                requests=count,
                prompt_tokens=prompt_tokens.get(key, 0),
                running_s=running_s.get(key, 0.0),
            )
            for key, count in self._active.items()
        )


def _drop(index: dict[K, dict[str, Route]], key: K, instance_id: str) -> None:
    del index[key][instance_id]
    if not index[key]:
        del index[key]
