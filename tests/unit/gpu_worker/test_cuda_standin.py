"""The worker's GPU checks of tests/gpu, against ckptio's CUDA runtime in host memory, in a process of their own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ckptio.devices import RUNTIME_VARIABLE

ROOT = Path(__file__).parents[3]
STANDIN = ROOT / "libs" / "ckptio" / "native_tests" / "cudart_standin.cpp"

# What needs no torch with CUDA, see tests/gpu/test_worker_gpu.py; those that do are skipped.
WITHOUT_TORCH = 8


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, built."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build the stand-in runtime with")
    library = tmp_path_factory.mktemp("standin") / "libcudart_standin.so"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread"]
    subprocess.run([compiler, *flags, os.fspath(STANDIN), "-o", os.fspath(library)], check=True)
    return library


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
