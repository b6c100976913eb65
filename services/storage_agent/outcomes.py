"""Owns how work ended, as far as somebody may still ask: a repeated command is answered, not run twice."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import WhimbrelError
from whimbrel.wire.messages import LoadEnded

from services.storage_agent.core.tasks import LoadTask

T = TypeVar("T")

# A scheduler repeats a command every second, so what is older than the last few hundred ends is not asked for again.
OUTCOMES_MAX = 256


class Outcomes(Generic[T]):
    """The last outcomes by id."""

    def __init__(self, outcomes_max: int = OUTCOMES_MAX) -> None:
        self._outcomes_max = outcomes_max
        self._outcomes: OrderedDict[str, T] = OrderedDict()

    def get(self, identifier: str) -> T | None:
        return self._outcomes.get(identifier)

    def remember(self, identifier: str, outcome: T) -> None:
        self._outcomes[identifier] = outcome
        if len(self._outcomes) > self._outcomes_max:
            self._outcomes.popitem(last=False)


def load_ended(task: LoadTask, server_id: str, error: WhimbrelError) -> LoadEnded:
    """The news of a load that did not finish."""
    return LoadEnded(
        task_id=task.task_id,
        instance_id=task.instance_id,
        model_id=task.key.model_id,
        server_id=server_id,
        error=error_reply(error),
    )
