"""Starts SGLang's Engine with a topology, has it generate, and reads what its ranks recorded."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_glm53.config import Glm53Config
from sglang_glm53.errors import PREFIX, Glm53Error
from sglang_glm53.ledger.topology import Topology
from sglang_glm53.trace.compare import Compared, compare, outside, read
from sglang_glm53.trace.hooks import FOLDER

PLUGIN = "glm53_trace"


@dataclass(frozen=True)
class Traced:
    """What ran beside what was counted, the messages between passes, and which class served."""

    passes: list[Compared]
    outside: dict[str, int]
    served: str

    @property
    def equal(self) -> bool:
        return all(each.equal for each in self.passes)


@dataclass(frozen=True)
class Run:
    """What to run.

    Attributes:
        model: a checkpoint's folder. prompts: lengths of the prompts, tokens.
        new_tokens: generated for each. steps, tokens: of MTP, 0 without.
        device: `cpu` or `cuda`. arguments: more of SGLang's.
    """

    model: Path
    topology: Topology
    prompts: tuple[int, ...]
    new_tokens: int
    steps: int
    tokens: int
    device: str
    arguments: tuple[str, ...] = ()


def trace(
    run: Run, config: Glm53Config, *, timeout: float, keep: Path | None, say: Callable[[str], None]
) -> Traced:
    """Run it and compare.

    Args:
        timeout: seconds for all of it. keep: a folder for recordings and log, else they go.

    Raises:
        Glm53Error: the Engine did not start or end well; the line says what, or names the log.
    """
    with _folder(keep) as folder:
        served = _generate(run, config, folder, timeout, say)
        ranks = read(folder)
        if len(ranks) != run.topology.tp:
            raise Glm53Error(
                f"{len(ranks)} processes ran passes, but tp is {run.topology.tp}; see {folder}"
            )
        found = compare(ranks, config, run.topology)
        return Traced(found, dict(outside(ranks)), served)


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="glm53-trace-") as name:
            yield Path(name)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Glm53Error(f"cannot make {keep}: {error.strerror or error}") from None
    if any(keep.iterdir()):
        raise Glm53Error(f"{keep} is not empty; name another folder")
    yield keep


def server_arguments(run: Run) -> list[str]:
    """SGLang's arguments for it. Graphs are off: what is replayed cannot be seen."""
    topology = run.topology
    arguments = [
        *("--model-path", str(run.model), "--device", run.device, "--skip-tokenizer-init"),
        *("--tp-size", str(topology.tp), "--ep-size", str(topology.ep), "--disable-radix-cache"),
    ]
    if topology.dp > 1:
        arguments += ["--dp-size", str(topology.dp), "--enable-dp-attention"]
    if topology.a2a != "none":
        arguments += ["--moe-a2a-backend", topology.a2a]
    if topology.dense_tp:
        arguments += ["--moe-dense-tp-size", "1"]
    if topology.dp_lm_head:
        arguments += ["--enable-dp-lm-head"]
    if topology.weights == "fp32":
        arguments += ["--dtype", "float32"]
    if run.device == "cuda":
        arguments += [
            *(
                "--cuda-graph-backend-decode",
                "disabled",
                "--cuda-graph-backend-prefill",
                "disabled",
            ),
            *("--kv-cache-dtype", "fp8_e4m3" if topology.kv == "fp8" else "bfloat16"),
        ]
    if run.tokens:
        arguments += [
            *("--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "1"),
            *("--speculative-num-steps", str(run.steps)),
            *("--speculative-num-draft-tokens", str(run.tokens)),
        ]
    return [*arguments, *run.arguments]


def _generate(
    run: Run, config: Glm53Config, folder: Path, timeout: float, say: Callable[[str], None]
) -> str:
    """The Engine in a process group of its own; returns the class that served."""
    rng = random.Random(0)
    limit = min(config.vocab_size, 1000)
    job = {
        "arguments": server_arguments(run),
        "prompts": [[rng.randrange(1, limit) for _ in range(length)] for length in run.prompts],
        "new_tokens": run.new_tokens,
        "result": str(folder / "result.json"),
    }
    (folder / "job.json").write_text(json.dumps(job, indent=1))
    log = folder / "log.txt"
    command = [sys.executable, "-m", "sglang_glm53.trace.child", str(folder / "job.json")]
    say(f"SGLang with {' '.join(job['arguments'])}")
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env=_environment(folder),
            start_new_session=True,
        )
        try:
            code: int | None = child.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # whatever is left of it
            child.wait()
    if code != 0:
        raise Glm53Error(_why(log, code, timeout))
    served = json.loads((folder / "result.json").read_text())["served"]
    return str(served.get("model", "unknown"))


def _environment(folder: Path) -> dict[str, str]:
    """This process's, with the recorder as an installed plugin of SGLang."""
    place = folder / "plugin"
    metadata = place / f"{PLUGIN}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\n{PLUGIN} = sglang_glm53.trace.hooks:install\n"
    )
    package = Path(__file__).resolve().parents[2]  # a checkout need not be installed
    paths = [str(place), str(package), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, FOLDER: str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    allowed = environment.get("SGLANG_PLUGINS")
    if allowed:
        environment["SGLANG_PLUGINS"] = f"{allowed},{PLUGIN}"
    return environment


def _why(log: Path, code: int | None, timeout: float) -> str:
    """One line for an Engine that did not end well: our own, or the log's last."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ours = [line.removeprefix(PREFIX) for line in lines if line.startswith(PREFIX)]
    if ours:
        return ours[0]
    if code is None:
        return f"SGLang was not done after {timeout:g} s; see --timeout, and --keep for the log"
    last: Sequence[str] = [line for line in lines if "Error" in line] or lines[-1:]
    text = last[-1][:300] if last else "no output"
    return f"SGLang ended with {code}: {text} (--keep DIR keeps its log)"
