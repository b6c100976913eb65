"""Runs a storage agent: `python -m services.storage_agent`, configured by WB_… variables (see config.py)."""

from __future__ import annotations

import os
import sys

from whimbrel.chassis.config import ConfigError, from_env
from whimbrel.chassis.service import main

from services.storage_agent.config import AgentConfig
from services.storage_agent.service import StorageAgentService

if __name__ == "__main__":
    try:
        config = from_env(AgentConfig, os.environ)
    except ConfigError as error:
        sys.exit(str(error))
    main(StorageAgentService(config), log_level=config.log_level, metrics_port=config.metrics_port)
