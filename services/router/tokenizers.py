"""Owns tokenizer files: fetched once from the repository, kept on disk, loaded in a thread, few in memory."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import structlog
from obstore.exceptions import BaseError
from whimbrel.wire.errors import LoadFailed, Unavailable, WhimbrelError
from whimbrel.wire.ids import directory_name, new_id

from services.router.text_files import read_text_files
from services.router.texts import ModelText, load_text, warm_up

log = structlog.get_logger()

# A tokenizer takes 10 to 50 MB of memory; more models than this are rarely in use at once.
TOKENIZERS_MAX = 64
# The repository may be remote, but these files are small.
FETCH_S_MAX = 60.0

Key = tuple[str, str]


class Tokenizers:
    """The most recently used ModelTexts. Loads run on their own, so a client that leaves stops no load."""

    def __init__(
        self, repository_url: str, cache_dir: Path, spawn: Callable[[Coroutine[Any, Any, None]], object]
    ) -> None:
        self._repository_url = repository_url
        self._cache_dir = cache_dir
        self._spawn = spawn
        self._texts: OrderedDict[Key, ModelText] = OrderedDict()
        self._loads: dict[Key, asyncio.Future[ModelText]] = {}
        self._by_content: WeakValueDictionary[str, ModelText] = WeakValueDictionary()
        # One thread: parsing holds the interpreter, and loads of several models at once would only slow down requests.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizers")

    def __len__(self) -> int:
        return len(self._texts)

    def has(self, model_id: str, digest: str) -> bool:
        """Whether a request for this model would not have to wait."""
        return (model_id, digest) in self._texts

    async def get(self, model_id: str, digest: str) -> ModelText:
        """The text of a model at a digest of its checkpoint; raises LoadFailed or Unavailable."""
        key = (model_id, digest)
        text = self._texts.get(key)
        if text is not None:
            self._texts.move_to_end(key)
            return text
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = asyncio.get_running_loop().create_future()
            self._spawn(self._load(key, load))
        return await asyncio.shield(load)

    async def warm_up(self) -> None:
        """Pay for the library once, before anybody waits for a tokenizer."""
        await asyncio.get_running_loop().run_in_executor(self._executor, warm_up)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _load(self, key: Key, load: asyncio.Future[ModelText]) -> None:
        model_id, digest = key
        started_at = time.monotonic()
        try:
            directory = await self._fetch(model_id, digest)
            text = await asyncio.get_running_loop().run_in_executor(
                self._executor, self._load_or_share, model_id, directory
            )
        except WhimbrelError as error:
            load.set_exception(error)
            load.exception()  # nobody may be waiting any more
        else:
            self._keep(key, text)
            load.set_result(text)
            log.info("tokenizer_loaded", model_id=model_id, load_s=round(time.monotonic() - started_at, 3))
        finally:
            del self._loads[key]
            load.cancel()

    def _load_or_share(self, model_id: str, directory: Path) -> ModelText:
        """Runs in the one thread. Fine-tunes have their base model's files: those are parsed and kept once."""
        content = _content_digest(directory)
        known = self._by_content.get(content)
        text = _load_or_forget(model_id, directory) if known is None else known.for_model(model_id)
        self._by_content[content] = text
        return text

    def _keep(self, key: Key, text: ModelText) -> None:
        # An older digest of the same model is of no use to anybody.
        for other in [other for other in self._texts if other[0] == key[0]]:
            del self._texts[other]
        self._texts[key] = text
        while len(self._texts) > TOKENIZERS_MAX:
            self._texts.popitem(last=False)

    async def _fetch(self, model_id: str, digest: str) -> Path:
        """The directory with the model's text files, complete or not there at all."""
        directory = self._cache_dir / directory_name(model_id) / _safe_name(model_id, digest)
        if directory.is_dir():
            return directory
        try:
            async with asyncio.timeout(FETCH_S_MAX):
                files = await read_text_files(self._repository_url, model_id)
        except (BaseError, OSError, TimeoutError) as cause:
            raise Unavailable(what=f"the model repository ({_first_line(cause)})") from cause
        if not files:
            raise LoadFailed(model_id=model_id, reason="the repository has no tokenizer files of it")
        await asyncio.get_running_loop().run_in_executor(self._executor, _publish, directory, files)
        return directory


def _content_digest(directory: Path) -> str:
    digest = hashlib.blake2b()
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        digest.update(f"{path.name} {len(data)} ".encode())
        digest.update(data)
    return digest.hexdigest()


def _load_or_forget(model_id: str, directory: Path) -> ModelText:
    """Load; files that cannot be read are not kept, so that the next try fetches them anew."""
    try:
        return load_text(model_id, directory)
    except LoadFailed:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _publish(directory: Path, files: dict[str, bytes]) -> None:
    """Write all files under another name, then rename: whoever finds the directory finds it whole."""
    parent = directory.parent
    unfinished = parent / new_id(".unfinished")
    unfinished.mkdir(parents=True)
    for name, data in files.items():
        (unfinished / name).write_bytes(data)
    for older in [older for older in parent.iterdir() if older != directory and _is_left_over(older)]:
        shutil.rmtree(older, ignore_errors=True)
    try:
        unfinished.rename(directory)
    except OSError:
        # Another router that shares the directory was faster; its files are the same.
        shutil.rmtree(unfinished, ignore_errors=True)
        if not directory.is_dir():
            raise


def _is_left_over(path: Path) -> bool:
    """Another digest of the model, or what a process that died left unfinished."""
    if not path.name.startswith(".unfinished"):
        return True
    try:
        return time.time() - path.stat().st_mtime > 2 * FETCH_S_MAX
    except FileNotFoundError:
        return False


def _safe_name(model_id: str, digest: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_:.-]{1,128}", digest) is None or digest.startswith("."):
        raise LoadFailed(model_id=model_id, reason=f"{digest[:64]!r} is no checkpoint digest")
    return digest.replace(":", "-")


def _first_line(cause: BaseException) -> str:
    return (str(cause) or type(cause).__name__).splitlines()[0]
