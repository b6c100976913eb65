"""Runs a storage agent: `python -m services.storage_agent`, configured by WB_… variables (see config.py)."""

from __future__ import annotations

from whimbrel.chassis.service import start

from services.storage_agent.config import AgentConfig
from services.storage_agent.service import StorageAgentService

if __name__ == "__main__":
    start(AgentConfig, StorageAgentService)
