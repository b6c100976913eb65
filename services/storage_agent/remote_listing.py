"""Owns the list of what is at the top of a remote store, over connections that fail."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import obstore
from obstore.exceptions import BaseError
from whimbrel.wire.errors import Unavailable

from services.storage_agent.remote_responses import first_line, status_of
from services.storage_agent.remote_retries import RemoteOptions, Retries, is_passing

# A store with ten thousand models sends its list in ten answers, one after the other.
LIST_S_MAX = 60.0


async def list_directories(store: Any, *, location: str, options: RemoteOptions) -> tuple[str, ...]:
    """The first parts of all keys that have more than one, in order; `location` is for messages. Raises Unavailable."""
    retries = Retries(options)
    while True:
        try:
            async with asyncio.timeout(LIST_S_MAX):
                result = await obstore.list_with_delimiter_async(store)
            return tuple(sorted(prefix.strip("/") for prefix in result["common_prefixes"]))
        except (BaseError, TimeoutError) as error:
            pause_s = retries.pause_after_failure(progressed=False, chance=random.random())
            if pause_s is None or not is_passing(status_of(error)):
                reason = first_line(error) if str(error) else f"no list in {LIST_S_MAX:g} s"
                raise Unavailable(what=f"the list of repository {location} ({reason})") from error
        await asyncio.sleep(pause_s)
