"""Runs a scheduler: `python -m services.scheduler`, configured by WB_… variables (see config.py)."""

from __future__ import annotations

from whimbrel.chassis.service import start

from services.scheduler.config import SchedulerConfig
from services.scheduler.service import SchedulerService

if __name__ == "__main__":
    start(SchedulerConfig, SchedulerService)
