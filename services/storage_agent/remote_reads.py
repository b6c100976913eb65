"""Owns reading from a remote store: bytes of one object into memory, over connections that stall and break (L1, L4).

A response is taken in pieces as they arrive. When it breaks, the next request asks for the rest only, on condition that
the object is still the same one; what was received is not asked for again, but for the last few kB. Errors that time
does not heal end the read at once. Two things are not believed: a response that sends more than was asked for, and one
for another range.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from errno import ENOENT
from pathlib import Path
from typing import Any, TypeVar

import ckptio
import obstore
from obstore.exceptions import (
    BaseError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from whimbrel.wire.errors import LoadFailed, Unavailable

from services.storage_agent.remote_responses import OnBytes, Place, Response, first_line, status_of
from services.storage_agent.remote_retries import RemoteOptions, Retries, is_passing

# All bytes are here; how long a server may take to end its response before the connection is dropped rather than kept.
END_S_MAX = 1.0

T = TypeVar("T")

# Nothing about these gets better by waiting, and what to do about them.
FINAL: tuple[tuple[type[BaseError], str], ...] = (
    (NotSupportedError, "the server does not answer ranges; serve it with one that does (nginx, an object store)"),
    (PermissionDeniedError, "access is denied; give the agent credentials that may read it"),
    (UnauthenticatedError, "the credentials are missing or wrong; set them for the agent"),
    (PreconditionError, "it was replaced while it was read; load the model again"),
    (InvalidPathError, "the name can't be used in this repository"),
    (UnknownConfigurationKeyError, "the settings of the store are not understood"),
)


class RemoteObject:
    """One object of a store. `location` is for messages, `model_id` for errors."""

    def __init__(self, store: Any, key: str, *, location: Path, model_id: str, options: RemoteOptions) -> None:
        self._store = store
        self._key = key
        self._location = location
        self._model_id = model_id
        self._options = options
        self._tag: str | None = None

    async def size_bytes(self) -> int:
        """Raises FileNotFoundError when there is none, LoadFailed and Unavailable."""

        async def ask() -> int:
            async with asyncio.timeout(self._options.stall_s):
                return int((await obstore.head_async(self._store, self._key))["size"])

        return await self._until_it_works(ask)

    async def read(self, size_bytes_max: int) -> bytes:
        """The whole object, which is small; raises as `size_bytes`, LoadFailed too when it is not small."""
        size_bytes, data = await self._until_it_works(lambda: self._begin(size_bytes_max))
        if len(data) < size_bytes:
            rest = memoryview(bytearray(size_bytes - len(data)))
            await self.read_into(len(data), rest)
            data += rest
        return bytes(data)

    async def read_into(self, offset_bytes: int, view: memoryview, on_bytes: OnBytes | None = None) -> None:
        """Fill `view` with the bytes from `offset_bytes` on, in order; `on_bytes` hears how many more are there.

        Raises TruncatedCheckpoint when the object ends before, FileNotFoundError, LoadFailed, Unavailable.
        """
        place = Place(view, on_bytes)
        retries = Retries(self._options)
        while not place.is_full:
            before_bytes = place.done_bytes
            cause = await self._try_to_fill(place, offset_bytes)
            if cause is not None:
                progressed = place.done_bytes > before_bytes
                await self._pause(retries, cause, offset_bytes + place.done_bytes, progressed=progressed)

    async def _try_to_fill(self, place: Place, offset_bytes: int) -> Exception | None:
        """One request for what is missing; returns what broke it, None when all is there."""
        end_bytes = offset_bytes + place.size_bytes
        try:
            with self._named():
                async with asyncio.timeout(self._options.stall_s):
                    result = await self._request(offset_bytes + place.done_bytes, end_bytes)
            with Response(result) as response:
                del result
                while piece := await response.next(self._options.stall_s):
                    if not place.take(piece):
                        raise self._unavailable(end_bytes, "more bytes came than were asked for")
                    if place.is_full:
                        await self._end(response, end_bytes)
                        return None
        except (BaseError, TimeoutError) as error:
            return error
        return EOFError("the response ended early")

    async def _request(self, start_bytes: int, end_bytes: int) -> Any:
        options: Any = {"range": (start_bytes, end_bytes)}
        if self._tag is not None:
            options["if_match"] = self._tag
        try:
            result = await obstore.get_async(self._store, self._key, options=options)
        except BaseError as error:
            if status_of(error) == 416:
                await self._check_end(end_bytes)
            raise
        self._remember(result)
        size_bytes = int(result.meta["size"])
        if size_bytes < end_bytes:
            raise ckptio.TruncatedCheckpoint(self._location, expected_bytes=end_bytes, actual_bytes=size_bytes)
        return result

    async def _check_end(self, end_bytes: int) -> None:
        """The server says that there is no such range; that it is right is seen from the size."""
        size_bytes = int((await obstore.head_async(self._store, self._key))["size"])
        if size_bytes < end_bytes:
            raise ckptio.TruncatedCheckpoint(self._location, expected_bytes=end_bytes, actual_bytes=size_bytes)

    async def _begin(self, size_bytes_max: int) -> tuple[int, bytearray]:
        """Size, and as much of the object as one response brings before it breaks."""
        async with asyncio.timeout(self._options.stall_s):
            result = await obstore.get_async(self._store, self._key)
        self._remember(result)
        size_bytes = int(result.meta["size"])
        if size_bytes > size_bytes_max:
            reason = f"{self._location} has {size_bytes} bytes, and at most {size_bytes_max} are read at once"
            raise LoadFailed(model_id=self._model_id, reason=reason)
        data = bytearray()
        try:
            with Response(result) as response:
                del result
                while piece := await response.next(self._options.stall_s):
                    data += piece
                    if len(data) > size_bytes:
                        raise self._unavailable(size_bytes, "more bytes came than were announced")
        except (BaseError, TimeoutError):
            if not data:
                raise
        return size_bytes, data

    def _remember(self, result: Any) -> None:
        """Later requests want the same version. A weak tag does not promise the same bytes and can't be asked for."""
        tag = result.meta.get("e_tag")
        if tag and not tag.startswith("W/"):
            self._tag = tag

    async def _end(self, response: Response, offset_bytes: int) -> None:
        """Take the end of a response, so that its connection can be used again; raises Unavailable for more bytes."""
        try:
            more = await response.next(min(END_S_MAX, self._options.stall_s))
        except (BaseError, TimeoutError):
            return  # every byte that was asked for is here
        if more:
            raise self._unavailable(offset_bytes, "more bytes came than were asked for")

    async def _until_it_works(self, ask: Callable[[], Awaitable[T]]) -> T:
        retries = Retries(self._options)
        while True:
            try:
                with self._named():
                    return await ask()
            except (BaseError, TimeoutError) as error:
                await self._pause(retries, error, 0, progressed=False)

    async def _pause(self, retries: Retries, cause: Exception, offset_bytes: int, *, progressed: bool) -> None:
        """Wait before the next try; raises when there is none."""
        for kind, advice in FINAL:
            if isinstance(cause, kind):
                reason = f"{self._location}: {advice} ({first_line(cause)})"
                raise LoadFailed(model_id=self._model_id, reason=reason) from cause
        pause_s = retries.pause_after_failure(progressed=progressed, chance=random.random())
        if pause_s is None or not is_passing(status_of(cause)):
            reason = first_line(cause) if str(cause) else f"nothing came for {self._options.stall_s:g} s"
            tried = "" if retries.failures < 2 else f", {retries.failures} times in a row"
            raise self._unavailable(offset_bytes, reason + tried) from cause
        await asyncio.sleep(pause_s)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """A missing object as a missing file; obstore's message is the whole answer of the server."""
        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT), os.fspath(self._location)) from None

    def _unavailable(self, offset_bytes: int, reason: str) -> Unavailable:
        return Unavailable(what=f"repository file {self._location} (at offset {offset_bytes}: {reason})")
