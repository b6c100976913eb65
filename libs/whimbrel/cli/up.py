"""Owns `whimbrel up` and `down`: a cluster in the foreground, or left running behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from whimbrel.cli.cluster import READY_S_MAX, AlreadyRunning, ClusterOptions, LocalCluster, is_python, read_state

# Stopping waits for running requests; after this the processes are killed by the supervisor itself.
DOWN_S_MAX = 60.0
DOWN_POLL_S = 0.1
READY_FILE = "ready"


async def run_cluster(options: ClusterOptions, console: Console) -> None:
    """Run until SIGINT or SIGTERM; leaves no process behind."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    started = time.monotonic()
    ready_file = options.directory / READY_FILE
    ready_file.unlink(missing_ok=True)
    cluster = LocalCluster(options, say=lambda line: console.print(line, style="dim", highlight=False))
    try:
        await cluster.start()
        ready = asyncio.create_task(cluster.wait_ready())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((ready, stopped), return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            ready_file.touch()
            _say_ready(cluster, time.monotonic() - started, console)
        else:
            ready.cancel()
        await stopped
    finally:
        ready_file.unlink(missing_ok=True)
        if not isinstance(sys.exc_info()[1], AlreadyRunning):
            console.print("stopping", style="dim")
            await cluster.stop()


def _say_ready(cluster: LocalCluster, seconds: float, console: Console) -> None:
    options = cluster.options
    console.print(
        f"[bold]ready[/bold] in {seconds:.1f} s at {cluster.url}/v1: "
        f"{options.servers} servers × {options.slots} slots\n"
        f"  deploy a model   whimbrel deploy NAME --source DIRECTORY_OR_URL --url {cluster.url}\n"
        f"  watch it         whimbrel events --follow --dir {options.directory}\n"
        f"  stop             Ctrl-C, or whimbrel down --dir {options.directory}",
        highlight=False,
    )


def start_detached(options: ClusterOptions, console: Console) -> None:
    """Start `whimbrel up` as a process of its own and return when it is ready.

    Raises AlreadyRunning, or RuntimeError with the end of its log when it ended instead.
    """
    if read_state(options.directory) is not None:
        raise AlreadyRunning(f"a cluster already runs in {options.directory}; stop it with: whimbrel down")
    options.directory.mkdir(parents=True, exist_ok=True)
    (options.directory / READY_FILE).unlink(missing_ok=True)
    log_path = options.directory / "up.log"
    argv = [
        sys.executable, "-m", "whimbrel.cli.main", "up",
        "--servers", str(options.servers), "--slots", str(options.slots),
        "--schedulers", str(options.schedulers),
        "--dir", str(options.directory), "--engine", options.engine,
        "--host", options.host, "--port", str(options.port),
        *(word for device in options.devices for word in ("--device", device)),
        "--pool-mib", str(options.pool_bytes_per_server // (1024 * 1024)),
    ]  # fmt: skip
    for name, value in options.environ.items():
        argv += ["--set", f"{name}={value}"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + READY_S_MAX
    while not (options.directory / READY_FILE).exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            raise RuntimeError(f"the cluster did not start; the end of {log_path}:\n{log_path.read_text()[-2000:]}")
        time.sleep(DOWN_POLL_S)
    console.print(log_path.read_text(), end="", highlight=False, markup=False)


def down_cluster(directory: Path) -> bool:
    """Stop the cluster of this directory and wait for its end; False when none runs. Raises TimeoutError."""
    state = read_state(directory)
    if state is None:
        return False
    os.kill(state["pid"], signal.SIGTERM)
    deadline = time.monotonic() + DOWN_S_MAX
    while is_python(state["pid"]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {state['pid']} has not ended after {DOWN_S_MAX:.0f} s; see {directory}/up.log")
        time.sleep(DOWN_POLL_S)
    return True
