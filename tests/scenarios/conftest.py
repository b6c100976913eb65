"""Owns the option that writes what the scenarios say now into their files, for somebody to review the difference."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="write the outputs of tests/scenarios/*.txt anew; review the difference"
    )


@pytest.fixture
def is_rewriting(pytestconfig: pytest.Config) -> bool:
    # Where the run starts at a directory further up, the option comes too late to be known, and nothing is rewritten.
    return bool(pytestconfig.getoption("--rewrite", default=False))
