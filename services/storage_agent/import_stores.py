"""Owns object stores and web servers as the origins of an import."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import (
    BaseError,
    NotFoundError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import HTTPStore, from_url
from whimbrel.wire.sources import Source

from services.storage_agent.import_downloads import Body, OriginFailed, RemoteFile
from services.storage_agent.import_files import (
    COMPANIONS,
    CONFIG_FILE,
    SAFETENSORS_FILE,
    SAFETENSORS_INDEX,
    needed_files,
    shards_of,
)

# What is lost of a connection that is cut, at most; smaller pieces only cost changes of threads.
STREAMED_BYTES = 128 * 1024
# obstore bounds a whole request, its body included; a download is watched byte by byte instead.
REQUEST_S_MAX = timedelta(hours=12)
CONNECT_S_MAX = timedelta(seconds=10)
# We try again ourselves, from the byte that was reached.
RETRIES: Any = {"max_retries": 1, "retry_timeout": timedelta(seconds=10)}
# Where cloud machines are asked for credentials when none are set.
_METADATA_HOST = "169.254.169.254"
LISTED_MAX = 10_000
INDEX_BYTES_MAX = 64 * 1024 * 1024


class StoreOrigin:
    """A prefix of an object store, or a directory of a web server. Raises OriginFailed for what can't be one."""

    def __init__(self, source: Source) -> None:
        self.name = source.location
        self.revision: str | None = None
        self._is_web = source.location.startswith(("http://", "https://"))
        # Whoever set an endpoint without TLS for the agents meant it; these options replace AWS_ALLOW_HTTP.
        options: Any = {"timeout": REQUEST_S_MAX, "connect_timeout": CONNECT_S_MAX, "allow_http": True}
        with self._translated():
            if not self._is_web:
                self._store: Any = from_url(source.location, client_options=options, retry_config=RETRIES)
                return
            if source.user is not None:
                # In a header instead of the URL, which obstore repeats in its errors.
                secret = base64.b64encode(f"{source.user}:{source.password or ''}".encode()).decode()
                options["default_headers"] = {"authorization": f"Basic {secret}"}
            self._store = HTTPStore(source.location, client_options=options, retry_config=RETRIES)

    async def files(self) -> list[RemoteFile]:
        with self._translated():
            return await (self._probed() if self._is_web else self._listed())

    def local(self, files: list[RemoteFile]) -> Path | None:
        """A store is never on this server."""
        return None

    @asynccontextmanager
    async def open(self, file: RemoteFile, offset_bytes: int) -> AsyncIterator[Body]:
        with self._translated():
            options: Any = {"range": {"offset": offset_bytes}} if offset_bytes else {}
            try:
                result = await obstore.get_async(self._store, file.name, options=options)
            except NotSupportedError:
                # The server ignores ranges: from the start, then.
                offset_bytes = 0
                result = await obstore.get_async(self._store, file.name)
            if _identity(result.meta) != file.identity or result.meta["size"] != file.size_bytes:
                raise OriginFailed("it changed while it was fetched; deploy again", is_final=True)
            yield Body(offset_bytes=offset_bytes, chunks=result.stream(min_chunk_size=STREAMED_BYTES))

    async def _listed(self) -> list[RemoteFile]:
        found: dict[str, Any] = {}
        async for batch in obstore.list(self._store):
            found |= {meta["path"]: meta for meta in batch}
            if len(found) > LISTED_MAX:
                raise OriginFailed(f"it holds more than {LISTED_MAX} objects; give one model's prefix", is_final=True)
        if not found:
            raise OriginFailed("there is nothing under this prefix; check its name", is_final=True)
        return [_remote(name, found[name]) for name in needed_files(found)]

    async def _probed(self) -> list[RemoteFile]:
        """A web server lists nothing: files are asked for by the names that models use."""
        files = [await self._head(CONFIG_FILE)]
        if files[0] is None:
            return []
        whole = await self._head(SAFETENSORS_FILE)
        weights = [SAFETENSORS_FILE] if whole else await self._shards()
        files += [whole] if whole else [await self._required(name) for name in weights]
        files += [await self._head(name) for name in COMPANIONS]
        return [file for file in files if file is not None]

    async def _shards(self) -> list[str]:
        """The index and what it names; nothing when there is none."""
        index = await self._head(SAFETENSORS_INDEX)
        if index is None:
            return []
        if index.size_bytes > INDEX_BYTES_MAX:
            raise OriginFailed(f"{SAFETENSORS_INDEX} has {index.size_bytes} bytes and is no index", is_final=True)
        raw = bytes(await (await obstore.get_async(self._store, SAFETENSORS_INDEX)).bytes_async())
        try:
            return [SAFETENSORS_INDEX, *shards_of(raw)]
        except ValueError as error:
            raise OriginFailed(f"{SAFETENSORS_INDEX} is no index of shards: {error}", is_final=True) from error

    async def _required(self, name: str) -> RemoteFile:
        file = await self._head(name)
        if file is None:
            raise OriginFailed(f"{name} is named by {SAFETENSORS_INDEX} and is not there", is_final=True)
        return file

    async def _head(self, name: str) -> RemoteFile | None:
        try:
            return _remote(name, await obstore.head_async(self._store, name))
        except (NotFoundError, FileNotFoundError):
            return None

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """obstore's errors as sentences; its own have pages of details, and URLs that may be signed."""
        try:
            yield
        except (NotFoundError, FileNotFoundError) as error:
            raise OriginFailed("it is not there any more", is_final=True) from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            settings = "give user and password in the URL" if self._is_web else "set AWS_* for the storage agents"
            raise OriginFailed(f"access is refused; {settings}", is_final=True) from error
        except PreconditionError as error:
            raise OriginFailed("it changed while it was fetched; deploy again", is_final=True) from error
        except (BaseError, ValueError) as error:
            if _METADATA_HOST in str(error):
                reason = "no credentials for it are set; set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION"
                raise OriginFailed(f"{reason} for the storage agents", is_final=True) from error
            raise OriginFailed(f"the request failed ({type(error).__name__}: {_cause(error)})") from error


def _remote(name: str, meta: Any) -> RemoteFile:
    return RemoteFile(name=name, size_bytes=int(meta["size"]), identity=_identity(meta))


def _identity(meta: Any) -> str:
    return str(meta["e_tag"] or meta["last_modified"].isoformat())


def _cause(error: Exception) -> str:
    """The last and plainest of the causes that obstore chains, without addresses."""
    line = str(error).split("\n", 1)[0]
    words = [word for word in line.rsplit(": ", 1)[-1].split() if "://" not in word]
    return " ".join(words)[:200] or "no reason given"
