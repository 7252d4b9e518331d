"""Which features of SGLang run on our path, which stand down to SGLang's class, which are refused.

One table, `FEATURES`, and one question, `decide`, asked where SGLang resolves the model class: by
then the server's arguments are known, which they are not when plugins are loaded.

* runs: our classes serve.
* stands down: one line with the reason, and SGLang's own class serves in our place. GLM53_STRICT=1
  makes it an error. Without a GPU SGLang's own class cannot run, so there it is refused.
* refused: one line, and the process ends: neither class would give what was asked for.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_glm53.errors import Glm53Error

logger = logging.getLogger(__name__)

ARCHITECTURES = ("GlmMoeDsaForCausalLM", "GlmMoeDsaForCausalLMNextN")
_STOCK_MODULE = "sglang.srt.models.glm4_moe"

RUNS, STANDS_DOWN, REFUSED = "runs", "stands down", "refused"


@dataclass(frozen=True)
class Situation:
    """What the table's predicates read.

    Attributes:
        read: the effective value of a server argument, by the name of its ServerArgs field.
        config: the checkpoint's config (`hf_config`).
        device: "cpu" or "cuda".
        dtype: served dtype, e.g. "torch.bfloat16".
    """

    read: Callable[[str], Any]
    config: Any
    device: str
    dtype: str

    def get(self, name: str, default: Any = None) -> Any:
        value = self.read(name)
        return default if value is None else value


@dataclass(frozen=True)
class Feature:
    """One row: where `asked(situation)` is true, `decision` holds for `reason`; `advice` is what
    the user can do."""

    name: str
    asked: Callable[[Situation], bool]
    decision: str
    reason: str
    advice: str


@dataclass(frozen=True)
class Decision:
    """What serves, and the rows of the table that led to it (none where ours runs)."""

    kind: str
    rows: tuple[Feature, ...] = ()


FEATURES: tuple[Feature, ...] = (
    Feature(
        "gpu",
        lambda s: s.device != "cpu" and os.environ.get("GLM53_ATTENTION") != "torch",
        STANDS_DOWN,
        "this release has no GPU kernels; its attention is plain torch",
        "serve on a CPU, or set GLM53_ATTENTION=torch to run the torch attention on the GPU",
    ),
)

_decision: Decision | None = None


def is_ours(hf_config: Any) -> bool:
    """Whether a checkpoint's config names an architecture that this package serves."""
    return any(name in ARCHITECTURES for name in getattr(hf_config, "architectures", None) or ())


def serves_our_model() -> bool:
    """Whether our classes serve in this process, as decided when the model class was resolved."""
    return _decision is not None and _decision.kind == RUNS


def current() -> Decision | None:
    """The decision of this process; None before a model class was resolved."""
    return _decision


def stock_class(name: str) -> type:
    """SGLang's own class of that name."""
    return getattr(importlib.import_module(_STOCK_MODULE), name)


def evaluate(situation: Situation) -> Decision:
    """Hold the table against a situation.

    Raises:
        Glm53Error: a refused feature was asked for; or one that stands down under GLM53_STRICT=1
            or without a GPU.
    """
    hits = tuple(row for row in FEATURES if row.asked(situation))
    for row in hits:
        if row.decision == REFUSED:
            raise Glm53Error(f"{row.name}: {row.reason}; {row.advice}")
    down = tuple(row for row in hits if row.decision == STANDS_DOWN)
    if not down:
        return Decision(RUNS)
    row = down[0]
    if situation.device == "cpu":
        raise Glm53Error(
            f"{row.name}: {row.reason}, and SGLang's own class cannot run without a GPU; "
            f"{row.advice}"
        )
    if os.environ.get("GLM53_STRICT") == "1":
        raise Glm53Error(f"{row.name}: {row.reason} (GLM53_STRICT=1); {row.advice}")
    return Decision(STANDS_DOWN, down)


def decide(model_config: Any) -> Decision:
    """Decide for the server of this process; logs once where it stands down.

    Args:
        model_config: SGLang's ModelConfig of the model whose class is being resolved.

    Raises:
        Glm53Error: see `evaluate`.
    """
    global _decision
    situation = situation_of(model_config)
    if situation is None:
        return Decision(RUNS)  # arguments are still being resolved: asked again later
    decision = evaluate(situation)
    if decision.kind == STANDS_DOWN and _decision is None and _first_rank():
        for row in decision.rows:
            logger.warning(
                "sglang-glm53 stands down (%s): %s; %s. SGLang's own class serves.",
                row.name,
                row.reason,
                row.advice,
            )
    _decision = decision
    return decision


def check_arguments(server_args: Any) -> None:
    """Check the checkpoint's config and the table while SGLang resolves its arguments.

    Does nothing for another architecture.

    Raises:
        Glm53Error: a config that gives garbage, or see `evaluate`.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import model_config_of

    from sglang_glm53.config import Glm53Config

    model_config = model_config_of(server_args)
    if not is_ours(model_config.hf_config):
        return
    view = resolving_view(server_args)
    decision = evaluate(_situation(lambda name: getattr(view, name, None), model_config))
    if decision.kind == RUNS:
        Glm53Config.from_hf(model_config.hf_config)


def situation_of(model_config: Any) -> Situation | None:
    """The situation of this process, or None before SGLang published its arguments."""
    from sglang.srt.runtime_context import get_context

    try:
        args = get_context().resolved_server_args_dict()
    except ValueError:
        return None
    return _situation(args.get, model_config)


def _situation(read: Callable[[str], Any], model_config: Any) -> Situation:
    return Situation(
        read=read,
        config=model_config.hf_config,
        device=str(read("device") or "cuda").split(":")[0],
        dtype=str(model_config.dtype),
    )


def _first_rank() -> bool:
    """Whether this process builds the model as the first rank (one line for the whole server)."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_rank() == 0
