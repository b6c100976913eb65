"""Owns /openapi.json: a small, true description of every path."""

from __future__ import annotations

from whimbrel.wire.messages import TOP_LOGPROBS_MAX
from whimbrel.wire.sources import GRAMMAR

from services.router.core.params import (
    CHAT_ONLY,
    CHOICES_MAX,
    COMPLETION_LOGPROBS_MAX,
    COMPLETION_ONLY,
    HARMLESS,
    HONOURED,
)
from services.router.core.residency import TIERS
from services.router.core.scalings import CONCURRENCY_MAX, INSTANCES_MAX, KEEP_ALIVE_S_MAX
from services.router.core.statuses import STATUSES

Json = dict[str, object]


def _operation(
    summary: str,
    *,
    status: str = "200",
    body: Json | None = None,
    parameter: str | tuple[str, ...] = (),
    query: str | None = None,
) -> Json:
    operation: Json = {
        "summary": summary,
        "responses": {
            status: {"description": "as asked"},
            "default": {
                "description": "an error",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            },
        },
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    names = (parameter,) if isinstance(parameter, str) else parameter
    places = [(name, "path") for name in names] + ([] if query is None else [(query, "query")])
    if places:
        operation["parameters"] = [
            {"name": name, "in": place, "required": True, "schema": {"type": "string"}} for name, place in places
        ]
    return operation


def _object(required: list[str], **properties: Json) -> Json:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


_TYPES: dict[str, Json] = {
    "model": {"type": "string"},
    "messages": {"type": "array", "minItems": 1, "items": {"type": "object"}},
    "prompt": {"oneOf": [{"type": "string"}, {"type": "array", "minItems": 1}]},
    "stream": {"type": "boolean"},
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
    "max_tokens": {"type": "integer", "minimum": 1},
    "max_completion_tokens": {"type": "integer", "minimum": 1},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "seed": {"type": "integer"},
    "stop": {"oneOf": [{"type": "string"}, {"type": "array", "maxItems": 4, "items": {"type": "string"}}]},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "repetition_penalty": {"type": "number", "minimum": 0.01, "maximum": 10},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    "n": {"type": "integer", "minimum": 1, "maximum": CHOICES_MAX},
    "logprobs": {
        "oneOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": COMPLETION_LOGPROBS_MAX}],
        "description": "whether, for a chat; how many alternatives, for a completion",
    },
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": TOP_LOGPROBS_MAX},
    "failover": {
        "type": "boolean",
        "default": True,
        "description": "not OpenAI's: whether the answer goes on elsewhere, after a pause, when its instance is lost; "
        "with false it ends with inference_lost",
    },
}
assert _TYPES.keys() == HONOURED


def _inference_body(prompt: str, foreign: tuple[str, ...]) -> Json:
    honoured = {name: schema for name, schema in _TYPES.items() if name not in foreign}
    harmless: dict[str, Json] = {name: {"description": "has no effect"} for name in sorted(HARMLESS)}
    return _object(["model", prompt], **honoured, **harmless)


_KEEP_ALIVE: Json = {"type": "number", "minimum": 0, "maximum": KEEP_ALIVE_S_MAX}
_SCALING = _object(
    [],
    min_instances={"type": "integer", "minimum": 0, "maximum": INSTANCES_MAX},
    max_instances={"type": "integer", "minimum": 1, "maximum": INSTANCES_MAX},
    target_concurrency={"type": "integer", "minimum": 1, "maximum": CONCURRENCY_MAX},
)
_DEPLOYMENT = _object(
    ["model", "source"],
    model={"type": "string"},
    source={"type": "string", "description": GRAMMAR},
    keep_alive_s=_KEEP_ALIVE,
    scaling=_SCALING,
)
_SCALE = {**_object([], keep_alive_s=_KEEP_ALIVE, scaling=_SCALING), "minProperties": 1}
_TIER: Json = {"type": "string", "enum": [str(tier) for tier in TIERS]}
_PREFETCH = _object(["tier"], tier=_TIER, pin={"type": "boolean", "description": "it is not evicted from there"})
_RESIDENCY = _object(["tier"], tier=_TIER)
_SERVER, _SERVER_MODEL = ("server",), ("server", "model")
_ERROR = _object(
    ["error"],
    error=_object(
        ["message", "type", "param", "code"],
        message={"type": "string"},
        type={"type": "string"},
        param={"type": ["string", "null"]},
        code={"type": "string", "enum": [*sorted(STATUSES), "method_not_allowed", "not_found"]},
    ),
)

DOCUMENT: Json = {
    "openapi": "3.1.0",
    "info": {"title": "Whimbrel", "version": "1", "description": "OpenAI's inference API, and /admin for operators."},
    "paths": {
        "/v1/chat/completions": {
            "post": _operation("Answer a conversation", body=_inference_body("messages", COMPLETION_ONLY))
        },
        "/v1/completions": {"post": _operation("Continue a text", body=_inference_body("prompt", CHAT_ONLY))},
        "/v1/models": {"get": _operation("List the models that can be asked, warm and cold")},
        "/v1/models/{model}": {"get": _operation("Describe a model", parameter="model")},
        "/admin/models": {
            "get": _operation("List every deployment"),
            "post": _operation("Deploy a model", status="202", body=_DEPLOYMENT),
        },
        "/admin/models/{model}": {
            "get": _operation("Describe a deployment", parameter="model"),
            "patch": _operation("Change how a model is scaled", body=_SCALE, parameter="model"),
            "delete": _operation("Delete a model", status="202", parameter="model"),
        },
        "/admin/jobs/{job_id}": {
            "get": _operation("Tell how far an import is", parameter="job_id"),
            "delete": _operation("Cancel an import; its job tells when it has ended", status="202", parameter="job_id"),
        },
        "/admin/servers/{server}/loads": {"get": _operation("List a server's load queue", parameter=_SERVER)},
        "/admin/servers/{server}/measure": {"post": _operation("Measure a server's storage", parameter=_SERVER)},
        "/admin/servers/{server}/cordon": {"post": _operation("Place nothing on a server", parameter=_SERVER)},
        "/admin/servers/{server}/drain": {"post": _operation("Cordon a server and empty it", parameter=_SERVER)},
        "/admin/servers/{server}/uncordon": {"post": _operation("Let a server take part again", parameter=_SERVER)},
        "/admin/servers/{server}/models/{model}/prefetch": {
            "post": _operation(
                "Bring a model into a tier of a server", status="202", body=_PREFETCH, parameter=_SERVER_MODEL
            )
        },
        "/admin/servers/{server}/models/{model}/pin": {
            "post": _operation("Keep a model in a tier", status="202", body=_RESIDENCY, parameter=_SERVER_MODEL)
        },
        "/admin/servers/{server}/models/{model}/unpin": {
            "post": _operation("Let a model be evicted again", status="202", body=_RESIDENCY, parameter=_SERVER_MODEL)
        },
        "/admin/servers/{server}/models/{model}/evict": {
            "post": _operation("Give back what nobody uses", status="202", body=_RESIDENCY, parameter=_SERVER_MODEL)
        },
        "/admin/cluster": {"get": _operation("Describe servers, slots, tiers and queues")},
        "/admin/explain": {"get": _operation("Tell why a model is where it is, or waits", query="model")},
        "/healthz": {"get": _operation("Alive")},
        "/readyz": {"get": _operation("Ready to place new models; the reason when not")},
        "/metrics": {"get": _operation("Metrics in the Prometheus text format")},
        "/openapi.json": {"get": _operation("This document")},
    },
    "components": {"schemas": {"Error": _ERROR}},
}
