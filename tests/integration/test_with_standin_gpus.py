"""Runs the tests of GPU servers in a process that has a CUDA runtime in host memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ckptio.devices import RUNTIME_VARIABLE

ROOT = Path(__file__).parents[2]
# What one chunk takes on its way to a GPU: long beside everything else that these tests do.
COPY_US = 20_000


@pytest.mark.parametrize("module", ["test_gpu_slots", "test_pipelining"])
def test_a_server_with_gpus_does_what_it_should(standin: Path, module: str) -> None:
    """L4, L5, E4: tests/integration/standin."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/integration/standin/{module}.py"],
        cwd=ROOT,
        env=environ | {RUNTIME_VARIABLE: os.fspath(standin), "STANDIN_COPY_US": str(COPY_US)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout
