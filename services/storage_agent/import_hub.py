"""Owns models of a hub as the origin of an import: the files of a revision and their bytes, or what its cache has."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx2
import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]
from whimbrel.wire.errors import ImportFailed
from whimbrel.wire.messages import JobStage

from services.storage_agent.import_downloads import Body, OriginFailed, RemoteFile
from services.storage_agent.import_files import needed_files
from services.storage_agent.threads import Threads

# A hub answers about a model in well under a second; its own client would wait for ever.
ANSWER_S_MAX = 10.0
# What is lost of a connection that is cut, at most; smaller pieces only cost changes of threads.
STREAMED_BYTES = 128 * 1024
# What must be there of a snapshot, as far as the cache knows what there is.
OFFLINE_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
# Answers that mean "later": too many requests, and servers in trouble.
_PASSING = (408, 429, 500, 502, 503, 504)


class HubOrigin:
    """One model at one revision. Honours HF_ENDPOINT, HF_TOKEN and HF_HOME of the agent's environment."""

    def __init__(self, repository: str, revision: str | None, threads: Threads) -> None:
        self.name = f"hf://{repository}"
        self.revision: str | None = revision
        self._repository = repository
        self._threads = threads

    async def files(self) -> list[RemoteFile]:
        """Also fixes the revision: a branch may move while its files are fetched."""
        with self._translated():
            info = await self._threads.run(
                huggingface_hub.HfApi().model_info,
                self._repository,
                revision=self.revision,
                timeout=ANSWER_S_MAX,
                files_metadata=True,
            )
        self.revision = info.sha or self.revision
        siblings = {sibling.rfilename: sibling for sibling in info.siblings or []}
        files = []
        for name in needed_files(siblings):
            found = siblings[name]
            size_bytes, sha256 = found.size, None
            if found.lfs is not None:
                size_bytes, sha256 = found.lfs.size, found.lfs.sha256
            if size_bytes is None:
                raise OriginFailed(f"{constants.ENDPOINT} does not say how large {name} is", is_final=True)
            identity = sha256 or found.blob_id or f"{self.revision}"
            files.append(RemoteFile(name=name, size_bytes=size_bytes, identity=identity, sha256=sha256))
        return files

    @asynccontextmanager
    async def open(self, file: RemoteFile, offset_bytes: int) -> AsyncIterator[Body]:
        url = huggingface_hub.hf_hub_url(
            self._repository, file.name, revision=self.revision, endpoint=constants.ENDPOINT
        )
        headers = build_hf_headers() | {"accept-encoding": "identity"}
        if offset_bytes:
            headers["range"] = f"bytes={offset_bytes}-"
        with self._translated():
            async with huggingface_hub.get_async_session() as client:
                timeout = httpx2.Timeout(ANSWER_S_MAX, read=None)
                async with client.stream("GET", url, headers=headers, timeout=timeout) as response:
                    hf_raise_for_status(response)
                    start_bytes = offset_bytes if response.status_code == httpx2.codes.PARTIAL_CONTENT else 0
                    yield Body(offset_bytes=start_bytes, chunks=response.aiter_bytes(STREAMED_BYTES))

    def local(self, files: list[RemoteFile]) -> Path | None:
        """The snapshot of this commit in the hub's cache on this server, when it has all that is needed."""
        snapshot = None
        for file in files:
            path = huggingface_hub.try_to_load_from_cache(self._repository, file.name, revision=self.revision)
            if not isinstance(path, str) or Path(path).stat().st_size != file.size_bytes:
                return None
            snapshot = Path(path).parent
        return snapshot

    async def offline(self, model_id: str) -> Path | None:
        """With HF_HUB_OFFLINE set, what the hub's cache on this server has of the revision, without it None.

        Raises ImportFailed when the cache does not have it.
        """
        if not constants.is_offline_mode():
            return None
        try:
            snapshot = await self._threads.run(
                huggingface_hub.snapshot_download,
                self._repository,
                revision=self.revision,
                local_files_only=True,
                allow_patterns=list(OFFLINE_PATTERNS),
            )
        except (LocalEntryNotFoundError, HFValidationError) as error:
            wanted = self._repository + (f" at {self.revision}" if self.revision else "")
            reason = (
                f"HF_HUB_OFFLINE is set and {constants.HF_HUB_CACHE} does not have all of {wanted}; "
                "fill that cache, or unset HF_HUB_OFFLINE for the storage agents"
            )
            raise ImportFailed(model_id=model_id, stage=JobStage.DOWNLOADING, reason=reason) from error
        self.revision = Path(snapshot).name
        return Path(snapshot)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """The hub's errors as sentences that say what to do; addresses with signatures in them are not repeated."""
        hub = constants.ENDPOINT
        try:
            yield
        except GatedRepoError as error:
            reason = f"{hub} gives it only to those who accepted its licence; accept it at {hub}/{self._repository}"
            raise OriginFailed(f"{reason} and set HF_TOKEN for the storage agents", is_final=True) from error
        except RevisionNotFoundError as error:
            raise OriginFailed(f"there is no revision {self.revision!r} of it at {hub}", is_final=True) from error
        except RepositoryNotFoundError as error:
            reason = f"{hub} has no such model, or it is private; check the name, or set HF_TOKEN"
            raise OriginFailed(f"{reason} for the storage agents", is_final=True) from error
        except HfHubHTTPError as error:
            status = error.response.status_code
            raise OriginFailed(f"{hub} answered HTTP {status}", is_final=status not in _PASSING) from error
        except HFValidationError as error:
            raise OriginFailed(f"{hub} can't have a model of this name", is_final=True) from error
        except OfflineModeIsEnabled as error:
            raise OriginFailed("HF_HUB_OFFLINE is set for this storage agent", is_final=True) from error
        except httpx2.HTTPError as error:
            raise OriginFailed(f"the connection to {hub} failed ({type(error).__name__})") from error
