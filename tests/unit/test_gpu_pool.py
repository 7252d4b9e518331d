"""The GPU stage for the pool: what it asks, what it writes, and that its rules can fail."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu import pool, pool_kernels  # noqa: E402
from gpu.compare import Check  # noqa: E402


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if not check.passed]


def copies(pages: str, backend: str, speed: float, cpu: float, same: bool = True) -> list[dict]:
    row = {"pages": pages, "layout": "layer_first", "backend": backend, "copies_a_page": 1}
    row |= {"gb_s": speed, "cpu_us_a_page": cpu, "same": same}
    return [{**row, "way": way} for way in ("to the host", "to the device")]


def kernels(**changed: Any) -> dict[str, Any]:
    record = {
        "same": {"FlashMLA, 1 rows": True},
        "microseconds": {"FlashMLA, 1 rows": {"layer": 17.7, "page": 17.5}},
        "copies": copies("page-major", "direct", 53, 2) + copies("layer-major", "direct", 4, 900),
        "pinned_gb_s": 55.0,
    }
    return {**record, **changed}


def test_good_kernels_pass() -> None:
    checks = pool.judge_kernels(kernels())
    assert not failed(checks) and len(checks) == 12


@pytest.mark.parametrize(
    ("changed", "fails"),
    [
        ({"same": {"FlashMLA, 1 rows": False}}, "the same from both"),
        ({"pinned_gb_s": 70.0}, "near pinned"),
        (
            {"copies": copies("page-major", "d", 53, 2) + copies("layer-major", "k", 54, 900)},
            "no slower",
        ),
        (
            {"copies": copies("page-major", "d", 53, 2) + copies("layer-major", "k", 4, 9)},
            "CPU time",
        ),
        (
            {"copies": copies("page-major", "d", 53, 2, same=False)
             + copies("layer-major", "d", 4, 900)},
            "page-major, layer_first",
        ),
        ({"copies": copies("page-major", "direct", 53, 2)}, "both measured"),
    ],
)  # fmt: skip
def test_bad_kernels_fail(changed: dict[str, Any], fails: str) -> None:
    names = failed(pool.judge_kernels(kernels(**changed)))
    assert names and any(fails in name for name in names)


def test_a_layout_that_sglang_does_not_copy_is_told() -> None:
    odd = {"layout": "page_first", "backend": "kernel", "failed": "no"}
    record = kernels()
    assert not failed(pool.judge_kernels({**record, "copies": [*record["copies"], odd]}))


def test_the_step_may_cost_two_percent() -> None:
    layer = {"1": 18.9, "16": 38.1}
    good = pool.judge_slice({"layer": layer, "page": {"1": 19.2, "16": 38.0}})
    assert not failed(good) and len(good) == 2
    assert failed(pool.judge_slice({"layer": layer, "page": {"1": 19.4, "16": 38.0}}))
    assert failed(pool.judge_slice({"layer": layer, "page": {"1": 18.9}}))
    assert failed(pool.judge_slice({}))


def test_steps_are_read_from_a_report(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[2] / "docs" / "benchmarks" / "slice.json"
    steps = pool.steps_of(shipped)
    assert set(steps) >= {"1", "8", "16"} and 10 < steps["1"] < 30
    assert pool.steps_of(tmp_path / "none.json") == {}


class Engine:
    """Answers from a cache that holds one prompt, and a host that keeps all."""

    def __init__(self, host: bool = True, empties: bool = True) -> None:
        self.host, self.seen, self.resident = host, set(), None
        self.empties, self.left = empties, set()
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = self

    async def async_generate(self, *, rid: str, **request: Any) -> dict[str, Any]:
        while request["sampling_params"]["max_new_tokens"] and rid not in self.left:
            await asyncio.sleep(0.001)
        return self.generate(**{**request, "sampling_params": {"max_new_tokens": 2}})

    def abort_request(self, *, rid: str) -> None:
        self.left.add(rid)

    def flush_cache(self) -> SimpleNamespace:
        self.resident = None
        return SimpleNamespace(success=self.empties)

    def generate(self, *, input_ids: list[int], sampling_params: dict, **_: Any) -> dict[str, Any]:
        name, new = tuple(input_ids), sampling_params["max_new_tokens"]
        where = {}
        if name == self.resident:
            where = {"device": len(name) - 1}
        elif name in self.seen and self.host:
            where = {"device": 64, "host": len(name) - 65}
        self.seen.add(name)
        self.resident = name
        tokens = [(sum(name) + i) % 7 for i in range(new)]
        meta = {
            "output_token_logprobs": [[-0.1, t, None] for t in tokens],
            "output_top_logprobs": [[[-0.1, t, None], [-2.0, 9, None]] for t in tokens],
            "cached_tokens": sum(where.values()),
            "cached_tokens_details": where or None,
            "spec_verify_ct": new // 3,
        }
        return {"output_ids": tokens, "meta_info": meta}


@pytest.fixture(autouse=True)
def no_idling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "IDLE_S", 0.0)


def records(**engine: Any) -> dict[str, Any]:
    prompts = [[seed] * pool.LENGTH for seed in range(3)]
    done = {run.name: pool.fill_and_come_back(Engine(**engine), prompts) for run in pool.RUNS}
    for record in done.values():  # a fake's times are nothing
        record["first_token_s"] = {"resident": [0.1] * 3, "loaded": [0.2] * 3}
    return done


def test_a_cache_that_comes_back_passes() -> None:
    checks = pool.judge_hicache(records())
    assert not failed(checks) and len(checks) == 4 * len(pool.RUNS) + 1


def test_a_cache_that_is_lost_fails() -> None:
    names = failed(pool.judge_hicache(records(host=False)))
    assert "hicache page-kernel: comes from the host" in names
    assert not any("stock" in name for name in names)


def test_pages_that_a_leaving_client_keeps_fail() -> None:
    names = failed(pool.judge_hicache(records(empties=False)))
    assert names == [
        f"hicache {run.name}: clients that leave" for run in pool.RUNS if run.name != "stock"
    ]


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        (lambda loaded: loaded["logprobs"].__setitem__(5, -0.2), "log-probabilities"),
        (lambda loaded: loaded["tokens"].__setitem__(5, 99), "log-probabilities"),
        (lambda loaded: loaded.__setitem__("verifies", 40), "accept length"),
    ],
)
def test_what_changed_fails(change: Any, fails: str) -> None:
    done = records()
    change(done["page-direct"]["loaded"])
    assert failed(pool.judge_hicache(done)) == [f"hicache page-direct: {fails}"]


def test_the_time_to_the_first_token_is_held_against_stock() -> None:
    done = records()
    done["stock"]["first_token_s"]["loaded"] = [0.1] * 3
    assert failed(pool.judge_hicache(done)) == ["hicache: time to the first token"]
    done["page-direct"]["first_token_s"]["loaded"] = [0.1] * 3
    assert not failed(pool.judge_hicache(done))


def test_runs_name_real_options() -> None:
    """Every engine option is a field of SGLang's arguments, and ours would serve a page-major pool
    with them."""
    import msgspec
    from sglang.srt.server_args import ServerArgs

    from sglang_glm53.memory import mode

    fields = {field.name for field in msgspec.structs.fields(ServerArgs)}
    for run in pool.RUNS:
        assert {**pool.ENGINE, **run.options}.keys() <= fields
    assert mode.obstacle({**pool.ENGINE}.get, "cuda") is None
    assert mode.draft_layers_in_page(pool.ENGINE.get) == 1


def test_kernels_run_on_small_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole script on a CPU: both pools take the same bytes, pages go out and come back."""
    monkeypatch.setenv("GLM53_POOL", "")
    command = [str(tmp_path), *("--pages", "12", "--copied", "5", "--layers", "5")]
    monkeypatch.setattr(sys, "argv", ["pool_kernels", *command, "--device", "cpu"])
    pool_kernels.main()
    record = json.loads((tmp_path / "pool-kernels.json").read_text())
    assert len(record["same"]) == 8 and all(record["same"].values())
    assert len(record["copies"]) == 4 and all(row["same"] for row in record["copies"])
    lost = SimpleNamespace(**{"ranges": ((0, 0, 1),) * 3})
    assert pool_kernels.copies_a_page(lost, "to the device") == 3
