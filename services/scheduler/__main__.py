"""Runs a scheduler: `python -m services.scheduler`."""

from __future__ import annotations

import os
import sys

from whimbrel.chassis.config import ConfigError, from_env
from whimbrel.chassis.service import main

from services.scheduler.config import SchedulerConfig
from services.scheduler.service import SchedulerService

if __name__ == "__main__":
    try:
        config = from_env(SchedulerConfig, os.environ)
    except ConfigError as error:
        sys.exit(str(error))
    main(
        SchedulerService(config),
        log_level=config.log_level,
        metrics_port=config.metrics_port,
        metrics_host=config.metrics_host,
    )
