"""Decode steps and prefills of one side, on a ModelRunner, without a server.

SGLang's own sglang.benchmark.one_batch builds the runner, allocates for the batch, and runs its
prefill and its decode steps, with the CUDA graphs that a server captures. Timed here: many steps
one by one with the GPU idle before each, as one_batch does; and many enqueued one behind another,
as SGLang's scheduler does with its overlap.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_glm53.bench.child import progress
from sglang_glm53.bench.served import check_side
from sglang_glm53.errors import Glm53Error

WARM_STEPS = 8
PIPELINED_STEPS = 24
TRACED_STEPS = 2
SPARE_STEPS = 8  # for the trace's warm-up and the eager step
PAGE = 64


def steps_in_all(timed: int) -> int:
    """Tokens that a decode measurement adds to each request."""
    return WARM_STEPS + timed + 2 * PIPELINED_STEPS + TRACED_STEPS + SPARE_STEPS


def decode(job: dict[str, Any], result: Any) -> None:
    """Job `decode`: `arguments` for SGLang, `side`, `batches`, `context`, `steps`, `chunk`,
    `vocab`, `experts`, `traces`: a folder for the profiler's traces.

    Raises:
        Glm53Error: the other side's class serves, a batch does not fit, or no graph was replayed.
    """
    bench = Bench(job, result)
    rows: list[dict[str, Any]] = []
    for batch in job["batches"]:
        bench.check_fits(batch, job["context"] + steps_in_all(job["steps"]))
    for batch in job["batches"]:
        tokens, state = bench.prefill(batch, job["context"], job["chunk"])
        for _ in range(WARM_STEPS):
            tokens = bench.decode(tokens, state)
        raw = []
        for _ in range(job["steps"]):
            bench.synchronize()
            start = time.perf_counter()
            tokens = bench.decode(tokens, state)
            bench.synchronize()
            raw.append(round((time.perf_counter() - start) * 1e3, 4))
        graph = bench.graph
        if bench.cuda and not graph:
            raise Glm53Error(f"batch {batch}: SGLang replayed no CUDA graph for its decode step")
        pipelined = []
        for _ in range(2):
            start = time.perf_counter()
            for _ in range(PIPELINED_STEPS):
                tokens = bench.decode(tokens, state)
            bench.synchronize()
            pipelined.append((time.perf_counter() - start) * 1e3 / PIPELINED_STEPS)
        row = {
            "batch": batch,
            "context": job["context"],
            "ms": statistics.median(raw),
            "raw_ms": raw,
            "pipelined_ms": min(pipelined),
            "graph": graph,
        }
        rows.append(row)
        result.save(rows=rows)
        progress(f"decode, batch {batch}: {row['ms']:.2f} ms a step")
        if bench.cuda:
            row.update(bench.trace(job["traces"], f"decode-{batch}", tokens, state))
            result.save(rows=rows)
    result.save(memory=bench.memory())
    for row in rows:  # last: nothing that goes wrong here can take a time away
        row["distinct_experts"] = bench.distinct_experts(row["batch"], job)
        result.save(rows=rows)


def prefill(job: dict[str, Any], result: Any) -> None:
    """Job `prefill`: `arguments`, `side`, `tokens`, `chunk`, `repeats`, `vocab`, `graph`: what
    the row is called.

    Raises:
        Glm53Error: the other side's class serves, or the prompt does not fit.
    """
    bench = Bench(job, result)
    bench.check_fits(1, job["tokens"] + 1)
    bench.prefill(1, job["tokens"], job["chunk"])  # warms up
    raw = []
    for _ in range(job["repeats"]):
        requests = bench.requests(1, job["tokens"])
        bench.synchronize()
        start = time.perf_counter()
        bench.extend(requests, job["chunk"])
        bench.synchronize()
        raw.append(round((time.perf_counter() - start) * 1e3, 4))
        progress(f"prefill of {job['tokens']}, graph {job['graph']}: {raw[-1]:.1f} ms")
        row = {
            "batch": 1,
            "context": job["tokens"],
            "ms": statistics.median(raw),
            "raw_ms": raw,
            "graph": bench.graph,
        }
        result.save(rows=[row], memory=bench.memory())


class Bench:
    """A loaded ModelRunner of one side, driven through SGLang's one_batch."""

    def __init__(self, job: dict[str, Any], result: Any) -> None:
        from sglang.srt.plugins import load_plugins

        load_plugins()  # one_batch does not; without it SGLang's class would serve for both
        import torch
        from sglang.benchmark import one_batch
        from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
        from sglang.srt.server_args import PortArgs, prepare_server_args
        from sglang.srt.utils import configure_logger

        self._torch, self._one_batch = torch, one_batch
        args = prepare_server_args(list(job["arguments"]))
        args.resolve_once()
        one_batch._set_envs_and_config(args)
        ports = PortArgs.init_new(args)
        ranks = SpawnRanks(world_rank=spawn_world_rank(args, tp_rank=0, pp_rank=0), gpu_id=0)
        publish(args, role="scheduler", ranks=ranks)
        one_batch._init_process_global_configs()
        configure_logger(args, prefix=" TP0")
        self._bench, _ = one_batch.load_model(args, ports, 0, 0)
        self.runner = self._bench.torch_runner
        self.cuda = str(self.runner.device).startswith("cuda")
        self.capacity = int(self.runner.max_total_num_tokens)
        self._random = random.Random(0)
        self._vocab = job["vocab"]
        self.graph = False
        self._watch_graph()
        served = {
            "model": _name(self.runner.model),
            "pool": _name(self.runner.token_to_kv_pool),
            "backend": _name(self.runner.attn_backend),
        }
        check_side(job["side"], served["model"])
        result.save(
            served=served,
            kv_tokens=self.capacity,
            load_seconds=time.time() - job["spawned"],
            memory=self.memory(),
        )
        progress(f"loaded after {time.time() - job['spawned']:.0f} s, {served['model']} serves")

    def check_fits(self, batch: int, tokens: int) -> None:
        need = batch * -(-tokens // PAGE) * PAGE
        if need > self.capacity:
            raise Glm53Error(
                f"batch {batch} x {tokens} tokens is more than the cache's {self.capacity}; "
                "give a smaller --batch or --context, or a larger --mem-fraction-static"
            )

    def requests(self, batch: int, tokens: int) -> list[Any]:
        """`batch` requests with distinct random prompts, in an emptied cache."""
        self._bench.clear()
        ids = [
            [self._random.randrange(1, self._vocab) for _ in range(tokens)] for _ in range(batch)
        ]
        return self._one_batch.prepare_synthetic_inputs_for_latency_test(batch, tokens, ids)

    def extend(self, requests: list[Any], chunk: int) -> tuple[Any, Any]:
        """Prefill in passes of at most `chunk` tokens; returns the next tokens and the batch."""
        total = len(requests[0].origin_input_ids)
        part = max(PAGE, chunk // len(requests) // PAGE * PAGE)
        done = 0
        while done < total:
            end = min(total, done + part)
            for request in requests:
                request.prefix_len, request.extend_end = done, end
            tokens, _, batch = self._bench.extend(requests)
            done = end
        return tokens, batch

    def prefill(self, batch: int, tokens: int, chunk: int) -> tuple[Any, Any]:
        return self.extend(self.requests(batch, tokens), chunk)

    def decode(self, tokens: Any, batch: Any) -> Any:
        return self._bench.decode(tokens, batch)[0]

    def synchronize(self) -> None:
        if self.cuda:
            self._torch.cuda.synchronize()

    def memory(self) -> dict[str, float]:
        """GiB: of the device in use by all; reserved and used at most by this process's torch."""
        if not self.cuda:
            return {}
        cuda = self._torch.cuda
        free, total = cuda.mem_get_info()
        return {
            "used_gib": (total - free) / 2**30,
            "reserved_gib": cuda.max_memory_reserved() / 2**30,
            "allocated_gib": cuda.max_memory_allocated() / 2**30,
        }

    def trace(self, folder: str, name: str, tokens: Any, batch: Any) -> dict[str, Any]:
        """Launches of a step, and its kernels, from a profile of a few steps."""
        from sglang_glm53.bench.trace import as_rows, kernels, read_events

        path = Path(folder) / f"{name}.trace.json.gz"
        try:
            activity = self._torch.profiler.ProfilerActivity
            for attempt in range(2):  # the first start of the profiler takes its time
                with self._torch.profiler.profile(
                    activities=[activity.CPU, activity.CUDA]
                ) as profiler:
                    for _ in range(TRACED_STEPS if attempt else 1):
                        tokens = self.decode(tokens, batch)
                    self.synchronize()
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
            events = read_events(path)
            table = kernels(events, TRACED_STEPS)
        except Exception as error:  # a profiler that this machine does not allow costs no times
            return {"launches": None, "trace_error": " ".join(f"{error!r}".split())}
        return {
            "launches": len(events) / TRACED_STEPS,
            "kernels": as_rows(table),
        }

    def distinct_experts(self, batch: int, job: dict[str, Any]) -> list[int] | str:
        """Distinct experts that each MoE layer's rows are sent to, in one decode step without its
        graph; or why that could not be counted."""
        counts: list[int] = []

        def count(module: Any, inputs: Any, output: Any) -> None:
            ids = output.topk_ids
            routed = ids[(ids >= 0) & (ids < job["experts"])]  # no padding, no shared expert
            counts.append(int(routed.unique().numel()))

        try:
            # The routing does not depend on the context.
            tokens, state = self.prefill(batch, min(job["context"], 2 * PAGE), job["chunk"])
            graphs = self.runner.decode_cuda_graph_runner
            hooks = [
                module.register_forward_hook(count)
                for module in self.runner.model.modules()
                if type(module).__name__ == "TopK"
            ]
            self.runner.decode_cuda_graph_runner = None
            try:
                self.decode(tokens, state)
                self.synchronize()
            finally:
                self.runner.decode_cuda_graph_runner = graphs
                for hook in hooks:
                    hook.remove()
        except Exception as error:
            return " ".join(f"{error!r}".split())
        return counts

    def _watch_graph(self) -> None:
        """Remember whether SGLang's last forward pass replayed a graph."""
        forward: Callable[..., Any] = self.runner.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            self.graph = bool(output.can_run_graph)
            return output

        self.runner.forward = watched


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
