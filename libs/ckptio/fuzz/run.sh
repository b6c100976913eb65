#!/bin/sh
# Fuzzes every reader for SECONDS each (default 60); stops at the first that breaks. Needs `pip install atheris`.
set -eu
cd "$(dirname "$0")"
for target in manifest index stock_header shard_index; do
    "${PYTHON:-python3}" fuzz.py "$target" "${1:-60}"
done
