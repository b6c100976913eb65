"""The GPU checks of tests/gpu, against a CUDA runtime in host memory, in a process of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptio.devices import RUNTIME_VARIABLE

STANDIN = Path(__file__).parents[1] / "native_tests" / "cudart_standin.cpp"


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, built."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build the stand-in runtime with")
    library = tmp_path_factory.mktemp("standin") / "libcudart_standin.so"
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread"]
    subprocess.run([compiler, *flags, os.fspath(STANDIN), "-o", os.fspath(library)], check=True)
    return library


def test_everything_that_a_gpu_must_do_works_with_the_stand_in(standin: Path) -> None:
    """L4, L5: the same tests as on a real GPU; the stand-in shows a synchronisation that is missing."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "gpu"],
        cwd=Path(__file__).parent,
        env=os.environ | {RUNTIME_VARIABLE: os.fspath(standin)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout


def test_a_library_that_is_no_cuda_runtime_is_refused_with_its_name(tmp_path: Path) -> None:
    code = "import ckptio; status = ckptio.cuda_status(); print(status.device_count, status.reason)"
    for name, reason in ((tmp_path / "nothing.so", "nothing.so"), ("libm.so.6", "not a CUDA runtime")):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {RUNTIME_VARIABLE: str(name)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.startswith("0 ")
        assert reason in result.stdout
