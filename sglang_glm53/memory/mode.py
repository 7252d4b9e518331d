"""How the cache's pages lie, and why: page-major (each page in one piece) or layer-major.

GLM53_POOL=page or layer asks for one; without it the pool takes DEFAULT, and layer-major where the
server's options keep a page-major pool from being read. What is asked for and cannot be is refused
before a weight is loaded (features.py has a row for each obstacle). No torch, no sglang: the
question is asked of the server's arguments.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_glm53.errors import Glm53Error

VARIABLE = "GLM53_POOL"
PAGE, LAYER = "page", "layer"

# Where nothing is asked for. Layer-major until page-major was measured on a GPU.
DEFAULT = LAYER

# What reads a page-major FP8 cache: FlashMLA's decode kernel steps from page to page by a stride of
# its own. The others step from token to token by one stride.
PAGE_MAJOR_BACKENDS = ("flashmla_kv", "flashmla_auto")

Read = Callable[[str], Any]


@dataclass(frozen=True)
class Obstacle:
    """What keeps a page-major pool from being used: where `holds(read, device)` is true.

    `read` gives a server argument by its ServerArgs field's name, None where it is not set.
    """

    name: str
    holds: Callable[[Read, str], bool]
    reason: str
    advice: str


@dataclass(frozen=True)
class Mode:
    """How a pool's pages lie. `reason` is why; empty where nobody need be told."""

    pages: str
    reason: str = ""

    @property
    def page_major(self) -> bool:
        return self.pages == PAGE

    def __str__(self) -> str:
        return f"{self.pages}-major" + (f" ({self.reason})" if self.reason else "")


def wish() -> str:
    """The value of GLM53_POOL: "", "page" or "layer".

    Raises:
        Glm53Error: it has a value that means nothing.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", PAGE, LAYER):
        raise Glm53Error(f'{VARIABLE} is "{value}"; it can be "{PAGE}" or "{LAYER}"')
    return value


def _with_kernels(device: str) -> bool:
    return device != "cpu" and os.environ.get("GLM53_ATTENTION") != "torch"


def _other_dtype(read: Read, device: str) -> bool:
    return _with_kernels(device) and read("kv_cache_dtype") != "fp8_e4m3"


def _other_backend(read: Read, device: str) -> bool:
    named = (read("dsa_prefill_backend"), read("dsa_decode_backend"))
    return _with_kernels(device) and any(name not in (None, *PAGE_MAJOR_BACKENDS) for name in named)


def _pipeline(read: Read, device: str) -> bool:
    return (read("pp_size") or 1) > 1


# Context parallelism, disaggregation, HiSparse and other cache layouts are no rows: with them
# SGLang's own class and pool serve.
OBSTACLES: tuple[Obstacle, ...] = (
    Obstacle(
        "a cache in bfloat16",
        _other_dtype,
        "its kernels (flashmla_sparse, fa3) read the cache by one stride from token to token",
        "use --kv-cache-dtype fp8_e4m3",
    ),
    Obstacle(
        "another sparse attention kernel than flashmla_kv",
        _other_backend,
        "it reads the cache by one stride from token to token",
        "leave out --dsa-prefill-backend and --dsa-decode-backend",
    ),
    Obstacle(
        "pipeline parallelism",
        _pipeline,
        "a stage's pages hold its own layers, and SGLang counts the draft's layer on every stage",
        "use --pp-size 1",
    ),
)


def obstacle(read: Read, device: str) -> Obstacle | None:
    """The first thing that keeps a page-major pool from being used."""
    return next((row for row in OBSTACLES if row.holds(read, device)), None)


def choose(read: Read, device: str) -> Mode:
    """How the pool of this server lies.

    Raises:
        Glm53Error: GLM53_POOL=page, and an option keeps it from being used.
    """
    asked = wish()
    if (asked or DEFAULT) == LAYER:
        return Mode(LAYER)
    hindrance = obstacle(read, device)
    if hindrance is None:
        return Mode(PAGE)
    if asked:
        raise Glm53Error(
            f"{VARIABLE}={PAGE} with {hindrance.name}: {hindrance.reason}; {hindrance.advice}"
        )
    return Mode(LAYER, f"{hindrance.name}: {hindrance.reason}")


def draft_layers_in_page(read: Read) -> int:
    """Layers of the MTP draft that lie in the target's pages: 1, or 0 where the draft keeps a
    cache of its own (another cache dtype, another kind of draft) or there is none."""
    if read("speculative_algorithm") not in ("EAGLE", "NEXTN") or read("enable_multi_layer_eagle"):
        return 0
    return int(read("speculative_draft_kv_cache_dtype") in (None, read("kv_cache_dtype")))


def published() -> Read:
    """The arguments of the server that this process belongs to; of none, nothing is set."""
    from sglang.srt.runtime_context import get_context

    try:
        return get_context().resolved_server_args_dict().get
    except ValueError:
        return lambda name: None
