"""Owns the model repository (tier REMOTE) as the agent sees it: reads that survive bad connections, and publishing.

A repository is a directory (`file://`), an object store (`s3://`, `gs://`, `az://` and compatible ones, with the
settings that obstore takes from the environment) or a web server (`http://`, `https://`), which is only read.

Who tries again: reads are tried again by us (`remote_reads`), because only we know which bytes have arrived, and so are
listings and deletes, whose answers obstore reads once only. Its own retries are off there, and so is its limit for a
whole request, which would cut off every large range on a slow network. Uploads (`remote_publishing`) are tried again by
obstore: it holds the part that failed. A directory is not tried again: its ranges are read straight into place, by
threads, and the kernel has done its best.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import unquote, urlsplit

import ckptio
from ckptio.manifest import INDEX_FILE, MANIFEST_FILE
from obstore.exceptions import BaseError
from obstore.store import from_url
from whimbrel.chassis.config import ConfigError
from whimbrel.wire.errors import ImportFailed, InvalidRequest, LoadFailed, Unavailable
from whimbrel.wire.ids import directory_name, model_id_of_directory

from services.storage_agent.checkpoints import checkpoint_digest
from services.storage_agent.core.chunks import CheckpointKey
from services.storage_agent.local_publishing import publish_directory, remove_directory
from services.storage_agent.remote_listing import list_directories
from services.storage_agent.remote_publishing import Cancelled, OnProgress, RemotePublisher
from services.storage_agent.remote_reads import RemoteObject
from services.storage_agent.remote_responses import OnBytes, first_line
from services.storage_agent.remote_retries import RemoteOptions

P = ParamSpec("P")
T = TypeVar("T")

# What is read whole into memory: manifests, indexes, configs, tokenizers. The largest in use have tens of MB; what has
# more than this is something else.
SMALL_FILE_BYTES_MAX = 1024 * 1024 * 1024

# Of a directory: how much one call reads, and so how long a cancelled read goes on.
LOCAL_PIECE_BYTES = 4 * 1024 * 1024

# Of one request to a store, for obstore. Reads end when they stall, however long they take.
READ_REQUEST_S_MAX = 24 * 3600.0

# Web servers, and memory that nobody else sees.
READ_ONLY_SCHEMES = ("http", "https", "memory")
# Of these nobody can say what they hold.
UNLISTED_SCHEMES = ("http", "https")


class Repository:
    """One repository. Raises ConfigError for a URL that obstore does not know."""

    def __init__(self, url: str, options: RemoteOptions | None = None) -> None:
        parts = urlsplit(url)
        self.url = url
        #: The repository as a directory of this machine, when it is one.
        self.directory = Path(unquote(parts.path)) if parts.scheme == "file" else None
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
        self._is_read_only = parts.scheme in READ_ONLY_SCHEMES
        self._options = options or RemoteOptions()
        self._store = self._open_store(retries=0, request_s=READ_REQUEST_S_MAX)
        self._publisher = RemotePublisher(
            self._store,
            self._open_store(retries=self._options.tries_max - 1, request_s=self._options.upload_request_s),
            self.location,
            self._options,
        )

    def location(self, model_id: str, file: str) -> Path:
        """Where a file is, for messages."""
        root = Path(self.url) if self.directory is None else self.directory
        return root / directory_name(model_id) / file

    # --- reading ---

    async def read(self, model_id: str, file: str, size_bytes_max: int = SMALL_FILE_BYTES_MAX) -> bytes:
        """A small file, whole; raises Unavailable, LoadFailed (also when it is not small), and FileNotFoundError when
        there is none."""
        return await self._object(model_id, file).read(size_bytes_max)

    async def read_into(
        self, model_id: str, file: str, offset_bytes: int, view: memoryview, on_bytes: OnBytes | None = None
    ) -> None:
        """Fill `view` from `offset_bytes` of a file on, in order; `on_bytes` hears of each piece how long it is.

        May be cancelled; once it has ended, however it did, nothing writes into `view` any more. Raises
        TruncatedCheckpoint when the file ends before, FileNotFoundError, LoadFailed for what waiting does not heal,
        and Unavailable with file, offset and cause after some tries that brought nothing.
        """
        # A view of our own, released whatever happens: the frames of an error may live for long, and with them the
        # right to memory that is somebody else's by then.
        with view.cast("B") as place:
            if self.directory is None:
                await self._object(model_id, file).read_into(offset_bytes, place, on_bytes)
            else:
                await self._read_local(model_id, file, offset_bytes, place, on_bytes)

    async def size_bytes(self, model_id: str, file: str) -> int:
        """Raises as `read`."""
        return await self._object(model_id, file).size_bytes()

    async def open(self, key: CheckpointKey) -> tuple[bytes, ckptio.Manifest, bytes]:
        """Manifest and index of a checkpoint, as bytes; raises LoadFailed when the repository holds other content."""
        try:
            raw_manifest = await self.read(key.model_id, MANIFEST_FILE)
        except FileNotFoundError as error:
            reason = f"{self.location(key.model_id, MANIFEST_FILE)} is not there; deploy the model again"
            raise LoadFailed(model_id=key.model_id, reason=reason) from error
        manifest = ckptio.Manifest.from_json(raw_manifest, self.location(key.model_id, MANIFEST_FILE))
        digest = checkpoint_digest(manifest)
        if digest != key.checkpoint_digest:
            reason = f"the repository holds {digest}, not {key.checkpoint_digest}; deploy the model again"
            raise LoadFailed(model_id=key.model_id, reason=reason)
        return raw_manifest, manifest, await self.read(key.model_id, INDEX_FILE)

    async def model_ids(self) -> tuple[str, ...]:
        """Every model that has a directory, in order; what is no model's is left out. Of a web server, which has no
        list, none. Raises Unavailable."""
        if urlsplit(self.url).scheme in UNLISTED_SCHEMES:
            return ()
        if self.directory is None:
            names = await list_directories(self._store, location=self.url, options=self._options)
        else:
            names = await _in_thread(_directories, self.directory)
        return tuple(model_id for name in names if (model_id := _model_id(name)) is not None)

    # --- publishing ---

    def staging_root(self) -> Path | None:
        """A directory in which what is staged can be published by a rename; None where it has to be uploaded."""
        return self.directory

    def check_publishable(self, model_id: str) -> None:
        """Raises ImportFailed where nothing can be published."""
        if self._is_read_only:
            reason = f"{self.url} can't be published to; set WB_REPOSITORY_URL to file://, s3://, gs:// or az://"
            raise ImportFailed(model_id=model_id, stage="queued", reason=reason)

    async def publish(
        self,
        staged: Path,
        model_id: str,
        on_progress: OnProgress | None = None,
        cancelled: Cancelled | None = None,
    ) -> None:
        """Put a verified checkpoint in its place, over what was there; whoever finds its manifest finds it whole.

        A directory is moved in one step. To a store everything is uploaded, the manifest last; an older one is removed
        first, and content that is there already is left alone. `on_progress(done_bytes, total_bytes)` and `cancelled()`
        are called on the event loop. Cancelled, or when it fails, no manifest is there, and a repeat goes on with the
        files that are missing. Raises ImportFailed, Cancelled, Unavailable, OSError, ckptio's errors.
        """
        self.check_publishable(model_id)
        if self.directory is not None:
            await _in_thread(publish_directory, staged, self.directory / directory_name(model_id), cancelled)
        else:
            await self._publisher.publish(staged, model_id, on_progress, cancelled)

    async def remove_published(self, model_id: str) -> None:
        """Remove a model from the repository; nothing happens when it is not there, or not ours to publish in."""
        if self.directory is not None:
            await _in_thread(remove_directory, self.directory / directory_name(model_id))
        elif not self._is_read_only:
            await self._publisher.remove(model_id)

    # --- how ---

    def _open_store(self, *, retries: int, request_s: float) -> Any:
        scheme = urlsplit(self.url).scheme
        settings: dict[str, Any] = {}
        if scheme not in ("file", "memory"):
            options = self._options
            pause, pause_max = (timedelta(seconds=value) for value in (options.pause_s, options.pause_s_max))
            settings["retry_config"] = {
                "max_retries": retries,
                "backoff": {"init_backoff": pause, "max_backoff": pause_max, "base": 2},
            }
            settings["client_options"] = {
                "timeout": timedelta(seconds=request_s),
                "connect_timeout": timedelta(seconds=options.connect_s),
                # These options replace those of the environment. Whoever names an http:// endpoint there means it.
                "allow_http": scheme != "https",
            }
        try:
            return from_url(self.url, **settings)
        except (BaseError, ValueError) as error:
            raise ConfigError("WB_REPOSITORY_URL", f"{self.url!r} can't be used: {first_line(error)}") from error

    def _object(self, model_id: str, file: str) -> RemoteObject:
        return RemoteObject(
            self._store,
            f"{directory_name(model_id)}/{file}",
            location=self.location(model_id, file),
            model_id=model_id,
            options=self._options,
        )

    async def _read_local(
        self, model_id: str, file: str, offset_bytes: int, view: memoryview, on_bytes: OnBytes | None
    ) -> None:
        location = self.location(model_id, file)
        done_bytes = 0
        try:
            descriptor = os.open(location, os.O_RDONLY | os.O_CLOEXEC)
            try:
                while done_bytes < len(view):
                    with view[done_bytes : done_bytes + LOCAL_PIECE_BYTES] as place:
                        count = await _in_thread(os.preadv, descriptor, [place], offset_bytes + done_bytes)
                    if count == 0:
                        size_bytes = os.fstat(descriptor).st_size
                        raise ckptio.TruncatedCheckpoint(
                            location, expected_bytes=offset_bytes + len(view), actual_bytes=size_bytes
                        )
                    done_bytes += count
                    if on_bytes is not None:
                        on_bytes(count)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            raise
        except OSError as error:
            what = f"repository file {location} (at offset {offset_bytes + done_bytes}: {error.strerror})"
            raise Unavailable(what=what) from error


def _directories(path: Path) -> tuple[str, ...]:
    """The names of the directories in a directory; blocking."""
    try:
        return tuple(sorted(entry.name for entry in path.iterdir() if entry.is_dir()))
    except OSError as error:
        raise Unavailable(what=f"the list of repository {path} ({error.strerror})") from error


def _model_id(name: str) -> str | None:
    """The model whose directory has this name; None when it is no model's."""
    try:
        return model_id_of_directory(name)
    except InvalidRequest:
        return None


async def _in_thread(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """A blocking call in a thread; cancelled, it waits for the call first, which may hold memory of the caller."""
    future = asyncio.get_running_loop().run_in_executor(None, partial(function, *arguments, **named))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with suppress(asyncio.CancelledError):  # however often it is asked, it can't be sooner
                await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # heard: whoever cancelled does not want to know
        raise
