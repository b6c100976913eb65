"""Tokenizer files: fetched once, whole or not at all, kept on disk, loaded once for all who wait."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from whimbrel.wire.errors import LoadFailed, Unavailable, WhimbrelError

from services.router import text_files
from services.router import tokenizers as module
from services.router.tokenizers import Tokenizers
from tests.unit.router.model_files import write_model

Make = Callable[[str], Tokenizers]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    async with asyncio.TaskGroup() as group:
        made: list[Tokenizers] = []

        def spawn(work: Coroutine[Any, Any, None]) -> object:
            return group.create_task(work)

        def make(url: str) -> Tokenizers:
            made.append(Tokenizers(url, tmp_path / "cache", spawn))
            return made[-1]

        yield make
        for each in made:
            each.close()


async def error_of(work: Awaitable[object]) -> WhimbrelError:
    with pytest.raises(WhimbrelError) as caught:
        await work
    return caught.value


async def test_text_files_are_fetched_and_weights_are_not(make: Make, repository: Path, tmp_path: Path) -> None:
    text = await make(repository.as_uri()).get("tiny", "xxh3:abc")
    assert text.encode_text("Paris")
    kept = {path.name for path in (tmp_path / "cache" / "tiny" / "xxh3-abc").iterdir()}
    assert kept == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }


async def test_fifty_requests_at_once_load_once(make: Make, repository: Path) -> None:
    tokenizers = make(repository.as_uri())
    texts = await asyncio.gather(*(tokenizers.get("tiny", "d1") for _ in range(50)))
    assert all(text is texts[0] for text in texts)


async def test_a_client_that_leaves_stops_no_load(make: Make, repository: Path) -> None:
    tokenizers = make(repository.as_uri())
    async with asyncio.TaskGroup() as group:
        first = group.create_task(tokenizers.get("tiny", "d1"))
        second = group.create_task(tokenizers.get("tiny", "d1"))
        await asyncio.sleep(0)
        first.cancel()
    assert second.result() is await tokenizers.get("tiny", "d1")


async def test_the_cache_serves_without_the_repository(make: Make, tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_model(tmp_path / "repository" / "m", tokenizer)
    url = (tmp_path / "repository").as_uri()
    await make(url).get("m", "d1")
    shutil.rmtree(tmp_path / "repository" / "m")
    assert (await make(url).get("m", "d1")).model_id == "m"


async def test_a_new_digest_replaces_the_old_one(make: Make, tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_model(tmp_path / "repository" / "m", tokenizer, context_tokens=100)
    tokenizers = make((tmp_path / "repository").as_uri())
    await tokenizers.get("m", "d1")
    shutil.rmtree(tmp_path / "repository" / "m")
    write_model(tmp_path / "repository" / "m", tokenizer, context_tokens=200)
    assert (await tokenizers.get("m", "d2")).settings.context_tokens == 200
    assert [path.name for path in (tmp_path / "cache" / "m").iterdir()] == ["d2"]
    assert not tokenizers.has("m", "d1")


async def test_the_least_recently_used_tokenizer_goes(
    make: Make, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOKENIZERS_MAX", 2)
    tokenizers = make(repository.as_uri())
    for model_id in ("tiny", "tiny2", "tiny", "no-template"):
        await tokenizers.get(model_id, "d1")
    assert [tokenizers.has(model_id, "d1") for model_id in ("tiny", "tiny2", "no-template")] == [True, False, True]


async def test_a_model_that_is_not_in_the_repository_is_a_typed_error(make: Make, repository: Path) -> None:
    error = await error_of(make(repository.as_uri()).get("absent", "d1"))
    assert isinstance(error, LoadFailed)


async def test_a_repository_that_is_away_is_unavailable_and_tried_again(
    make: Make, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizers = make((tmp_path / "repository").as_uri())
    assert isinstance(await error_of(tokenizers.get("m", "d1")), Unavailable)
    write_model(tmp_path / "repository" / "m", tokenizer)
    assert (await tokenizers.get("m", "d1")).model_id == "m"


async def test_a_broken_file_is_not_kept(make: Make, tokenizer: Tokenizer, tmp_path: Path) -> None:
    directory = tmp_path / "repository" / "m"
    write_model(directory, tokenizer)
    whole = (directory / "tokenizer.json").read_bytes()
    (directory / "tokenizer.json").write_bytes(whole[:1000])
    tokenizers = make((tmp_path / "repository").as_uri())
    assert isinstance(await error_of(tokenizers.get("m", "d1")), LoadFailed)
    (directory / "tokenizer.json").write_bytes(whole)
    assert (await tokenizers.get("m", "d1")).model_id == "m"


async def test_a_file_that_is_too_large_is_not_read(
    make: Make, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "FILE_BYTES_MAX", 100)
    error = await error_of(make(repository.as_uri()).get("tiny", "d1"))
    assert "bytes" in str(error)


@pytest.mark.parametrize("digest", ["../x", "", ".", "a/b", "x" * 200])
async def test_a_digest_cannot_leave_the_cache(make: Make, repository: Path, digest: str) -> None:
    error = await error_of(make(repository.as_uri()).get("tiny", digest))
    assert "is no checkpoint digest" in str(error)


async def test_two_models_with_the_same_files_share_one_tokenizer_and_keep_their_names(
    make: Make, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Fine-tunes of one base model: parsing holds the interpreter, and a tokenizer takes memory."""
    for name in ("base", "fine-tune"):
        write_model(tmp_path / "repository" / name, tokenizer)
    write_model(tmp_path / "repository" / "other", tokenizer, context_tokens=77)
    tokenizers = make((tmp_path / "repository").as_uri())
    base, fine_tune, other = [await tokenizers.get(name, "d1") for name in ("base", "fine-tune", "other")]
    assert base._tokenizer is fine_tune._tokenizer
    assert base._tokenizer is not other._tokenizer
    assert (base.model_id, fine_tune.model_id, other.settings.context_tokens) == ("base", "fine-tune", 77)
