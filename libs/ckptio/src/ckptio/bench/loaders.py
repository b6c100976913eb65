"""Every loader of the comparison, each at the settings that measured best for it.

A loader is prepared (imports, pool, threads) outside the measured time; what it prepares is called inside.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptio.pool import PoolReport

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Tensors as the loader returned them, and whatever must live as long as they do."""

    tensors: dict[str, torch.Tensor]
    owner: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A loader ready to load; `must_clone` when it only maps, so that private bytes cost a clone more."""

    load: Callable[[], Loaded]
    must_clone: bool = False
    pool: PoolReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderEntry:
    """One loader: the format it reads, the module it needs, its settings by temperature."""

    name: str
    format: str
    prepare: Callable[[Path, str], AbstractContextManager[Prepared]]
    module: str = "torch"
    needs_model: bool = False
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    settings: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether it is a variant of ckptio."""
        return self.name.partition(".")[0] == "ckptio"

    @property
    def is_installed(self) -> bool:
        """Whether its module can be found."""
        return importlib.util.find_spec(self.module) is not None


@contextmanager
def _ckptio(place: Path, temperature: str) -> Iterator[Prepared]:
    with _pooled(place, verify=True) as prepared:
        yield prepared


@contextmanager
def _ckptio_unverified(place: Path, temperature: str) -> Iterator[Prepared]:
    with _pooled(place, verify=False) as prepared:
        yield prepared


@contextmanager
def _pooled(place: Path, *, verify: bool) -> Iterator[Prepared]:
    from ckptio.bench.pooled import resident_pool

    with resident_pool(place) as (pool, load_into_pool):

        def load() -> Loaded:
            return Loaded(tensors=load_into_pool(verify).tensors)

        yield Prepared(load=load, pool=pool.report)


@contextmanager
def _ckptio_private(place: Path, temperature: str) -> Iterator[Prepared]:
    from ckptio.torch import load

    yield Prepared(load=lambda: Loaded(tensors=load(place)))


@contextmanager
def _safetensors(place: Path, temperature: str) -> Iterator[Prepared]:
    import torch  # noqa: F401  safe_open would import it inside the measured time
    from safetensors import safe_open

    file = _only_weights(place)

    def load() -> Loaded:
        with safe_open(file, framework="pt") as weights:
            return Loaded(tensors={name: weights.get_tensor(name).clone() for name in weights.keys()})  # noqa: SIM118

    yield Prepared(load=load)


@contextmanager
def _safetensors_mapped(place: Path, temperature: str) -> Iterator[Prepared]:
    from safetensors.torch import load_file

    file = _only_weights(place)
    yield Prepared(load=lambda: Loaded(tensors=load_file(file)), must_clone=True)


@contextmanager
def _torch(place: Path, temperature: str) -> Iterator[Prepared]:
    import torch

    # Cold, reading is the faster way to private bytes; warm, mapping and cloning is.
    is_mapped = temperature == "warm"

    def load() -> Loaded:
        return Loaded(tensors=torch.load(place, map_location="cpu", weights_only=True, mmap=is_mapped))

    yield Prepared(load=load, must_clone=is_mapped)


@contextmanager
def _transformers(place: Path, temperature: str) -> Iterator[Prepared]:
    import transformers

    # The class, so that the import of its module is not part of the first load.
    model_class = _model_class(transformers, place)

    def load() -> Loaded:
        model = model_class.from_pretrained(place, dtype="auto", local_files_only=True)
        return Loaded(tensors={name: value.data for name, value in model.named_parameters()}, owner=model)

    yield Prepared(load=load, must_clone=True)


def _model_class(transformers: Any, place: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(place, local_files_only=True)
    return getattr(transformers, config.architectures[0])


@contextmanager
def _runai(place: Path, temperature: str) -> Iterator[Prepared]:
    from runai_model_streamer import SafetensorsStreamer

    file = str(_only_weights(place))

    def load() -> Loaded:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(file)
            return Loaded(tensors=dict(streamer.get_tensors()))

    yield Prepared(load=load)


@contextmanager
def _fastsafetensors(place: Path, temperature: str) -> Iterator[Prepared]:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup
    from fastsafetensors.frameworks import get_framework_op

    # It would import torch inside the measured time.
    get_framework_op("pytorch")
    file = str(_only_weights(place))

    def load() -> Loaded:
        loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
        loader.add_filenames({0: [file]})
        buffer = loader.copy_files_to_device()
        tensors = {name: buffer.get_tensor(name) for name in loader.get_keys()}
        return Loaded(tensors=tensors, owner=(loader, buffer))

    yield Prepared(load=load)


@contextmanager
def _tensorizer(place: Path, temperature: str) -> Iterator[Prepared]:
    from tensorizer import TensorDeserializer

    def load() -> Loaded:
        deserializer = TensorDeserializer(str(place), device="cpu")
        return Loaded(tensors=dict(deserializer.items()), owner=deserializer)

    yield Prepared(load=load)


def _only_weights(place: Path) -> Path:
    files = sorted(place.glob("*.safetensors"))
    if len(files) != 1:
        raise FileNotFoundError(f"{place}: {len(files)} safetensors files, one expected")
    return files[0]


_BUFFERED_STREAMER = {"RUNAI_STREAMER_FS_STRATEGY": "sync_buffered"}
_BUFFERED_FASTSAFETENSORS = {"FASTSAFETENSORS_ODIRECT": "0"}

_ALL = (
    LoaderEntry(name="ckptio", format="ckptio", prepare=_ckptio, settings="resident pool, verified"),
    LoaderEntry(
        name="ckptio.unverified", format="ckptio", prepare=_ckptio_unverified, settings="resident pool"
    ),
    LoaderEntry(
        name="ckptio.stock",
        format="safetensors",
        prepare=_ckptio_unverified,
        settings="safetensors as they are, resident pool",
    ),
    LoaderEntry(
        name="ckptio.private", format="ckptio", prepare=_ckptio_private, settings="fresh memory, verified"
    ),
    LoaderEntry(
        name="safetensors",
        format="safetensors",
        prepare=_safetensors,
        module="safetensors",
        settings="safe_open, clone of each tensor",
    ),
    LoaderEntry(
        name="safetensors.mapped",
        format="safetensors",
        prepare=_safetensors_mapped,
        module="safetensors",
        settings="load_file, clone of all",
    ),
    LoaderEntry(
        name="torch", format="torch", prepare=_torch, settings="torch.load; warm with mmap, clone of all"
    ),
    LoaderEntry(
        name="transformers",
        format="safetensors",
        prepare=_transformers,
        module="transformers",
        needs_model=True,
        settings="from_pretrained, clone of all parameters",
    ),
    LoaderEntry(
        name="runai",
        format="safetensors",
        prepare=_runai,
        module="runai_model_streamer",
        environment={"warm": _BUFFERED_STREAMER},
        settings="SafetensorsStreamer; warm with sync_buffered",
    ),
    LoaderEntry(
        name="fastsafetensors",
        format="safetensors",
        prepare=_fastsafetensors,
        module="fastsafetensors",
        environment={"cold": _BUFFERED_FASTSAFETENSORS, "warm": _BUFFERED_FASTSAFETENSORS},
        settings="without direct I/O",
    ),
    LoaderEntry(
        name="tensorizer",
        format="tensorizer",
        prepare=_tensorizer,
        module="tensorizer",
        settings="TensorDeserializer",
    ),
)

LOADERS: Mapping[str, LoaderEntry] = {entry.name: entry for entry in _ALL}
