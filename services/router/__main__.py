"""`python -m services.router`: the router as a process, configured by its environment."""

from __future__ import annotations

import os

from whimbrel.chassis.config import from_env
from whimbrel.chassis.service import main

from services.router.config import RouterConfig
from services.router.service import RouterService

if __name__ == "__main__":
    config = from_env(RouterConfig, os.environ)
    main(RouterService(config), log_level=config.log_level, metrics_port=config.metrics_port)
