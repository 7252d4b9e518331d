"""PyTorch's caching allocator for CUDA, as far as it decides how much memory a process holds.

A tensor lies in a block of a segment that the driver gave. Segments are larger than what they were
made for, and one that still holds a single tensor is not given back by `empty_cache`: the free
memory that SGLang sizes its cache by is what segments take, not what tensors do. Rules and sizes
are those of c10/cuda/CUDACachingAllocator.cpp with its default settings (no expandable segments).
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

KIB, MIB = 1 << 10, 1 << 20
SMALLEST = 512  # a block's size is a multiple of it
SMALL = 1 * MIB  # up to here a tensor lies in a small segment
SMALL_SEGMENT = 2 * MIB
MIDDLE = 10 * MIB  # up to here a large tensor shares a segment of LARGE_SEGMENT
LARGE_SEGMENT = 20 * MIB
ROUNDED = 2 * MIB  # beyond it a segment is the tensor, rounded up to this


@dataclass(eq=False)
class Block:
    """A piece of a segment; neighbours are linked so that free ones can be joined."""

    size: int
    small: bool
    number: int
    free: bool = True
    before: Block | None = None
    after: Block | None = None

    @property
    def is_segment(self) -> bool:
        return self.before is None and self.after is None


@dataclass
class Allocator:
    """The memory of one process on one GPU, one stream.

    Attributes:
        held: bytes of all segments, which is what the GPU's free memory lacks.
        used: bytes of the tensors, rounded to blocks.
    """

    held: int = 0
    used: int = 0
    _made: int = 0
    _free: dict[bool, list[tuple[int, int, Block]]] = field(
        default_factory=lambda: {True: [], False: []}
    )

    def take(self, size: int) -> Block:
        """A block for a tensor of `size` bytes: the smallest free one, or a new segment."""
        size = max(SMALLEST, -(-size // SMALLEST) * SMALLEST)
        small = size <= SMALL
        free = self._free[small]
        entry = next((entry for entry in free if entry[0] >= size), None)
        if entry is None:
            block = self._segment(size, small)
        else:
            free.remove(entry)
            block = entry[2]
        rest = block.size - size
        if rest >= SMALLEST if small else rest > SMALL:
            self._made += 1
            piece = Block(rest, small, self._made, before=block, after=block.after)
            if block.after is not None:
                block.after.before = piece
            block.size, block.after = size, piece
            self._offer(piece)
        block.free = False
        self.used += block.size
        return block

    def give(self, block: Block) -> None:
        """Free a tensor's block; it is joined with free neighbours and kept."""
        self.used -= block.size
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._free[block.small].remove((other.size, other.number, other))
                block = _joined(block, other)
        self._offer(block)

    def empty_cache(self) -> None:
        """Give segments without any tensor back to the driver."""
        for small, free in self._free.items():
            self.held -= sum(block.size for _, _, block in free if block.is_segment)
            self._free[small] = [entry for entry in free if not entry[2].is_segment]

    def _segment(self, size: int, small: bool) -> Block:
        if small:
            size = SMALL_SEGMENT
        else:
            size = LARGE_SEGMENT if size < MIDDLE else -(-size // ROUNDED) * ROUNDED
        self.held += size
        self._made += 1
        return Block(size, small, self._made)

    def _offer(self, block: Block) -> None:
        insort(self._free[block.small], (block.size, block.number, block))


def _joined(block: Block, other: Block) -> Block:
    """`block` with its free neighbour in it."""
    block.size += other.size
    if other is block.before:
        block.before = other.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = other.after
        if block.after is not None:
            block.after.before = block
    return block
