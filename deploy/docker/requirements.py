"""Prints what extras of a pyproject.toml require from outside, so that images install it in a layer of its own.

    python requirements.py <directory with pyproject.toml> <extra>...

Requirements on our own two distributions are replaced by what those require. With the constraints file this is what
`pip install 'whimbrel[<extra>]'` brings, without our code, which changes far more often than these packages do.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

OURS = {"whimbrel": Path("."), "ckptio": Path("libs/ckptio")}


def outside_requirements(root: Path, name: str, extras: set[str]) -> set[str]:
    """The requirements of one of our distributions that are not ours."""
    project = tomllib.loads((root / OURS[name] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = list(project.get("dependencies", []))
    for extra in sorted(extras):
        wanted += project["optional-dependencies"][extra]
    found: set[str] = set()
    for requirement in wanted:
        parts = re.match(r"([A-Za-z0-9._-]+)(?:\[([^\]]*)\])?", requirement)
        assert parts is not None, requirement
        if parts[1] in OURS:
            inner = {extra.strip() for extra in (parts[2] or "").split(",") if extra.strip()}
            found |= outside_requirements(root, parts[1], inner)
        else:
            found.add(requirement)
    return found


if __name__ == "__main__":
    print("\n".join(sorted(outside_requirements(Path(sys.argv[1]), "whimbrel", set(sys.argv[2:])))))
