#!/usr/bin/env bash
# Sets up a fresh Debian or Ubuntu machine: system packages (by apt when root), virtual environment, both distributions.
set -euo pipefail

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

missing=()
need() { # need <package> <test...>: remembers the package when the test fails
    local package=$1
    shift
    "$@" >/dev/null 2>&1 || missing+=("$package")
}

export PATH="$PATH:/usr/sbin:/sbin"
need python3 command -v "$PYTHON"
need python3-venv "$PYTHON" -c 'import venv, ensurepip'
need python3-dev "$PYTHON" -c 'import os, sysconfig; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")'
need g++ command -v g++
need libxxhash-dev test -e /usr/include/xxhash.h
need doctest-dev test -e /usr/include/doctest/doctest.h
need make command -v make
need nats-server command -v nats-server
need redis-server command -v redis-server
need nginx command -v nginx

if ((${#missing[@]})); then
    if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
        echo "setup: installing ${missing[*]}"
        apt-get update -qq
        # The packages would start system services; Whimbrel runs its own on free ports.
        DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    else
        echo "setup: missing ${missing[*]}; run: sudo apt-get install ${missing[*]}" >&2
        exit 1
    fi
fi

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: $("$PYTHON" --version) is too old, 3.11 or newer is needed; name one with PYTHON=python3.12" >&2
    exit 1
}

[[ -x $VENV/bin/python ]] || "$PYTHON" -m venv "$VENV"
echo "setup: installing Python packages into $VENV"
"$VENV/bin/python" -m pip install -q --upgrade "pip>=24" "setuptools>=77" wheel
"$VENV/bin/python" -m pip install -q -c constraints.txt -e libs/ckptio
"$VENV/bin/python" -m pip install -q -c constraints.txt -e '.[dev]'
"$VENV/bin/python" -c 'import ckptio, torch, whimbrel; print("setup: ready;", ckptio.native_status(), "torch", torch.__version__)'
