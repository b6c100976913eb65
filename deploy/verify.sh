#!/usr/bin/env bash
# Runs docker-compose.yml for real: build, start, deploy the demo model, ask it, lose a worker and an agent, tear down.
# Exit status 0 means that all of it happened and that no container is left.
#
#   deploy/verify.sh             images from registries; Python packages from deploy/wheels if that exists, else from pip
#   deploy/verify.sh --offline   no registry at all: the base images are made by debootstrap, the packages come from
#                                wheels that pip downloads (or has) outside. Needs root, debootstrap and Python 3.11.
#
# Without a running docker engine, root gets one: dockerd is started on a socket of its own, and stopped and removed at
# the end. In an engine that was there the images stay (docker image ls 'whimbrel-*').
# Environment: MODELS (default .models), PYTHON (default .venv/bin/python), WB_PORT (default: a free one).
set -euo pipefail
cd "$(dirname "$0")/.."

QUESTION='What is the capital of France? Answer in one sentence.'
MODEL=smollm2-135m
SUITE=bookworm # its Python is 3.11, that of the default BASE_IMAGE
BUILD_S_MAX=1800
READY_S_MAX=300
DEPLOY_S_MAX=300
# A cold answer on a busy machine of two cores; an idle one takes a second.
ANSWER_S_MAX=120
STOP_S_MAX=90

MODELS=${MODELS:-.models}
PYTHON=${PYTHON:-.venv/bin/python}
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/whimbrel
PROJECT=whimbrel-verify-$$

offline=no
scratch=
dockerd_pid=
had_bridge=no
is_up=no

say() { printf 'verify: [%3d s] %s\n' "$SECONDS" "$*"; }
fail() {
    printf 'verify: %s\n' "$*" >&2
    exit 1
}

main() {
    case ${1:-} in
    '') ;;
    --offline) offline=yes ;;
    *)
        sed -n '2,12s/^# \{0,1\}//p' "$0"
        exit 2
        ;;
    esac
    scratch=$(mktemp -d /tmp/whimbrel-verify.XXXXXX)
    trap clean_up EXIT
    trap 'exit 130' INT TERM
    find_engine
    find_compose
    find_models
    if [[ $offline == yes ]]; then
        make_wheels
        make_base_images
    else
        check_base_images
    fi
    build
    start
    deploy_model
    say "asking it, cold"
    local server
    server=$(ask)
    say "asking it, warm"
    ask >/dev/null
    # The other server's agent first, then this one's worker: the answer must then come through an agent that is younger
    # than its worker, over the memory they share.
    lose "agent-$((1 - ${server#s}))"
    lose "worker-${server#s}-0"
    stop
    say "all of it works"
}

find_engine() {
    if docker info >/dev/null 2>&1; then
        say "using the docker engine that runs here"
        return
    fi
    [[ $(id -u) -eq 0 ]] || fail "no docker engine answers; start one, or run this as root with docker.io installed"
    command -v dockerd >/dev/null || fail "no docker engine answers and there is no dockerd; install docker.io"
    say "no docker engine answers: starting dockerd for this run"
    ip link show docker0 >/dev/null 2>&1 && had_bridge=yes
    export DOCKER_HOST=unix://$scratch/docker.sock
    dockerd --host "$DOCKER_HOST" --data-root "$scratch/data" --exec-root "$scratch/exec" \
        --pidfile "$scratch/docker.pid" >"$scratch/dockerd.log" 2>&1 &
    dockerd_pid=$!
    local try
    for try in {1..60}; do
        docker info >/dev/null 2>&1 && return
        kill -0 "$dockerd_pid" 2>/dev/null || break
        sleep 0.5
    done
    tail -n 5 "$scratch/dockerd.log" >&2
    fail "dockerd did not come up (after $try tries)"
}

find_compose() {
    if docker compose version >/dev/null 2>&1; then
        compose_command=(docker compose)
        build_flags=()
    elif command -v docker-compose >/dev/null; then
        compose_command=(docker-compose)
        build_flags=(--force-rm) # a build that fails leaves its container behind otherwise
    else
        fail "neither 'docker compose' nor docker-compose is installed"
    fi
    export WB_PORT=${WB_PORT:-$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')}
    url=http://127.0.0.1:$WB_PORT
}

compose() { "${compose_command[@]}" --project-name "$PROJECT" "$@" </dev/null; }

find_models() {
    if [[ ! -f $MODELS/$MODEL/model.safetensors ]]; then
        "$PYTHON" -c 'import gguf, transformers' 2>/dev/null ||
            fail "$MODELS/$MODEL is missing, and $PYTHON lacks what makes it; run: make models"
        "$PYTHON" tools/demo_models.py --out "$MODELS" --only smollm2
    fi
    WB_MODELS_DIR=$(realpath "$MODELS")
    export WB_MODELS_DIR
}

# Everything the images install, as wheels: packages of others and, new every time, our own two distributions.
make_wheels() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
        fail "--offline needs Python 3.11 to collect wheels; name one with PYTHON=, or run: make setup"
    "$PYTHON" deploy/docker/requirements.py . router scheduler agent worker cli >"$scratch/outside.txt"
    # pip decides by the Python it runs on; Debian's is 3.11.2, for which redis wants this one too.
    echo 'async-timeout>=4.0.3' >>"$scratch/outside.txt"
    cat constraints.txt "$scratch/outside.txt" >"$scratch/collected"
    if ! cmp -s "$scratch/collected" deploy/wheels/outside/.collected; then
        say "collecting wheels in deploy/wheels"
        rm -rf deploy/wheels/outside
        "$PYTHON" -m pip wheel -qq --wheel-dir deploy/wheels/outside --constraint constraints.txt \
            --requirement "$scratch/outside.txt" || fail "pip could not collect the wheels (see above)"
        cp "$scratch/collected" deploy/wheels/outside/.collected
    fi
    say "building our own wheels"
    # From a copy: a build directory that is left in the tree would put modules that are gone into the next wheel.
    mkdir "$scratch/source"
    cp -r --parents pyproject.toml README.md LICENSE services libs "$scratch/source"
    rm -rf deploy/wheels/own "$scratch/source/libs/ckptio/build"
    "$PYTHON" -m pip wheel -qq --no-deps --wheel-dir deploy/wheels/own \
        "$scratch/source" "$scratch/source/libs/ckptio" ||
        fail "our own wheels could not be built; 'make setup' installs what is needed (g++, python3-dev, libxxhash-dev)"
}

# One small Debian with Python, nats-server and redis-server, imported under three names of its own: nothing that an
# engine may hold already is overwritten.
make_base_images() {
    export BASE_IMAGE=whimbrel-verify-python NATS_IMAGE=whimbrel-verify-nats REDIS_IMAGE=whimbrel-verify-redis
    local archive=$CACHE/verify-$SUITE.tar
    if [[ ! -f $archive ]]; then
        [[ $(id -u) -eq 0 ]] && command -v debootstrap >/dev/null || fail "--offline needs root and debootstrap"
        say "making a base system with debootstrap"
        local mirror
        mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 2>/dev/null | sed -n 1p)
        debootstrap --variant=minbase --include=python3,python3-venv,nats-server,redis-server,wget \
            "$SUITE" "$scratch/root" ${mirror:+"$mirror"} >"$scratch/debootstrap.log" 2>&1 ||
            fail "debootstrap failed: $(tail -n 3 "$scratch/debootstrap.log")"
        rm -rf "$scratch"/root/var/cache/apt/archives/*.deb "$scratch"/root/var/lib/apt/lists/*
        mkdir -p "$CACHE"
        tar -C "$scratch/root" --create --file "$archive.$$" . && mv "$archive.$$" "$archive"
        rm -rf "$scratch/root"
    fi
    say "importing the base images"
    local image
    for image in "$BASE_IMAGE" "$NATS_IMAGE" "$REDIS_IMAGE"; do
        docker image inspect "$image" >/dev/null 2>&1 || docker import "$archive" "$image" >/dev/null
    done
}

check_base_images() {
    local image
    for image in "${BASE_IMAGE:-python:3.11-slim-bookworm}" "${NATS_IMAGE:-nats:2.10-alpine}" "${REDIS_IMAGE:-redis:7.2-alpine}"; do
        docker image inspect "$image" >/dev/null 2>&1 || docker pull --quiet "$image" ||
            fail "$image is not here and cannot be pulled; try: deploy/verify.sh --offline"
    done
    [[ -d deploy/wheels/outside ]] || say "no deploy/wheels: the build asks pip's index (if it cannot: --offline)"
}

build() {
    say "building the images"
    # The classic builder everywhere: it finds images that exist only here, and Debian's engine has no other.
    export DOCKER_BUILDKIT=0 COMPOSE_DOCKER_CLI_BUILD=0
    local service
    for service in scheduler-0 router agent-0 cli worker-0-0; do
        timeout "$BUILD_S_MAX" "${compose_command[@]}" --project-name "$PROJECT" build "${build_flags[@]}" "$service" \
            </dev/null >"$scratch/build.log" 2>&1 ||
            { tail -n 30 "$scratch/build.log" >&2; fail "building $service failed (or took over $BUILD_S_MAX s)"; }
        say "built $service"
    done
}

start() {
    say "starting the cluster, HTTP on $url"
    is_up=yes
    timeout "$READY_S_MAX" "${compose_command[@]}" --project-name "$PROJECT" up --detach --no-build \
        </dev/null >"$scratch/up.log" 2>&1 || { tail -n 20 "$scratch/up.log" >&2; fail "the cluster did not start"; }
    wait_healthy
}

# Until every container of the project is healthy.
wait_healthy() {
    local deadline=$((SECONDS + READY_S_MAX)) waiting ids
    while :; do
        ids=$(docker ps --all --quiet --filter "label=com.docker.compose.project=$PROJECT")
        # shellcheck disable=SC2086 # one word per container
        waiting=$(docker inspect --format '{{.Name}} {{.State.Health.Status}}' $ids | grep -v ' healthy$' || true)
        [[ -z $waiting ]] && break
        ((SECONDS < deadline)) || fail "not healthy after $READY_S_MAX s: $(tr '\n' ' ' <<<"$waiting")"
        sleep 1
    done
    say "all $(wc -w <<<"$ids") containers are healthy"
}

deploy_model() {
    say "deploying $MODEL"
    timeout "$DEPLOY_S_MAX" "${compose_command[@]}" --project-name "$PROJECT" run --rm -T cli \
        deploy "$MODEL" --source "/models/$MODEL" --json </dev/null >"$scratch/deploy.log" 2>&1 ||
        { tail -n 10 "$scratch/deploy.log" >&2; fail "deploying $MODEL failed"; }
}

# Asks through the published port, insists on Paris, and prints the server that answered.
ask() {
    python3 - "$url" "$MODEL" "$QUESTION" "$ANSWER_S_MAX" <<'PYTHON'
import json, sys, time, urllib.error, urllib.request

url, model, question, answer_s_max = sys.argv[1:]
body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 32}
request = urllib.request.Request(
    url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
)
started = time.monotonic()
try:
    with urllib.request.urlopen(request, timeout=float(answer_s_max)) as response:
        answer = json.load(response)["choices"][0]["message"]["content"].strip()
        server = response.headers["x-whimbrel-server"]
        tier = response.headers["x-whimbrel-tier"]
except urllib.error.HTTPError as error:
    sys.exit(f"verify: asking failed with {error.code}: {error.read(1000).decode(errors='replace')}")
except OSError as error:
    sys.exit(f"verify: asking failed: {error}")
print(f"verify:   {answer!r} from {server} ({tier}) in {time.monotonic() - started:.2f} s", file=sys.stderr)
if "Paris" not in answer:
    sys.exit("verify: that answer does not name Paris")
print(server)
PYTHON
}

# Kills a service without warning and asks again, while it is away and when it is back; nothing else is restarted.
lose() {
    local container
    container=$(compose ps --quiet "$1")
    say "killing $1 and asking again"
    docker kill --signal KILL "$container" >/dev/null
    ask >/dev/null
    # An engine does not restart what was killed by hand, whatever the restart policy.
    docker start "$container" >/dev/null
    wait_healthy
    ask >/dev/null
}

stop() {
    say "stopping the cluster"
    local left
    is_up=no
    timeout "$STOP_S_MAX" "${compose_command[@]}" --project-name "$PROJECT" down --volumes --remove-orphans --timeout 30 \
        </dev/null >"$scratch/down.log" 2>&1 || tail -n 10 "$scratch/down.log" >&2
    left=$(docker ps --all --quiet --filter "label=com.docker.compose.project=$PROJECT")
    [[ -z $left ]] || fail "containers are left: $left"
}

clean_up() {
    local status=$?
    trap - EXIT INT TERM
    set +e
    if [[ $is_up == yes ]]; then
        ((status == 0)) || compose logs --no-color --tail 15 >&2
        (stop) || status=1
    fi
    if [[ -n $dockerd_pid ]]; then
        say "stopping the dockerd of this run"
        kill "$dockerd_pid" 2>/dev/null
        local try
        for try in {1..60}; do
            kill -0 "$dockerd_pid" 2>/dev/null || break
            sleep 0.5
        done
        kill -0 "$dockerd_pid" 2>/dev/null && { kill -KILL "$dockerd_pid"; say "dockerd had to be killed after $try tries"; }
        wait "$dockerd_pid" 2>/dev/null
        [[ $had_bridge == yes ]] || ip link delete docker0 2>/dev/null
    fi
    # A later build must not find the code of today.
    [[ $offline == no ]] || rm -rf deploy/wheels/own
    # Never across a file system: what a mount that is left over holds is not ours to delete.
    rm -rf --one-file-system "$scratch"
    exit "$status"
}

main "$@"
