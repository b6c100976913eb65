"""What heartbeats say of residency: whoever hears them, or asks after missing too many, knows what is there."""

from __future__ import annotations

import random

import pytest
from whimbrel.wire.messages import ResidentModel, Tier

from services.storage_agent.core.news import HEARTBEATS_COVERED, WHOLE_ENTRIES_MAX, Key, News, ResidencyNews


def a_model(number: int, dram_bytes: int = 10) -> ResidentModel:
    return ResidentModel(
        model_id=f"m{number}", checkpoint_digest="d", tier=Tier.DRAM, size_bytes=10, dram_bytes=dram_bytes
    )


def many() -> list[ResidentModel]:
    return [a_model(number) for number in range(WHOLE_ENTRIES_MAX + 2)]


class Listener:
    """What a scheduler makes of the news. `is_behind`: it has to ask for everything."""

    def __init__(self) -> None:
        self.known: dict[Key, ResidentModel] = {}
        self.version = -1
        self.is_behind = True

    def hear(self, news: News) -> None:
        if news.base_version is None:
            self.known = {}
        elif self.version < news.base_version or self.is_behind:
            self.is_behind = True
            return
        for model in news.resident:
            key = (model.model_id, model.checkpoint_digest)
            if model.dram_bytes or model.ssd_bytes:
                self.known[key] = model
            else:
                self.known.pop(key, None)
        self.version, self.is_behind = news.version, False


def test_a_short_residency_is_told_whole_every_time() -> None:
    news = ResidencyNews()
    for models in ([a_model(1)], [a_model(1), a_model(2)], [a_model(2)], []):
        told = news.tell(models)
        assert told.base_version is None
        assert list(told.resident) == models


def test_a_version_changes_with_what_is_told_and_only_then() -> None:
    news = ResidencyNews()
    versions = [news.tell(models).version for models in ([], [a_model(1)], [a_model(1)], [a_model(1, 5)], [])]
    assert versions == [0, 1, 1, 2, 3]


def test_a_long_residency_is_told_whole_once_and_then_by_what_changed() -> None:
    """P2: a residency that is long is delta-encoded."""
    news, models = ResidencyNews(), many()
    first = news.tell(models)
    assert (first.base_version, len(first.resident)) == (None, len(models))
    assert news.tell(models).resident == ()
    models[3] = a_model(3, dram_bytes=4)
    gone = models.pop()
    told = news.tell(models)
    assert told.base_version == first.version < told.version
    assert {(model.model_id, model.dram_bytes) for model in told.resident} == {("m3", 4), (gone.model_id, 0)}
    assert all(not model.ssd_bytes for model in told.resident)
    news.ask_whole()
    assert news.tell(models).base_version is None
    assert news.tell(models).base_version is not None, "asked once, told once"


@pytest.mark.parametrize("missed", [1, HEARTBEATS_COVERED - 1])
def test_who_missed_a_few_heartbeats_needs_no_resync(missed: int) -> None:
    news, models, listener = ResidencyNews(), many(), Listener()
    listener.hear(news.tell(models))
    for number in range(missed):
        models[number] = a_model(number, dram_bytes=1)
        news.tell(models)
    models[20] = a_model(20, dram_bytes=2)
    listener.hear(news.tell(models))
    assert not listener.is_behind
    assert list(listener.known.values()) == models


def test_who_missed_too_many_sees_it_and_is_told_everything_on_request() -> None:
    news, models, listener = ResidencyNews(), many(), Listener()
    listener.hear(news.tell(models))
    for number in range(HEARTBEATS_COVERED + 1):
        models[number] = a_model(number, dram_bytes=1)
        news.tell(models)
    listener.hear(news.tell(models))
    assert listener.is_behind
    news.ask_whole()
    listener.hear(news.tell(models))
    assert list(listener.known.values()) == models


@pytest.mark.parametrize("seed", range(10))
def test_a_listener_that_loses_heartbeats_is_right_or_knows_that_it_is_behind(seed: int) -> None:
    """P2, seeded."""
    chance, news, listener = random.Random(seed), ResidencyNews(), Listener()
    here: dict[int, ResidentModel] = {}
    for step in range(300):
        for _ in range(chance.randrange(6)):
            number = chance.randrange(2 * WHOLE_ENTRIES_MAX)
            if here.pop(number, None) is None or chance.random() < 0.8:
                here[number] = a_model(number, dram_bytes=chance.randrange(1, 10))
        if listener.is_behind and step and chance.random() < 0.5:
            news.ask_whole()
        told = news.tell(here.values())
        if chance.random() < 0.3:
            continue  # lost on the way
        listener.hear(told)
        if not listener.is_behind:
            expected = {(model.model_id, model.checkpoint_digest): model for model in here.values()}
            assert listener.known == expected, f"seed {seed}, step {step}"
    assert len(news._changed) <= 4 * WHOLE_ENTRIES_MAX, "what is long gone is forgotten"
