"""The committed corpus of the fuzzer, replayed: whatever was found once stays fixed, without a fuzzer."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FUZZ = Path(__file__).parent.parent / "fuzz"
INPUTS = sorted(path for path in (FUZZ / "corpus").glob("*/*") if path.is_file())


def _module_of_the_fuzzer(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ckptio_fuzz_{name}", FUZZ / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


targets = _module_of_the_fuzzer("targets")
structure = _module_of_the_fuzzer("structure")


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_an_input_of_the_corpus_breaks_nothing(path: Path, tmp_path: Path) -> None:
    """F7: nothing read is trusted: only typed errors come out; what is accepted is written again equal."""
    is_accepted = targets.all_targets(tmp_path)[path.parent.name](path.read_bytes())
    assert is_accepted or path.name != "real"


@pytest.mark.parametrize("target", sorted(structure.CODECS))
def test_no_value_in_any_place_breaks_anything(target: str, tmp_path: Path) -> None:
    """F7: of a real input, every value replaced by each that is likely to be mishandled, or left out."""
    read = targets.all_targets(tmp_path)[target]
    answers = [
        read(mutant) for mutant in structure.mutants(target, (FUZZ / "corpus" / target / "real").read_bytes())
    ]
    assert answers.count(False) > 100
    assert answers.count(True) > 0


def test_every_reader_has_a_corpus_with_good_and_bad(tmp_path: Path) -> None:
    names = targets.all_targets(tmp_path)
    assert {path.parent.name for path in INPUTS} == set(names)
    assert all((FUZZ / "corpus" / name / "real").is_file() for name in names)
    assert len(INPUTS) > 80
