"""The `ckptio` command: convert, export, inspect, verify, doctor. Progress goes to standard error."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ckptio.checkpoint import read_checkpoint, verify
from ckptio.convert import convert
from ckptio.errors import CkptioError
from ckptio.export import export
from ckptio.manifest import Manifest
from ckptio.native import native_status
from ckptio.writer import Progress

_GIB = 1024**3


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; 0 when it worked, 1 for a bad checkpoint or a system error, 130 when interrupted."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (CkptioError, OSError) as error:
        print(f"ckptio: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ckptio: interrupted, nothing was left behind", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ckptio", description="Checkpoints made for loading.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("convert", help="convert a safetensors model directory")
    command.add_argument("source", type=Path, help="directory, or one .safetensors file")
    command.add_argument("destination", type=Path, help="directory to make")
    command.add_argument("--name", help="what to record as the source, such as a hub id (default: the path)")
    command.add_argument("--revision", help="revision of the source to record")
    command.add_argument("--overwrite", action="store_true", help="replace a checkpoint at the destination")
    command.set_defaults(run=_convert)

    command = commands.add_parser("export", help="write a checkpoint as safetensors again")
    command.add_argument("checkpoint", type=Path)
    command.add_argument("destination", type=Path, help="directory to make")
    command.add_argument("--overwrite", action="store_true", help="replace an export at the destination")
    command.set_defaults(run=_export)

    command = commands.add_parser("inspect", help="show what a checkpoint holds, without reading weights")
    command.add_argument("checkpoint", type=Path)
    command.add_argument("--json", action="store_true", help="print the manifest")
    command.add_argument("--tensors", action="store_true", help="list every tensor")
    command.set_defaults(run=_inspect)

    command = commands.add_parser("verify", help="read every byte and compare with the recorded digests")
    command.add_argument("checkpoint", type=Path)
    command.set_defaults(run=_verify)

    command = commands.add_parser("doctor", help="show what this machine offers to the loader")
    command.set_defaults(run=_doctor)
    return parser


def _convert(options: argparse.Namespace) -> int:
    manifest = convert(
        options.source,
        options.destination,
        source_name=options.name,
        revision=options.revision,
        overwrite=options.overwrite,
        progress=_progress_line(),
    )
    print(f"{options.destination}: {_summary(manifest)}")
    return 0


def _export(options: argparse.Namespace) -> int:
    path = export(
        options.checkpoint, options.destination, overwrite=options.overwrite, progress=_progress_line()
    )
    print(path)
    return 0


def _inspect(options: argparse.Namespace) -> int:
    manifest, index = read_checkpoint(options.checkpoint)
    if options.json:
        print(manifest.to_json(), end="")
        return 0
    print(_summary(manifest))
    print(f"architecture  {manifest.architecture or 'unknown'}")
    print(f"source        {manifest.source} ({manifest.source.kind})")
    for partition in manifest.partitions:
        print(f"partition     {partition.file}, {partition.size_bytes} bytes")
    for group in index.aliases:
        print("shared        " + ", ".join(index.names[row] for row in group))
    if options.tensors:
        for entry in index.values():
            stride = "" if entry.stride is None else f" stride {list(entry.stride)}"
            place = f"partition {entry.partition} offset {entry.offset_bytes}"
            print(f"{entry.name}  {entry.dtype} {list(entry.shape)}{stride}  {place}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    verify(options.checkpoint, progress=_progress_line())
    print(f"{options.checkpoint}: every byte is as it was written")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    status = native_status()
    print(f"python        {platform.python_version()} on {platform.release()}, {os.cpu_count()} processors")
    print(f"native part   {'loaded' if status.is_loaded else 'missing: ' + status.reason}")
    if status.is_loaded:
        _report_pool()
    return 0 if status.is_loaded else 1


def _report_pool() -> None:
    from ckptio.pool import ChunkPool

    with ChunkPool.create(None, 64 * 1024 * 1024) as pool:
        report = pool.report
        speed = pool.size_bytes / max(report.prefault_s, 1e-9) / _GIB
        print(f"pool          {speed:.1f} GiB/s to back with memory")
        print(f"page locking  {'works' if report.is_locked else 'refused: ' + report.lock_error}")
        huge_pages = "work" if report.has_huge_pages else "not used: " + report.huge_pages_error
        print(f"huge pages    {huge_pages}")


def _summary(manifest: Manifest) -> str:
    parameters = f"{manifest.parameter_count / 1e6:,.1f} M parameters"
    return f"{manifest.tensor_count} tensors, {parameters}, {manifest.total_bytes} bytes, " + ", ".join(
        manifest.dtypes
    )


def _progress_line() -> Callable[[Progress], None] | None:
    """Rewrites one line on a terminal; says nothing into a file."""
    if not sys.stderr.isatty():
        return None

    def show(progress: Progress) -> None:
        share = progress.done_bytes / max(progress.total_bytes, 1)
        end = "\n" if progress.done_bytes >= progress.total_bytes else ""
        text = f"\r{progress.stage} {share:4.0%} of {progress.total_bytes / _GIB:.2f} GiB"
        print(text, end=end, file=sys.stderr, flush=True)

    return show


if __name__ == "__main__":
    sys.exit(main())
