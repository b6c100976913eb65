"""Imports that stand still half way until they may go on: what a test says of a running one can't come too late."""

from __future__ import annotations

import threading
from collections.abc import Callable

import ckptio
import pytest

# How often one that stands still looks whether it was cancelled.
LOOK_S = 0.005


class HeldImports:
    """Conversions and verifications that stop once they have moved bytes, and still can be cancelled."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.may_be_verified = threading.Event()

    def hold(self, monkeypatch: pytest.MonkeyPatch) -> None:
        convert, verify = ckptio.convert, ckptio.verify

        def held_convert(*arguments: object, **named: object) -> object:
            tell: Callable[[ckptio.Progress], None] = named.pop("progress")  # type: ignore[assignment]
            is_cancelled: Callable[[], bool] = named["cancelled"]  # type: ignore[assignment]

            def progress(latest: ckptio.Progress) -> None:
                tell(latest)
                while latest.done_bytes and not self.may_go_on.wait(LOOK_S) and not is_cancelled():
                    pass

            return convert(*arguments, progress=progress, **named)  # type: ignore[arg-type]

        def held_verify(*arguments: object, **named: object) -> object:
            tell: Callable[[ckptio.Progress], None] = named.pop("progress")  # type: ignore[assignment]

            def progress(latest: ckptio.Progress) -> None:
                tell(latest)
                while latest.done_bytes and not self.may_be_verified.wait(LOOK_S):
                    tell(latest)  # raises when the job is cancelled

            return verify(*arguments, progress=progress, **named)  # type: ignore[arg-type]

        monkeypatch.setattr("services.storage_agent.import_work.ckptio.convert", held_convert)
        monkeypatch.setattr("services.storage_agent.import_work.ckptio.verify", held_verify)

    def go_on(self) -> None:
        """Whatever stands still goes on, and nothing does any more."""
        self.may_go_on.set()
        self.may_be_verified.set()
