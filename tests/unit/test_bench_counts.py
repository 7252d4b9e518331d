"""What `glm53 bench slice` counts: the slice's config, the bytes of a step, the trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_glm53.bench import step_bytes
from sglang_glm53.bench.rank_slice import slice_config, write_slice
from sglang_glm53.bench.trace import exposed, kernels, launches_a_step, read_events
from sglang_glm53.config import Glm53Config
from sglang_glm53.errors import Glm53Error

CONTEXT = 2304


@pytest.fixture(scope="module")
def rank() -> Glm53Config:
    return Glm53Config.from_hf(slice_config(layers=78, experts=32))


# --- the slice -----------------------------------------------------------------------------------


def test_the_slice_has_the_models_layers(rank: Glm53Config) -> None:
    assert rank.full_layers == (0, 1, 2, *range(6, 75, 4))
    assert len(rank.full_layers) == 21
    assert sum(rank.is_sparse(layer) for layer in range(78)) == 75
    assert rank.latent_dim == 576 and rank.qk_head_dim == 256


@pytest.mark.parametrize("layers", [1, 3, 6, 10, 78])
def test_any_number_of_layers_is_a_config_that_is_accepted(layers: int) -> None:
    config = Glm53Config.from_hf(slice_config(layers=layers, experts=16))
    assert config.num_hidden_layers == layers and config.filled == ()


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"layers": 0, "experts": 32}, "0 layers"),
        ({"layers": 78, "experts": 7}, "7 experts"),
        ({"layers": 78, "experts": 32, "vocab_size": 10}, "vocabulary of 10"),
    ],
)
def test_a_slice_that_cannot_be_is_refused(sizes: dict[str, int], says: str) -> None:
    with pytest.raises(Glm53Error, match=says):
        slice_config(**sizes)


def test_the_folder_holds_config_and_a_tokenizer_that_loads(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder = write_slice(tmp_path / "slice", layers=6, experts=16, vocab_size=4096)
    config = json.loads((folder / "config.json").read_text())
    assert config == slice_config(layers=6, experts=16, vocab_size=4096)
    assert max(config["eos_token_id"]) < 4096
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("t5 t1999 unheard").ids == [5, 1999, 0]


def test_a_folder_that_cannot_be_written_is_one_line() -> None:
    with pytest.raises(Glm53Error, match="cannot write the slice to /dev/null/x"):
        write_slice(Path("/dev/null/x"), layers=6, experts=16)


# --- bytes of a step -----------------------------------------------------------------------------
# Stock's counts, by hand from its profile on an H200: 42.4 GB at batch 1, 102.1 at batch 8 with a
# random routing of four sets of eight experts, 111.2 at batch 8 and 112.1 at batch 16 with all 32.


@pytest.mark.parametrize(("batch", "gigabytes"), [(1, 42.4), (8, 111.2), (16, 112.1)])
def test_a_decode_step_reads_what_stock_was_counted_to_read(
    rank: Glm53Config, batch: int, gigabytes: float
) -> None:
    total = sum(step_bytes.decode_step(rank, batch=batch, context=CONTEXT).values())
    assert total / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_fewer_experts_read_fewer_bytes(rank: Glm53Config) -> None:
    drawn = 32 * (1 - 0.75**8)  # 8 rows, each one of four sets
    total = sum(step_bytes.decode_step(rank, batch=8, context=CONTEXT, experts=drawn).values())
    assert total / 1e9 == pytest.approx(102.1, rel=0.02)


@pytest.mark.parametrize(("batch", "milliseconds"), [(1, 25.1), (8, 29.8)])
def test_an_mtp_step_reads_what_stock_was_counted_to_read(
    rank: Glm53Config, batch: int, milliseconds: float
) -> None:
    parts = step_bytes.mtp_step(
        rank,
        batch=batch,
        context=CONTEXT,
        steps=5,
        tokens=6,
        verify_experts=32 * (1 - 0.75 ** (6 * batch)),
        draft_experts=32 * (1 - 0.75**batch),
    )
    assert sum(parts.values()) / 4.3e12 * 1e3 == pytest.approx(milliseconds, rel=0.02)
    assert parts["draft: lm_head"] == 5 * 154880 * 6144 * 2


@pytest.mark.parametrize(("rows", "distinct"), [(1, 8), (3, 24), (4, 32), (8, 32), (96, 32)])
def test_experts_dealt_in_turn_are_those_that_sglangs_kernel_deals(
    rank: Glm53Config, rows: int, distinct: int
) -> None:
    assert step_bytes.round_robin_experts(rows, rank) == distinct
    # SGLang's formula: slot row * 8 + choice, plus the layer, modulo the experts.
    for layer in (3, 40, 77):
        dealt = {(row * 8 + choice + layer) % 32 for row in range(rows) for choice in range(8)}
        assert len(dealt) == distinct


def test_parts_against_the_sizes_of_single_weights(rank: Glm53Config) -> None:
    """Against megabytes of single kernels' weights."""
    heads, scale = 64, step_bytes.FP8
    absorbed = heads * 192 * 512 * 2 + heads * 256 * 512 * 2
    assert absorbed / 1e6 == pytest.approx(12.6 + 16.8, rel=0.01)
    whole = (16.1 + 33.6 + 100.7) * 1e6 * scale + absorbed
    assert step_bytes.attention_weights(rank) == pytest.approx(whole, rel=0.01)
    assert step_bytes.expert_weights(rank) == pytest.approx(37.75e6, rel=0.01)
    dense = step_bytes.attention_weights(rank, step_bytes.BF16)
    assert dense == pytest.approx(2 * (16.1 + 33.6 + 100.7) * 1e6 + absorbed, rel=0.01)


def test_the_cache_of_a_token_and_the_loaded_weights(rank: Glm53Config) -> None:
    assert step_bytes.kv_bytes_per_token(rank) == 53940
    assert step_bytes.kv_bytes_per_token(rank, kv="bf16") == 92628
    assert step_bytes.kv_bytes_per_token(rank, mtp=True) == 53940 + 656 + 132
    assert step_bytes.loaded_weights(rank) / 2**30 == pytest.approx(106.66, rel=0.02)
    assert step_bytes.loaded_weights(rank, mtp=True) > step_bytes.loaded_weights(rank)
    assert [step_bytes.kv_kind(name) for name in ("fp8_e4m3", "bfloat16", "auto")] == [
        "fp8",
        "bf16",
        "bf16",
    ]


def test_a_long_context_costs_index_keys_and_no_latents(rank: Glm53Config) -> None:
    short, long = (
        step_bytes.decode_step(rank, batch=1, context=context) for context in (4096, 131072)
    )
    assert long["latents"] == short["latents"] == 78 * 2048 * 656
    assert long["index keys"] == 32 * short["index keys"] == 21 * 131072 * 132


# --- the trace -----------------------------------------------------------------------------------


def event(name: str, ts: float, dur: float = 1.0, cat: str = "kernel") -> dict[str, Any]:
    return {"name": name, "ts": ts, "dur": dur, "cat": cat, "ph": "X"}


def write_trace(path: Path, events: list[dict[str, Any]]) -> Path:
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return path


def test_the_kernel_table_of_a_trace(tmp_path: Path) -> None:
    events = [
        event("gemm", 5, 30.0),
        event("memset", 1, 0.5, "gpu_memset"),
        event("aten::add", 0, 99.0, "cpu_op"),
        event("gemm", 100, 50.0),
        event("copy", 90, 2.0, "gpu_memcpy"),
        {"name": "process", "ph": "M", "ts": 0},
    ]
    found = read_events(write_trace(tmp_path / "a.json.gz", events))
    assert [each["name"] for each in found] == ["memset", "gemm", "copy", "gemm"]
    table = kernels(found, steps=2)
    # Idle: 1.5 to 5, 35 to 90 and 92 to 100.
    assert [(k.name, k.calls, k.us, k.exposed_us) for k in table] == [
        ("gemm", 1.0, 40.0, 40.0),
        ("(idle)", 1.5, pytest.approx(66.5 / 3), pytest.approx(66.5 / 3)),
        ("copy", 0.5, 2.0, 2.0),
        ("memset", 0.5, 0.5, 0.5),
    ]
    assert table[0].total_us == 40.0


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 50)), min_size=1, max_size=30).map(
        sorted
    )
)
def test_exposed_times_and_gaps_are_the_time_that_passes(launches: list[tuple[int, int]]) -> None:
    events = [event("any", ts, dur) for ts, dur in launches]
    found = exposed(events)
    passed = max(ts + dur for ts, dur in launches) - launches[0][0]
    assert sum(map(sum, found)) == passed
    worked = {t for ts, dur in launches for t in range(ts, ts + dur)}
    assert sum(own for own, _ in found) == len(worked)


def test_what_runs_beside_another_costs_what_it_adds() -> None:
    """A kernel that started early and waited; one on a second stream, wholly covered."""
    events = [event("gemm", 0, 10), event("waits", 4, 8), event("covered", 5, 3)]
    assert exposed(events) == [(10, 0), (2, 0), (0, 0)]


def test_a_long_name_is_cut_and_its_kernels_stay_one() -> None:
    (kernel,) = kernels([event("k" * 3000, 0, 2.0), event("k" * 3000, 2, 4.0)], steps=1)
    assert (len(kernel.name), kernel.calls, kernel.us) == (160, 2.0, 3.0)


@pytest.mark.parametrize("cut", [0, 1, 3, 5])
def test_launches_of_a_step_from_a_trace_that_starts_and_ends_anywhere(cut: int) -> None:
    step = ["sample", "gemm", "gemm", "norm", "gemm", "draft", "draft"]
    names = (step * 9)[cut : len(step) * 8 + cut // 2]
    events = [event(name, ts) for ts, name in enumerate(names)]
    assert launches_a_step(events, 8) == 7


def test_a_trace_without_a_name_that_occurs_once_a_step() -> None:
    events = [event("gemm", ts) for ts in range(40)]
    assert launches_a_step(events, 8) == 5


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b"{}"), gzip.compress(b"[1]")],
    ids=["no gzip", "no trace", "a list"],  # gzip writes the time into its header
)
def test_what_is_no_trace_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json.gz"
    path.write_bytes(content)
    with pytest.raises(Glm53Error, match="no profiler trace"):
        read_events(path)


def test_a_trace_that_saw_no_gpu_is_one_line(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "a.json.gz", [event("aten::add", 0, cat="cpu_op")])
    with pytest.raises(Glm53Error, match="saw nothing run on a GPU"):
        read_events(path)
