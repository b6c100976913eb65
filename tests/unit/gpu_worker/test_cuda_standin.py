"""The worker's GPU checks of tests/gpu, against ckptio's CUDA runtime in host memory, in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ckptio.devices import RUNTIME_VARIABLE

ROOT = Path(__file__).parents[3]

# What needs no torch with CUDA, see tests/gpu/test_worker_gpu.py; those that do are skipped.
WITHOUT_TORCH = 8


@pytest.mark.timeout(300)
def test_everything_that_a_worker_does_with_gpus_works_with_the_stand_in(standin: Path) -> None:
    """L5, L6: the worker allocates, another process copies by handle, the worker sees the bytes."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/gpu"],
        cwd=ROOT,
        env=os.environ | {RUNTIME_VARIABLE: os.fspath(standin)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None, result.stdout
    assert int(passed[1]) >= WITHOUT_TORCH, result.stdout
