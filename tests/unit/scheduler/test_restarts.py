"""Stories of a scheduler that restarts or falls silent, and of messages that get lost."""

from __future__ import annotations

import pytest
from whimbrel.wire.events import InstanceWasLost, LoadWasLost, ServerLost
from whimbrel.wire.messages import (
    LoadModel,
    Message,
    PlaceModelReply,
    PrepareInstance,
    UnloadInstance,
)
from whimbrel.wire.records import Forget, InstanceState, Record

from services.scheduler.core.controller import Controller
from services.scheduler.core.ready import Tick
from services.scheduler.core.settings import Settings
from tests.unit.scheduler.builders import a_cluster, place, served
from tests.unit.scheduler.toys import ToyCluster, a_model_record


def test_a_busy_step_loop_loses_nobody() -> None:
    """The store may be away for a while: whoever was alive has its time again to be heard."""
    cluster = a_cluster("a", "b")
    served(cluster)
    cluster.start_agent("s9")
    cluster.start_worker("s9", 0)
    cluster.run(0.1)
    cluster.kill_agent("s9")
    cluster.kill_worker("s9", 0)
    cluster.run(5.0)
    waiting = cluster.router.request("q2", "b")
    cluster.run(0.2)
    cluster.events.clear()
    assert cluster.controller is not None
    controller = cluster.controller
    cluster.controller = None
    cluster.run(20.0)
    cluster.controller = controller
    ready = cluster.deliver(Tick())
    assert not [event for event in ready.events if isinstance(event, ServerLost | InstanceWasLost | LoadWasLost)]
    cluster.run(10.0)
    assert waiting.is_done


def test_a_scheduler_that_restarts_in_a_load_goes_on_with_it() -> None:
    """P2"""
    cluster = a_cluster("a")
    request = cluster.router.request("q1", "a")
    cluster.run(0.5)
    cluster.stop_scheduler()
    cluster.run(0.2)
    cluster.start_scheduler()
    cluster.run(10.0)
    assert request.is_done
    assert len(cluster.said_to_all(LoadModel)) == 1, "the agent's heartbeat says that it has the task"


def test_a_scheduler_that_restarts_knows_its_ready_instances() -> None:
    """P2"""
    cluster = a_cluster("a")
    served(cluster)
    cluster.stop_scheduler()
    cluster.start_scheduler()
    (reply,) = cluster.deliver(place("q2")).messages
    assert isinstance(reply.message, PlaceModelReply)
    assert reply.message.route is not None
    cluster.run(10.0)
    assert len(cluster.instances()) == 1
    assert cluster.said_to_all(LoadModel) == []


def test_instances_whose_worker_does_not_have_them_are_gone_after_a_restart() -> None:
    """P2: agents and workers are the truth about themselves."""
    cluster = a_cluster("a")
    served(cluster)
    cluster.stop_scheduler()
    cluster.kill_worker("s0", 0)
    cluster.start_worker("s0", 0)
    cluster.start_scheduler()
    cluster.run(0.1)
    assert cluster.instances() == []


def test_nothing_is_placed_on_servers_that_are_known_from_records_only() -> None:
    """P2: they are presumed alive, but what they have is not known yet."""
    cluster = a_cluster("a", "b")
    served(cluster)
    cluster.stop_scheduler()
    cluster.run(0.1)
    cluster.start_scheduler()
    ready = cluster.deliver(place("q2", "b"))
    assert ready.records == ()
    cluster.run(0.1)
    assert [record.model_id for record in cluster.instances()] == ["b"]


@pytest.mark.parametrize("state", [InstanceState.DRAINING, InstanceState.UNLOADING, InstanceState.LOADING], ids=str)
def test_whatever_was_going_on_is_taken_up_after_a_restart(state: InstanceState) -> None:
    """P2"""
    cluster = a_cluster("a", "b", settings=Settings(fair_wait_s=1.0))
    first = cluster.router.request("q1", "a", run_s=4.0 if state is InstanceState.DRAINING else 0.1)
    cluster.run_until(lambda: bool(cluster.instances()), 1.0)
    if state is not InstanceState.LOADING:
        cluster.run(2.0)
        second = cluster.router.request("q2", "b")
        cluster.drops = lambda message: isinstance(message, UnloadInstance)
        cluster.run_until(lambda: [record.state for record in cluster.instances()] == [state], 5.0)
    else:
        second = cluster.router.request("q2", "a")
    cluster.stop_scheduler()
    cluster.drops = lambda message: False
    cluster.run(0.3)
    cluster.start_scheduler()
    cluster.run(20.0)
    assert first.is_done
    assert second.is_done


def test_a_step_is_forgotten_nowhere_records_replay_to_the_state_after_every_one() -> None:
    """P2: whatever the moment of a crash, the next life starts with what the last one knew."""
    cluster = a_cluster("a", "b", servers=2)
    prefixes: list[tuple[int, dict[tuple[str, str], Record]]] = []
    initial = dict(cluster.store)

    def check(cluster: ToyCluster, ready: object) -> None:
        assert cluster.controller is not None
        prefixes.append((len(cluster.journal), cluster.controller.cluster.durable()))

    start = len(cluster.journal)
    cluster.check = check
    requests = [cluster.router.request(f"q{n}", "ab"[n % 2], run_s=0.5) for n in range(6)]
    cluster.run(4.0)
    cluster.kill_worker("s1", 0)
    cluster.run(10.0)
    assert all(request.is_over for request in requests)
    assert len({length for length, _ in prefixes}) > 4
    for length, state in prefixes:
        replayed = _replay(initial, cluster.journal[start:length])
        assert replayed == state
        again = Controller(
            records=replayed.values(), settings=Settings(), epoch=9, now=0.0, new_id=lambda prefix: prefix
        )
        assert again.cluster.durable() == state


def _replay(initial: dict[tuple[str, str], Record], records: list[Record]) -> dict[tuple[str, str], Record]:
    state = dict(initial)
    for record in records:
        if isinstance(record, Forget):
            state.pop((record.forgotten_table, record.forgotten_key), None)
        else:
            state[record.table, record.key()] = record
    return state


def the_story(drops: object = None, *, drop_at: int | None = None) -> tuple[int, float]:
    """A cold request, then one of another model that takes the slot. How many messages there were, and how long the
    second one waited; message number `drop_at` is lost."""
    count = 0

    def lose(message: Message) -> bool:
        nonlocal count
        count += 1
        return count - 1 == drop_at

    cluster = ToyCluster(models=[a_model_record("a"), a_model_record("b")], settings=Settings(fair_wait_s=1.0))
    cluster.run(1.5)
    cluster.drops = lose
    first = cluster.router.request("q1", "a", run_s=0.5)
    cluster.run_until(lambda: first.is_done, 15.0)
    second = cluster.router.request("q2", "b", run_s=0.5)
    cluster.run_until(lambda: second.is_done, 15.0)
    assert second.routed_s is not None
    return count, second.routed_s - second.asked_s


def test_no_single_lost_message_keeps_a_request_from_its_route() -> None:
    """P2: whatever is lost once is said again, or was not needed."""
    count, undisturbed_s = the_story()
    assert count > 20
    for number in range(count):
        _, waited_s = the_story(drop_at=number)
        assert waited_s < undisturbed_s + 3.0, f"message {number} was lost"


def test_commands_are_repeated_until_they_are_heard() -> None:
    cluster = a_cluster("a", drops=lambda message: isinstance(message, LoadModel | PrepareInstance))
    cluster.router.request("q1", "a")
    cluster.run(3.5)
    for kind in (LoadModel, PrepareInstance):
        assert 3 <= len(cluster.said_to_all(kind)) <= 4, "about once a second"
    cluster.drops = lambda message: False
    cluster.run(5.0)
    assert cluster.router.requests["q1"].is_done
    for kind in (LoadModel, PrepareInstance):
        assert len(cluster.said_to_all(kind)) <= 5
