"""Builds the native extension; everything else of the package is described in pyproject.toml."""

from __future__ import annotations

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

NATIVE = "src/ckptio/native"
SOURCES = ("cuda", "device", "digest", "digest_avx2", "faults", "pipeline", "reader", "region")

# A machine without a compiler can still have the pure part; `ckptio.native_status()` then says what is
# missing.
IS_PURE = os.environ.get("CKPTIO_PURE", "") == "1"

extension = Extension(
    "ckptio._native",
    sources=[
        "src/ckptio/_native.pyx",
        *(f"{NATIVE}/{name}.cpp" for name in SOURCES),
    ],
    depends=[
        "src/ckptio/_native.pxd",
        *sorted(f"{NATIVE}/{path.name}" for path in Path(NATIVE).glob("*.[hi]*")),
    ],
    include_dirs=["src/ckptio"],
    language="c++",
    extra_compile_args=[
        "-std=c++20",
        "-O3",
        "-Wall",
        "-Wextra",
        "-Wconversion",
        "-fvisibility=hidden",
        "-pthread",
        # Assertions stay on: Python builds its own extensions with them off.
        "-UNDEBUG",
    ],
    extra_link_args=["-pthread", "-ldl"],
)

setup(ext_modules=[] if IS_PURE else cythonize([extension], language_level=3))
