"""A client that streams a prompt back and notes when each piece of it came."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Self

import httpx

MODEL = "alpha"
FIRST_TEXT_S_MAX = 45.0
READ_S_MAX = 90.0


def numbered(words: int) -> str:
    """A text of some four tokens a word, in which a token that is lost, doubled or out of its place shows; the byte
    tokenizer cuts through its birds."""
    return " ".join(f"{number:03d}" + "🐦" * (number % 20 == 0) for number in range(words))


class Client:
    """One streamed completion. `error` is what the router said, `cut` how the connection ended without a word."""

    def __init__(self, url: str, prompt: str) -> None:
        self.prompt = prompt
        self.text = ""
        self.finish_reason: str | None = None
        self.error = ""
        self.cut = ""
        self.longest_pause_s = 0.0
        self._url = url
        self._heard_s: float | None = None
        self._has_text = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_whole(self) -> bool:
        return not self.error and not self.cut and (self.text, self.finish_reason) == (self.prompt, "stop")

    @property
    def is_cut_short(self) -> bool:
        """Whether the connection ended, with nothing wrong in what had come."""
        return bool(self.cut) and not self.error and self.finish_reason is None and self.prompt.startswith(self.text)

    def start(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def until_text(self) -> None:
        async with asyncio.timeout(FIRST_TEXT_S_MAX):
            await self._has_text.wait()

    async def end(self, seconds: float) -> bool:
        """Whether it has ended within this time."""
        assert self._task is not None
        await asyncio.wait({self._task}, timeout=seconds)
        return self._task.done()

    async def leave(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def outcome(self) -> str:
        """What was seen, for people."""
        if self.is_whole:
            return "the whole text"
        said = self.error or self.cut or f"finish_reason {self.finish_reason}"
        same = next((n for n, (a, b) in enumerate(zip(self.text, self.prompt, strict=False)) if a != b), len(self.text))
        wrong = "" if self.prompt.startswith(self.text) else f", wrong from character {same}: {self.text[same:][:40]!r}"
        return f"{len(self.text)} of {len(self.prompt)} characters{wrong} ({said})"

    async def _run(self) -> None:
        body = {"model": MODEL, "prompt": self.prompt, "max_tokens": 1000, "temperature": 0, "stream": True}
        try:
            async with (
                httpx.AsyncClient(timeout=READ_S_MAX) as http,
                http.stream("POST", f"{self._url}/v1/completions", json=body) as response,
            ):
                if response.is_error:
                    self.error = (await response.aread()).decode()
                async for line in response.aiter_lines():
                    self._take(line)
            if self.finish_reason is None and not self.error:
                self.cut = "the connection ended"
        except httpx.HTTPError as error:
            self.cut = repr(error)
        finally:
            self._has_text.set()

    def _take(self, line: str) -> None:
        if not line.startswith("data: ") or line == "data: [DONE]":
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            self.error = str(event["error"])
            return
        now = time.monotonic()
        for choice in event["choices"]:
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            if choice["text"]:
                self.longest_pause_s = max(self.longest_pause_s, now - (self._heard_s or now))
                self._heard_s = now
                self.text += choice["text"]
                self._has_text.set()
