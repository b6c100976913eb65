"""Owns which files of a checkpoint a router reads, and reading them from the repository, whatever kind it is."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import msgspec
import obstore
from obstore.store import from_url
from whimbrel.wire.errors import LoadFailed, Unavailable
from whimbrel.wire.ids import directory_name

# Everything that turns text into tokens and back; no weights.
TEXT_FILES = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "tokenizer.model",
        "spiece.model",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
    }
)

# The largest tokenizer files in use have about 30 MB.
FILE_BYTES_MAX = 64 * 1024 * 1024
# A connection that brings nothing for so long is given up, and obstore tries again.
STALL_S_MAX = 10.0
CONNECT_S_MAX = 5.0

LOCAL_SCHEMES = ("file", "memory")
MANIFEST_FILE = "manifest.json"


class _File(msgspec.Struct):
    name: str
    size_bytes: int


class _Manifest(msgspec.Struct):
    """What a router wants to know of a checkpoint's manifest: the files beside the weights."""

    files: list[_File]


async def read_text_files(repository_url: str, model_id: str) -> dict[str, bytes]:
    """A model's text files by name, none when it is not there.

    Raises LoadFailed, Unavailable, OSError and obstore's errors, which have been tried again; it may take long.
    """
    store = _open_store(repository_url)
    if urlsplit(repository_url).scheme not in LOCAL_SCHEMES:
        sizes = await _sizes_in_manifest(store, model_id)
    else:
        listing = await obstore.list_with_delimiter_async(store, prefix=directory_name(model_id))
        sizes = {entry["path"].rsplit("/", 1)[-1]: entry["size"] for entry in listing["objects"]}
    return {
        name: await _read_file(store, model_id, name, size_bytes)
        for name, size_bytes in sizes.items()
        if name in TEXT_FILES
    }


async def _read_file(store: Any, model_id: str, name: str, size_bytes: int) -> bytes:
    if size_bytes > FILE_BYTES_MAX:
        raise LoadFailed(model_id=model_id, reason=f"{name} has {size_bytes} bytes")
    answer = await obstore.get_async(store, f"{directory_name(model_id)}/{name}")
    data = bytes(await answer.bytes_async())
    if len(data) != size_bytes:
        raise Unavailable(what=f"file {name} of model {model_id!r} ({len(data)} bytes came, not {size_bytes})")
    return data


async def _sizes_in_manifest(store: Any, model_id: str) -> dict[str, int]:
    """A web server can't list, and a listing that breaks is not tried again; the manifest names the files as well."""
    try:
        answer = await obstore.get_async(store, f"{directory_name(model_id)}/{MANIFEST_FILE}")
    except FileNotFoundError:
        return {}
    size_bytes = answer.meta["size"]
    if size_bytes > FILE_BYTES_MAX:
        raise LoadFailed(model_id=model_id, reason=f"{MANIFEST_FILE} has {size_bytes} bytes")
    try:
        manifest = msgspec.json.decode(bytes(await answer.bytes_async()), type=_Manifest)
    except msgspec.MsgspecError as cause:
        reason = f"{MANIFEST_FILE} in the repository is damaged ({cause}); deploy the model again"
        raise LoadFailed(model_id=model_id, reason=reason) from cause
    return {file.name: file.size_bytes for file in manifest.files}


def _open_store(url: str) -> Any:
    settings: dict[str, Any] = {}
    if urlsplit(url).scheme not in LOCAL_SCHEMES:
        settings["client_options"] = {
            "read_timeout": timedelta(seconds=STALL_S_MAX),
            "connect_timeout": timedelta(seconds=CONNECT_S_MAX),
            # These options replace those of the environment. Whoever names an http:// endpoint there means it.
            "allow_http": not url.startswith("https:"),
        }
    return from_url(url, **settings)
