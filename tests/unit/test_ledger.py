"""The ledger's formulas: parameters, cache, memory, operators, collectives, bounds."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from sglang_glm53.bench import step_bytes
from sglang_glm53.bench.rank_slice import slice_config
from sglang_glm53.checkpoint import checkpoint_tensors
from sglang_glm53.config import Glm53Config
from sglang_glm53.errors import Glm53Error
from sglang_glm53.ledger import hardware, memory, model, observations
from sglang_glm53.ledger.account import Account
from sglang_glm53.ledger.collectives import Collective, Rows, collectives
from sglang_glm53.ledger.formula import Sheet, evaluate, substitute
from sglang_glm53.ledger.glm53 import config_json
from sglang_glm53.ledger.topology import PRESETS, Topology, Workload, parse
from sglang_glm53.tiny.options import TinyOptions
from sglang_glm53.tiny.options import config_json as tiny_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def config() -> Glm53Config:
    return Glm53Config.from_hf(config_json())


@pytest.fixture(scope="module")
def h200() -> hardware.Hardware:
    return hardware.load("h200")


def account(config: Glm53Config, topology: str | Topology, **work: object) -> Account:
    shape = PRESETS[topology] if isinstance(topology, str) else topology
    return Account(config, shape, replace(Workload(), **work), hardware.load("h200"))


# --- formulas ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("a * b + 1", 7),
        ("8 / 2", 4),
        ("min(a, b) ** 3 - -1", 9),
        ("ceil(7 / b) * floor(2.5)", 6),
        ("a if b > 2 else 0", 2),
        ("a if b <= 2 else 0", 0),
        ("b % a + b // a", 2),
    ],
)
def test_a_formula_is_computed(formula: str, value: float) -> None:
    found = evaluate(formula, {"a": 2, "b": 3})
    assert found == value and isinstance(found, int)


@pytest.mark.parametrize(
    "formula", ["__import__('os')", "a.b", "[a]", "lambda: 1", "open(a)", "'x'"]
)
def test_a_formula_is_arithmetic_and_nothing_else(formula: str) -> None:
    with pytest.raises(ValueError, match="not arithmetic"):
        evaluate(formula, {"a": 1, "b": 1})


def test_a_figure_shows_the_numbers_that_were_computed() -> None:
    sheet = Sheet({"hidden": 6144, "rank": 2624})
    figure = sheet.add("projection", "hidden * rank", "parameters", "A projections", "config.json")
    assert figure.value == 6144 * 2624 and figure.numbers == "6144 * 2624"
    assert sheet.add("twice", "2 * projection").value == 2 * 6144 * 2624
    assert evaluate(figure.numbers, {}) == figure.value
    assert substitute("max(a, b) - a", {"a": 1, "b": 2}) == "max(1, 2) - 1"
    with pytest.raises(KeyError, match="unknown"):
        sheet.add("wrong", "hidden * unknown")


def test_every_figure_can_be_recomputed_from_what_it_shows(config: Glm53Config) -> None:
    one = account(config, "dp8-deepep", steps=5, tokens=6, accept=3.5)
    figures = list(one.figures())
    assert len(figures) > 80
    for figure in figures:
        assert evaluate(figure.numbers, {}) == pytest.approx(figure.value, rel=1e-9), figure.name
        assert figure.title and figure.formula


# --- parameters and cache ------------------------------------------------------------------------


def test_the_parameters_are_those_of_the_checkpoint(config: Glm53Config) -> None:
    """Against the loader's table of every tensor's shape."""
    sheet = model.parameters(config)
    sizes = {name: math.prod(shape) for name, shape in checkpoint_tensors(config)}
    assert sheet["parameters_with_mtp"] == sum(sizes.values())
    mtp = sum(size for name, size in sizes.items() if name.startswith("model.layers.78."))
    assert sheet["mtp"] == mtp
    assert sheet["parameters_total"] == sum(sizes.values()) - mtp == 743_377_019_904
    layer = {name: size for name, size in sizes.items() if name.startswith("model.layers.6.")}
    parts = sheet["attention"] + sheet["indexer"] + sheet["moe_layer"]
    assert sum(layer.values()) == parts + sheet["layer_norms"] + sheet["index_norm"]


@pytest.mark.parametrize("options", [TinyOptions(), TinyOptions(layers=11, experts=4, heads=8)])
def test_any_config_is_counted(options: TinyOptions) -> None:
    special = dict.fromkeys(("<|endoftext|>", "<|user|>", "<|observation|>"), 0)
    small = Glm53Config.from_hf(tiny_config(options, special))
    total = sum(math.prod(shape) for _, shape in checkpoint_tensors(small))
    assert model.parameters(small)["parameters_with_mtp"] == total


@pytest.mark.parametrize(
    ("kv", "latent", "index", "token"),
    [
        ("bf16", 1152, 132, 92_628),
        ("fp8", 656, 132, 53_940),
        ("fp8-raw", 576, 132, 47_700),
        ("fp32", 2304, 512, 190_464),
    ],
)
def test_the_cache_of_a_token(
    config: Glm53Config, kv: str, latent: int, index: int, token: int
) -> None:
    sheet = model.cache(config, kv)
    assert (sheet["latent_token"], sheet["index_layer_token"]) == (latent, index)
    assert sheet["kv_bytes_per_token"] == 78 * latent + 21 * index == token
    assert sheet["page_bytes"] == 64 * token
    with_mtp = model.cache(config, kv, mtp=True)
    assert with_mtp["kv_bytes_per_token"] == token + latent + index


def test_a_page_in_one_piece(config: Glm53Config) -> None:
    sheet = model.cache(config, "fp8")
    assert sheet["page_bytes"] == 78 * 41_984 + 21 * 8_448 == 3_452_160


@pytest.mark.parametrize(("kv", "gib"), [("bf16", 90.5), ("fp8", 52.7), ("fp8-raw", 46.6)])
def test_a_million_tokens(config: Glm53Config, kv: str, gib: float) -> None:
    assert model.cache(config, kv)["kv_bytes_per_token"] * 2**20 / 2**30 == pytest.approx(
        gib, abs=0.06
    )


# --- memory --------------------------------------------------------------------------------------


def test_a_rank_of_the_slice_is_a_rank_of_eight(config: Glm53Config) -> None:
    """32 experts on one rank, and one of eight ranks that has all but the experts whole."""
    slice_ = Glm53Config.from_hf(slice_config(layers=78, experts=32))
    one = memory.stored(slice_, Topology(), mtp=True)
    eighth = Topology(tp=8, ep=8, dp=8, a2a="deepep", dense_tp=1, dp_lm_head=1)
    rank = memory.stored(config, eighth, mtp=True)
    routers = 75 * (256 - 32) * (6144 * 2 + 4)  # the slice's routers are narrow
    assert rank["stored_target"] == one["stored_target"] + routers


def test_the_bytes_that_a_step_reads_are_the_benchs(config: Glm53Config) -> None:
    """The bench counts the key projection of the indexer in FP8, the ledger as it lies there."""
    slice_ = Glm53Config.from_hf(slice_config(layers=78, experts=32))
    dequantised = 21 * 6144 * 128 * (2 - model.FP8_WIDTH)
    for batch in (1, 8, 16):
        bench = step_bytes.decode_step(slice_, batch=batch, context=2304)
        here = account(slice_, "tp1", batch=batch, context=2304).decode
        assert here.bytes_read == pytest.approx(sum(bench.values()) + dequantised, rel=1e-12)
        work = {"steps": 5, "tokens": 6, "batch": batch, "context": 2304}
        mtp = account(slice_, "tp1", **work).mtp
        of_bench = step_bytes.mtp_step(slice_, batch=batch, context=2304, steps=5, tokens=6)
        again = dequantised + 6144 * 128 * (2 - model.FP8_WIDTH)  # the first draft selects too
        assert mtp.bytes_read == pytest.approx(sum(of_bench.values()) + again, rel=1e-12)


def test_ranks_share_what_can_be_split(config: Glm53Config) -> None:
    one, eight = (memory.stored(config, PRESETS[name], mtp=False) for name in ("tp1", "tp8"))
    for part in ("stored_routed", "stored_dense", "stored_shared", "stored_vocabulary"):
        assert eight[part] * 8 == one[part]
    for part in ("stored_indexers", "stored_routers", "stored_norms"):
        assert eight[part] == one[part]
    assert one["stored_attention"] / 8 < eight["stored_attention"] < one["stored_attention"] / 4


def test_distinct_experts(config: Glm53Config) -> None:
    base = memory.stored(config, PRESETS["tp8-ep8"], mtp=False)
    assert [memory.distinct_experts(base, rows, "even") for rows in (1, 8, 32, 64)] == [
        1,
        8,
        32,
        32,
    ]
    drawn = memory.distinct_experts(base, 32, "random")
    assert drawn == pytest.approx(32 * (1 - (1 - 8 / 256) ** 32))


# --- operators -----------------------------------------------------------------------------------


def test_the_operators_weights_are_those_that_a_step_reads(config: Glm53Config) -> None:
    """Two counts of the same: by operator, and by part of the model."""
    for name in PRESETS:
        one = account(config, name)
        by = one.decode.bytes_by
        layers = {"dense": 3, "full": 18, "shared": 57}
        weights = sum(
            count * sum(each.weights.value for each in one.layer(kind))  # type: ignore[arg-type]
            for kind, count in layers.items()
        )
        cache = sum(
            count * sum(each.cache.value for each in one.layer(kind))  # type: ignore[arg-type]
            for kind, count in layers.items()
        )
        assert cache == by["latents"] + by["index keys"]
        parts = set(by) - {"latents", "index keys", "lm_head"}
        assert weights == pytest.approx(sum(by[part] for part in parts), rel=1e-12)


def test_a_tokens_flops_are_twice_its_parameters(config: Glm53Config) -> None:
    """Beside attention over the cache and the embedding, which is a look-up; norms multiply, but
    are not counted as FLOPs."""
    one = account(config, "tp1", batch=1, context=2048)
    sheet = one.parameters
    over_cache = 78 * 2 * 64 * 2048 * (576 + 512) + 21 * 2 * 32 * 128 * 2048
    matrices = sheet["parameters_active"] - sheet["norms_total"] - 75 * 256  # the routers' biases
    assert one.decode.flops == 2 * matrices + over_cache


def test_a_prefill_computes_every_pair_of_positions_once(config: Glm53Config) -> None:
    """Row by row, in one pass or in several."""
    prompt, most = 5000, 2048
    scored = sum(range(1, prompt + 1))
    attended = sum(min(row, most) for row in range(1, prompt + 1))
    from sglang_glm53.ledger.operators import prefill_shape

    for chunk in (5000, 3000, 4096):
        shapes = [
            prefill_shape(config, chunk=min(chunk, prompt - before), before=before)
            for before in range(0, prompt, chunk)
        ]
        assert sum(shape.scored for shape in shapes) == scored
        assert sum(shape.attended for shape in shapes) == attended
    short = prefill_shape(config, chunk=2048, before=0)
    assert (short.form, short.scored, short.attended) == ("expanded", 0, 2048 * 2049 // 2)


# --- collectives ---------------------------------------------------------------------------------


def by_kind(rows: list[Collective]) -> dict[tuple[str, str], int]:
    return {(row.where, row.kind): row.count for row in rows}


def test_pure_tp(config: Glm53Config) -> None:
    rows = account(config, "tp8").decode.passes[0].collectives
    assert by_kind(rows) == {
        ("embedding", "all-reduce"): 1,
        ("attention output", "all-reduce"): 78,
        ("FFN output", "all-reduce"): 78,
        ("logits", "all-gather"): 1,
    }
    reduce = rows[1]
    assert reduce.bytes.value == 32 * 6144 * 2 and reduce.sent.value == 2 * 7 * 49_152
    assert rows[-1].bytes.value == 32 * 154880 * 2


def test_attention_dp_gathers_and_scatters(config: Glm53Config) -> None:
    decode = account(config, "dp8").decode.passes[0].collectives
    assert by_kind(decode) == {
        ("FFN input, attention DP", "all-reduce"): 78,
        ("FFN output, attention DP", "all-reduce"): 78,
        ("lm_head input, attention DP", "all-reduce"): 1,
        ("logits", "all-gather"): 1,
    }
    (prefill,) = account(config, "dp8").prefill
    assert by_kind(prefill.collectives) == {
        ("FFN input, attention DP", "all-reduce"): 78,
        ("FFN output, attention DP", "all-reduce"): 78,
        ("lm_head input, attention DP", "all-reduce"): 1,
        ("logits", "all-gather"): 1,
    }


def test_decode_under_attention_dp_where_the_custom_all_reduce_does_not_reach(
    config: Glm53Config,
) -> None:
    """On a CPU, with MTP, and beyond 16 MiB: equal parts."""
    moved = [
        ("FFN input, attention DP", "all-gather"),
        ("FFN output, attention DP", "reduce-scatter"),
    ]
    on_cpu = account(config, replace(PRESETS["dp8"], device="cpu")).decode.passes[0]
    with_mtp = account(config, "dp8", steps=5, tokens=6).mtp.passes[0]
    large = account(config, "dp8", batch=2048, context=64).decode.passes[0]
    for each in (on_cpu, with_mtp, large):
        found = by_kind(each.collectives)
        assert all(found[key] == 78 for key in moved)
    just = account(config, "dp8", batch=1360, context=64).decode.passes[0]
    assert by_kind(just.collectives)["FFN input, attention DP", "all-reduce"] == 78
    whole = by_kind(account(config, "dp8-ep8").decode.passes[0].collectives)
    assert whole["FFN output, attention DP", "reduce-scatter"] == 78


def test_deepep_and_gather_never_meet_in_a_layer(config: Glm53Config) -> None:
    rows = account(config, "dp8-deepep").decode.passes[0].collectives
    layers = {row.where: row.layers for row in rows}
    assert layers["experts"] == "layers 3-77"
    assert layers["FFN input, attention DP"] == layers["FFN output, attention DP"] == "layers 0-2"
    whole = replace(PRESETS["dp8-deepep"], dense_tp=1, dp_lm_head=1)
    rows = account(config, whole).decode.passes[0].collectives
    assert by_kind(rows) == {("experts", "dispatch"): 75, ("experts", "combine"): 75}


def test_one_prompt_is_dispatched_by_one_rank(config: Glm53Config) -> None:
    """Its rows come from one rank and return to it; the experts that answer are on all of them."""
    (prefill,) = account(config, "dp8-deepep").prefill
    rows = {row.kind: row for row in prefill.collectives if row.where == "experts"}
    copies = 8 * (1 - (7 / 8) ** 8)  # ranks that a row goes to, expected: 5.25
    values, scales = 8192 * copies * 6144, 8192 * copies * 48 * 4
    dispatch, combine = rows["dispatch"], rows["combine"]
    assert dispatch.sent.value == pytest.approx((values + scales) * 7 / 8)
    assert dispatch.received.value == pytest.approx((values + scales) / 8)
    assert combine.sent.value == pytest.approx(2 * values / 8)
    assert combine.received.value == combine.busiest == pytest.approx(2 * values * 7 / 8)
    assert combine.milliseconds(hardware.load("h200")) == pytest.approx(
        75 * (combine.received.value / 450e6 + 0.005)
    )
    decode = account(config, "dp8-deepep").decode.passes[0].collectives
    even = next(row for row in decode if row.kind == "dispatch")
    assert even.sent.value == even.received.value == even.bytes.value / 8 * 7 / 8
    assert even.bytes.value == 32 * 8 * (6144 + 48 * 4)  # low latency: once for each expert


def test_deepep_without_attention_dp(config: Glm53Config) -> None:
    rows = account(config, "tp8-deepep").decode.passes[0].collectives
    assert [(row.where, row.kind, row.count) for row in rows] == [
        ("embedding", "all-reduce", 1),
        ("attention output", "all-reduce", 3),
        ("FFN output", "all-reduce", 3),
        ("attention output", "reduce-scatter", 75),
        ("experts", "dispatch", 75),
        ("experts", "combine", 75),
        ("next attention's input", "all-gather", 75),
        ("logits", "all-gather", 1),
    ]
    # Together they move what an all-reduce would.
    assert rows[3].sent.value + rows[6].sent.value == rows[1].sent.value


def test_uneven_rows_are_padded_or_summed(config: Glm53Config) -> None:
    """Padded to the longest while that costs at most twice the rows, as SGLang decides."""
    topology = PRESETS["dp8"]

    def message(rows: tuple[int, ...]) -> tuple[str, int]:
        found = collectives(config, topology, "decode", Rows(rows, rows))
        row = next(row for row in found if row.where == "FFN input, attention DP")
        return row.kind, int(row.bytes.value) // (6144 * 2)

    assert message((4, 4, 4, 4, 4, 4, 4, 1)) == ("all-reduce", 29)
    assert message((4, 3, 3, 3, 3, 0, 0, 0)) == ("all-gather", 32)
    assert message((4, 1, 0, 0, 0, 0, 0, 0)) == ("all-reduce", 5)


def test_what_crosses_machines_takes_the_network(
    config: Glm53Config, h200: hardware.Hardware
) -> None:
    """Sixteen ranks are two machines of eight; a ring leaves each over its eight ports."""
    one = account(config, Topology(tp=16, ep=16), batch=32)
    reduce = next(row for _, _, row in one.decode.collectives if row.where == "FFN output")
    sent = 2 * 15 / 16 * 32 * 6144 * 2
    assert reduce.busiest == pytest.approx(sent)
    assert reduce.crossing(8) == pytest.approx(sent / 8)
    assert reduce.milliseconds(h200) == pytest.approx(78 * (sent / 8 / 50e6 + 0.005))
    total = sum(times * row.milliseconds(h200) for times, _, row in one.decode.collectives)
    assert one.decode.bound.communication.value == pytest.approx(total)
    spread = Topology(tp=16, ep=16, dp=16, a2a="deepep")
    rows = account(config, spread, batch=64).decode.passes[0].collectives
    dispatch = next(row for row in rows if row.kind == "dispatch")
    assert dispatch.crossing(8) == pytest.approx(dispatch.busiest * 8 / 15)
    assert dispatch.milliseconds(h200) == pytest.approx(75 * (dispatch.crossing(8) / 50e6 + 0.005))
    # Inside one machine nothing crosses.
    assert all(row.crossing(8) == 0 for _, _, row in account(config, "tp8").decode.collectives)
    groups = account(config, Topology(tp=16, ep=16, dp=2)).decode.passes[0].collectives
    assert {row.group: bool(row.crossing(8)) for row in groups} == {"attn_tp": False, "tp": True}


def test_one_rank_sends_nothing(config: Glm53Config) -> None:
    one = account(config, "tp1", steps=5, tokens=6)
    assert one.mtp.collective_count == one.decode.collective_count == 0
    assert one.decode.bound.communication.value == 0


def test_mtp_multiplies_rows_and_adds_passes(config: Glm53Config) -> None:
    one = account(config, "tp8", steps=5, tokens=6, accept=3.5)
    passes = {each.kind: each for each in one.mtp.passes}
    assert {kind: each.times for kind, each in passes.items()} == {
        "verify": 1,
        "draft-extend": 1,
        "draft": 4,
    }
    plain = one.decode.passes[0].collectives
    for verify, decode in zip(passes["verify"].collectives, plain, strict=True):
        assert verify.bytes.value == 6 * decode.bytes.value and verify.count == decode.count
    heads = {kind: each.collectives[-1].shape[0] for kind, each in passes.items()}
    assert heads == {"verify": 192, "draft-extend": 32, "draft": 32}
    assert one.mtp.collective_count == 158 + 5 * 4
    assert one.break_even.value == one.mtp.bound.bound_ms / one.decode.bound.bound_ms


# --- the bound, and what fits --------------------------------------------------------------------


def test_the_bound_is_bytes_over_bandwidth(config: Glm53Config, h200: hardware.Hardware) -> None:
    step = account(config, "dp8-deepep").decode
    assert step.bound.limit == "memory"
    assert step.bound.bound_ms == pytest.approx(step.bytes_read / 4.237e12 * 1e3)
    prefill = account(config, "tp8").prefill_bound
    assert prefill.limit == "compute" and prefill.bound_ms == prefill.compute.value


def test_what_fits(config: Glm53Config) -> None:
    one = account(config, "dp8-deepep", context=8192, batch=8)
    # Among eight ranks 2.51 GiB are gone before anything is loaded.
    free = 0.85 * (150.11e9 - 2.695e9) - one.loaded.total
    tokens = one.capacity["pool_tokens"]
    assert tokens % 64 == 0 and tokens * 53940 <= free < (tokens + 64) * 53940
    assert one.capacity["concurrent"] == 8 * (tokens // 8192)
    half = replace(one, mem_fraction=0.5)
    assert half.capacity["pool_tokens"] == half.capacity["concurrent"] == 0


def test_the_draft_takes_room_while_the_cache_is_sized(config: Glm53Config) -> None:
    plain = account(config, "dp8-deepep")
    drafts = account(config, "dp8-deepep", steps=5, tokens=6)
    head = 154880 * 6144 * 2
    beside = drafts.stored["stored_while_sizing"] - drafts.stored["stored_bytes"]
    assert beside == head + head / 8  # the embedding is whole there, lm_head split over eight
    assert drafts.capacity["pool_tokens"] < plain.capacity["pool_tokens"]


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -1, True, "x", 10**400],
    ids=["nan", "inf", "negative", "bool", "word", "huge"],
)
@pytest.mark.parametrize("field", ["bandwidth", "before_loading"])
def test_a_rate_that_is_none_is_one_line(tmp_path: Path, field: str, value: object) -> None:
    content = yaml.safe_load((hardware.FOLDER / "h200.yaml").read_text())
    content[field]["measured" if field == "bandwidth" else "alone"] = value
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(Glm53Error, match="give a number|needs the numbers") as told:
        hardware.load(str(path))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", hardware.available())
def test_hardware_files(name: str, config: Glm53Config) -> None:
    gpu = hardware.load(name)
    for rate in hardware.RATES:
        found = getattr(gpu, rate)
        assert found.best_known > 0 and found.unit and found.source
    assert Account(config, PRESETS["tp8"], Workload(), gpu).decode.bound.bound_ms > 1


def test_measured_rates_are_those_of_the_recorded_run() -> None:
    recorded = json.loads((ROOT / "docs/benchmarks/slice.json").read_text())
    gpu = hardware.load("h200")
    speed = recorded["bandwidth"]["bytes_per_second"]
    assert gpu.bandwidth.measured == pytest.approx(speed, rel=0.02)
    assert gpu.memory_bytes.measured / 2**30 == pytest.approx(
        recorded["machine"]["gpu_memory_gib"], abs=0.05
    )
    # A process that only asks has a context too, and nothing of SGLang's.
    asked = recorded["machine"]["gpu_memory_gib"] - recorded["machine"]["gpu_memory_free_gib"]
    assert asked < gpu.before_loading.alone / 2**30 < asked + 0.25


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("- 1", "does not describe a GPU"),
        ("title: x", "lacks memory_bytes, bandwidth"),
        ("a: [", "x.yaml: "),
    ],
)
def test_a_wrong_hardware_file_is_one_line(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(content)
    with pytest.raises(Glm53Error, match=says) as error:
        hardware.load(str(file))
    assert "\n" not in str(error.value)


# --- observations --------------------------------------------------------------------------------


@pytest.mark.parametrize("seen", observations.observations(), ids=lambda seen: seen.name)
def test_an_observation_is_reproduced(seen: observations.Observation) -> None:
    within = abs(seen.difference) <= seen.tolerance
    assert within == seen.reproduced, f"{seen.said}: {seen.figure.value}"
    assert seen.reproduced or "not reproduced" in seen.note


def test_the_pools_of_the_recorded_run_are_the_observed_ones() -> None:
    recorded = json.loads((ROOT / "docs/benchmarks/slice.json").read_text())
    rows = {(row["work"], side): row[f"kv_tokens_{side}"] for row in recorded["rows"]
            for side in ("stock", "ours")}  # fmt: skip
    for name, work in (
        ("78-fp8", "decode"),
        ("78-fp8-mtp", "mtp_step"),
        ("10-fp8-prefill", "prefill"),
    ):
        stock, ours = observations.POOLS[name][4:]
        assert (rows[work, "stock"], rows[work, "ours"]) == (stock, ours)


# --- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tp=3", "3 does not divide the 64 attention heads"),
        ("tp=128", "128 does not divide the 64 attention heads"),
        ("tp=8,ep=3", "ep 3 does not divide tp 8"),
        ("tp=8,ep=16", "ep 16 does not divide tp 8"),
        ("tp=4,dp=8", "dp 8 exceeds tp 4"),
        ("tp=8,dp=3", "dp 3 does not divide tp 8"),
        ("tp=0", "tp is 0"),
        ("tp=8,ep=4,a2a=deepep", "use ep=8"),
        ("tp=32", "cuts the 128 wide blocks"),
        ("tp=2,a2a=carrier", "a2a is 'carrier'"),
        ("tp=2,kv=int4", "kv is 'int4'"),
        ("tp=2,weights=int4", "weights is 'int4'"),
        ("tp=2,dense_tp=7", "dense_tp is 7"),
    ],
)
def test_a_topology_that_cannot_be_is_one_line(config: Glm53Config, text: str, says: str) -> None:
    with pytest.raises(Glm53Error) as error:
        account(config, parse(text))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_ep_that_does_not_divide_the_experts() -> None:
    odd = Glm53Config.from_hf({**config_json(), "n_routed_experts": 12})
    with pytest.raises(Glm53Error, match="ep 8 does not divide the 12 routed experts"):
        account(odd, "tp8-ep8")


@pytest.mark.parametrize(
    ("work", "says"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"context": 2**20 + 1}, "exceeds the model's 1048576 positions"),
        ({"steps": 5, "tokens": 5}, "use 5-1-6"),
        ({"steps": 5}, "draft steps and verified tokens"),
        ({"steps": 5, "tokens": 6, "accept": 7.0}, "accept length 7 is not between 1 and 6"),
        ({"accept": 2.0}, "not between 1 and 1"),
        ({"routing": "lucky"}, "routing is 'lucky'"),
        ({"page": 32}, "pages of 64"),
    ],
)
def test_work_that_cannot_be_is_one_line(
    config: Glm53Config, work: dict[str, object], says: str
) -> None:
    with pytest.raises(Glm53Error) as error:
        account(config, "tp8", **work)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_mtp_without_an_mtp_layer(config: Glm53Config) -> None:
    without = replace(config, num_nextn_predict_layers=0)
    with pytest.raises(Glm53Error, match="has no MTP layer"):
        account(without, "tp8", steps=1, tokens=2)


@pytest.mark.parametrize(
    ("text", "topology"),
    [
        ("tp8", PRESETS["tp8"]),
        ("dp8-deepep,kv=bf16", replace(PRESETS["dp8-deepep"], kv="bf16")),
        ("tp=4, ep=2", Topology(tp=4, ep=2)),
        ("", Topology()),
    ],
)
def test_topologies_in_words(text: str, topology: Topology) -> None:
    assert parse(text) == topology
    assert parse(topology.name) == topology


@pytest.mark.parametrize("text", ["tp9", "tp=8,fast", "tp=x", "tp=", "pp=2", "tp=8,dp8"])
def test_words_that_are_no_topology(text: str) -> None:
    with pytest.raises(Glm53Error, match="topology") as error:
        parse(text)
    assert "\n" not in str(error.value)


def test_the_ledger_imports_neither_torch_nor_sglang() -> None:
    program = (
        "import sys, pkgutil, importlib, sglang_glm53.ledger as package\n"
        "for each in pkgutil.iter_modules(package.__path__):\n"
        "    importlib.import_module(f'sglang_glm53.ledger.{each.name}')\n"
        "heavy = {'torch', 'sglang', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
