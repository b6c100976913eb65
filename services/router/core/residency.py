"""Owns the bodies of commands about where a model's bytes are: which tier, and whether they stay there."""

from __future__ import annotations

from whimbrel.wire.messages import Tier

from services.router.core.fields import read_flag, read_object, read_text, refuse

# The tiers of a server that an operator may fill and empty; what is on a GPU is an instance's.
TIERS = (Tier.SSD, Tier.DRAM)


def read_residency(body: object, *, may_pin: bool) -> tuple[Tier, bool]:
    """Tier and pin of a body such as {"tier": "dram", "pin": true}; raises InvalidRequest."""
    given = read_object(body, "body")
    for name in given:
        if name != "tier" and not (may_pin and name == "pin"):
            refuse(name[:64], "is not known here; give tier, and for a prefetch pin")
    tier = read_text(given.get("tier"), "tier")
    if tier not in TIERS:
        refuse("tier", f"must be one of {', '.join(TIERS)}, not {tier[:64]!r}")
    return Tier(tier), read_flag(given.get("pin", False), "pin")
