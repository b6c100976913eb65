#!/bin/sh
# Installs one service into /opt/whimbrel during an image build; see the Dockerfile for the layers.
#
#   install.sh outside <extra>...  the packages of others
#   install.sh wheels              wheels of our own two distributions into /wheels/own, unless they came with the build
#   install.sh own [ckptio]        our own code
#
# Wheels in /wheels (from deploy/wheels) make this work without any registry. Without them pip asks its index.
set -eu

python=/opt/whimbrel/bin/python

install() {
    "$python" -m pip install --quiet --no-cache-dir --disable-pip-version-check --no-compile "$@"
}

case $1 in
outside)
    shift
    "$python" /src/deploy/docker/requirements.py /src "$@" >/tmp/outside.txt
    if [ -d /wheels/outside ]; then
        install --no-index --find-links /wheels/outside --constraint /src/constraints.txt --requirement /tmp/outside.txt
    else
        # The index of torch has builds without CUDA, which sort above the plain version of the constraints.
        install --extra-index-url "$TORCH_INDEX_URL" --constraint /src/constraints.txt --requirement /tmp/outside.txt
    fi
    ;;
wheels)
    mkdir -p /wheels/own
    if ls /wheels/own/ckptio-*.whl /wheels/own/whimbrel-*.whl >/dev/null 2>&1; then
        exit 0
    fi
    # The official Python images carry their own headers; Debian's Python has them in a package.
    headers=python3-dev
    if "$python" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
    then
        headers=
    fi
    apt-get update -qq
    # shellcheck disable=SC2086 # empty is no package
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends g++ libc6-dev libxxhash-dev $headers
    "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir /wheels/own /src /src/libs/ckptio
    ;;
own)
    install --no-index --no-deps /wheels/own/whimbrel-*.whl
    if [ "${2:-}" = ckptio ]; then
        install --no-index --no-deps /wheels/own/ckptio-*.whl
        # A storage agent without its native reader would start, and fail at the first load.
        "$python" -c 'from ckptio.native import require_native; require_native()'
    fi
    ;;
*)
    echo "install.sh: unknown step $1" >&2
    exit 2
    ;;
esac
