"""Which chunk of which checkpoint is in which tier, who holds it, and when it goes."""

from __future__ import annotations

import pytest
from whimbrel.wire.messages import Tier

from services.storage_agent.core.chunks import CheckpointKey, ChunkId, Layout
from services.storage_agent.core.eviction import Evict, Victim, Wait, choose_victims
from services.storage_agent.core.residency import DramCopy, Residency

KEY = CheckpointKey(model_id="m", checkpoint_digest="xxh3:1")
OTHER = CheckpointKey(model_id="m", checkpoint_digest="xxh3:2")
LAYOUT = Layout(partition_bytes=(25, 10), chunk_size_bytes=10)
A, B, C, D = LAYOUT.chunks()  # B is the only chunk of the second partition, D is the short one


def a_residency() -> Residency:
    return Residency(chunk_count=8, ssd_size_bytes=100)


def open_copy(residency: Residency, key: CheckpointKey = KEY, holder: str = "load", now: float = 0.0) -> DramCopy:
    return residency.open_copy(key, layout=LAYOUT, size_bytes=33, holder=holder, now=now)


def a_copy(residency: Residency, *ready: ChunkId, key: CheckpointKey = KEY, first: int = 0) -> DramCopy:
    """An idle copy with these chunks; its places begin with `first`."""
    copy = open_copy(residency, key)
    residency.place(copy.copy_id, range(first, first + 4))
    for chunk in ready:
        residency.arrive(copy.copy_id, chunk)
    residency.let_go(copy.copy_id, "load", now=1.0)
    residency.check()
    return copy


def test_a_copy_is_found_by_its_content_and_is_whole_when_every_byte_is_in() -> None:
    residency = a_residency()
    copy = open_copy(residency)
    assert residency.find(KEY) is copy
    assert residency.find(OTHER) is None, "other content is another checkpoint"
    assert copy.unplaced() == [A, B, C, D]
    residency.place(copy.copy_id, (7, 5, 3, 1))
    assert copy.unplaced() == []
    assert copy.partitions() == ((7, 3, 1), (5,)), "in file order"
    for chunk in (A, B, D):
        residency.arrive(copy.copy_id, chunk)
    assert not copy.is_whole
    assert copy.ready_bytes == 25
    residency.arrive(copy.copy_id, C)
    assert copy.is_whole
    assert copy.ready_bytes == 35
    assert residency.used_chunks() == 4
    residency.check()


def test_what_a_load_did_not_fill_is_free_again_and_what_it_did_stays_for_the_next() -> None:
    """L2: a model may be partly resident."""
    residency = a_residency()
    copy = open_copy(residency)
    residency.place(copy.copy_id, (7, 5, 3, 1))
    residency.arrive(copy.copy_id, B)
    assert residency.let_go(copy.copy_id, "load", now=1.0) == (7, 3, 1)
    residency.check()
    again = open_copy(residency, holder="next")
    assert again is copy
    assert again.unplaced() == [A, C, D]
    residency.place(copy.copy_id, (0, 1, 2))
    assert copy.places == {A: 0, B: 5, C: 1, D: 2}


def test_a_load_that_filled_nothing_leaves_nothing() -> None:
    residency = a_residency()
    copy = open_copy(residency)
    residency.place(copy.copy_id, (0, 1, 2, 3))
    assert residency.let_go(copy.copy_id, "load", now=1.0) == (0, 1, 2, 3)
    assert residency.find(KEY) is residency.copy(copy.copy_id) is None
    assert residency.let_go(copy.copy_id, "load", now=2.0) == (), "it may be let go of twice"
    assert residency.drop(copy.copy_id) == ()


def test_a_copy_outlives_its_holders_and_is_held_until_the_last_of_them() -> None:
    """L11: unload is free; the bytes stay for the next load."""
    residency = a_residency()
    copy = a_copy(residency, A, B, C, D)
    for holder in ("instance 1", "instance 2"):
        residency.hold(copy.copy_id, holder, now=2.0)
    assert residency.let_go(copy.copy_id, "somebody else", now=3.0) == ()
    for holder in ("instance 1", "instance 2"):
        assert residency.dram_candidates()[0].is_held
        assert residency.let_go(copy.copy_id, holder, now=3.0) == ()
    assert not residency.dram_candidates()[0].is_held
    assert copy.used_s == 3.0
    assert residency.find(KEY) is copy


def test_a_held_copy_that_must_go_is_hidden_at_once_and_gives_its_chunks_back_at_the_end() -> None:
    residency = a_residency()
    copy = a_copy(residency, A, B, C, D)
    residency.hold(copy.copy_id, "instance 1", now=2.0)
    assert residency.drop(copy.copy_id) == ()
    assert residency.find(KEY) is None
    assert residency.resident() == (), "what is doomed is not offered"
    second = open_copy(residency)
    assert second is not copy
    residency.place(second.copy_id, (4, 5, 6, 7))
    residency.check()
    assert residency.let_go(copy.copy_id, "instance 1", now=3.0) == (0, 1, 2, 3)
    assert residency.dram_copies() == (second,)
    residency.check()


def test_an_idle_copy_gives_up_its_last_chunks_first() -> None:
    """L2: a load begins with the first chunks, so those are worth most."""
    residency = a_residency()
    copy = a_copy(residency, A, B, C, D)
    assert residency.shed(copy.copy_id, 0) == ()
    assert residency.shed(copy.copy_id, 1) == (3,)
    assert copy.unplaced() == [D]
    residency.check()
    assert residency.shed(copy.copy_id, 2) == (1, 2)
    assert copy.ready == {A}
    assert residency.shed(copy.copy_id, 1) == (0,)
    assert residency.copy(copy.copy_id) is None
    residency.check()


def test_an_ssd_copy_goes_together_with_what_dram_holds_of_it() -> None:
    residency = a_residency()
    residency.add_ssd(KEY, layout=LAYOUT, size_bytes=40, now=0.0)
    a_copy(residency, A, B)
    assert residency.evict(KEY) == (0, 1)
    assert residency.ssd(KEY) is None
    assert residency.ssd_used_bytes() == residency.used_chunks() == 0


def test_an_ssd_copy_that_is_no_good_leaves_what_dram_has() -> None:
    residency = a_residency()
    residency.add_ssd(KEY, layout=LAYOUT, size_bytes=40, now=0.0)
    copy = a_copy(residency, A, B)
    residency.remove_ssd(KEY)
    residency.remove_ssd(KEY)
    assert residency.find(KEY) is copy
    residency.use_ssd(KEY, now=5.0)
    assert residency.ssd_copies() == (), "using a copy that was removed meanwhile changes nothing"


def test_space_is_reserved_for_all_of_a_copy_from_its_first_byte_on() -> None:
    residency = a_residency()
    copy = residency.add_ssd(KEY, layout=LAYOUT, size_bytes=40, now=0.0, missing=LAYOUT.chunks())
    assert not copy.is_whole
    assert residency.ssd_used_bytes() == 40
    copy.missing.clear()
    assert copy.is_whole


def test_an_ssd_copy_is_held_by_fetches_and_by_whoever_holds_it_in_dram_and_cold_ones_go_first() -> None:
    residency = a_residency()
    cold, warm = KEY, OTHER
    residency.add_ssd(warm, layout=LAYOUT, size_bytes=30, now=0.0)
    fetched = residency.add_ssd(cold, layout=LAYOUT, size_bytes=40, now=5.0)
    copy = a_copy(residency, A, key=warm)
    gone = choose_victims(residency.ssd_candidates(), need=50, capacity=100)
    assert gone == Evict(victims=(Victim(key=cold, size=40),)), "DRAM holds the older one"
    residency.hold(copy.copy_id, "instance 1", now=6.0)
    residency.use_ssd(warm, now=6.0)
    assert choose_victims(residency.ssd_candidates(), need=100, capacity=100) == Wait(obtainable=70, held=30)
    fetched.users.add("filling")
    assert all(candidate.is_held for candidate in residency.ssd_candidates())
    residency.let_go(copy.copy_id, "instance 1", now=8.0)
    assert [candidate.is_held for candidate in residency.ssd_candidates()] == [False, True]


@pytest.mark.parametrize("tier", [Tier.SSD, Tier.DRAM])
def test_a_pin_keeps_a_copy_and_in_dram_what_it_stands_on_too(tier: Tier) -> None:
    residency = a_residency()
    residency.add_ssd(KEY, layout=LAYOUT, size_bytes=40, now=0.0)
    a_copy(residency, A)
    residency.pin("m", tier)
    assert residency.ssd_candidates()[0].is_held
    assert residency.dram_candidates()[0].is_held is (tier is Tier.DRAM)
    assert [model.pinned for model in residency.resident()] == [(tier,)]
    residency.unpin("m", tier)
    assert not residency.ssd_candidates()[0].is_held


def test_pins_of_two_tiers_are_two_pins() -> None:
    residency = a_residency()
    residency.pin("m", Tier.SSD)
    residency.pin("m", Tier.DRAM)
    residency.unpin("m", Tier.SSD)
    assert residency.pinned("m") == {Tier.DRAM}
    residency.pin("m", Tier.SSD)
    residency.unpin("m")
    assert residency.pinned("m") == set()
    residency.unpin("m", Tier.DRAM)
    assert residency.pinned("m") == set(), "a pin that is not there may be taken away"


def test_what_is_resident_is_told_once_with_the_fastest_tier_that_has_all_of_it() -> None:
    residency = a_residency()
    residency.add_ssd(KEY, layout=LAYOUT, size_bytes=40, now=0.0)
    residency.add_ssd(OTHER, layout=LAYOUT, size_bytes=40, now=0.0, missing=(A,))
    first, second = residency.resident()
    assert (first.tier, first.size_bytes, first.ssd_bytes, first.dram_bytes) == (Tier.SSD, 35, 35, 0)
    assert (second.tier, second.ssd_bytes) == (Tier.REMOTE, 25), "a part of a checkpoint is no checkpoint"
    copy = a_copy(residency, A, D)
    assert (residency.resident()[0].tier, residency.resident()[0].dram_bytes) == (Tier.SSD, 15)
    residency.hold(copy.copy_id, "load", now=2.0)
    residency.place(copy.copy_id, (6, 7))
    for chunk in (B, C):
        residency.arrive(copy.copy_id, chunk)
    assert (residency.resident()[0].tier, residency.resident()[0].dram_bytes) == (Tier.DRAM, 35)
    residency.remove_ssd(KEY)
    assert [model.checkpoint_digest for model in residency.resident()] == [OTHER.checkpoint_digest, "xxh3:1"]


def test_a_copy_with_nothing_in_it_yet_is_not_resident() -> None:
    residency = a_residency()
    residency.add_ssd(KEY, layout=LAYOUT, size_bytes=40, now=0.0, missing=LAYOUT.chunks())
    open_copy(residency)
    assert residency.resident() == ()


def test_copies_can_be_listed_by_model() -> None:
    residency = a_residency()
    residency.add_ssd(KEY, layout=LAYOUT, size_bytes=10, now=0.0)
    a_copy(residency, A)
    assert len(residency.ssd_copies("m")) == len(residency.dram_copies("m")) == 1
    assert residency.ssd_copies("n") == residency.dram_copies("n") == ()
