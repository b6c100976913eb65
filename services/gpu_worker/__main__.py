"""Runs a GPU worker: `python -m services.gpu_worker`, configured by WB_… variables (see config.py)."""

from __future__ import annotations

import os

from whimbrel.chassis.service import start

from services.gpu_worker.config import EngineName, WorkerConfig
from services.gpu_worker.engines.echo_engine import EchoCosts, EchoEngine
from services.gpu_worker.engines.engine import Engine
from services.gpu_worker.service import WorkerService


def make_engine(config: WorkerConfig) -> Engine:
    """The engine that is configured; torch is imported here and only for the engine that needs it."""
    if config.engine is EngineName.ECHO:
        costs = EchoCosts(
            load_s=config.echo_load_s,
            prefill_s_per_token=config.echo_prefill_s_per_token,
            decode_s=config.echo_decode_s,
        )
        return EchoEngine(costs)
    # The OpenMP threads of torch wait for each other at the end of every operation. Spinning there gains little on an
    # idle machine, and costs several times the work as soon as anybody else wants a processor.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from services.gpu_worker.engines.transformers_engine import TransformersEngine

    return TransformersEngine(precision=config.dtype, threads=config.threads)


if __name__ == "__main__":
    start(WorkerConfig, lambda config: WorkerService(config, lambda: make_engine(config)))
