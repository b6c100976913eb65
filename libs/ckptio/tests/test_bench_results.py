"""The pure parts of the benchmark: shapes, order, statistics, text."""

from __future__ import annotations

import pytest

from ckptio.bench.ablation import FACTORS, AblationRun, ablation_steps
from ckptio.bench.attach import AttachRun
from ckptio.bench.ceiling import RawRead
from ckptio.bench.results import AblationSample, LoadSample, Measured, RawSample, result_rows
from ckptio.bench.schedule import NEIGHBOURS, plan_steps
from ckptio.bench.specs import CHECKPOINTS, checkpoint_spec
from ckptio.bench.table import results_text
from ckptio.bench.timing import LoadRun

GB = 1_000_000_000


def a_run(seconds: float, **values: float) -> LoadRun:
    """A load of one GB."""
    base: dict[str, float] = {
        "returned_s": seconds,
        "cpu_s": 0.5,
        "anonymous_bytes": 0,
        "minor_faults": 0,
        "peak_bytes": 1000,
        "resident_bytes": 0,
        "tensor_count": 3,
        "size_bytes": GB,
    }
    return LoadRun(seconds=seconds, **(base | values))  # type: ignore[arg-type]


def measured(**seconds: list[float]) -> Measured:
    """Loads by "<temperature>_<loader>" (two underscores for a dot), one per round."""
    one = Measured(checkpoint="qwen1.5b", is_quick=False)
    for key, values in seconds.items():
        temperature, _, loader = key.replace("__", ".").partition("_")
        for number, value in enumerate(values):
            run = a_run(value)
            one.loads.append(LoadSample(temperature=temperature, loader=loader, round=number, run=run))
    return one


def by_name(*some: Measured) -> dict[str, dict]:
    return {row["name"]: row for row in result_rows(some)}


@pytest.mark.parametrize(
    ("name", "tensors", "size_bytes"),
    [
        ("qwen1.5b", 338, 3_087_428_608),
        ("opt1.3b", 388, 2_631_516_160),
        ("lora", 392, 147_718_144),
        ("many", 4000, 597_262_132),
    ],
)
def test_checkpoints_have_the_published_shapes(name: str, tensors: int, size_bytes: int) -> None:
    spec = checkpoint_spec(name)
    assert len(spec.tensors) == tensors
    assert spec.size_bytes == size_bytes
    assert len({tensor.name for tensor in spec.tensors}) == tensors


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_quick_checkpoint_is_smaller_and_lies_elsewhere(name: str) -> None:
    full, quick = checkpoint_spec(name), checkpoint_spec(name, is_quick=True)
    assert quick.size_bytes < full.size_bytes / 5
    assert quick.directory_name != full.directory_name
    assert quick.fingerprint != full.fingerprint


def test_many_tensors_end_on_no_page_and_stay_aligned() -> None:
    offset_bytes = 0
    for tensor in checkpoint_spec("many").tensors:
        assert tensor.size_bytes % 512 != 0
        assert offset_bytes % (4 if tensor.dtype == "float32" else 2) == 0
        offset_bytes += tensor.size_bytes


def test_an_unknown_checkpoint_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no checkpoint 'gpt9'; there are: qwen1\.5b"):
        checkpoint_spec("gpt9")


@pytest.mark.parametrize("seed", range(5))
def test_each_round_has_every_loader_once_at_every_temperature(seed: int) -> None:
    loaders = ["ckptio", "ckptio.stock", "ckptio.unverified", "safetensors", "torch"]
    steps = plan_steps(loaders, ["cold", "warm"], rounds=3, seed=seed)
    for number in range(3):
        loads = [(s.temperature, s.loader) for s in steps if s.round == number and not s.is_raw]
        assert sorted(loads) == sorted((t, x) for t in ("cold", "warm") for x in loaders), seed


@pytest.mark.parametrize("seed", range(5))
def test_what_is_compared_by_per_cent_runs_side_by_side_with_a_plain_read_before_each(seed: int) -> None:
    loaders = ["torch", "ckptio", "safetensors", "ckptio.unverified", "ckptio.stock"]
    steps = plan_steps(loaders, ["cold", "warm"], rounds=2, seed=seed)
    places = [n for n, s in enumerate(steps) if s.temperature == "cold" and s.loader in NEIGHBOURS]
    for start in range(0, len(places), 6):
        group = places[start : start + 6]
        assert group == list(range(group[0], group[0] + 6)), seed
        for raw, load in zip(group[::2], group[1::2], strict=True):
            assert steps[raw].is_raw, seed
            assert not steps[load].is_raw, seed
            assert steps[raw].loader == steps[load].loader, seed


def test_the_order_depends_on_the_seed_alone() -> None:
    plans = [plan_steps(["ckptio", "torch", "runai"], ["cold", "warm"], rounds=4, seed=s) for s in (1, 1, 2)]
    assert plans[0] == plans[1]
    assert plans[0] != plans[2]


def test_ratios_are_of_loads_of_the_same_round() -> None:
    one = measured(cold_ckptio=[1.0, 2.0, 1.0], cold_torch=[2.0, 6.0], warm_ckptio=[0.5], warm_torch=[2.0])
    rows = by_name(one)
    cold = rows["ckptio.cold.ratio.torch"]
    assert (cold["median"], cold["min"], cold["max"], cold["n"]) == (2.5, 2.0, 3.0, 2)
    assert rows["ckptio.warm.ratio.torch"]["median"] == 4.0
    assert "ckptio.cold.ratio.ckptio.stock" not in rows


def test_the_share_of_the_ceiling_is_that_of_the_read_before() -> None:
    """The stock file and the converted one differ by a few kB: bandwidths are compared, not seconds."""
    one = measured(cold_ckptio=[1.0, 2.0], cold_ckptio__stock=[1.0, 1.0])
    for number, seconds in enumerate([0.9, 1.9]):
        read = RawRead(size_bytes=GB, seconds=seconds, threads=2)
        one.raws.append(RawSample(loader="ckptio", round=number, run=read))
    rows = by_name(one)
    assert rows["ckptio.cold.share_of_ceiling"]["median"] == pytest.approx((0.9 + 0.95) / 2)
    assert rows["ckptio.cold.load_s.ckptio"]["params"]["share_of_ceiling"] == pytest.approx(0.925)
    assert rows["ckptio.cold.load_s.ckptio.stock"]["params"]["share_of_ceiling"] is None
    assert rows["ckptio.ceiling.read_bytes_per_s"]["max"] == pytest.approx(GB / 0.9)


def test_verification_and_stock_are_compared_within_a_round() -> None:
    one = measured(
        cold_ckptio=[1.02, 2.04], cold_ckptio__unverified=[1.0, 2.0], cold_ckptio__stock=[1.02, 2.04]
    )
    rows = by_name(one)
    assert rows["ckptio.verify.overhead_share"]["median"] == pytest.approx(0.02)
    assert rows["ckptio.stock.share_of_converted"]["median"] == pytest.approx(1.0)
    assert rows["ckptio.cpu_s.cold"]["median"] == 0.5
    assert rows["ckptio.rss_beyond_pool_bytes"]["median"] == 1000


def test_memory_beyond_the_pool_is_left_out_where_the_kernel_cannot_tell() -> None:
    one = Measured(checkpoint="lora", is_quick=True)
    run = a_run(1.0)
    unknown = LoadRun(**{name: getattr(run, name) for name in run.__slots__} | {"peak_bytes": None})
    one.loads.append(LoadSample(temperature="cold", loader="ckptio", round=0, run=unknown))
    rows = by_name(one)
    assert "ckptio.rss_beyond_pool_bytes" not in rows
    assert rows["ckptio.cold.load_s.ckptio"]["params"]["peak_bytes"] is None


def test_the_first_checkpoint_has_the_plain_names_and_others_their_own() -> None:
    first, second = measured(cold_ckptio=[1.0]), measured(cold_ckptio=[2.0])
    second.checkpoint = "lora"
    rows = by_name(first, second)
    assert rows["ckptio.cpu_s.cold"]["params"]["checkpoint"] == "qwen1.5b"
    assert rows["ckptio.cpu_s.cold.lora"]["params"]["checkpoint"] == "lora"


def test_an_attach_counts_by_its_median_and_by_the_first_one() -> None:
    one = measured()
    for first in (0.009, 0.011, 0.010):
        one.attaches.append(
            AttachRun(
                seconds=(first, 0.002, 0.004, 0.003),
                anonymous_bytes=5000,
                minor_faults=1,
                size_bytes=GB,
                tensor_count=338,
                digest="",
            )
        )
    rows = by_name(one)
    assert rows["ckptio.dram.map_s.qwen1.5b"]["median"] == pytest.approx(0.0035)
    assert rows["ckptio.dram.first_map_s.qwen1.5b"]["median"] == pytest.approx(0.010)
    assert rows["ckptio.dram.map_private_bytes.qwen1.5b"]["max"] == 5000


def test_factors_are_added_in_order_and_left_out_one_by_one() -> None:
    steps = {step.name: step.factors for step in ablation_steps()}
    assert steps["none"] == ()
    assert steps["to_threads"] == ("bulk", "direct", "threads")
    assert steps["to_pipeline"] == FACTORS
    assert set(steps["without_pinned"]) == set(FACTORS) - {"pinned"}
    assert len(steps) == 1 + 2 * len(FACTORS)


def test_what_a_factor_brings_is_the_ratio_to_the_step_before() -> None:
    one = measured()
    for step, seconds in {"none": 6.0, "to_bulk": 5.0, "to_pipeline": 1.0, "without_bulk": 1.5}.items():
        run = AblationRun(seconds=seconds, size_bytes=GB)
        one.ablations.append(AblationSample(step=step, round=0, run=run))
    rows = by_name(one)
    assert rows["ckptio.ablation.gain.bulk"]["median"] == pytest.approx(1.2)
    assert rows["ckptio.ablation.loss_without.bulk"]["median"] == pytest.approx(1.5)
    assert "ckptio.ablation.gain.direct" not in rows
    assert rows["ckptio.ablation.load_s.none"]["params"]["device"] == "host"


def test_the_text_puts_the_fastest_first_and_says_what_is_missing() -> None:
    one = measured(cold_torch=[2.0, 2.2], cold_ckptio=[1.0, 1.1])
    report = {
        "commit": "abc",
        "machine": {
            "cpu": "A",
            "cores": 2,
            "memory_bytes": 2**30,
            "file_system": "ext4",
            "pool_pages": "huge",
        },
        "run": {"left_out": {"runai": "runai_model_streamer is not installed"}},
        "results": result_rows([one]),
    }
    text = results_text(report)
    lines = text.splitlines()
    assert lines[2] == "qwen1.5b, cold, 1.00 GB"
    assert [line.split()[0] for line in lines[4:6]] == ["ckptio", "torch"]
    assert "2.00 x" in lines[5]
    assert lines[-1] == "left out: runai: runai_model_streamer is not installed"


def test_a_few_per_cent_are_also_told_by_the_bests_of_all_rounds() -> None:
    """Medians of few rounds lose them in the spread of a shared disk."""
    rows = by_name(
        measured(
            cold_ckptio=[1.05, 3.0, 1.2],
            cold_ckptio__unverified=[2.0, 1.0, 1.3],
            cold_ckptio__stock=[1.5, 1.25, 2],
        )
    )
    assert rows["ckptio.verify.overhead_share"]["params"]["of_bests"] == pytest.approx(0.05)
    assert rows["ckptio.stock.share_of_converted"]["params"]["of_bests"] == pytest.approx(0.84)
    alone = by_name(measured(cold_ckptio=[1.0]))
    assert "ckptio.verify.overhead_share" not in alone
