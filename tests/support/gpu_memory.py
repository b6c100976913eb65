"""Memory of GPUs in a process of its own, as CUDA demands of IPC handles: what workers allocate, for tests."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import ckptio
import xxhash

ANSWER_S_MAX = 30.0


def _serve(connection: Connection) -> None:
    """Allocate, describe and read memory until the other end hangs up."""
    buffers: dict[str, list[ckptio.DeviceBuffer]] = {}
    connection.send("ready")
    while True:
        try:
            verb, name, *arguments = connection.recv()
        except EOFError:
            return
        if verb == "allocate":
            buffers[name] = [ckptio.DeviceBuffer.allocate(device, size_bytes) for device, size_bytes in arguments[0]]
            connection.send([buffer.ipc_handle() for buffer in buffers[name]])
        elif verb == "digest":
            connection.send([xxhash.xxh3_64_intdigest(bytes(buffer.read())) for buffer in buffers[name]])
        else:
            for buffer in buffers.pop(name, []):
                buffer.close()
            connection.send(None)


class GpuMemory:
    """`with GpuMemory() as memory:` starts the process. Names are those of instances."""

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        assert self._answer() == "ready"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        self._process.join(ANSWER_S_MAX)
        assert self._process.exitcode == 0

    def allocate(self, name: str, wanted: list[tuple[str, int]]) -> list[bytes]:
        """A handle for each pair of device and size."""
        handles: list[bytes] = self._ask("allocate", name, wanted)
        return handles

    def digests(self, name: str) -> list[int]:
        """XXH3-64 of each allocation."""
        digests: list[int] = self._ask("digest", name)
        return digests

    def free(self, name: str) -> None:
        self._ask("free", name)

    def _ask(self, *message: Any) -> Any:
        self._connection.send(message)
        return self._answer()

    def _answer(self) -> Any:
        assert self._connection.poll(ANSWER_S_MAX), "the process with the memory does not answer"
        return self._connection.recv()
