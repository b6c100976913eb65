"""Owns the HTTP client of a cluster: catalogue, jobs, cluster state, and chat with its stage times."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx

DEFAULT_URL = "http://127.0.0.1:8343"
# How often a job is asked for; progress comes from the agent at about this rate.
JOB_POLL_S = 0.2
# Instances end when requests do, which takes seconds.
DRAIN_POLL_S = 0.5
# Answers of the admin API are small; only an unreachable cluster takes longer.
ADMIN_S_MAX = 15.0
# A measurement reads some hundred MB and waits for a load to end; the router itself gives up a little earlier.
MEASURE_S_MAX = 130.0

# Most migrations take some tenths of a second, and a load before that seconds.
MIGRATION_POLL_S = 0.1
MIGRATION_ENDS = ("finished", "abandoned", "requeued")

# A service that is started again is back in seconds.
AWAY_S_MAX = 30.0
AWAY_POLL_S = 0.5
SERVICE_UNAVAILABLE = 503

JsonObject = dict[str, Any]
A = TypeVar("A")


class ApiError(Exception):
    """The cluster answered with an error: its HTTP status, stable code and sentence."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(slots=True)
class Answer:
    """A streamed answer as the client saw it; seconds from sending the request."""

    text: str = ""
    finish_reason: str | None = None
    first_token_s: float | None = None
    duration_s: float = 0.0
    stages_ms: dict[str, float] = field(default_factory=dict)
    tier: str = ""
    server: str = ""


class AdminClient:
    """Talks to one router. Raises ApiError for what the cluster refuses, httpx.TransportError when it is not there."""

    def __init__(self, url: str = DEFAULT_URL) -> None:
        self.url = url.rstrip("/")
        # No read limit: a cold start may take minutes, and the stream carries comments meanwhile.
        self._http = httpx.AsyncClient(base_url=self.url, timeout=httpx.Timeout(ADMIN_S_MAX, read=None))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def deploy(
        self, model_id: str, source: str, keep_alive_s: float | None = None, scaling: JsonObject | None = None
    ) -> JsonObject:
        """Start importing `source`, as `wire.sources` has its grammar; returns job_id, model and state. `scaling` has
        some of min_instances, max_instances and target_concurrency."""
        body = {"model": model_id, "source": source, **_given(keep_alive_s=keep_alive_s, scaling=scaling)}
        return await self._call("POST", "/admin/models", body)

    async def scale(
        self, model_id: str, scaling: JsonObject | None = None, keep_alive_s: float | None = None
    ) -> JsonObject:
        """Change what is given of how a model is scaled; returns all of it, and desired_instances."""
        body = _given(scaling=scaling, keep_alive_s=keep_alive_s)
        return await self._call("PATCH", f"/admin/models/{quote(model_id)}", body)

    async def explain(self, model_id: str) -> JsonObject:
        """Why a model is where it is, or waits: the last decision, and what would be decided now."""
        return await self._call("GET", f"/admin/explain?model={quote(model_id, safe='')}")

    async def job(self, job_id: str) -> JsonObject:
        return await self._call("GET", f"/admin/jobs/{quote(job_id, safe='')}")

    async def cancel(self, job_id: str) -> JsonObject:
        """Ask for the end of an import; returns its status. It has ended when `job` says failed or finished."""
        return await self._call("DELETE", f"/admin/jobs/{quote(job_id, safe='')}")

    async def follow_job(self, job_id: str) -> AsyncIterator[JsonObject]:
        """The job's status again and again until it has ended; raises ApiError when it ended badly.

        Routers and schedulers may be restarted meanwhile: only who stays away for AWAY_S_MAX is given up.
        """
        while True:
            status = await self._patiently(lambda: self.job(job_id))
            yield status
            if status["stage"] == "failed":
                error = status.get("error") or {}
                raise ApiError(200, error.get("code", "import_failed"), error.get("message", "the import failed"))
            if status["stage"] == "finished":
                return
            await asyncio.sleep(JOB_POLL_S)

    async def _patiently(self, ask: Callable[[], Awaitable[A]]) -> A:
        deadline_s = time.monotonic() + AWAY_S_MAX
        while True:
            try:
                return await ask()
            except (httpx.TransportError, ApiError) as error:
                is_away = not isinstance(error, ApiError) or error.status == SERVICE_UNAVAILABLE
                if not is_away or time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(AWAY_POLL_S)

    async def deploy_and_wait(self, model_id: str, source: str, keep_alive_s: float | None = None) -> JsonObject:
        """Deploy and return the job's last status."""
        started = await self.deploy(model_id, source, keep_alive_s)
        return [status async for status in self.follow_job(started["job_id"])][-1]

    async def delete(self, model_id: str) -> JsonObject:
        return await self._call("DELETE", f"/admin/models/{quote(model_id)}")

    async def models(self) -> list[JsonObject]:
        answer = await self._call("GET", "/admin/models")
        return list(answer["models"])

    async def cluster(self) -> JsonObject:
        return await self._call("GET", "/admin/cluster")

    async def prefetch(self, server: str, model_id: str, tier: str, *, pin: bool = False) -> JsonObject:
        """Bring a model into `ssd` or `dram` of a server; returns at once, with the task_id that `loads` shows."""
        return await self._move(server, model_id, "prefetch", {"tier": tier, "pin": pin})

    async def pin(self, server: str, model_id: str, tier: str) -> JsonObject:
        return await self._move(server, model_id, "pin", {"tier": tier})

    async def unpin(self, server: str, model_id: str, tier: str) -> JsonObject:
        return await self._move(server, model_id, "unpin", {"tier": tier})

    async def evict(self, server: str, model_id: str, tier: str) -> JsonObject:
        """Give back what nobody uses; raises ApiError (conflict) while the model is pinned there or used."""
        return await self._move(server, model_id, "evict", {"tier": tier})

    async def loads(self, server: str) -> JsonObject:
        """The load queue of a server, running first."""
        return await self._call("GET", f"/admin/servers/{quote(server, safe='')}/loads")

    async def cordon(self, server: str) -> JsonObject:
        """Place nothing there from now on; returns the server's flags, and the instances that are still there."""
        return await self._order(server, "cordon")

    async def uncordon(self, server: str) -> JsonObject:
        return await self._order(server, "uncordon")

    async def drain(self, server: str) -> JsonObject:
        """As `cordon`, and what is there goes: idle instances at once, others when their requests have ended."""
        return await self._order(server, "drain")

    async def follow_drain(self, server: str) -> AsyncIterator[list[str]]:
        """Drain, and yield the instances that are still there, again and again until there are none.

        Raises ApiError (conflict) when somebody uncordons the server meanwhile.
        """
        left: list[str] = (await self.drain(server))["instances"]
        while left:
            yield left
            await asyncio.sleep(DRAIN_POLL_S)
            servers = {entry["server_id"]: entry for entry in (await self._patiently(self.cluster))["servers"]}
            if server in servers and not servers[server]["is_draining"]:
                raise ApiError(200, "conflict", f"server {server} was uncordoned before it was empty")
            left = (await self._patiently(lambda: self.drain(server)))["instances"]
        yield left

    async def migrate(self, what: str, server: str, slot: int | None = None) -> JsonObject:
        """Move an instance, named by its model, its id or a request on it, with all its requests; returns the migration
        as it begins. Raises ApiError (conflict) that says why it can't be moved."""
        body = {"what": what, "server": server, **_given(slot=slot)}
        return await self._call("POST", "/admin/migrations", body)

    async def migrations(self) -> list[JsonObject]:
        """Those on their way, then those that ended lately, the newest first."""
        answer = await self._call("GET", "/admin/migrations")
        return list(answer["migrations"])

    async def follow_migration(self, migration_id: str) -> AsyncIterator[JsonObject]:
        """The migration again and again until it has ended."""
        while True:
            found = [one for one in await self._patiently(self.migrations) if one["migration_id"] == migration_id]
            if not found:
                raise ApiError(200, "conflict", f"{migration_id} is not known any more; see the events of migrations")
            yield found[0]
            if found[0]["state"] in MIGRATION_ENDS:
                return
            await asyncio.sleep(MIGRATION_POLL_S)

    async def measure(self, server: str) -> JsonObject:
        """Measure the storage of a server; takes seconds, and waits for the load that runs."""
        path = f"/admin/servers/{quote(server, safe='')}/measure"
        return await self._call("POST", path, timeout_s=MEASURE_S_MAX)

    async def is_ready(self) -> bool:
        """True when the router says that it can serve."""
        try:
            return (await self._http.get("/readyz", timeout=2.0)).status_code == 200
        except httpx.TransportError:
            return False

    async def chat(
        self, model_id: str, messages: list[JsonObject], answer: Answer, **options: Any
    ) -> AsyncIterator[str]:
        """Stream a chat; yields text as it comes and fills `answer` with text, times and stages."""
        body = {"model": model_id, "messages": messages, "stream": True, **options}
        sent = time.perf_counter()
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise _error_of(response)
            answer.tier = response.headers.get("x-whimbrel-tier", "")
            answer.server = response.headers.get("x-whimbrel-server", "")
            async for line in response.aiter_lines():
                if line.startswith(": server-timing"):
                    timing = line.removeprefix(": server-timing")
                    answer.stages_ms = parse_server_timing(timing)
                    answer.tier = parse_tier(timing) or answer.tier
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ApiError(200, event["error"]["code"], event["error"]["message"])
                for choice in event["choices"]:
                    answer.finish_reason = choice["finish_reason"] or answer.finish_reason
                    text = choice["delta"].get("content") or ""
                    if text:
                        answer.first_token_s = answer.first_token_s or time.perf_counter() - sent
                        answer.text += text
                        yield text
        answer.duration_s = time.perf_counter() - sent

    async def ask(self, model_id: str, prompt: str, **options: Any) -> Answer:
        """One question, streamed to its end."""
        answer = Answer()
        async for _ in self.chat(model_id, [{"role": "user", "content": prompt}], answer, **options):
            pass
        return answer

    async def _move(self, server: str, model_id: str, verb: str, body: JsonObject) -> JsonObject:
        path = f"/admin/servers/{quote(server, safe='')}/models/{quote(model_id)}/{verb}"
        return await self._call("POST", path, body)

    async def _order(self, server: str, order: str) -> JsonObject:
        return await self._call("POST", f"/admin/servers/{quote(server, safe='')}/{order}")

    async def _call(
        self, method: str, path: str, body: JsonObject | None = None, timeout_s: float = ADMIN_S_MAX
    ) -> JsonObject:
        response = await self._http.request(method, path, json=body, timeout=timeout_s)
        if response.status_code >= 400:
            raise _error_of(response)
        result: JsonObject = response.json()
        return result


def parse_server_timing(header: str) -> dict[str, float]:
    """`queue;dur=1.5, load;dur=20` as milliseconds by stage; entries of another form are passed over."""
    stages: dict[str, float] = {}
    for entry in header.split(","):
        name, _, rest = entry.strip().partition(";")
        if rest.strip().startswith("dur="):
            stages[name.strip()] = float(rest.strip().removeprefix("dur="))
    return stages


def parse_tier(header: str) -> str:
    """The tier named by a `tier;desc=…` entry, where the bytes came from; empty when there is none."""
    for entry in header.split(","):
        name, _, description = entry.strip().partition(";desc=")
        if name == "tier":
            return description
    return ""


def _given(**fields: object) -> JsonObject:
    """Those that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def _error_of(response: httpx.Response) -> ApiError:
    try:
        error = response.json()["error"]
        return ApiError(response.status_code, error["code"] or "", error["message"])
    except (ValueError, KeyError, TypeError):
        return ApiError(response.status_code, "", f"HTTP {response.status_code} from {response.url}")
