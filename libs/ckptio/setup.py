"""Builds the native extension; everything else of the package is described in pyproject.toml."""

from __future__ import annotations

import os

from Cython.Build import cythonize
from setuptools import Extension, setup

NATIVE = "src/ckptio/native"

# A machine without a compiler can still have the pure part; `ckptio.native_status()` then says what is
# missing.
IS_PURE = os.environ.get("CKPTIO_PURE", "") == "1"

extension = Extension(
    "ckptio._native",
    sources=[
        "src/ckptio/_native.pyx",
        f"{NATIVE}/digest.cpp",
        f"{NATIVE}/reader.cpp",
        f"{NATIVE}/region.cpp",
    ],
    depends=[
        "src/ckptio/_native.pxd",
        *(f"{NATIVE}/{name}" for name in ("digest.hpp", "errors.hpp", "reader.hpp", "region.hpp")),
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
    ],
    extra_link_args=["-pthread"],
)

setup(ext_modules=[] if IS_PURE else cythonize([extension], language_level=3))
