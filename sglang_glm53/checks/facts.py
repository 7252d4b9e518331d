"""What is known about a deployment: each fact from one function, gathered when it is first read.

A fact that is None is not known, and rules that read it are skipped. `Facts(name=value)` says a
fact instead of gathering it; `Facts.only(name=value)` says some and leaves all others unknown, so
that nothing of this machine is read: for tests, and for recipes of other machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_glm53.checks import files, headers, machine, packages, precision
from sglang_glm53.config import Glm53Config
from sglang_glm53.errors import Glm53Error
from sglang_glm53.ledger.hardware import Hardware

# What to say where a rule is skipped because a fact is unknown.
UNKNOWN: dict[str, str] = {
    "versions": "no Python packages to look at",
    "pins": "SGLang is not installed",
    "torch_cuda": "torch is not installed, or not built for CUDA",
    "driver_cuda": "no NVIDIA driver",
    "modules": "no Python packages to look at",
    "entry_points": "no Python packages to look at",
    "contested": "no Python packages to look at",
    "catalog_problems": "SGLang is not installed",
    "environment": "no environment variables to look at",
    "device": "no GPU in this machine",
    "capability": "no NVIDIA GPU",
    "gpu_name": "no NVIDIA GPU",
    "gpus": "no GPU in this machine",
    "gpu_memory_bytes": "no GPU in this machine",
    "hardware": "no data file for this GPU",
    "host_memory_bytes": "the machine does not say how much memory it has",
    "checkpoint": "no checkpoint folder (--model DIR)",
    "raw_config": "no config.json (--model DIR)",
    "config": "no config.json that can be served (--model DIR)",
    "config_problem": "no config.json (--model DIR)",
    "quantization": "the weights' precision is not known: the checkpoint is not on this machine",
    "precision": "the weights' precision is not known, or none that the ledger counts (BF16, FP8)",
    "tokenizer_config": "no tokenizer_config.json (--model DIR)",
    "generation_config": "no generation_config.json (--model DIR)",
    "chat_template": "no chat template beside the checkpoint (--model DIR)",
    "headers": "no safetensors files (DIR)",
    "argv": "no server arguments (-- SGLANG ARGS)",
    "args": "no server arguments that SGLang resolves (-- SGLANG ARGS)",
    "given": "no server arguments (-- SGLANG ARGS)",
    "args_problem": "no server arguments (-- SGLANG ARGS)",
    "flag_names": "SGLang's parser was not asked",
    "variables": "SGLang's parser was not asked",
    "machine_named": "nobody was asked about a machine",
}

# Facts that only a caller can say.
SAID = (
    *("checkpoint", "argv", "args", "given", "args_problem", "flag_names", "variables"),
    "machine_named",
)


class Facts:
    """What is known. Every attribute is None where it is not known.

    Said by the caller (not gathered):
        checkpoint: folder of the checkpoint (config.json, tokenizer files, safetensors).
        argv: SGLang's arguments as the user wrote them, without the program's name.
        args: SGLang's server arguments, resolved, as attributes by the names of ServerArgs fields;
            one that is absent reads as None.
        given: names of the ServerArgs fields that the user set himself.
        args_problem: the line with which SGLang's own parser or resolution refused `argv`; ""
            where it did not.
        flag_names: every option that the installed SGLang's parser has, as "--page-size".
        variables: every environment variable that the installed SGLang declares.
        hardware: the ledger's row of the GPU that is served on.
        machine_named: whether the machine to judge for was named, and is not this one.
    """

    def __init__(self, **said: Any) -> None:
        strange = sorted(set(said) - set(UNKNOWN))
        if strange:
            raise TypeError(f"no such fact: {', '.join(strange)}")
        for name in SAID:
            said.setdefault(name, None)
        self.__dict__.update(said)  # a cached_property looks here first
        if isinstance(said["args"], Mapping):
            self.args = SimpleNamespace(**said["args"])

    checkpoint: Path | None
    argv: tuple[str, ...] | None
    args: Any
    given: frozenset[str] | None
    args_problem: str | None
    flag_names: frozenset[str] | None
    variables: frozenset[str] | None
    machine_named: bool | None

    @classmethod
    def only(cls, **said: Any) -> Facts:
        """Facts of which nothing is known but what is said (and what follows from it)."""
        known = {"config", "config_problem", "quantization", "precision"}
        follows = known if "raw_config" in said else set()
        return cls(**{name: None for name in UNKNOWN if name not in follows} | said)

    # --- the Python environment --------------------------------------------------------------

    @cached_property
    def versions(self) -> dict[str, str | None] | None:
        """Installed versions by distribution name, as written in the pins; None: not installed."""
        return packages.versions()

    @cached_property
    def pins(self) -> dict[str, str] | None:
        """What the installed SGLang asks for, by distribution name: {"torch": "==2.14.1"}."""
        return packages.pins()

    @cached_property
    def modules(self) -> frozenset[str] | None:
        """Which of packages.MODULES can be imported (none is)."""
        return packages.modules()

    @cached_property
    def entry_points(self) -> tuple[packages.Plugin, ...] | None:
        """Plugins of SGLang's entry point groups that are installed."""
        return packages.plugins()

    @cached_property
    def contested(self) -> tuple[str, ...] | None:
        """Other plugins that name a symbol that this package changes, one line each."""
        return packages.contested()

    @cached_property
    def catalog_problems(self) -> tuple[str, ...] | None:
        """Rows of patches/catalog.yaml that the installed SGLang does not meet, one line each."""
        return packages.catalog_problems()

    @cached_property
    def torch_cuda(self) -> str | None:
        """CUDA version that torch is built for, "13.0"."""
        return packages.torch_cuda()

    @cached_property
    def environment(self) -> Mapping[str, str] | None:
        """Environment variables of the server."""
        return machine.environment()

    # --- the machine ---------------------------------------------------------------------------

    @cached_property
    def driver_cuda(self) -> str | None:
        """Newest CUDA version that the NVIDIA driver runs, "13.0"."""
        return machine.driver_cuda()

    @cached_property
    def device(self) -> str | None:
        """ "cuda" (NVIDIA), "rocm", or "cpu"."""
        return machine.device()

    @cached_property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of the NVIDIA GPU, (9, 0) on Hopper."""
        return machine.capability()

    @cached_property
    def gpu_name(self) -> str | None:
        """The driver's name of the GPU, "NVIDIA H200"."""
        return machine.gpu_name()

    @cached_property
    def gpus(self) -> int | None:
        """GPUs of this machine."""
        return machine.gpus()

    @cached_property
    def gpu_memory_bytes(self) -> int | None:
        """Memory of one GPU, bytes."""
        return machine.gpu_memory_bytes()

    @cached_property
    def hardware(self) -> Hardware | None:
        """The ledger's row of this machine's GPU."""
        return machine.hardware()

    @cached_property
    def host_memory_bytes(self) -> int | None:
        """Memory of the host, bytes."""
        return machine.host_memory_bytes()

    # --- the checkpoint --------------------------------------------------------------------------

    @cached_property
    def raw_config(self) -> dict[str, Any] | None:
        """config.json, with what --json-model-override-args puts in."""
        return files.read_json(self.checkpoint, "config.json")

    @cached_property
    def config_problem(self) -> str | None:
        """Why `raw_config` cannot be served, in one line; "" where it can."""
        if self.raw_config is None:
            return None
        try:
            Glm53Config.from_hf(self.raw_config)
        except Glm53Error as error:
            return str(error)
        return ""

    @cached_property
    def config(self) -> Glm53Config | None:
        """The same, read; None where it cannot be served."""
        return Glm53Config.from_hf(self.raw_config) if self.config_problem == "" else None

    @cached_property
    def quantization(self) -> str | None:
        """Quantization method of the weights, "bf16" where there is none; None: not known."""
        if self.raw_config is None:
            return None
        return precision.of(self.raw_config, self.arg("quantization"))

    @cached_property
    def precision(self) -> str | None:
        """The same where the ledger counts such weights: "bf16" or "fp8"."""
        return self.quantization if self.quantization in precision.COUNTED else None

    @cached_property
    def tokenizer_config(self) -> dict[str, Any] | None:
        """tokenizer_config.json."""
        return files.read_json(self.checkpoint, "tokenizer_config.json")

    @cached_property
    def generation_config(self) -> dict[str, Any] | None:
        """generation_config.json."""
        return files.read_json(self.checkpoint, "generation_config.json")

    @cached_property
    def chat_template(self) -> str | None:
        """The chat template that lies beside the weights."""
        return files.chat_template(self.checkpoint)

    @cached_property
    def headers(self) -> headers.Headers | None:
        """Names, dtypes and shapes of the checkpoint's tensors."""
        return headers.scan(self.checkpoint)

    # --- reading arguments -----------------------------------------------------------------------

    def arg(self, name: str, default: Any = None) -> Any:
        """A server argument, or `default` where it is absent or None."""
        value = getattr(self.args, name, None)
        return default if value is None else value

    def unknown(self, names: Sequence[str]) -> str | None:
        """Why a rule that reads these facts is skipped; None where all are known."""
        return next((UNKNOWN[name] for name in names if getattr(self, name) is None), None)
