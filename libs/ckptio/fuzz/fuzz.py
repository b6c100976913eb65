"""Fuzzes one reader with atheris, coverage-guided, from the committed corpus: `fuzz.py TARGET [SECONDS]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris  # type: ignore[import-not-found]

with atheris.instrument_imports(include=["ckptio"]):
    from structure import mutate
    from targets import all_targets

CORPUS = Path(__file__).parent / "corpus"

# Every input is a few kB: more memory or time than this is a defect of the reader.
MEMORY_MIB = 512
INPUT_S = 10
INPUT_BYTES = 16 * 1024


def main() -> None:
    """Ends with a crash report in the working directory when an input breaks a target."""
    name = sys.argv[1]
    seconds = int(sys.argv[2]) if len(sys.argv) > 2 else 60
    # On memory: one target writes a file for each input.
    with tempfile.TemporaryDirectory(prefix="ckptio-fuzz-", dir="/dev/shm") as directory:
        work, found = Path(directory, "work"), Path(directory, "found")
        work.mkdir()
        found.mkdir()
        target = all_targets(work)[name]
        options = [
            f"-max_total_time={seconds}",
            f"-rss_limit_mb={MEMORY_MIB}",
            f"-timeout={INPUT_S}",
            f"-max_len={INPUT_BYTES}",
            "-print_final_stats=1",
            str(found),
            str(CORPUS / name),
        ]

        def custom_mutator(raw: bytes, size_max: int, seed: int) -> bytes:
            """Bytes alone rarely pass the outer syntax, so two of three mutants keep it."""
            mutant = mutate(name, raw, seed) if seed % 3 else None
            if mutant is None or len(mutant) > size_max:
                return bytes(atheris.Mutate(raw, size_max))
            return mutant

        atheris.Setup(
            [sys.argv[0], *options], lambda raw: target(raw) and None, custom_mutator=custom_mutator
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
