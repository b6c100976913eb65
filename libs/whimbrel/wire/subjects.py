"""Owns every NATS subject and queue group; nobody else spells one.

Grammar (`wb` being the cluster's prefix): `wb.cmd.<service>[.<id>…].<verb>`, `wb.tok.<router>`, `wb.hb.<service>.<id>`,
`wb.evt.<noun>.<id>.<verb>`. Ids that may hold dots are escaped so that they stay one token.
"""

from __future__ import annotations

from whimbrel.wire.messages import (
    AgentHeartbeat,
    Message,
    RouterHeartbeat,
    SchedulerHeartbeat,
    WorkerHeartbeat,
)

SCHEDULER_QUEUE = "scheduler"
EVENTS_STREAM = "WB_EVENTS"

# Characters of a model id that would split or match a subject, each with its escape. '=' itself cannot stand in an id.
_ESCAPES = str.maketrans({".": "=2E", "/": "=2F", "*": "=2A", ">": "=3E", " ": "=20"})


def token(identifier: str) -> str:
    """One subject token for an id."""
    return identifier.translate(_ESCAPES)


def verb(message: Message) -> str:
    return str(message.__struct_config__.tag)


class Subjects:
    """The subjects of one cluster."""

    def __init__(self, cluster: str = "wb") -> None:
        assert cluster
        assert token(cluster) == cluster
        self.cluster = cluster

    def to_scheduler(self, message: Message) -> str:
        return f"{self.cluster}.cmd.scheduler.{verb(message)}"

    def to_agent(self, server_id: str, message: Message) -> str:
        return f"{self.cluster}.cmd.agent.{token(server_id)}.{verb(message)}"

    def to_worker(self, server_id: str, slot: int, message: Message) -> str:
        return f"{self.cluster}.cmd.worker.{token(server_id)}.{slot}.{verb(message)}"

    def to_router(self, router_id: str, message: Message) -> str:
        return f"{self.cluster}.cmd.router.{token(router_id)}.{verb(message)}"

    def tokens(self, router_id: str) -> str:
        return f"{self.cluster}.tok.{token(router_id)}"

    def heartbeat(self, message: AgentHeartbeat | WorkerHeartbeat | RouterHeartbeat | SchedulerHeartbeat) -> str:
        match message:
            case AgentHeartbeat():
                return f"{self.cluster}.hb.agent.{token(message.server_id)}"
            case WorkerHeartbeat():
                return f"{self.cluster}.hb.worker.{token(message.server_id)}.{message.slot}"
            case RouterHeartbeat():
                return f"{self.cluster}.hb.router.{token(message.router_id)}"
            case SchedulerHeartbeat():
                return f"{self.cluster}.hb.scheduler.{token(message.scheduler_id)}"

    def event(self, noun: str, identifier: str, past_verb: str) -> str:
        return f"{self.cluster}.evt.{noun}.{token(identifier)}.{past_verb}"

    def events_stream(self) -> str:
        """The JetStream stream of this cluster's public events; WB_EVENTS for the cluster `wb`."""
        return EVENTS_STREAM if self.cluster == "wb" else f"{self.cluster.upper()}_EVENTS"

    def peer(self, subject: str) -> str:
        """Whom a command goes to and what it says, for people, such as `scheduler.place_model`."""
        return subject.removeprefix(f"{self.cluster}.cmd.")

    # What a service listens to.

    def all_to_scheduler(self) -> str:
        return f"{self.cluster}.cmd.scheduler.*"

    def all_to_agent(self, server_id: str) -> str:
        return f"{self.cluster}.cmd.agent.{token(server_id)}.*"

    def all_to_worker(self, server_id: str, slot: int) -> str:
        return f"{self.cluster}.cmd.worker.{token(server_id)}.{slot}.*"

    def all_to_router(self, router_id: str) -> str:
        return f"{self.cluster}.cmd.router.{token(router_id)}.*"

    def all_to_agents(self) -> str:
        return f"{self.cluster}.cmd.agent.>"

    def all_to_workers(self) -> str:
        return f"{self.cluster}.cmd.worker.>"

    def all_to_routers(self) -> str:
        return f"{self.cluster}.cmd.router.>"

    def all_heartbeats(self, service: str) -> str:
        return f"{self.cluster}.hb.{service}.>"

    def worker_heartbeats_of(self, server_id: str) -> str:
        return f"{self.cluster}.hb.worker.{token(server_id)}.*"

    def all_events(self) -> str:
        return f"{self.cluster}.evt.>"

    def events_of(self, noun: str) -> str:
        return f"{self.cluster}.evt.{noun}.>"
