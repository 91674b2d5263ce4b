"""Support coding "bucketed": only buckets of eight slots that are not empty are stored.

Per tile of 4,096 slots: 64 bits, in two 32-bit words, say which groups of 64 slots have a nonzero
(group ``g``: bit ``g % 32`` of word ``g // 32``). The tile's bytes come in one stream: for each of
these groups, in order, a byte whose bit ``b`` says that bucket ``b`` of the group has a nonzero;
then for each of these buckets, in order, the byte of its eight slots, bit ``s`` for slot ``s``.

Eight slots are eight consecutive tokens of one neuron, and these tend to fire together: real
activations take fewer bits this way than if every element fired independently of its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from bitsparse.backends.optional import numba_jit, tl, triton_jit
from bitsparse.codings import tables, words
from bitsparse.codings.base import Mask
from bitsparse.layout import BUCKET, GROUP, TILE, Geometry, table_words

GROUPS = TILE // GROUP
BUCKETS = GROUP // BUCKET


class BucketedSupport:
    """See the module's description."""

    name = "bucketed"
    cost = 2

    def applies(self, geometry: Geometry, nnz: int) -> bool:
        return True

    def nbytes(self, geometry: Geometry, bucket_bytes: int) -> int:
        return 8 * geometry.tiles + bucket_bytes + 4 * table_words(geometry.tiles)

    def encode(self, mask_words: Tensor, geometry: Geometry) -> Mask:
        bits = mask_words.new_zeros(geometry.tiles * TILE)
        bits[: mask_words.numel() * 32] = words.unpack(mask_words, mask_words.numel() * 32)
        bits = bits.view(geometry.tiles, GROUPS, BUCKETS, BUCKET).to(torch.int64)
        weights = 1 << torch.arange(BUCKET, device=bits.device)
        bucket = (bits * weights).sum(3)
        group = ((bucket != 0) * weights).sum(2)
        streams = [torch.cat([g[g != 0], b[b != 0]]) for g, b in zip(group, bucket, strict=True)]
        counts = torch.tensor([len(s) for s in streams], dtype=torch.int64, device=bits.device)
        return Mask(
            self,
            words.pack((group != 0).view(-1)),
            torch.cat(streams).to(torch.uint8),
            tables.build(counts),
        )

    def decode(self, mask: Mask, geometry: Geometry) -> Tensor:
        assert mask.words is not None and mask.buckets is not None
        assert mask.bucket_offsets is not None
        starts = tables.read(mask.bucket_offsets, geometry.tiles)
        nonempty = words.unpack(mask.words, geometry.tiles * GROUPS).view(-1, GROUPS) != 0
        is_group = _is_group(starts, nonempty)
        group = mask.buckets.new_zeros(nonempty.numel())
        group[nonempty.view(-1)] = mask.buckets[is_group]
        stored = words.unpack_bytes(group).view(-1) != 0
        bucket = mask.buckets.new_zeros(stored.numel())
        bucket[stored] = mask.buckets[~is_group]
        shifts = torch.arange(0, 32, BUCKET, device=bucket.device, dtype=torch.int32)
        flat = (bucket.view(-1, 4).to(torch.int32) << shifts).sum(1, dtype=torch.int32)
        return flat[: geometry.mask_words]

    def check(self, mask: Mask, geometry: Geometry, step: int) -> Iterator[Tensor]:
        tiles = geometry.tiles
        words.check_buffer("groups", mask.words, torch.int32, 2 * tiles)
        buckets = mask.buckets
        if buckets is None or buckets.dtype != torch.uint8 or buckets.dim() != 1:
            raise ValueError("buckets: got another tensor, allowed: torch.uint8, one dimension")
        limit = GROUPS * (1 + BUCKETS)
        starts = tables.check("bucket_offsets", mask.bucket_offsets, tiles, limit, buckets.numel())
        assert mask.words is not None
        if int(torch.count_nonzero(buckets)) != buckets.numel():
            raise ValueError("buckets: got an empty group or bucket, which is not stored")
        for first in range(0, tiles, step):
            here = starts[first : first + step + 1]
            counts = here[1:] - here[:-1]
            part = Mask(
                self,
                mask.words[2 * first : 2 * (first + step)],
                buckets[int(here[0]) : int(here[-1])],
                tables.build(counts),
            )
            self._check_bytes(part, counts)
            yield self.decode(part, Geometry(1, counts.numel() * TILE, 1))

    def _check_bytes(self, mask: Mask, counts: Tensor) -> None:
        """Raise ValueError unless the tiles' bytes are as many as their groups say."""
        assert mask.words is not None and mask.buckets is not None
        nonempty = words.unpack(mask.words, counts.numel() * GROUPS).view(-1, GROUPS)
        groups = nonempty.sum(1)
        if bool((groups > counts).any()):
            raise ValueError("groups: got a tile that has more groups than bytes")
        # Bits set in the group bytes: that many bucket bytes must follow.
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        set_bits = words.count_bits(mask.buckets) * _is_group(starts, nonempty)
        tile_of = torch.repeat_interleave(counts)
        buckets = torch.zeros_like(counts).index_add_(0, tile_of, set_bits)
        if not torch.equal(groups + buckets, counts):
            raise ValueError("buckets: got a tile whose bytes are not as many as its groups say")

    @property
    def cpu_words(self) -> object:
        return _cpu_words

    @property
    def triton_words(self) -> object:
        return _words


def _is_group(starts: Tensor, nonempty: Tensor) -> Tensor:
    """Which bytes of the stream are those of groups: bool ``[bytes]``."""
    tile_of = torch.repeat_interleave(starts[1:] - starts[:-1])
    position = torch.arange(tile_of.numel(), device=starts.device)
    return position - starts[tile_of] < nonempty.sum(1)[tile_of]


CODING = BucketedSupport()

# --------------------------------------------------------------------------------- CPU


@numba_jit
def _cpu_words(mask, buckets, offset, tile, rows, cols, height, words):
    groups = np.uint64(mask[2 * tile]) | np.uint64(mask[2 * tile + 1]) << np.uint64(32)
    nonempty = 0
    rest = groups
    while rest != np.uint64(0):
        rest &= rest - np.uint64(1)
        nonempty += 1
    at_group, at_bucket = offset, offset + nonempty
    for g in range(GROUPS):
        low, high = np.uint32(0), np.uint32(0)
        if (groups >> np.uint64(g)) & np.uint64(1) != np.uint64(0):
            group = buckets[at_group]
            at_group += 1
            for b in range(4):
                if group & np.uint8(1 << b):
                    low |= np.uint32(buckets[at_bucket]) << np.uint32(8 * b)
                    at_bucket += 1
            for b in range(4):
                if group & np.uint8(16 << b):
                    high |= np.uint32(buckets[at_bucket]) << np.uint32(8 * b)
                    at_bucket += 1
        words[2 * g] = low
        words[2 * g + 1] = high


@numba_jit
def cpu_store(first, last, words, offsets, mask, buckets):
    """Write groups and bytes of the tiles ``[first, last)`` from their flat words."""
    tile_words = np.zeros(TILE // 32, np.uint32)
    for tile in range(first, last):
        begin = tile * (TILE // 32)
        stored = words[begin : min(begin + TILE // 32, words.size)]
        tile_words[: stored.size] = stored
        tile_words[stored.size :] = np.uint32(0)
        groups, nonempty = np.uint64(0), 0
        for g in range(GROUPS):
            if (tile_words[2 * g] | tile_words[2 * g + 1]) != np.uint32(0):
                groups |= np.uint64(1) << np.uint64(g)
                nonempty += 1
        mask[2 * tile] = np.uint32(groups & np.uint64(0xFFFFFFFF))
        mask[2 * tile + 1] = np.uint32(groups >> np.uint64(32))
        at_group, at_bucket = offsets[tile], offsets[tile] + nonempty
        for g in range(GROUPS):
            both = np.uint64(tile_words[2 * g])
            both |= np.uint64(tile_words[2 * g + 1]) << np.uint64(32)
            if both == np.uint64(0):
                continue
            group = 0
            for b in range(BUCKETS):
                byte = np.uint8((both >> np.uint64(8 * b)) & np.uint64(0xFF))
                if byte != np.uint8(0):
                    group |= 1 << b
                    buckets[at_bucket] = byte
                    at_bucket += 1
            buckets[at_group] = np.uint8(group)
            at_group += 1


# ------------------------------------------------------------------------------ Triton


@triton_jit
def _group_ranks(groups_low, groups_high):
    """For each of 64 groups: whether it is nonempty, its rank; and how many are nonempty."""
    g = tl.arange(0, 64)
    word = tl.where(g < 32, groups_low, groups_high)
    present = ((word >> (g & 31)) & 1) != 0
    before = tl.where(g < 32, 0, words.popcount(groups_low))
    rank = before + words.popcount(word & ((1 << (g & 31)) - 1))
    return present, rank, words.popcount(groups_low) + words.popcount(groups_high)


@triton_jit
def _words(mask_ptr, buckets_ptr, bucket_offsets_ptr, tile, mask_words, inside):
    base = mask_ptr + tile.to(tl.int64) * 2
    present, group_rank, nonempty = _group_ranks(tl.load(base), tl.load(base + 1))
    stream = buckets_ptr + tables.entry(bucket_offsets_ptr, tile)
    group = tl.load(stream + group_rank, mask=present, other=0).to(tl.int32)
    count = words.popcount(group)
    before = tl.cumsum(count, axis=0) - count + nonempty
    # Bucket b = 4 * half + byte of its group.
    b = tl.arange(0, 2)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    group = group[:, None, None]
    rank = before[:, None, None] + words.popcount(group & ((1 << b) - 1))
    byte = tl.load(stream + rank, mask=((group >> b) & 1) != 0, other=0).to(tl.int32)
    return tl.sum(byte << (8 * tl.arange(0, 4)[None, None, :]), axis=2)


@triton_jit
def nonzero_bytes(tile_words):
    """How many of the four bytes of each word are not zero."""
    x = tile_words.to(tl.uint32, bitcast=True)
    x |= x >> 4
    x |= x >> 2
    x |= x >> 1
    return words.popcount((x & 0x01010101).to(tl.int32, bitcast=True))


@triton_jit
def store(tile_words, mask_ptr, buckets_ptr, bucket_offsets_ptr, tile):
    """Write groups and bytes of one tile from its flat words ``[64, 2]``."""
    b = tl.arange(0, 2)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    byte = (tile_words[:, :, None] >> (8 * tl.arange(0, 4)[None, None, :])) & 0xFF
    group = tl.sum(tl.sum((byte != 0).to(tl.int32) << b, axis=2), axis=1)
    g = tl.arange(0, 64)
    flags = (group != 0).to(tl.int32) << (g & 31)
    low = tl.sum(tl.where(g < 32, flags, 0), axis=0)
    high = tl.sum(tl.where(g < 32, 0, flags), axis=0)
    base = mask_ptr + tile.to(tl.int64) * 2
    tl.store(base, low)
    tl.store(base + 1, high)
    present, group_rank, nonempty = _group_ranks(low, high)
    stream = buckets_ptr + tables.entry(bucket_offsets_ptr, tile)
    tl.store(stream + group_rank, group.to(tl.uint8), mask=present)
    count = words.popcount(group)
    before = tl.cumsum(count, axis=0) - count + nonempty
    group = group[:, None, None]
    rank = before[:, None, None] + words.popcount(group & ((1 << b) - 1))
    tl.store(stream + rank, byte.to(tl.uint8), mask=byte != 0)
