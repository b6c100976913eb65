"""Owns the loads of a simulated agent: the real cores of the service (tasks, residency, eviction, path), driven as its
loop and `loading.py` drive them; bytes only take time."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Cancelled, Conflict, ModelTooLarge, QueueFull, Unavailable, WhimbrelError
from whimbrel.wire.messages import (
    ActivateInstance,
    AttachInstance,
    DetachInstance,
    LoadEnded,
    LoadFinished,
    LoadModel,
    Message,
    Tier,
    WaitStage,
)

from services.storage_agent.core.chunks import CheckpointKey
from services.storage_agent.core.eviction import Evict, NeverFits, Wait, choose_victims
from services.storage_agent.core.path import Crossed, Read, next_move, reports, source_tier
from services.storage_agent.core.residency import DramCopy
from services.storage_agent.core.tasks import LoadTask, TaskEvent, Tasks
from tests.simulation.clock import Job, Stopped, Turns
from tests.simulation.load_words import Run, partitions, tell_progress

if TYPE_CHECKING:
    from tests.simulation.agents import SimAgent

#: What the tiers really do, seconds per byte; the scheduler has to find out.
SECONDS_PER_BYTE = {Tier.REMOTE: 1 / 0.2e9, Tier.SSD: 1 / 2e9}
AWAY_S_MAX, ANSWER_S_MAX, RETRY_S, DETACH_S_MAX, ROOM_S_MAX = 20.0, 10.0, 1.0, 2.0, 30.0
CPU = "cpu"


class Loads:
    """The load tasks of one agent's life."""

    def __init__(self, agent: SimAgent) -> None:
        self._agent = agent
        self._tasks = Tasks()
        self._runs: dict[str, Run] = {}
        self._outcomes: dict[str, LoadFinished | LoadEnded] = {}
        self._path: Turns | None = None
        self._slots: dict[int, Turns] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def task_ids(self) -> tuple[str, ...]:
        return tuple(task.task_id for task in self._tasks.all())

    def running_ids(self) -> tuple[str, ...]:
        return tuple(task.task_id for task in self._tasks.all() if task.is_running)

    def works_on(self, model_id: str) -> bool:
        return any(task.key.model_id == model_id for task in self._tasks.all())

    def begin(self, command: LoadModel) -> None:
        """Begin a load, or say again how it ended."""
        agent = self._agent
        outcome = self._outcomes.get(command.task_id)
        is_undone = isinstance(outcome, LoadFinished) and command.instance_id not in agent.attached()
        if outcome is not None and not is_undone:
            agent.tell_scheduler(outcome)
            return
        task = LoadTask(
            task_id=command.task_id,
            instance_id=command.instance_id,
            key=CheckpointKey(model_id=command.model_id, checkpoint_digest=command.checkpoint_digest),
            size_bytes=command.size_bytes,
            slots=command.slots,
            queued_s=agent.now,
        )
        try:
            is_new = self._tasks.add(task)
        except QueueFull as error:
            self._say_ended(task, error)
            return
        if is_new:
            run = self._runs[task.task_id] = Run(task=task)
            # It exists before it runs: its first part may end it.
            agent.clock.after(0.0, agent, lambda: self._start(run))
            agent.beat()

    def cancel(self, task_id: str) -> None:
        run = self._runs.get(task_id)
        if run is not None and run.job is not None and not run.is_ending:
            run.job.stop()

    def stop(self, model_id: str) -> None:
        for task in self._tasks.all():
            if task.key.model_id == model_id:
                self.cancel(task.task_id)

    def _start(self, run: Run) -> None:
        run.job = Job(self._agent, self._run(run))
        run.job.resume()

    async def _run(self, run: Run) -> None:
        task, agent = run.task, self._agent
        error: WhimbrelError | None = None
        try:
            await self._load(run)
        except Stopped:
            error = Cancelled(what=f"load {task.task_id}")
        except WhimbrelError as failure:
            error = failure
        run.is_ending = True
        if run.filling is not None:
            run.filling.stop()
        if error is not None and run.is_lent:
            await self._detach(task)
            agent.settle(task.instance_id)
        self._path_turns().give_up(run.path_turn)
        if run.copy is not None:
            agent.let_go(run.copy.copy_id, run.holder)
        if run.slot_turn is not None:
            self._slots[task.slot].give_up(run.slot_turn)
        del self._runs[task.task_id]
        if error is not None:
            task.on(TaskEvent.TASK_CANCELLED if isinstance(error, Cancelled) else TaskEvent.TASK_FAILED)
        self._tasks.remove(task)
        if error is not None:
            self._say_ended(task, error)
        else:
            self._say_finished(run)
        agent.sweep()
        agent.beat()

    async def _load(self, run: Run) -> None:
        task, agent = run.task, self._agent
        run.slot_turn = await self._slots.setdefault(task.slot, Turns(agent.clock)).take()
        layout = agent.layout(task.key)
        if layout.chunk_count > agent.residency.chunk_count:
            capacity_bytes = agent.residency.chunk_count * layout.chunk_size_bytes
            size_bytes = task.size_bytes
            raise ModelTooLarge(model_id=task.key.model_id, need_bytes=size_bytes, capacity_bytes=capacity_bytes)
        if task.instance_id in agent.lent:
            raise Conflict(reason=f"instance {task.instance_id} still holds the lease of an earlier load; try again")
        known = agent.residency.find(task.key)
        if known is None or not known.is_whole:
            run.path_turn = await self._path_turns().take()
            known = agent.residency.find(task.key)
        task.start(agent.now)
        agent.beat()
        ssd = agent.residency.ssd(task.key)
        run.source = source_tier(known, ssd)
        if ssd is None:
            missing = layout.chunks()
            agent.residency.add_ssd(
                task.key, layout=layout, size_bytes=layout.size_bytes, now=agent.now, missing=missing
            )
        copy = run.copy = agent.residency.open_copy(
            task.key, layout=layout, size_bytes=layout.size_bytes, holder=run.holder, now=agent.now
        )
        await self._make_room(copy)
        task.on(TaskEvent.CHUNKS_RESERVED)
        run.filling = Job(agent, self._fill(run, copy))
        run.filling.resume()
        await self._attach(run, copy)
        await run.filling.done
        self._path_turns().give_up(run.path_turn)
        if agent.devices[task.slot] != CPU:
            # GPUs have their own copy now; the lease tells of the instance's life only.
            agent.let_go(copy.copy_id, f"instance {task.instance_id}")
        task.on(TaskEvent.BYTES_ARRIVED)
        if agent.errors:
            raise agent.errors.pop()
        await self._ask(task.slot, ActivateInstance(instance_id=task.instance_id))
        task.on(TaskEvent.WORKER_ACTIVATED)

    async def _make_room(self, copy: DramCopy) -> None:
        agent, need = self._agent, len(copy.unplaced())
        until_s = agent.now + ROOM_S_MAX
        while True:
            candidates = agent.residency.dram_candidates()
            match choose_victims(candidates, need=need, capacity=agent.residency.chunk_count):
                case Evict(victims=victims):
                    for victim in victims:
                        agent.free_chunks.update(agent.residency.shed(victim.key, victim.size))
                    agent.residency.place(copy.copy_id, [agent.free_chunks.pop() for _ in range(need)])
                    return
                case Wait() if agent.now < until_s:
                    await agent.clock.sleep(0.1)
                case Wait() | NeverFits():
                    raise Unavailable(what=f"memory for {copy.key.model_id}")

    async def _fill(self, run: Run, copy: DramCopy) -> None:
        """Chunk after chunk, from the fastest tier that has it; what the repository gives goes to the SSD as well."""
        agent, done_bytes = self._agent, copy.ready_bytes
        crossed: dict[Tier, Crossed] = defaultdict(Crossed)
        run.crossed = crossed
        while not copy.is_whole:
            ssd = agent.residency.ssd(copy.key)
            if ssd is None:
                raise Stopped
            move = next_move(copy, ssd, wanted=Tier.DRAM)
            assert move is not None
            tier = Tier.SSD if isinstance(move, Read) else Tier.REMOTE
            chunks = move.chunks  # type: ignore[union-attr]
            size_bytes = copy.layout.bytes_in(set(chunks))
            stage = WaitStage.LOADING if tier is Tier.SSD else WaitStage.FETCHING
            tell_progress(agent, run.task, stage, done_bytes, copy.layout.size_bytes)
            await agent.clock.sleep(size_bytes * SECONDS_PER_BYTE[tier])
            crossed[tier].size_bytes += size_bytes
            crossed[tier].seconds += size_bytes * SECONDS_PER_BYTE[tier]
            done_bytes += size_bytes
            for chunk in chunks:
                agent.residency.arrive(copy.copy_id, chunk)
                ssd.missing.discard(chunk)
            tell_progress(agent, run.task, stage, done_bytes, copy.layout.size_bytes)

    async def _attach(self, run: Run, copy: DramCopy) -> None:
        task, agent = run.task, self._agent
        path = agent.lend(copy, task.instance_id, task.slots)
        run.is_lent = True
        attach = AttachInstance(
            instance_id=task.instance_id,
            model_id=task.key.model_id,
            agent_epoch=agent.epoch,
            checkpoint_path="",
            index_digest=task.key.checkpoint_digest,
            pool_path="",
            lease_path=path,
            chunk_size_bytes=copy.layout.chunk_size_bytes,
            partitions=partitions(copy.layout, copy, agent.devices[task.slot]),
        )
        await self._ask(task.slot, attach)
        if agent.lent[task.instance_id][1].holder is None:
            raise Unavailable(what=f"worker {agent.server_id}/{task.slot}, which answered without taking the lease,")
        agent.settle(task.instance_id)
        task.on(TaskEvent.WORKER_ATTACHED)

    async def _ask(self, slot: int, message: Message) -> None:
        """Patiently: a worker that is away takes seconds to start."""
        agent = self._agent
        until_s = agent.now + AWAY_S_MAX
        while True:
            try:
                await agent.network.request(agent, ("worker", agent.server_id, slot), message, ANSWER_S_MAX)
            except Unavailable:
                if agent.now + RETRY_S >= until_s:
                    raise
            else:
                return
            await agent.clock.sleep(RETRY_S)

    async def _detach(self, task: LoadTask) -> None:
        agent, message = self._agent, DetachInstance(instance_id=task.instance_id)
        try:
            await agent.network.request(agent, ("worker", agent.server_id, task.slot), message, DETACH_S_MAX)
        except WhimbrelError:
            return  # whether it let go is what its lease says

    def _path_turns(self) -> Turns:
        if self._path is None:
            self._path = Turns(self._agent.clock)
        return self._path

    def _say_ended(self, task: LoadTask, error: WhimbrelError) -> None:
        self._say(
            LoadEnded(
                task_id=task.task_id,
                instance_id=task.instance_id,
                model_id=task.key.model_id,
                server_id=self._agent.server_id,
                error=error_reply(error),
            )
        )

    def _say_finished(self, run: Run) -> None:
        task = run.task
        if not run.crossed and run.copy is not None:
            run.crossed = {Tier.DRAM: Crossed(size_bytes=task.size_bytes, seconds=0.001)}
        self._say(
            LoadFinished(
                task_id=task.task_id,
                instance_id=task.instance_id,
                model_id=task.key.model_id,
                server_id=self._agent.server_id,
                source_tier=run.source,
                queue_s=task.queue_s(self._agent.now),
                reports=reports(run.crossed),
            )
        )

    def _say(self, outcome: LoadFinished | LoadEnded) -> None:
        self._outcomes[outcome.task_id] = outcome
        self._agent.tell_scheduler(outcome)
