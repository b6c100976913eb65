"""The package without its extension: everything pure works, the rest says what is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ckptio

SCRIPT = """
import sys
sys.modules["ckptio._native"] = None  # as if it had not been built
import ckptio
from pathlib import Path
root = Path(sys.argv[1])
status = ckptio.native_status()
assert not status.is_loaded
assert "libxxhash-dev" in status.reason
ckptio.convert(root / "source", root / "again")
ckptio.verify(root / "again")
ckptio.export(root / "again", root / "stock")
for use in (
    lambda: ckptio.ChunkPool.create(None, 1 << 24),
    lambda: ckptio.Reader(),
    lambda: ckptio.map_chunks("/dev/null", 4096, [], 0),
    lambda: ckptio.CancelToken,
):
    try:
        use()
    except ckptio.NativeMissing as error:
        assert status.reason in str(error)
    else:
        raise AssertionError("it worked")
import torch
loaded = ckptio.load(root / "again")
assert sorted(loaded) == ["t.0", "t.1", "t.2"]
ckptio.save(loaded, root / "saved")
assert all(torch.equal(tensor, loaded[name]) for name, tensor in ckptio.load(root / "saved").items())
print("as expected")
"""


def test_everything_pure_works_and_the_rest_says_why_not(a_checkpoint: Callable, tmp_path: Path) -> None:
    a_checkpoint()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("as expected\n", "")


def test_the_extension_is_there_in_this_test_run() -> None:
    assert ckptio.native_status() == ckptio.NativeStatus(is_loaded=True, reason="")
