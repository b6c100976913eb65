"""Owns the bodies about how a model is scaled: a part of a deployment, and PATCH /admin/models/{id}."""

from __future__ import annotations

from whimbrel.wire.messages import ScaleModel, Scaling

from services.router.core.fields import read_number, read_object, read_optional, read_whole, refuse

# A year; whoever wants a model to stay for longer can say so again.
KEEP_ALIVE_S_MAX = 365 * 24 * 3600.0
# No cluster has more slots; a slip of the keyboard should not ask for them.
INSTANCES_MAX = 10_000
CONCURRENCY_MAX = 10_000

_BOUNDS = {
    "min_instances": (0, INSTANCES_MAX),
    "max_instances": (1, INSTANCES_MAX),
    "target_concurrency": (1, CONCURRENCY_MAX),
}


def read_keep_alive_s(value: object, field: str) -> float:
    return read_number(value, field, 0.0, KEEP_ALIVE_S_MAX)


def read_scaling(value: object, field: str) -> Scaling:
    """All of it; what is not given is the default, but a minimum raises the maximum. Raises InvalidRequest."""
    given = _read_bounds(value, field)
    if "max_instances" not in given:
        given["max_instances"] = max(Scaling().max_instances, given.get("min_instances", 0))
    scaling = Scaling(**given)
    if scaling.min_instances > scaling.max_instances:
        reason = f"must not be above max_instances, which is {scaling.max_instances}, as {scaling.min_instances} is"
        refuse(f"{field}.min_instances", reason)
    return scaling


def read_scale(model_id: str, body: object) -> ScaleModel:
    """A change; what is not given stays, and the scheduler knows what that is. Raises InvalidRequest."""
    given = read_object(body, "body")
    for name in given:
        if name not in ("scaling", "keep_alive_s"):
            refuse(name[:64], "can't be changed; a change has scaling and keep_alive_s only")
    bounds = _read_bounds(given.get("scaling", {}), "scaling")
    keep_alive_s = read_optional(given, "keep_alive_s", read_keep_alive_s)
    if not bounds and keep_alive_s is None:
        refuse("body", f"changes nothing; give keep_alive_s, or scaling with some of {', '.join(_BOUNDS)}")
    return ScaleModel(
        model_id=model_id,
        min_instances=bounds.get("min_instances"),
        max_instances=bounds.get("max_instances"),
        target_concurrency=bounds.get("target_concurrency"),
        keep_alive_s=keep_alive_s,
    )


def _read_bounds(value: object, field: str) -> dict[str, int]:
    given = read_object(value, field)
    bounds: dict[str, int] = {}
    for name, number in given.items():
        if name not in _BOUNDS:
            refuse(f"{field}.{name[:64]}", f"is not known here; scaling has {', '.join(_BOUNDS)}")
        bounds[name] = read_whole(number, f"{field}.{name}", *_BOUNDS[name])
    return bounds
