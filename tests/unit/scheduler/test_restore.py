"""Stories of a store that was emptied: models come back from the repository, instances from their workers."""

from __future__ import annotations

import random

import pytest
from whimbrel.wire.errors import ModelNotFound, Unavailable
from whimbrel.wire.events import ModelDeleted, ModelRestored
from whimbrel.wire.messages import (
    DeleteModel,
    DeployModel,
    ErrorReply,
    GetModels,
    GetModelsReply,
    ImportFinished,
    LoadModel,
    Message,
    ModelState,
    ReportRepository,
    RepositoryModelFound,
    RepositoryReported,
    RouteAdded,
    Tier,
    UnloadInstance,
)
from whimbrel.wire.records import InstanceState, ModelRecord

from services.scheduler.core.controller import Controller
from services.scheduler.core.ready import Arrived, Outgoing, Ready, Reply, Tick, ToAgent
from services.scheduler.core.restore import RESTORE_WAIT_S, RESTORED_SOURCE
from services.scheduler.core.settings import Settings
from tests.unit.scheduler.builders import ask, place, served
from tests.unit.scheduler.toy_peers import GB
from tests.unit.scheduler.toys import Drops, ToyCluster, a_model_record

MANIFEST = b'{"parameter_count": 7, "architecture": "ToyForCausalLM", "partitions": [{"size_bytes": 250000000}]}'


class RepositoryCluster(ToyCluster):
    """Its agents know what is published; `published` maps model ids to manifests. `empty()` loses every record."""

    def __init__(self, *models: str, servers: int = 1, slots: int = 1, drops: Drops = lambda message: False) -> None:
        self.published = dict.fromkeys(models, MANIFEST)
        #: How many models an agent names before it falls silent; None: all, and that this was all.
        self.falls_silent_after: dict[str, int | None] = {}
        self.is_new_store_empty = False
        super().__init__(models=[a_model_record(model_id) for model_id in models], servers=servers, slots=slots)
        self.run(5.0)
        self.said.clear()
        self.drops = drops

    def start_scheduler(self) -> None:
        if not self.is_new_store_empty:
            super().start_scheduler()
            return
        self.controller = Controller(
            records=list(self.store.values()),
            settings=self.settings,
            epoch=next(self._epochs),
            now=self.now,
            new_id=lambda prefix: f"{prefix}-{next(self._ids)}",
            is_emptied=not any(isinstance(record, ModelRecord) for record in self.store.values()),
        )
        self._beat_all()

    def empty(self) -> None:
        """Redis and the scheduler are gone together."""
        self.stop_scheduler()
        self.store.clear()
        self.journal.clear()
        self.said.clear()
        self.events.clear()
        self.is_new_store_empty = True
        self.start_scheduler()

    def _arrive(self, outgoing: Outgoing) -> None:
        match outgoing.to, outgoing.message:
            case ToAgent(server_id=server_id), ReportRepository(scheduler_epoch=epoch) if server_id in self.agents:
                self.report(server_id, epoch)
            case Reply(), ErrorReply(code=Unavailable.code):
                return  # routers ask again
            case _:
                super()._arrive(outgoing)

    def report(self, server_id: str, epoch: int) -> None:
        named_max = self.falls_silent_after.get(server_id)
        for number, model_id in enumerate(self.published):
            if named_max is not None and number >= named_max:
                return
            self.to_scheduler(self.found(model_id, server_id))
        if named_max is None:
            models = len(self.published)
            self.to_scheduler(RepositoryReported(server_id=server_id, scheduler_epoch=epoch, models=models))

    def found(self, model_id: str, server_id: str = "s0") -> RepositoryModelFound:
        return RepositoryModelFound(
            server_id=server_id,
            model_id=model_id,
            checkpoint_digest=f"digest-of-{model_id}",
            size_bytes=GB // 4,
            manifest=self.published[model_id],
            model_config=b"{}",
        )

    def models(self) -> dict[str, ModelRecord]:
        return {record.model_id: record for record in self.store.values() if isinstance(record, ModelRecord)}


def unloads(cluster: ToyCluster) -> list[str]:
    return [message.instance_id for message in cluster.said_to_all(UnloadInstance)]  # type: ignore[attr-defined]


def code(message: Message) -> str | None:
    return message.code if isinstance(message, ErrorReply) else None


def test_what_the_repository_holds_is_listed_again_with_default_settings() -> None:
    """P2: Redis emptied, and the scheduler with it."""
    cluster = RepositoryCluster("a", "b")
    cluster.empty()
    cluster.run(0.5)
    assert {m: record.state for m, record in cluster.models().items()} == dict.fromkeys("ab", ModelState.READY)
    restored = cluster.happened(ModelRestored)
    assert [event.subject_id() for event in restored] == ["a", "b"]
    assert len(cluster.said_to_all(ReportRepository)) == 1
    assert cluster.controller is not None
    assert cluster.controller.cluster.durable() == cluster.store


def test_a_restored_model_is_what_its_import_would_have_made_it_but_for_the_settings() -> None:
    """F4: the same bytes lead to the same record."""
    cluster = RepositoryCluster("a")
    cluster.published["a"] = (
        b'{"parameter_count": 9, "architecture": null, "partitions": [{"size_bytes": 1}, {"size_bytes": 5}], "x": 1}'
    )
    found = cluster.found("a")
    cluster.deliver(Arrived(message=DeployModel(model_id="new", source="/models/new", keep_alive_s=5.0)))
    (job_id,) = [k for t, k in cluster.store if t == "jobs"]
    imported = ImportFinished(
        job_id=job_id,
        model_id="new",
        server_id="s0",
        checkpoint_digest=found.checkpoint_digest,
        size_bytes=found.size_bytes,
        manifest=found.manifest,
        model_config=found.model_config,
    )
    cluster.deliver(Arrived(message=imported))
    by_import = cluster.models()["new"]
    cluster.empty()
    cluster.run(0.5)
    restored = cluster.models()["a"]
    assert (restored.source, restored.job_id, restored.keep_alive_s) == (RESTORED_SOURCE, "", None)
    mine = {"model_id", "source", "job_id", "created_at_s", "keep_alive_s"}
    for name in set(ModelRecord.__struct_fields__) - mine:
        assert getattr(restored, name) == getattr(by_import, name), name
    assert restored.partition_bytes


def test_an_instance_that_runs_is_adopted_and_serves_on() -> None:
    """P2: nobody loads again what is there, and nobody unloads it."""
    cluster = RepositoryCluster("a", "b")
    served(cluster, "a")
    (before,) = cluster.instances()
    cluster.empty()
    cluster.run_until(lambda: bool(cluster.models()), 0.5)
    (record,) = cluster.instances()
    assert (record.instance_id, record.model_id, record.slots) == (before.instance_id, "a", before.slots)
    assert (record.state, record.source_tier) == (InstanceState.READY, Tier.DRAM)
    assert record.task_id != before.task_id
    assert [m.route.instance_id for m in cluster.said_to_all(RouteAdded)] == [before.instance_id]  # type: ignore[attr-defined]
    request = cluster.router.request("q2", "a")
    cluster.run(3.0)
    assert request.is_done
    assert unloads(cluster) == []
    assert cluster.said_to_all(LoadModel) == []
    assert len(cluster.said_to_all(RouteAdded)) == 1, "told once"


def test_a_request_that_runs_all_the_while_ends_as_if_nothing_had_happened() -> None:
    """P2, R2: what its router counts there is counted again."""
    cluster = RepositoryCluster("a")
    served(cluster, "a")
    request = cluster.router.request("q2", "a", run_s=6.0)
    cluster.run(0.5)
    cluster.empty()
    cluster.run(3.0)
    assert cluster.controller is not None
    (instance,) = cluster.controller.cluster.instances.values()
    assert instance.requests == 1
    cluster.run(5.0)
    assert request.is_done
    assert instance.requests == 0


def test_an_adopted_instance_gives_way_and_ends_like_any_other() -> None:
    """R6"""
    cluster = RepositoryCluster("a", "b")
    served(cluster, "a")
    cluster.empty()
    request = cluster.router.request("q2", "b")
    cluster.run(10.0)
    assert request.is_done
    assert [record.model_id for record in cluster.instances()] == ["b"]
    cluster.run(cluster.settings.keep_alive_s + 5.0)
    assert cluster.instances() == []


def test_who_asks_meanwhile_is_not_told_that_the_model_is_not_there() -> None:
    """Nothing is lost in silence: a client would believe it."""
    cluster = RepositoryCluster("a")
    cluster.drops = lambda message: isinstance(message, RepositoryReported)
    cluster.empty()
    cluster.run(0.5)
    assert code(ask(cluster, GetModels())) == Unavailable.code
    assert code(ask(cluster, DeleteModel(model_id="a"))) == Unavailable.code
    (answer,) = cluster.deliver(place("q1", "a")).messages
    assert code(answer.message) == Unavailable.code
    request = cluster.router.request("q2", "a")
    cluster.run(2.0)
    assert cluster.models() == {}, "half a catalogue is never durable: the next life would not search"
    cluster.drops = lambda message: False
    cluster.run(10.0)
    assert request.is_done
    assert isinstance(ask(cluster, GetModels()), GetModelsReply)
    assert code(ask(cluster, DeleteModel(model_id="nobody"))) == ModelNotFound.code


def test_a_report_that_ends_half_way_is_asked_of_another_agent() -> None:
    cluster = RepositoryCluster("a", "b", "c", servers=2)
    cluster.falls_silent_after = {"s0": 1, "s1": 1}
    cluster.empty()
    cluster.run(1.0)
    assert cluster.models() == {}
    asked = [outgoing.to for outgoing in cluster.said if isinstance(outgoing.message, ReportRepository)]
    assert set(asked) == {ToAgent(server_id="s0")}
    cluster.kill_agent("s0")
    cluster.falls_silent_after = {}
    cluster.run(10.0)
    assert set(cluster.models()) == {"a", "b", "c"}
    assert ToAgent(server_id="s1") in [o.to for o in cluster.said if isinstance(o.message, ReportRepository)]


def test_an_agent_that_lives_but_says_nothing_is_not_waited_for_alone() -> None:
    cluster = RepositoryCluster("a", servers=2)
    cluster.falls_silent_after = {"s0": 0}
    cluster.empty()
    cluster.run(12.0)
    assert set(cluster.models()) == {"a"}


@pytest.mark.parametrize("lost", range(4))
def test_no_single_lost_message_of_a_report_loses_a_model(lost: int) -> None:
    """P2"""
    kinds = (ReportRepository, RepositoryModelFound, RepositoryReported)
    cluster = RepositoryCluster("a", "b")
    served(cluster, "a")
    seen: list[Message] = []

    def drops(message: Message) -> bool:
        if isinstance(message, kinds):
            seen.append(message)
        return bool(seen) and message is seen[-1] and len(seen) == lost + 1

    cluster.drops = drops
    cluster.empty()
    cluster.run(3.0)
    assert len(seen) > 4, "it was said again"
    assert set(cluster.models()) == {"a", "b"}
    assert [record.model_id for record in cluster.instances()] == ["a"]
    assert unloads(cluster) == []


def test_a_scheduler_that_dies_in_a_report_leaves_it_to_the_next_one() -> None:
    """P2"""
    cluster = RepositoryCluster("a", "b")
    served(cluster, "a")
    cluster.falls_silent_after = {"s0": 1}
    cluster.empty()
    cluster.run(0.5)
    cluster.stop_scheduler()
    cluster.falls_silent_after = {}
    cluster.start_scheduler()
    cluster.run(1.5)
    assert set(cluster.models()) == {"a", "b"}
    assert [record.model_id for record in cluster.instances()] == ["a"]


def test_a_repeated_report_is_harmless() -> None:
    cluster = RepositoryCluster("a")
    cluster.empty()
    cluster.run(0.5)
    records = len(cluster.journal)
    epoch = cluster.said_to_all(ReportRepository)[0].scheduler_epoch  # type: ignore[attr-defined]
    for _ in range(2):
        cluster.report("s0", epoch)
        cluster.run(0.5)
    assert len(cluster.journal) == records
    assert len(cluster.happened(ModelRestored)) == 1


def test_a_report_for_an_earlier_leader_counts_for_nothing() -> None:
    cluster = RepositoryCluster("a")
    cluster.drops = lambda message: isinstance(message, ReportRepository)
    cluster.empty()
    cluster.run(0.5)
    cluster.report("s0", 0)
    cluster.run(0.1)
    assert cluster.models() == {}


def test_a_model_that_was_deployed_meanwhile_stays_as_it_is() -> None:
    cluster = RepositoryCluster("a", "b")
    cluster.drops = lambda message: isinstance(message, RepositoryReported)
    cluster.empty()
    cluster.run(0.5)
    cluster.deliver(Arrived(message=DeployModel(model_id="a", source="/elsewhere/a", keep_alive_s=3.0)))
    cluster.drops = lambda message: False
    cluster.run(5.0)
    mine = cluster.models()["a"]
    assert (mine.source, mine.checkpoint_digest, mine.keep_alive_s) == ("/elsewhere/a", "digest-of-/elsewhere/a", 3.0)
    assert [event.subject_id() for event in cluster.happened(ModelRestored)] == ["b"]


def test_a_model_that_was_deleted_meanwhile_does_not_come_back() -> None:
    cluster = RepositoryCluster("a", "b")
    cluster.drops = lambda message: isinstance(message, RepositoryReported)
    cluster.empty()
    cluster.run(0.5)
    cluster.deliver(Arrived(message=DeployModel(model_id="a", source="/elsewhere/a")))
    cluster.run(2.0)
    cluster.deliver(Arrived(message=DeleteModel(model_id="a")))
    cluster.run(2.0)
    assert cluster.happened(ModelDeleted)
    cluster.drops = lambda message: False
    cluster.run(5.0)
    assert set(cluster.models()) == {"b"}


def test_an_instance_of_a_model_that_is_nowhere_is_unloaded_after_the_search() -> None:
    cluster = RepositoryCluster("a", "b")
    served(cluster, "a")
    del cluster.published["a"]
    cluster.empty()
    cluster.run(5.0)
    assert cluster.instances() == []
    assert unloads(cluster)
    request = cluster.router.request("q2", "b")
    cluster.run(5.0)
    assert request.is_done, "its slot is free again"


def test_workers_and_clients_wait_for_the_catalogue_for_a_bounded_time_and_the_search_goes_on() -> None:
    cluster = RepositoryCluster("a")
    served(cluster, "a")
    cluster.falls_silent_after = {"s0": 0}
    cluster.empty()
    cluster.run(RESTORE_WAIT_S - 1.0)
    assert unloads(cluster) == []
    assert code(ask(cluster, GetModels())) == Unavailable.code
    cluster.run(3.0)
    assert unloads(cluster)
    assert ask(cluster, GetModels()) == GetModelsReply(models=())
    (answer,) = cluster.deliver(place("q1", "a")).messages
    assert code(answer.message) == ModelNotFound.code
    cluster.falls_silent_after = {}
    cluster.run(10.0)
    assert set(cluster.models()) == {"a"}


def test_a_cluster_without_servers_does_not_wait_for_them() -> None:
    cluster = RepositoryCluster("a", servers=1)
    cluster.kill_agent("s0")
    cluster.kill_worker("s0", 0)
    cluster.empty()
    cluster.run(cluster.settings.lost_after_s + 0.5)
    assert ask(cluster, GetModels()) == GetModelsReply(models=())
    cluster.start_agent("s9")
    cluster.run(1.0)
    assert set(cluster.models()) == {"a"}


def test_an_instance_whose_server_has_other_content_of_the_model_drains() -> None:
    """L1: nobody is answered by weights that are not those of the catalogue."""
    cluster = RepositoryCluster("a")
    served(cluster, "a")
    (before,) = cluster.instances()
    agent = cluster.agents["s0"]
    agent.tiers["a", "another digest"] = agent.tiers.pop(("a", "digest-of-a"))
    cluster.empty()
    cluster.run(3.0)
    assert cluster.instances() == []
    assert set(unloads(cluster)) == {before.instance_id}


def test_an_instance_waits_for_its_agent_to_say_what_the_server_has() -> None:
    cluster = RepositoryCluster("a", servers=2)
    served(cluster, "a")
    (before,) = cluster.instances()
    other = "s1" if before.server_id == "s0" else "s0"
    agent = cluster.agents[before.server_id]
    agent.is_alive = False
    cluster.empty()
    cluster.run(0.5)
    assert set(cluster.models()) == {"a"}, f"{other} has reported"
    assert cluster.instances() == []
    agent.is_alive = True
    cluster.run(2.5)
    assert [record.instance_id for record in cluster.instances()] == [before.instance_id]
    assert unloads(cluster) == []


@pytest.mark.parametrize(("device", "is_adopted"), [("cpu", True), ("cuda:0", False)])
def test_an_instance_on_several_gpus_drains_because_its_worker_knows_one_of_them(device: str, is_adopted: bool) -> None:
    cluster = RepositoryCluster("a")
    served(cluster, "a")
    partitions = b'{"size_bytes": 125000000}, {"size_bytes": 125000000}'
    cluster.published["a"] = b'{"parameter_count": 7, "architecture": "Toy", "partitions": [%s]}' % partitions
    worker = cluster.workers["s0", 0]
    worker.device, worker.memory_bytes = device, 0 if device == "cpu" else GB
    cluster.empty()
    cluster.run(3.0)
    assert bool(cluster.instances()) is is_adopted
    assert bool(unloads(cluster)) is not is_adopted


def test_a_load_that_was_on_its_way_begins_anew_for_whoever_waits() -> None:
    cluster = RepositoryCluster("a")
    request = cluster.router.request("q1", "a")
    cluster.run(0.5)
    cluster.empty()
    cluster.run(10.0)
    assert request.is_done
    assert len(cluster.instances()) == 1


def test_what_has_ended_in_this_life_is_not_adopted_by_late_news() -> None:
    """P2: a heartbeat that was on its way for long says nothing about now."""
    cluster = RepositoryCluster("a")
    served(cluster, "a")
    late: list[Message] = []
    cluster.empty()
    cluster.drops = lambda message: bool(late.append(message)) if type(message).__name__ == "WorkerHeartbeat" else False
    cluster.run(1.5)
    (instance,) = cluster.instances()
    cluster.workers["s0", 0].end(None)
    cluster.run(0.1)
    assert cluster.instances() == []
    old = next(m for m in late if getattr(m, "instance_id", None) == instance.instance_id)
    cluster.deliver(Arrived(message=old))
    assert cluster.instances() == []


@pytest.mark.parametrize("seed", range(20))
def test_after_an_emptied_store_at_any_moment_all_is_there_again(seed: int) -> None:
    """P2: with messages that get lost, an agent that dies, and requests that run and wait."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    models = ("a", "b", "c")
    cluster = RepositoryCluster(*models, servers=2, slots=2)
    cluster.check = owners_are_single
    requests = [cluster.router.request(f"q{n}", chance.choice(models), run_s=chance.random() * 4) for n in range(6)]
    cluster.run(chance.random() * 6)
    cluster.drops = lambda message: chance.random() < 0.1
    cluster.empty()
    for number in range(3):
        cluster.run(chance.random() * 2)
        requests.append(cluster.router.request(f"r{number}", chance.choice(models), run_s=chance.random()))
    if chance.random() < 0.5:
        cluster.kill_agent("s0")
        cluster.run(chance.random() * 5)
        cluster.start_agent("s0")
    cluster.run(3.0)
    cluster.drops = lambda message: False
    cluster.run(40.0)
    assert set(cluster.models()) == set(models)
    assert all(request.is_done for request in requests), [r.request_id for r in requests if not r.is_done]
    assert cluster.controller is not None
    assert cluster.controller.cluster.durable() == cluster.store
    assert cluster.controller.cluster.search is None
    held = {(k, w.instance_id) for k, w in cluster.workers.items() if w.instance_id is not None}
    assert held == {((r.server_id, r.slot), r.instance_id) for r in cluster.instances()}


def owners_are_single(cluster: ToyCluster, ready: Ready) -> None:
    slots = [(record.server_id, slot) for record in cluster.instances() for slot in record.slots]
    assert len(slots) == len(set(slots))


def test_a_store_that_was_not_emptied_is_not_searched_for() -> None:
    cluster = RepositoryCluster("a")
    controller = Controller(
        records=list(cluster.store.values()), settings=Settings(), epoch=99, now=0.0, new_id=lambda prefix: prefix
    )
    ready = controller.step([Tick()], now=0.0, wall_s=0.0)
    assert controller.cluster.search is None
    assert not [outgoing for outgoing in ready.messages if isinstance(outgoing.message, ReportRepository)]
