"""Runs a GPU worker: `python -m services.gpu_worker`, configured by WB_… variables (see config.py)."""

from __future__ import annotations

import os

from whimbrel.chassis.service import start

from services.gpu_worker.config import EngineName, WorkerConfig
from services.gpu_worker.engines.echo_engine import EchoCosts, EchoEngine
from services.gpu_worker.engines.engine import Engine
from services.gpu_worker.service import WorkerService

# In iterations of libgomp's waiting loop: some 50 microseconds.
SPIN_COUNT = "5000"


def make_engine(config: WorkerConfig) -> Engine:
    """The engine that is configured; torch is imported here and only for the engine that needs it."""
    if config.engine is EngineName.ECHO:
        costs = EchoCosts(
            load_s=config.echo_load_s,
            prefill_s_per_token=config.echo_prefill_s_per_token,
            decode_s=config.echo_decode_s,
        )
        return EchoEngine(costs)
    # The OpenMP threads of torch wait for each other at the end of every operation, some hundred times a token. To wake
    # a sleeping thread costs more than many of these operations; to spin without a bound costs several times the work
    # as soon as anybody else wants a processor. So they spin for about as long as a wake-up takes, and then sleep.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    from services.gpu_worker.engines.transformers_engine import TransformersEngine

    return TransformersEngine(precision=config.dtype, threads=config.threads, device=config.device)


if __name__ == "__main__":
    start(WorkerConfig, lambda config: WorkerService(config, lambda: make_engine(config)))
