"""One buffer that holds the pages of a page-major pool, and the views that a layer is read by.

The target's pool is built first and divides each page for itself and the MTP draft; the draft's
pool, built next in the same process over the same page numbers, takes its part of the same arena.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from sglang_glm53.memory.page import PageLayout


@dataclass(eq=False)
class Arena:
    """Pages in one piece each.

    Attributes:
        layout: what lies where in a page.
        memory: uint8, [pages * page_bytes]; page p begins at p * page_bytes.
    """

    layout: PageLayout
    memory: torch.Tensor

    @classmethod
    def allocate(cls, layout: PageLayout, pages: int, device: str | torch.device) -> Arena:
        """An arena of zeros."""
        nbytes = pages * layout.page_bytes
        return cls(layout, torch.zeros(nbytes, dtype=torch.uint8, device=device))

    @property
    def count(self) -> int:
        """Pages, the one for padding included."""
        return self.memory.numel() // self.layout.page_bytes

    @property
    def pages(self) -> torch.Tensor:
        """The arena as [pages, page_bytes] uint8."""
        return self.memory.view(self.count, self.layout.page_bytes)

    def latents(self, layer: int, dtype: torch.dtype) -> torch.Tensor:
        """A layer's latents as [pages, page_size, 1, values] of `dtype`; a view that steps by a
        page from page to page and by a row from token to token."""
        start = self.layout.latent_offset(layer)
        piece = self.pages[:, start : start + self.layout.latent_bytes].view(dtype)
        return piece.unflatten(1, (self.layout.page_size, 1, -1))

    def index_keys(self, layer: int, dtype: torch.dtype) -> torch.Tensor:
        """A layer's index keys and scales as [pages, values] of `dtype`; a view. [0, values] of a
        layer without index keys."""
        if not self.layout.holds_index(layer):
            return self.pages[:0, : self.layout.index.page_bytes].view(dtype)
        start = self.layout.index_offset(layer)
        return self.pages[:, start : start + self.layout.index.page_bytes].view(dtype)


@dataclass(frozen=True)
class Share:
    """The layers of an arena that one pool reads and writes: `count` from `first` on."""

    arena: Arena
    first: int
    count: int

    @property
    def is_draft(self) -> bool:
        return self.first >= self.arena.layout.target_layers

    @property
    def whole(self) -> bool:
        """Whether nothing else lies in the pages."""
        return self.count == self.arena.layout.layers

    @property
    def nbytes(self) -> int:
        """Bytes of the arena that count as this pool's: the draft's pieces, or all others."""
        layout = self.arena.layout
        page = layout.page_bytes - layout.draft_bytes
        return self.arena.count * (layout.draft_bytes if self.is_draft else page)


# The arena whose draft part nobody has taken yet.
_offered: weakref.ref[Arena] | None = None


def offer(arena: Arena) -> None:
    """Let the next pool of this process take the draft's part of `arena`."""
    global _offered
    _offered = weakref.ref(arena) if arena.layout.draft_layers else None


def claim(own: PageLayout, pages: int, device: str | torch.device) -> Share | None:
    """The draft's part of the arena that was offered, if a pool with pages like `own` fits it.

    Args:
        own: the page that the pool would have by itself.
        pages: how many it needs.
    """
    global _offered
    arena = _offered() if _offered is not None else None
    if arena is None:
        return None
    layout = arena.layout
    fits = (
        own.row_bytes == layout.row_bytes
        and own.index == layout.index
        and own.layers == layout.draft_layers
        and all(own.full)
        and pages == arena.count
        and torch.device(device).type == arena.memory.device.type
    )
    if not fits:
        return None
    _offered = None
    return Share(arena, layout.target_layers, layout.draft_layers)
