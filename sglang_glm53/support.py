"""Which class serves: ours, SGLang's own where we stand down, or none where options are refused.

The table is in features.py; the one question is `decide`, asked where SGLang resolves the model
class: by then the server's arguments are known, which they are not when plugins are loaded.

* runs: our classes serve.
* stands down: one line with the reason, and SGLang's own class serves in our place. GLM53_STRICT=1
  makes it an error, unless it was asked for (GLM53_SERVE=stock). Without a GPU SGLang's own class
  cannot run, so there it is refused. GLM53_SERVE=ours lets our classes serve where the only reason
  is that nobody tested them with the option.
* refused: one line, and the process ends: neither class would give what was asked for.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_glm53 import __version__
from sglang_glm53.compat.versions import sglang_version
from sglang_glm53.errors import Glm53Error
from sglang_glm53.features import (
    FEATURES,
    REFUSED,
    RUNS,
    SPECULATION,
    STANDS_DOWN,
    STOCK_ON_PURPOSE,
    UNTESTED,
    Feature,
    Situation,
    serve_wish,
)

logger = logging.getLogger(__name__)

ARCHITECTURES = ("GlmMoeDsaForCausalLM", "GlmMoeDsaForCausalLMNextN")
_STOCK_MODULE = "sglang.srt.models.glm4_moe"


@dataclass(frozen=True)
class Decision:
    """What serves, and the rows of the table that led to it (none where ours runs)."""

    kind: str
    rows: tuple[Feature, ...] = ()


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


def evaluate(situation: Situation, rows: Sequence[Feature] = FEATURES) -> Decision:
    """Hold the table, or some rows of it, against a situation.

    Raises:
        Glm53Error: a refused feature was asked for; or one that stands down without a GPU or
            under GLM53_STRICT=1. What GLM53_SERVE=stock asks for on purpose is no error there.
    """
    hits = tuple(row for row in rows if row.asked(situation))
    for row in hits:
        if row.decision == REFUSED:
            raise Glm53Error(f"{row.name}: {row.reason}; {row.advice}")
    down = tuple(row for row in hits if row.decision == STANDS_DOWN)
    if serve_wish() == "ours":
        down = tuple(row for row in down if row.reason != UNTESTED)
    if not down:
        return Decision(RUNS)
    row = down[0]
    if situation.device == "cpu":
        raise Glm53Error(
            f"{row.name}: {row.reason}, and SGLang's own class cannot run without a GPU; "
            f"{row.advice}"
        )
    if os.environ.get("GLM53_STRICT") == "1" and row.name != STOCK_ON_PURPOSE:
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
    if decision.kind == RUNS and _decision is None and _first_rank():
        name = model_config.hf_config.architectures[0]
        logger.info("sglang-glm53 %s serves %s", __version__, name)
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
    situation = situation_from(lambda name: getattr(view, name, None), model_config)
    if evaluate(situation).kind == RUNS:
        check_ranks(situation, Glm53Config.from_hf(model_config.hf_config))


def check_ranks(situation: Situation, config: Any) -> None:
    """Refuse ranks that do not divide what they share. On a CPU SGLang would pad the config
    instead, and the checkpoint no longer fit it.

    Raises:
        Glm53Error: one line that names the size.
    """
    ranks = situation.get("tp_size", 1)
    groups = situation.get("attn_dp_size", 1)
    if situation.get("enable_dp_attention"):
        groups = max(groups, situation.get("dp_size", 1))
    expert_groups = situation.get("ep_size", 1)
    experts = config.n_routed_experts + situation.get("ep_num_redundant_experts", 0)
    if experts % expert_groups:
        raise Glm53Error(
            f"--ep-size {expert_groups}: {experts} experts (redundant ones included) cannot be "
            "shared evenly; use a number of groups that divides them"
        )
    for name, share in (
        ("num_attention_heads", max(1, ranks // groups)),
        ("intermediate_size", situation.get("moe_dense_tp_size", ranks)),
        ("moe_intermediate_size", max(1, ranks // expert_groups)),
    ):
        size = getattr(config, name)
        if size % share:
            raise Glm53Error(
                f"--tp-size {ranks}: {name} is {size}, which {share} ranks cannot share evenly; "
                "use a number of ranks that divides it"
            )


def check_speculation(server_args: Any) -> None:
    """Hold the rows of the table that SGLang would otherwise forestall with an error of its own.

    Raises:
        Glm53Error: see `evaluate`.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import model_config_of

    view = resolving_view(server_args)
    situation = situation_from(lambda name: getattr(view, name, None), model_config_of(server_args))
    evaluate(situation, [row for row in FEATURES if row.name in SPECULATION])


def situation_of(model_config: Any) -> Situation | None:
    """The situation of this process, or None before SGLang published its arguments."""
    from sglang.srt.runtime_context import get_context

    try:
        args = get_context().resolved_server_args_dict()
        # A weight update writes where its weights came from; the options are still the first ones.
        started_with = get_context().server_args.resolved_dict()
    except ValueError:
        return None
    args = {**args, **{name: started_with.get(name) for name in ("model_path", "load_format")}}
    return situation_from(args.get, model_config)


def situation_from(read: Callable[[str], Any], model_config: Any) -> Situation:
    """The situation of a server, from its arguments (read by name) and SGLang's ModelConfig."""
    import torch

    device = str(read("device") or "cuda").split(":")[0]
    rocm = torch.version.hip is not None
    nvidia = device == "cuda" and not rocm and torch.cuda.is_available()
    return Situation(
        read=read,
        config=model_config.hf_config,
        device=device,
        dtype=str(model_config.dtype),
        capability=torch.cuda.get_device_capability() if nvidia else None,
        rocm=rocm,
        sglang=sglang_version(),
    )


def _first_rank() -> bool:
    """Whether this process builds the model as the first rank (one line for the whole server)."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_rank() == 0
