#!/usr/bin/env bash
# Every check that needs a real GPU, in one go; what it prints belongs into docs/gpu-checks.txt.
# Needs a CUDA driver and runtime, Python with ckptio built, and pytest. Takes under a minute.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
"$PYTHON" -m ckptio.cli doctor
"$PYTHON" -m pytest -q -rs libs/ckptio/tests/gpu
# The worker's checks need the project's own packages too, and for some of them torch with CUDA and transformers.
"$PYTHON" -m pytest -q -rs tests/gpu
