"""Partition plans, decided here and pure: which GPU holds a tensor, and how one is split over several GPUs.

A tensor of one GPU keeps its name in the index. Where GPUs share a tensor, each partition has a row of its
own: a part of it, or a copy, named after the tensor and the partition ("q_proj.weight#1"), and the table of
slices of the index says of which whole. Tied tensors that are split alike stay tied in every partition;
split in different ways they are stored apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptio.dtypes import DTYPES
from ckptio.index import Slice
from ckptio.index_rules import PARTITIONS_MAX, slice_name
from ckptio.plan import Extent, Member, size_of

# Modules that a plan made from a model names although a checkpoint may have no tensor for them: buffers that
# are computed, and a head that is tied to the embedding.
_OFTEN_WITHOUT_TENSORS = frozenset({"rotary_emb", "lm_head"})

_NAMED_MAX = 8

# Styles of a tensor-parallel plan, by what they do to the weight (and to a bias or scale of one dimension).
_SPLIT_ROWS = frozenset({"colwise", "colwise_rep", "colwise_gather_output", "embedding_rowwise"})
_SPLIT_COLUMNS = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input", "embedding_colwise"})
_COPY = frozenset({"replicate", "replicated_with_grad_allreduce", "sequence_parallel", "all_reduce"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor goes: to `gpu`; or without one to all of them, split along `dimension` or as copies."""

    gpu: int | None = None
    dimension: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Partitioning:
    """A partition plan for `gpus` GPUs: `place_of` tells the place of a tensor by its name and shape.

    `unused` tells, of the names of all tensors, which entries of the plan none of them matches.
    """

    gpus: int
    place_of: Callable[[str, tuple[int, ...]], Place]
    unused: Callable[[Sequence[str]], tuple[str, ...]] = lambda names: ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A range of every row of a tensor: `length_bytes` from `start_bytes`, out of rows of `row_bytes`."""

    row_bytes: int
    start_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one GPU gets of input extent `source`: a `cut` of it, or all; `slices` by names of members."""

    source: int
    gpu: int
    extent: Extent
    cut: Cut | None = None
    slices: Mapping[str, Slice]


def by_device_map(device_map: Mapping[str, int | str]) -> Partitioning:
    """A plan from a device map such as `{"model.layers.0": 0, "": 1}`: the longest module that holds wins.

    Devices are numbers, or "cuda:1". Raises ValueError for any other device, and later for a tensor that no
    module of the map holds, and for a module that holds no tensor (unless that is usual: "" for all the rest,
    rotary embeddings, a tied head).
    """
    gpu_of = {module: _gpu(device, module) for module, device in device_map.items()}
    if not gpu_of:
        raise ValueError("the device map is empty")

    def place_of(name: str, shape: tuple[int, ...]) -> Place:
        module = name
        while module not in gpu_of:
            if not module:
                raise ValueError(f"{name}: no module of the device map holds it")
            module = module.rpartition(".")[0]
        return Place(gpu=gpu_of[module])

    def unused(names: Sequence[str]) -> tuple[str, ...]:
        holders = {""}
        for name in names:
            module = name
            while module and module not in holders:
                holders.add(module)
                module = module.rpartition(".")[0]
        return tuple(module for module in gpu_of if module not in holders and not _may_be_absent(module))

    return Partitioning(gpus=max(gpu_of.values()) + 1, place_of=place_of, unused=unused)


def balanced(names_and_sizes: Sequence[tuple[str, int]], gpus: int) -> Partitioning:
    """A plan that cuts tensors (name, size_bytes), in their order, so that the largest partition is smallest.

    Raises ValueError when there are fewer tensors than GPUs.
    """
    _check_gpus(gpus)
    if len(names_and_sizes) < gpus:
        raise ValueError(f"{len(names_and_sizes)} tensors cannot be divided over {gpus} GPUs")
    sizes = [size_bytes for _, size_bytes in names_and_sizes]
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_fill(sizes, middle)) <= gpus:
            high = middle
        else:
            low = middle + 1
    gpu_of: dict[str, int] = {}
    gpu = filled = 0
    for number, (name, size_bytes) in enumerate(names_and_sizes):
        # Also a GPU more when only as many tensors are left as GPUs without one.
        is_last_call = gpu < gpus - 1 and len(sizes) - number == gpus - 1 - gpu
        if number and (filled + size_bytes > low or is_last_call):
            gpu, filled = gpu + 1, 0
        gpu_of[name] = gpu
        filled += size_bytes

    def place_of(name: str, shape: tuple[int, ...]) -> Place:
        if name not in gpu_of:
            raise ValueError(f"{name}: the plan does not know it")
        return Place(gpu=gpu_of[name])

    return Partitioning(gpus=gpus, place_of=place_of)


def by_tensor_parallel(plan: Mapping[str, str], gpus: int) -> Partitioning:
    """A plan from module patterns to styles, as in transformers' `base_model_tp_plan`.

    A star stands for a layer number; a pattern may leave out leading modules ("layers.*.mlp.up_proj" also
    means "model.layers.3.mlp.up_proj"), and the longest one that fits wins. "colwise" splits a weight and its
    bias along their first dimension, "rowwise" a weight along its last, with a whole bias on each GPU; all
    that no pattern names is copied to each GPU. Dimensions that `gpus` does not divide are split as
    `torch.chunk` does. Raises ValueError for a style that needs to know more of the model than the plan says
    (packed and expert weights), for an empty plan, and later for a dimension too short to give each GPU a
    part, and for a pattern that fits no tensor (unless that is usual: a tied head).
    """
    _check_gpus(gpus)
    if not plan:
        raise ValueError("the tensor-parallel plan is empty: it would copy the whole model to each GPU")
    for pattern, style in plan.items():
        if style not in _SPLIT_ROWS | _SPLIT_COLUMNS | _COPY:
            raise ValueError(f"{pattern}: style {style!r} cannot be split by ckptio; leave it out to copy it")
    expressions = {
        pattern: re.compile(r"(?:.*\.)?" + re.escape(pattern).replace(r"\*", r"\d+")) for pattern in plan
    }
    patterns = [
        (expressions[pattern], style)
        for pattern, style in sorted(plan.items(), key=lambda item: (-len(item[0]), item[0]))
    ]

    def place_of(name: str, shape: tuple[int, ...]) -> Place:
        if gpus == 1:
            return Place(gpu=0)
        module = name.rpartition(".")[0]
        for pattern, style in patterns:
            # A pattern may also name a parameter itself.
            if pattern.fullmatch(module) or pattern.fullmatch(name):
                return _place_by_style(style, shape)
        return Place()

    def unused(names: Sequence[str]) -> tuple[str, ...]:
        texts = {text for name in names for text in (name, name.rpartition(".")[0])}
        return tuple(
            pattern
            for pattern, expression in expressions.items()
            if not _may_be_absent(pattern) and not any(map(expression.fullmatch, texts))
        )

    return Partitioning(gpus=gpus, place_of=place_of, unused=unused)


def split_sizes(size: int, gpus: int) -> tuple[int, ...]:
    """Sizes of the parts of a dimension, as `torch.chunk` makes them; raises ValueError if they are fewer."""
    step = -(-size // gpus)
    sizes = tuple(min(step, size - start) for start in range(0, size, step)) if size else ()
    if len(sizes) != gpus:
        raise ValueError(f"a dimension of {size} gives parts for {len(sizes)} GPUs, not {gpus}")
    return sizes


def divide(extents: Sequence[Extent], partitioning: Partitioning) -> tuple[Share, ...]:
    """What each GPU gets of `extents`, in their order for each GPU.

    Raises ValueError, naming the tensor, when the plan does not fit it, and for entries of the plan that
    match no tensor, naming those.
    """
    _check_all_used(extents, partitioning)
    shares: list[Share] = []
    for number, extent in enumerate(extents):
        members_at: dict[Place, list[Member]] = {}
        for member in extent.members:
            members_at.setdefault(partitioning.place_of(member.name, member.shape), []).append(member)
        if all(place.gpu is not None for place in members_at):
            # Bytes that tensors of several GPUs share are stored once, where the first of them is.
            members_at = {next(iter(members_at)): list(extent.members)}
        if len(members_at) > 1:
            _refuse_views(extent, extent.members)
        for place, members in members_at.items():
            if place.gpu is not None:
                part = Extent(size_bytes=extent.size_bytes, members=tuple(members))
                shares.append(Share(source=number, gpu=place.gpu, extent=part, slices={}))
            elif place.dimension is None:
                shares += [_copy(number, extent, members, gpu) for gpu in range(partitioning.gpus)]
            else:
                shares += _split(number, extent, members, place.dimension, partitioning.gpus)
    return tuple(sorted(shares, key=lambda share: share.gpu))


def _check_all_used(extents: Sequence[Extent], partitioning: Partitioning) -> None:
    unused = partitioning.unused([member.name for extent in extents for member in extent.members])
    if unused:
        more = ", …" if len(unused) > _NAMED_MAX else ""
        listed = ", ".join(repr(entry) for entry in unused[:_NAMED_MAX])
        raise ValueError(f"no tensor matches {listed}{more}; correct the plan, or leave that out")


def _may_be_absent(module: str) -> bool:
    return module.rpartition(".")[2] in _OFTEN_WITHOUT_TENSORS


def _copy(number: int, extent: Extent, members: Sequence[Member], gpu: int) -> Share:
    slices = {
        slice_name(member.name, gpu): Slice(whole=member.name, dimension=None, start=0, shape=member.shape)
        for member in members
    }
    renamed = tuple(replace(member, name=slice_name(member.name, gpu)) for member in members)
    part = Extent(size_bytes=extent.size_bytes, members=renamed)
    return Share(source=number, gpu=gpu, extent=part, slices=slices)


def _split(number: int, extent: Extent, members: Sequence[Member], dimension: int, gpus: int) -> list[Share]:
    first = members[0]
    _refuse_views(extent, members)
    try:
        sizes = split_sizes(first.shape[dimension], gpus)
    except ValueError as error:
        raise ValueError(f"{first.name}: {error}") from error
    item_bytes = DTYPES[first.dtype].item_size_bytes * math.prod(first.shape[dimension + 1 :])
    shares = []
    start = 0
    for gpu, size in enumerate(sizes):
        shape = (*first.shape[:dimension], size, *first.shape[dimension + 1 :])
        size_bytes = size_of(first.dtype, shape)
        names = {slice_name(member.name, gpu): member.name for member in members}
        shares.append(
            Share(
                source=number,
                gpu=gpu,
                extent=Extent(
                    size_bytes=size_bytes,
                    members=tuple(
                        Member(name=name, dtype=first.dtype, shape=shape, size_bytes=size_bytes)
                        for name in names
                    ),
                ),
                cut=Cut(
                    row_bytes=first.shape[dimension] * item_bytes,
                    start_bytes=start * item_bytes,
                    length_bytes=size * item_bytes,
                ),
                slices={
                    name: Slice(whole=whole, dimension=dimension, start=start, shape=first.shape)
                    for name, whole in names.items()
                },
            )
        )
        start += size
    return shares


def _refuse_views(extent: Extent, members: Sequence[Member]) -> None:
    first = members[0]
    for member in members:
        is_whole = member.stride is None and member.size_bytes == extent.size_bytes
        if not is_whole or (member.dtype, member.shape) != (first.dtype, first.shape):
            raise ValueError(f"{member.name}: is a view of bytes and cannot be split over GPUs; leave it out")


def _place_by_style(style: str, shape: tuple[int, ...]) -> Place:
    if style in _COPY or not shape or math.prod(shape) == 0:
        return Place()
    if style in _SPLIT_ROWS:
        return Place(dimension=max(len(shape) - 2, 0))
    return Place(dimension=len(shape) - 1) if len(shape) > 1 else Place()


def _fill(sizes: Sequence[int], limit_bytes: int) -> list[int]:
    """Sums of consecutive sizes, each at most `limit_bytes`."""
    sums = [0]
    for size_bytes in sizes:
        if sums[-1] + size_bytes > limit_bytes:
            sums.append(0)
        sums[-1] += size_bytes
    return sums


def _gpu(device: int | str, module: str) -> int:
    text = str(device).removeprefix("cuda:")
    if isinstance(device, bool) or not text.isdecimal() or int(text) >= PARTITIONS_MAX:
        raise ValueError(f"{module or 'the whole model'}: {device!r} is not a GPU; give a number or 'cuda:1'")
    return int(text)


def _check_gpus(gpus: int) -> None:
    if not 1 <= gpus <= PARTITIONS_MAX:
        raise ValueError(f"{gpus} GPUs; from 1 to {PARTITIONS_MAX} are possible")
