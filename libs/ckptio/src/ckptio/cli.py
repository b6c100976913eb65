"""The `ckptio` command: convert, export, inspect, verify, bench, doctor. Progress goes to standard error."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import ckptio
from ckptio.checkpoint import read_checkpoint, verify
from ckptio.convert import ConversionPlan, convert, plan_conversion
from ckptio.devices import cuda_status
from ckptio.errors import CkptioError, UnsupportedFormat
from ckptio.export import export
from ckptio.index import Index
from ckptio.manifest import Manifest
from ckptio.native import native_status
from ckptio.partitioning import Partitioning, by_device_map, by_tensor_parallel
from ckptio.source import lone_shard_warning, read_json_object
from ckptio.writer import Progress

# A plan names modules; a few MB are enough for any model.
PLAN_BYTES_MAX = 16 * 1024 * 1024

_GIB = 1024**3
_READER_LEFT = 128 + 13  # as a shell says it of a program that SIGPIPE ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; 0 when it worked, 1 for a bad checkpoint or a system error, 130 when interrupted.

    141 when whoever reads the output wants no more of it.
    """
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        options = _parser(has_bench="bench" in arguments).parse_args(arguments)
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # What is still in the buffer would fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_LEFT
    except (CkptioError, OSError) as error:
        print(f"ckptio: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "ckptio: interrupted; run the same command again to finish",
            file=sys.stderr,
        )
        return 130


def _parser(*, has_bench: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ckptio", description="Checkpoints made for loading.")
    parser.add_argument("--version", action="version", version=f"ckptio {ckptio.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("convert", help="convert a model directory of safetensors or torch files")
    command.add_argument("source", type=Path, help="directory, or one .safetensors, .bin, .pt or .pth file")
    command.add_argument("destination", type=Path, help="directory to make")
    command.add_argument("--name", help="what to record as the source, such as a hub id (default: the path)")
    command.add_argument("--revision", help="revision of the source to record")
    command.add_argument("--overwrite", action="store_true", help="replace a checkpoint at the destination")
    command.add_argument(
        "--no-resume",
        action="store_false",
        dest="resume",
        help="start from the beginning, and leave nothing behind when interrupted",
    )
    command.add_argument("--dry-run", action="store_true", help="say what would be done and write nothing")
    command.add_argument("--gpus", type=int, metavar="N", help="divide the tensors over N GPUs")
    plans = command.add_mutually_exclusive_group()
    plans.add_argument(
        "--device-map", type=Path, metavar="FILE.json", help='GPUs of modules: {"model.layers.0": 0, "": 1}'
    )
    plans.add_argument(
        "--tp-plan",
        type=Path,
        metavar="FILE.json",
        help='tensor parallelism over the GPUs of --gpus: {"layers.*.mlp.up_proj": "colwise", ...}',
    )
    command.set_defaults(run=_convert)

    command = commands.add_parser("export", help="write a checkpoint as safetensors again")
    command.add_argument("checkpoint", type=Path)
    command.add_argument("destination", type=Path, help="directory to make")
    command.add_argument("--overwrite", action="store_true", help="replace an export at the destination")
    command.add_argument(
        "--no-verify",
        action="store_false",
        dest="verify",
        help="do not compare the bytes with their digests: for what is left of a damaged checkpoint",
    )
    command.set_defaults(run=_export)

    command = commands.add_parser("inspect", help="show what a checkpoint holds, without reading weights")
    command.add_argument("checkpoint", type=Path)
    command.add_argument("--json", action="store_true", help="print the manifest")
    command.add_argument("--tensors", action="store_true", help="list every tensor")
    command.set_defaults(run=_inspect)

    command = commands.add_parser("verify", help="read every byte and compare with the recorded digests")
    command.add_argument("checkpoint", type=Path)
    command.set_defaults(run=_verify)

    if has_bench:
        # Here, because no other command needs what the benchmark imports.
        from ckptio.bench.cli import add_parser

        add_parser(commands)
    else:
        commands.add_parser("bench", help="measure loading on this machine, beside other loaders")

    command = commands.add_parser("doctor", help="show what this machine offers to the loader")
    command.set_defaults(run=_doctor)
    return parser


def _convert(options: argparse.Namespace) -> int:
    partitioning = _partitioning(options)
    if options.dry_run:
        _print_plan(plan_conversion(options.source, options.destination, partitioning=partitioning))
        return 0
    warning = lone_shard_warning(options.source) if options.source.is_file() else ""
    if warning:
        print(f"ckptio: warning: {warning}", file=sys.stderr)
    manifest = convert(
        options.source,
        options.destination,
        source_name=options.name,
        revision=options.revision,
        partitioning=partitioning,
        overwrite=options.overwrite,
        resume=options.resume,
        progress=_progress_line(),
    )
    print(f"{options.destination}: {_summary(manifest)}")
    return 0


def _partitioning(options: argparse.Namespace) -> Partitioning | int | None:
    file = options.device_map or options.tp_plan
    if file is None:
        return cast("int | None", options.gpus)
    table = read_json_object(file, PLAN_BYTES_MAX, is_strict=True)
    try:
        if options.tp_plan is None:
            if options.gpus is not None:
                raise ValueError("a device map says itself which GPUs there are; leave out --gpus")
            return by_device_map(cast("dict[str, int | str]", table))
        if options.gpus is None:
            raise ValueError("a tensor-parallel plan also needs --gpus")
        return by_tensor_parallel(cast("dict[str, str]", table), options.gpus)
    except ValueError as error:
        raise UnsupportedFormat(file, str(error)) from error


def _print_plan(plan: ConversionPlan) -> None:
    size_bytes = sum(plan.partition_bytes)
    print(f"{len(plan.tensors)} tensors, {size_bytes} bytes, from {plan.source_kind}; nothing is written")
    print(f"architecture  {plan.architecture or 'unknown'}")
    for path in plan.weights:
        print(f"weights       {path}")
    for number, partition_bytes in enumerate(plan.partition_bytes):
        count = sum(tensor.partition == number for tensor in plan.tensors)
        print(f"GPU {number:<9} {count} tensors, {partition_bytes} bytes")
    for group in plan.ties:
        print("shared        " + ", ".join(group))
    for name in plan.files:
        print(f"copied        {name}")
    print(f"space         {plan.required_bytes} bytes needed, {plan.available_bytes} free")
    for warning in plan.warnings:
        print(f"warning       {warning}")


def _export(options: argparse.Namespace) -> int:
    path = export(
        options.checkpoint,
        options.destination,
        overwrite=options.overwrite,
        verify=options.verify,
        progress=_progress_line(),
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
    for number, partition in enumerate(manifest.partitions):
        count = sum(gpu == number for gpu in index.partition)
        print(f"GPU {number:<9} {partition.file}, {count} tensors, {partition.size_bytes} bytes")
    for name, rows in index.rows_of_wholes().items():
        if rows[0] in index.slices:
            print(f"split         {name} {_share_of(index, rows)}")
    for group in index.aliases:
        print("shared        " + ", ".join(index.names[row] for row in group))
    if options.tensors:
        for entry in index.values():
            stride = "" if entry.stride is None else f" stride {list(entry.stride)}"
            place = f"partition {entry.partition} offset {entry.offset_bytes}"
            print(f"{entry.name}  {entry.dtype} {list(entry.shape)}{stride}  {place}")
    return 0


def _share_of(index: Index, rows: tuple[int, ...]) -> str:
    part = index.slices[rows[0]]
    gpus = ", ".join(str(index.partition[row]) for row in rows)
    if part.dimension is None:
        return f"{list(part.shape)}: a copy on GPU {gpus}"
    return f"{list(part.shape)}: along dimension {part.dimension}, over GPU {gpus}"


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
        _report_gpus()
    return 0 if status.is_loaded else 1


def _report_gpus() -> None:
    status = cuda_status()
    text = f"none: {status.reason}" if status.reason else str(status.device_count)
    print(f"GPUs          {text}")


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
