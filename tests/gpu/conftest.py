"""GPUs for the tests: real ones, or those of ckptio's stand-in runtime when CKPTIO_CUDA_RUNTIME names it."""

from __future__ import annotations

import ckptio
import pytest
from ckptio.devices import RUNTIME_VARIABLE

from tests.unit.gpu_worker.conftest import lender as lender


@pytest.fixture(autouse=True)
def gpus() -> int:
    """How many GPUs there are; without any the test is skipped, and says why."""
    status = ckptio.cuda_status()
    if status.device_count == 0:
        pytest.skip(f"no GPU: {status.reason}; {RUNTIME_VARIABLE} may name another runtime")
    return status.device_count
