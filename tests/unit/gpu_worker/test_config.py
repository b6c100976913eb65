"""The worker's settings, from the environment alone."""

from __future__ import annotations

import os

import pytest
from whimbrel.chassis.config import ConfigError, from_env

from services.gpu_worker.config import EngineName, WorkerConfig
from services.gpu_worker.engines.engine import Precision


def test_a_server_id_is_all_that_is_needed() -> None:
    config = from_env(WorkerConfig, {"WB_SERVER_ID": "server-1"})
    assert (config.slot, config.engine, config.dtype) == (0, EngineName.TRANSFORMERS, Precision.AUTO)
    assert config.threads == len(os.sched_getaffinity(0))


def test_every_setting_has_its_variable() -> None:
    config = from_env(
        WorkerConfig,
        {
            "WB_SERVER_ID": "s", "WB_SLOT": "2", "WB_ENGINE": "echo", "WB_DTYPE": "float32", "WB_TORCH_THREADS": "3",
            "WB_PREWARM": "0", "WB_REQUESTS_MAX": "7", "WB_ECHO_LOAD_S": "1.5", "WB_ECHO_PREFILL_S_PER_TOKEN": "0.5",
            "WB_ECHO_DECODE_S": "0.25", "WB_DEVICE": "cuda:3",
        },
    )  # fmt: skip
    assert (config.slot, config.engine, config.dtype, config.threads) == (2, EngineName.ECHO, Precision.FLOAT32, 3)
    assert (config.prewarm, config.requests_max, config.device) == (False, 7, "cuda:3")
    assert (config.echo_load_s, config.echo_prefill_s_per_token, config.echo_decode_s) == (1.5, 0.5, 0.25)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WB_SERVER_ID", "a/b"),
        ("WB_SLOT", "-1"),
        ("WB_DEVICE", "tpu"),
        ("WB_DEVICE", "cuda"),
        ("WB_DEVICE", "cuda:-1"),
        ("WB_DEVICE", "cuda:01"),
        ("WB_ENGINE", "magic"),
        ("WB_DTYPE", "int4"),
        ("WB_TORCH_THREADS", "-2"),
        ("WB_REQUESTS_MAX", "0"),
        ("WB_ECHO_DECODE_S", "-0.1"),
    ],
)
def test_a_bad_value_is_refused_and_its_variable_named(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        from_env(WorkerConfig, {"WB_SERVER_ID": "s", variable: value})
