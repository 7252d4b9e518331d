"""All measurements in one call, on a CPU or a GPU, of our classes and of SGLang's own.

    python -m regression.measure --out DIR                         from tests/, on a CPU
    python -m regression.measure --out DIR --stock --kv bfloat16 fp8_e4m3 --prompts 200
    python -m regression.measure --out DIR --faults                the table of planted faults

Results go into DIR/regression.json as they come, the servers' logs beside it. The exit code is 1 if
a check of ours failed; SGLang's own class is measured beside it and judged by nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from . import settings
from .report import Job, Report, table
from .run import Args, run_job

KV = ("bfloat16", "fp8_e4m3")


def jobs_of(options: argparse.Namespace, on_gpu: bool, gpus: int) -> list[Job]:
    """The servers to start, those of one side and cache next to each other."""
    dense = settings.DENSE_ON_GPU if on_gpu else settings.DENSE
    known = {s.name: s for s in settings.SETTINGS} | {"dense": dense}
    if options.settings:
        chosen = [known[name] for name in options.settings]
    elif options.faults:
        chosen = [settings.PLAIN, settings.WITH_MTP]
    elif on_gpu:
        chosen = [settings.WITH_MTP, settings.PLAIN, dense]
        chosen += [settings.TP_2, settings.DP_2_MTP] if gpus > 1 else []
    else:
        chosen = list(known.values())
    kinds: list[str | None] = list(options.kv or (KV if on_gpu else (None,)))
    sides = ["ours", "stock"] if options.stock else ["ours"]
    return [Job(setting, side, kv) for kv in kinds for setting in chosen for side in sides]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m regression.measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--checkpoint", type=Path, help="the shipped miniature by default")
    parser.add_argument("--fp8", action="store_true", help="its FP8 form, written into OUT")
    parser.add_argument("--prompts", type=int, help="a context; 60 on a CPU, 200 on a GPU")
    parser.add_argument("--kv", nargs="+", choices=KV, help="cache; on a GPU both by default")
    parser.add_argument("--stock", action="store_true", help="SGLang's own class too")
    parser.add_argument("--faults", action="store_true", help="planted faults alone; on a CPU")
    names = [setting.name for setting in settings.SETTINGS]
    parser.add_argument("--settings", nargs="+", choices=names, help="servers, by name")
    parser.add_argument("--at-once", type=int, default=0, help="servers at a time")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and what failed; the exit code."""
    import torch

    options = parse(argv)
    on_gpu = torch.cuda.is_available()
    if options.faults and on_gpu:
        sys.exit("regression.measure: the planted faults break the CPU's path; leave out --faults")
    if not on_gpu and (options.stock or "fp8_e4m3" in (options.kv or ())):
        sys.exit("regression.measure: without a GPU there is neither --stock nor an FP8 cache")
    if options.prompts is not None and options.prompts < 1:
        sys.exit(f"regression.measure: --prompts {options.prompts}: ask at least one")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"regression.measure: --out {options.out}: {error.strerror}; name another folder")
    checkpoint = options.checkpoint
    if checkpoint is None:
        from sglang_glm53.miniature import derive_fp8, folder

        checkpoint = derive_fp8(options.out / "fp8") if options.fp8 else folder()
    for name in ("config.json", "tokenizer.json"):
        if not (checkpoint / name).is_file():
            sys.exit(
                f"regression.measure: {checkpoint} has no {name}; name a checkpoint of GLM-5.3"
            )
    prompts = options.prompts or (200 if on_gpu else 60)
    given = {"prompts": prompts, "checkpoint": checkpoint.name, "device": device(on_gpu)}
    report = Report(options.out / "regression.json", given)
    args = Args(options.out, checkpoint, on_gpu, options.faults, settings.amount(prompts))
    jobs = jobs_of(options, on_gpu, torch.cuda.device_count())
    at_once = options.at_once or (5 if on_gpu else 1)
    # Processes: the answers are large, and reading them takes turns in one.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=min(at_once, len(jobs)), mp_context=context) as pool:
        for done in as_completed([pool.submit(run_job, job, args) for job in jobs]):
            report.keep(done.result())
    order = {job.name: place for place, job in enumerate(jobs)}
    print(table(sorted(report.found, key=lambda found: order[found.job.name])))
    failed = report.failures()
    print("\n".join(failed) or "all checks passed")
    return 1 if failed else 0


def device(on_gpu: bool) -> str:
    import torch

    return torch.cuda.get_device_name() if on_gpu else "cpu"


if __name__ == "__main__":
    sys.exit(main())
