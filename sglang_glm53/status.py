"""What serves: a block that each scheduler adds to its state, and reading it back over HTTP."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from sglang_glm53 import __version__, catalog, support
from sglang_glm53.compat import sglang_version
from sglang_glm53.errors import Glm53Error, degraded
from sglang_glm53.watch import hooks as watch

KEY = "glm53"
_SYMBOL = (
    "sglang.srt.managers.scheduler_components.internal_state:"
    "SchedulerInternalStateController._add_topology"
)


def publish() -> None:
    """Add our block to the state that /server_info shows under internal_states[i]["glm53"]."""

    def factory(original: Callable[..., None]) -> Callable[..., None]:
        def _add_topology(self: Any, state: dict[str, Any]) -> None:
            original(self, state)
            state[KEY] = server_block(self.scheduler)

        return _add_topology

    catalog.wrap(_SYMBOL, factory)


def server_block(scheduler: Any) -> dict[str, Any]:
    """The block of one scheduler process.

    Returns:
        package, sglang: versions. serving: "ours", "stock" or "other model". model, draft, pool,
        draft_pool, backend, draft_backend: qualified class names, or None. layout: the pool's
        layout. pages: how its pages lie, in words. attention: the kernels of SGLang's DSA backend
        by their option names, or None. device, dtype: served. stood_down: [{feature, reason,
        advice}]. error: what GLM53_ON_ERROR=stock let pass, or None.
        alarms: the watchdog's by kind, those that came (watch/); None where it is off.
    """
    runner = scheduler.tp_worker.model_runner
    draft = _draft_runner(scheduler)
    decision = support.current()
    if not support.is_ours(runner.model_config.hf_config):
        serving = "other model"
    elif type(runner.model).__module__.startswith("sglang_glm53."):
        serving = "ours"
    else:
        serving = "stock"
    pool = runner.token_to_kv_pool
    return {
        "package": __version__,
        "sglang": sglang_version(),
        "serving": serving,
        "model": _name(runner.model),
        "draft": _name(getattr(draft, "model", None)),
        "pool": _name(pool),
        "layout": getattr(pool, "layout", None),
        "pages": getattr(pool, "pages_in_words", None),
        "draft_pool": _name(getattr(draft, "token_to_kv_pool", None)),
        "backend": _name(runner.attn_backend),
        "draft_backend": _name(getattr(draft, "attn_backend", None)),
        "attention": _attention(runner.attn_backend),
        "device": str(runner.device),
        "dtype": str(runner.model_config.dtype),
        "stood_down": [
            {"feature": row.name, "reason": row.reason, "advice": row.advice}
            for row in (decision.rows if decision is not None else ())
        ],
        "error": degraded(),
        "alarms": watch.block(),
    }


def read_status(url: str, *, timeout: float = 10.0) -> dict[str, Any]:
    """Our block of a running server's first scheduler, with its accept length where it has one.

    Args:
        url: the server's address, "http://127.0.0.1:30000".
        timeout: seconds.

    Raises:
        Glm53Error: no server answers there, it is no SGLang server, or it runs without us.
    """
    base = url.rstrip("/")
    try:
        with urllib.request.urlopen(f"{base}/server_info", timeout=timeout) as response:
            info = json.load(response)
    except urllib.error.HTTPError as error:
        raise Glm53Error(
            f"{base}/server_info answers with HTTP {error.code}; check that an SGLang server "
            "listens there, is ready and asks for no API key"
        ) from error
    except json.JSONDecodeError as error:
        raise Glm53Error(f"{base}/server_info is no JSON: is this an SGLang server?") from error
    # ValueError: an address that is none; HTTPException: something answers, but not in HTTP.
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = " ".join(str(getattr(error, "reason", error)).split()) or type(error).__name__
        raise Glm53Error(
            f"no SGLang server answers at {base}: {reason}; check the address and that it is ready"
        ) from error
    states = info.get("internal_states", [{}]) if isinstance(info, dict) else None
    if not isinstance(states, list) or not all(isinstance(state, dict) for state in states[:1]):
        raise Glm53Error(
            f"{base}/server_info is not SGLang's; check that an SGLang server listens there"
        )
    states = states or [{}]
    block = states[0].get(KEY)
    if not isinstance(block, dict):
        raise Glm53Error(
            f"the SGLang server at {base} runs without sglang-glm53; install it into the server's "
            f"environment and start the server again"
        )
    return {**block, "accept_length": states[0].get("avg_spec_accept_length")}


def _draft_runner(scheduler: Any) -> Any:
    """The draft's ModelRunner, or None without speculative decoding."""
    draft = getattr(scheduler, "draft_worker", None)
    for attribute in ("draft_worker", "draft_runner"):
        draft = getattr(draft, attribute, draft)
    return getattr(draft, "model_runner", draft)


def _attention(backend: Any) -> str | None:
    """What `--dsa-prefill-backend` and `--dsa-decode-backend` came to."""
    prefill = getattr(backend, "dsa_prefill_impl", None)
    decode = getattr(backend, "dsa_decode_impl", None)
    return None if prefill is None else f"{prefill} for prefill, {decode} for decode"


def _name(value: Any) -> str | None:
    if value is None:
        return None
    return f"{type(value).__module__}.{type(value).__qualname__}"
