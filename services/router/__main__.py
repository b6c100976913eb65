"""Runs a router: `python -m services.router`, configured by WB_… variables (see config.py)."""

from __future__ import annotations

from whimbrel.chassis.service import start

from services.router.config import RouterConfig
from services.router.service import RouterService

if __name__ == "__main__":
    start(RouterConfig, RouterService)
