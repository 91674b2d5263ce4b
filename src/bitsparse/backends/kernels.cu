// CUDA C++ kernels for 16-bit dtypes, compiled at run time (see cuda.py).
//
// One warp works on one tile of 64 rows by 64 columns, without any barrier wider than the warp. The
// tensor's columns are a multiple of 64, so that a tile lies inside one block of rows; rows that the
// last block lacks hold nothing. Lane l owns the groups (columns) 2 l and 2 l + 1: its four mask
// words are words 4 l to 4 l + 3 of the tile, and its values come after those of the lanes before.
//
// A lane walks down its two columns: 64 rows, the same for all lanes, whatever the density. A row of
// the tile is 128 bytes, one access of the warp. Packed values pass through shared memory, since
// there neighbouring lanes hold neighbouring values and here they hold neighbouring columns.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define WARPS 2  // tiles a block: 8.5 KiB of shared memory each, 17 if gated
#define ALL 0xffffffffu

constexpr int flat = 0, bucketed = 1, full = 2;  // support codings
constexpr int FIELDS[2] = {4, 3};                // widths of the exponent field, in counted order

struct Tile {
    u32 index;
    i64 base;  // of its first element
    u32 rows;  // that the tensor has, of 64
};

// The tile of this warp; index >= tiles if there is none.
static __device__ __forceinline__ Tile locate(u32 tiles, i64 rows, u32 cols) {
    Tile t;
    t.index = blockIdx.x * WARPS + (threadIdx.x >> 5);
    u32 across = cols >> 6;
    u32 block = t.index / across;
    u32 column = (t.index - block * across) << 6;
    i64 first = (i64)block << 6;
    t.base = first * cols + column;
    t.rows = (u32)min((i64)64, rows - first);
    return t;
}

// Entry `tile` of an offset table: 16 entries take 10 words.
static __device__ __forceinline__ i64 entry(const u32* table, u32 tile) {
    const u32* block = table + (u64)(tile >> 4) * 10;
    u64 base = (u64)block[1] << 32 | block[0];
    u32 pair = block[2 + ((tile & 15) >> 1)];
    return base + ((pair >> ((tile & 1) * 16)) & 0xffff);
}

static __device__ __forceinline__ u32 exclusive_scan(u32 value, int lane) {
    u32 sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        u32 other = __shfl_up_sync(ALL, sum, step);
        if (lane >= step) sum += other;
    }
    return sum - value;
}

static __device__ __forceinline__ u32 count(uint4 words) {
    return __popc(words.x) + __popc(words.y) + __popc(words.z) + __popc(words.w);
}

// How many bytes of a word are not zero.
static __device__ __forceinline__ u32 nonzero_bytes(u32 x) {
    x |= x >> 4;
    x |= x >> 2;
    x |= x >> 1;
    return __popc(x & 0x01010101);
}

// Where value k of a tile is in shared memory. The lanes read and write at equal distances, which is
// in one bank of 32 at density 1/2 but for the one word left out in 17.
// Behind them every lane has room for what it need not read or write: without branches is faster.
constexpr int SPARE = 4096 + 256, STAGE = SPARE + 64;
static __device__ __forceinline__ u32 staged(u32 k) { return k + (k >> 5 << 1); }

// The most bytes of groups and buckets that a tile has.
constexpr int BUCKET_BYTES = 64 + 512;

// ------------------------------------------------------------- two 16-bit elements in a register
// MANTISSA says which dtype: 7 bfloat16, 10 float16.

template <int MANTISSA>
static __device__ __forceinline__ constexpr u32 infinity() { return 0x7fff >> MANTISSA << MANTISSA; }

// Bits 15 and 31, as 0 and 1 in both halves; and as 0 and 0xffff.
static __device__ __forceinline__ u32 ones(u32 high_bits) { return high_bits >> 15 & 0x00010001; }
static __device__ __forceinline__ u32 masks(u32 high_bits) { return ones(high_bits) * 0xffff; }

// relu passes on what is positive or NaN.
template <int MANTISSA>
static __device__ __forceinline__ u32 relu(u32 x) {
    // The sum has bit 15 set where the magnitude is more than infinity's.
    u32 nan = (x & 0x7fff7fff) + (0x7fff - infinity<MANTISSA>()) * 0x10001u;
    return __vmaxs2(x, 0) | (x & masks(nan & x));
}

// Infinite, NaN or -0.0: products with zero show these. 0 or 1 in both halves.
template <int MANTISSA>
static __device__ __forceinline__ u32 special(u32 x) {
    u32 large = (x & 0x7fff7fff) + (0x8000 - infinity<MANTISSA>()) * 0x10001u;
    return ones(large) | (__vminu2(x ^ 0x80008000, 0x00010001) ^ 0x00010001);
}

static __device__ __forceinline__ u32 nonzero(u32 x) { return __vminu2(x, 0x00010001); }

template <int MANTISSA>
static __device__ __forceinline__ float2 to_float(u32 x) {
    if (MANTISSA == 7) return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000));
    float2 y;
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(y.x), "=f"(y.y) : "r"(x));
    return y;
}

// Rounded to the nearest, ties to even.
template <int MANTISSA>
static __device__ __forceinline__ u32 from_float(float2 y) {
    u32 x;
    if (MANTISSA == 7) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(y.y), "f"(y.x));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(y.y), "f"(y.x));
    return x;
}

// Product as eager computes it: rounded to the dtype, or to float32 if LATE.
template <int MANTISSA, bool LATE>
static __device__ __forceinline__ float2 multiply(float2 a, float2 b) {
    float2 y = make_float2(a.x * b.x, a.y * b.y);
    return LATE ? y : to_float<MANTISSA>(from_float<MANTISSA>(y));
}

// The hidden values from relu(gate) and up.
template <int MANTISSA, bool GATED, bool SQUARED, bool LATE>
static __device__ __forceinline__ u32 product(u32 gate, u32 up) {
    if (!GATED && !SQUARED) return gate;
    float2 x = to_float<MANTISSA>(gate);
    if (SQUARED && GATED) x = multiply<MANTISSA, LATE>(x, x);
    else if (SQUARED) x = make_float2(x.x * x.x, x.y * x.y);
    if (GATED) {
        float2 y = to_float<MANTISSA>(up);
        x = make_float2(x.x * y.x, x.y * y.y);
    }
    return from_float<MANTISSA>(x);
}

// ---------------------------------------------------------------------------------- first pass
// Rows 16 q to 16 q + 15 and columns 8 j to 8 j + 7 of the tile are lane 4 j + q's, in registers: what
// it finds in a column are 16 bits in a row, and four neighbouring lanes hold the whole column.

// From the bits of 8 columns (two a register) to the lane's mask words.
static __device__ __forceinline__ uint4 gather_words(u32 (&bits)[4], int q) {
    // Transpose among four lanes: lane q gets pair q of columns from all of them.
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
        u32 got = __shfl_xor_sync(ALL, q & 1 ? bits[k] : bits[k + 1], 1);
        if (q & 1) bits[k] = got; else bits[k + 1] = got;
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
        u32 got = __shfl_xor_sync(ALL, q & 2 ? bits[k] : bits[k + 2], 2);
        if (q & 2) bits[k] = got; else bits[k + 2] = got;
    }
    return make_uint4(__byte_perm(bits[0], bits[1], 0x5410), __byte_perm(bits[2], bits[3], 0x5410),
                      __byte_perm(bits[0], bits[1], 0x7632), __byte_perm(bits[2], bits[3], 0x7632));
}

// Bytes of nonempty groups and buckets in the tile.
static __device__ __forceinline__ u32 bucket_bytes(uint4 w) {
    u32 bytes = nonzero_bytes(w.x) + nonzero_bytes(w.y) + nonzero_bytes(w.z) + nonzero_bytes(w.w);
    return __reduce_add_sync(ALL, bytes + ((w.x | w.y) != 0) + ((w.z | w.w) != 0));
}

// Statistics of one stream; `v`: what is kept of the tile, else zero. The signs are lost.
//   counts: of the first field, those of the second are `tiles` further on.
template <int MANTISSA>
static __device__ __forceinline__ void count_exponents(
    u32 (&v)[64], u32 nnz, int lane, u32 tile, i64 tiles, int* counts, u8* exponents) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 64; i++) {
        v[i] &= 0x7fff7fff;
        most = __vmaxu2(most, v[i]);
    }
    int top = __reduce_max_sync(ALL, max(most & 0xffff, most >> 16)) >> MANTISSA;
#pragma unroll
    for (int f = 0; f < 2; f++) {
        // Magnitudes from `least` on have room in the field; adding 2**15 - least carries just
        // these into bit 15, in both halves of a register.
        int least = max(0, top - (1 << FIELDS[f]) + 2) << MANTISSA;
        u32 add = (0x8000 - least) * 0x10001u, fit = 0;
#pragma unroll
        for (int i = 0; i < 64; i++) fit = __dp4a((v[i] + add) & 0x80008000, 0x01010101u, fit);
        fit = __reduce_add_sync(ALL, fit >> 7);
        if (lane == 0) counts[f * tiles + tile] = least ? nnz - fit : 0;
    }
    if (lane == 0) exponents[tile] = top;
}

// Positions and counts of nonzero patterns.
//   x: u16 [numel]; words: u32 [128 * tiles]; counts: i32 [rows of counts, tiles], the first row with
//   the sign flag in bit 16; exponents: u8 [tiles].
template <bool STATISTICS, int MANTISSA>
__global__ void __launch_bounds__(32 * WARPS)
survey(const u16* x, uint4* words, int* counts, u8* exponents, i64 rows, i64 cols, i64 tiles) {
    Tile t = locate(tiles, rows, cols);
    if (t.index >= tiles) return;
    int lane = threadIdx.x & 31, q = lane & 3, j = lane >> 2;
    const u16* from = x + t.base + 8 * j;
    u32 v[64], bits[4] = {0, 0, 0, 0}, seen = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int row = 16 * q + i;
        uint4 four = row < t.rows ? __ldcs((const uint4*)(from + row * cols)) : make_uint4(0, 0, 0, 0);
        v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
    }
#pragma unroll
    for (int i = 0; i < 64; i++) {
        bits[i & 3] |= nonzero(v[i]) << (i >> 2);
        seen |= v[i];
    }
    uint4 w = gather_words(bits, q);
    words[t.index * (u64)32 + lane] = w;
    u32 nnz = __reduce_add_sync(ALL, count(w));
    bool sign = __any_sync(ALL, seen & 0x80008000);
    if (lane == 0) counts[t.index] = nnz | (u32)sign << 16;
    if (STATISTICS) {
        u32 bytes = bucket_bytes(w);
        if (lane == 0) counts[tiles + t.index] = bytes;
        count_exponents<MANTISSA>(v, nnz, lane, t.index, tiles, counts + 2 * tiles, exponents);
    }
}

// Activation, positions and counts.
//   gate, up, hidden: u16 [numel], hidden may be gate; words: where relu(gate) counts; up_words: the
//   same of relu(up) if RELU_UP; counts, exponents ([streams, tiles]): as above.
template <int MANTISSA, bool GATED, bool SQUARED, bool RELU_UP, bool LATE, bool STATISTICS>
__global__ void __launch_bounds__(32 * WARPS)
activate(const u16* gate, const u16* up, u16* hidden, uint4* words, uint4* up_words, int* counts,
         u8* exponents, i64 rows, i64 cols, i64 tiles) {
    Tile t = locate(tiles, rows, cols);
    if (t.index >= tiles) return;
    int lane = threadIdx.x & 31, q = lane & 3, j = lane >> 2;
    u32 g[64], u[GATED ? 64 : 1];
    u32 bits[4] = {0, 0, 0, 0}, up_bits[4] = {0, 0, 0, 0}, kept_bits[4] = {0, 0, 0, 0};
    u32 seen = 0, up_seen = 0;
    i64 at = t.base + 8 * j + (i64)(16 * q) * cols;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        bool inside = 16 * q + i < t.rows;
        const u16* from = gate + at + i * cols;
        uint4 four = inside ? __ldcs((const uint4*)from) : make_uint4(0, 0, 0, 0);
        g[4 * i] = four.x, g[4 * i + 1] = four.y, g[4 * i + 2] = four.z, g[4 * i + 3] = four.w;
        if (GATED) {
            from = up + at + i * cols;
            four = inside ? __ldcs((const uint4*)from) : make_uint4(0, 0, 0, 0);
            u[4 * i] = four.x, u[4 * i + 1] = four.y, u[4 * i + 2] = four.z, u[4 * i + 3] = four.w;
        }
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        u32 result[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 a = relu<MANTISSA>(g[4 * i + k]), b = 0, fires = nonzero(a), mask = ~0u;
            if (GATED) {
                b = u[4 * i + k];
                if (RELU_UP) b = relu<MANTISSA>(b);
                u32 either = special<MANTISSA>(a) | special<MANTISSA>(b), kept;
                fires |= either;
                kept = fires;
                if (RELU_UP) {
                    u32 up_fires = nonzero(b) | either;
                    up_bits[k] |= up_fires << i;
                    kept &= up_fires;
                    kept_bits[k] |= kept << i;
                }
                mask = kept * 0xffff;
            }
            bits[k] |= fires << i;
            result[k] = product<MANTISSA, GATED, SQUARED, LATE>(a, b);
            g[4 * i + k] = a & mask;
            seen |= a & mask;
            if (GATED) {
                u[4 * i + k] = b & mask;
                up_seen |= b & mask;
            }
        }
        if (16 * q + i < t.rows)
            *(uint4*)(hidden + at + i * cols) = make_uint4(result[0], result[1], result[2], result[3]);
    }
    uint4 w = gather_words(bits, q);
    words[t.index * (u64)32 + lane] = w;
    u32 nnz = __reduce_add_sync(ALL, count(w));
    if (RELU_UP) {
        uint4 up_w = gather_words(up_bits, q);
        up_words[t.index * (u64)32 + lane] = up_w;
        nnz = __reduce_add_sync(ALL, count(gather_words(kept_bits, q)));
        if (STATISTICS) {
            u32 bytes = bucket_bytes(up_w);
            if (lane == 0) counts[6 * tiles + t.index] = bytes;
        }
    }
    u32 sign = __any_sync(ALL, seen & 0x80008000) ? 1u << 16 : 0;
    if (__any_sync(ALL, up_seen & 0x80008000)) sign |= 1u << 17;
    if (lane == 0) counts[t.index] = nnz | sign;
    if (STATISTICS) {
        u32 bytes = bucket_bytes(w);
        if (lane == 0) counts[tiles + t.index] = bytes;
        count_exponents<MANTISSA>(g, nnz, lane, t.index, tiles, counts + 2 * tiles, exponents);
        if constexpr (GATED)
            count_exponents<MANTISSA>(u, nnz, lane, t.index, tiles, counts + 4 * tiles, exponents + tiles);
    }
}

// ------------------------------------------------------------------------------------- encode

// A flat mask in buckets.
//   words: the flat mask; groups: u32 [2 * tiles]; buckets: u8; bucket_offsets: their table.
__global__ void __launch_bounds__(32 * WARPS)
bucket(const uint4* words, u32* groups, u8* buckets, const u32* bucket_offsets, i64 rows, i64 cols,
       i64 tiles) {
    Tile t = locate(tiles, rows, cols);
    if (t.index >= tiles) return;
    int lane = threadIdx.x & 31;
    __shared__ u8 storage[WARPS][BUCKET_BYTES + 32];
    u8* staged_bytes = storage[threadIdx.x >> 5];
    uint4 w = words[t.index * (u64)32 + lane];
    u32 first = (w.x | w.y) != 0, second = (w.z | w.w) != 0;
    u32 firsts = __ballot_sync(ALL, first), seconds = __ballot_sync(ALL, second);
    u32 both = (first | second << 1) << (2 * (lane & 15));
    u32 low = __reduce_or_sync(ALL, lane < 16 ? both : 0);
    u32 high = __reduce_or_sync(ALL, lane < 16 ? 0 : both);
    if (lane == 0) {
        groups[2 * t.index] = low;
        groups[2 * t.index + 1] = high;
    }
    u32 parts[4] = {w.x, w.y, w.z, w.w}, sixteen = 0;
#pragma unroll
    for (int b = 0; b < 16; b++) sixteen |= (u32)((parts[b >> 2] >> (8 * (b & 3)) & 0xff) != 0) << b;
    u32 below = (1u << lane) - 1;
    u32 rank = __popc(firsts & below) + __popc(seconds & below);
    staged_bytes[first ? rank : BUCKET_BYTES + lane] = sixteen & 0xff;
    staged_bytes[second ? rank + first : BUCKET_BYTES + lane] = sixteen >> 8;
    u32 mine = __popc(sixteen), nonempty = __popc(firsts) + __popc(seconds);
    rank = nonempty + exclusive_scan(mine, lane);
#pragma unroll
    for (int b = 0; b < 16; b++) {
        u32 k = rank + __popc(sixteen & ((1u << b) - 1));
        staged_bytes[sixteen >> b & 1 ? k : BUCKET_BYTES + lane] = parts[b >> 2] >> (8 * (b & 3));
    }
    __syncwarp();
    u8* stream = buckets + entry(bucket_offsets, t.index);
    u32 bytes = nonempty + __reduce_add_sync(ALL, mine);
    for (u32 k = lane; k < bytes; k += 32) stream[k] = staged_bytes[k];
}

// Codes of the kept elements.
//   x: u16 [numel]; words, more: flat masks, of which both must be set; offsets: table of the
//   values; out: u16 [nnz] if WIDTH is 16, else zeroed u32 words; exponents: u8 [tiles]; escapes: u8;
//   escape_offsets: their table.
template <int WIDTH, int FIELD, int MANTISSA, bool RELU>
__global__ void __launch_bounds__(32 * WARPS)
encode(const u16* x, const uint4* words, const uint4* more, const u32* offsets, void* out,
       const u8* exponents, u8* escapes, const u32* escape_offsets, i64 rows, i64 cols, i64 tiles) {
    __shared__ u16 storage[WARPS][STAGE];
    Tile t = locate(tiles, rows, cols);
    if (t.index >= tiles) return;
    int lane = threadIdx.x & 31;
    u16* codes = storage[threadIdx.x >> 5];

    uint4 w = words[t.index * (u64)32 + lane], m = more[t.index * (u64)32 + lane];
    w = make_uint4(w.x & m.x, w.y & m.y, w.z & m.z, w.w & m.w);
    u32 mine = count(w);
    u32 total = __reduce_add_sync(ALL, mine);
    if (total == 0) return;
    i64 offset = entry(offsets, t.index);
    u32 rank = exclusive_scan(mine, lane), second_rank = rank + __popc(w.x) + __popc(w.y);
    const u16* from = x + t.base + 2 * lane;
    u32 stride = cols;  // at most 2**24: offsets in a tile fit in 32 bits
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 first = half ? w.y : w.x, second = half ? w.w : w.z;
#pragma unroll
        for (int begin = 0; begin < 32; begin += 16) {
            u32 pair[16];
#pragma unroll
            for (int i = 0; i < 16; i++) {
                // Of rows where neither is kept nothing is read.
                bool wanted = (first | second) >> (begin + i) & 1;
                u32 row = half * 32 + begin + i;
                pair[i] = wanted ? __ldcs((const u32*)(from + row * stride)) : 0;
            }
#pragma unroll
            for (int i = 0; i < 16; i++) {
                u32 one = first >> (begin + i) & 1, two = second >> (begin + i) & 1;
                codes[one ? staged(rank) : SPARE + 2 * lane] = pair[i];
                codes[two ? staged(second_rank) : SPARE + 2 * lane] = pair[i] >> 16;
                rank += one;
                second_rank += two;
            }
        }
    }
    __syncwarp();

    constexpr u32 limit = (1 << FIELD) - 1;
    u32 top = FIELD ? exponents[t.index] : 0;
    u8* escape = FIELD ? escapes + entry(escape_offsets, t.index) : nullptr;
    for (u32 first = 0; first < total; first += 32) {
        u32 k = first + lane;
        u32 code = k < total ? codes[staged(k)] : 0;
        // relu passes on what is positive or NaN.
        if (RELU && code >> 15 && (code & 0x7fff) <= (0x7fffu >> MANTISSA << MANTISSA)) code = 0;
        if (FIELD) {
            u32 exponent = (code & 0x7fff) >> MANTISSA;
            u32 distance = top - exponent;
            bool escaped = k < total && distance >= limit;
            u32 all = __ballot_sync(ALL, escaped);
            if (escaped) {
                escape[__popc(all & ((1u << lane) - 1))] = exponent;
                distance = limit;
            }
            escape += __popc(all);
            code = (code & ((1 << MANTISSA) - 1)) | distance << MANTISSA
                   | code >> 15 << (MANTISSA + FIELD);
        }
        if (k < total) {
            if (WIDTH == 16) ((u16*)out)[offset + k] = code;
            else codes[staged(k)] = code & ((1u << WIDTH) - 1);
        }
    }
    if (WIDTH == 16) return;
    __syncwarp();

    // The tile's bits start at bit `shift` of word 0 of `to`. Words at both ends may be shared with
    // the tiles next to it: their bits are distinct, so the order of the writes does not matter.
    u64 bit = (u64)offset * WIDTH;
    u32* to = (u32*)out + (bit >> 5);
    int shift = bit & 31, end = shift + total * WIDTH;
    for (int i = lane; i * 32 < end; i += 32) {
        int begin = i * 32 - shift;  // of the word, in the tile's bits; negative for the first
        int k = begin > 0 ? begin / WIDTH : 0;
        int at = k * WIDTH - begin;  // of the code, in the word
        u32 word = 0;
#pragma unroll
        for (int n = 0; n < (31 + WIDTH - 1) / WIDTH + 1; n++) {
            if (at < 32 && k < total) {
                u32 code = codes[staged(k)];
                word |= at >= 0 ? code << at : code >> -at;
            }
            k++;
            at += WIDTH;
        }
        if (begin < 0 || i * 32 + 32 > end) atomicOr(to + i, word);
        else to[i] = word;
    }
}

// ------------------------------------------------------------------------------------- decode

// The lane's mask words.
template <int SUPPORT>
static __device__ __forceinline__ uint4 read_words(
    const Tile& t, int lane, const u32* mask, const u8* buckets, const u32* bucket_offsets,
    u8* scratch) {
    if (SUPPORT == flat) return ((const uint4*)mask)[t.index * (u64)32 + lane];
    if (SUPPORT == full) {
        u64 rows = t.rows == 64 ? ~0ull : (1ull << t.rows) - 1;
        return make_uint4((u32)rows, (u32)(rows >> 32), (u32)rows, (u32)(rows >> 32));
    }
    i64 begin = entry(bucket_offsets, t.index);
    u32 bytes = entry(bucket_offsets, t.index + 1) - begin;
    for (u32 k = lane; k < bytes; k += 32) scratch[k] = buckets[begin + k];
    uint2 both = ((const uint2*)mask)[t.index];
    u64 groups = (u64)both.y << 32 | both.x;
    int g = 2 * lane, before = __popcll(groups & ((1ull << g) - 1));
    __syncwarp();
    bool has_first = groups >> g & 1, has_second = groups >> g >> 1 & 1;
    // What is read where nothing is stored lies in the scratch, and is not used.
    u32 first = has_first ? scratch[before] : 0;
    u32 second = has_second ? scratch[before + has_first] : 0;
    u32 sixteen = first | second << 8, parts[4] = {0, 0, 0, 0};
    u32 rank = __popcll(groups) + exclusive_scan(__popc(sixteen), lane);
#pragma unroll
    for (int b = 0; b < 16; b++) {
        u32 byte = scratch[rank + __popc(sixteen & ((1u << b) - 1))];
        parts[b >> 2] |= sixteen >> b & 1 ? byte << (8 * (b & 3)) : 0;
    }
    __syncwarp();
    return make_uint4(parts[0], parts[1], parts[2], parts[3]);
}

// Patterns of the tile's values, unpacked to shared memory (see `staged`).
template <int WIDTH, int FIELD, int MANTISSA>
static __device__ __forceinline__ void read_values(
    u16* values, u32 total, i64 offset, const Tile& t, int lane, const void* in,
    const u8* exponents, const u8* escapes, const u32* escape_offsets) {
    constexpr u32 limit = (1 << FIELD) - 1;
    u32 top = FIELD ? exponents[t.index] : 0;
    const u8* escape = FIELD ? escapes + entry(escape_offsets, t.index) : nullptr;
    u64 bit = (u64)offset * WIDTH;
    const u32* from = (const u32*)in + (bit >> 5);
    u32 shift = bit & 31;
#pragma unroll 2
    for (u32 first = 0; first < total; first += 32) {
        u32 k = first + lane;
        u32 code = 0;
        if (k < total) {
            if (WIDTH == 16) {
                code = ((const u16*)in)[offset + k];
            } else {
                u32 at = shift + k * WIDTH;
                u32 low = from[at >> 5], high = 0;
                if ((at & 31) + WIDTH > 32) high = from[(at >> 5) + 1];
                code = __funnelshift_r(low, high, at & 31) & ((1u << WIDTH) - 1);
            }
        }
        if (FIELD) {
            u32 distance = (code >> MANTISSA) & limit;
            u32 exponent = top - distance;
            bool escaped = k < total && distance == limit;
            u32 all = __ballot_sync(ALL, escaped);
            if (escaped) exponent = escape[__popc(all & ((1u << lane) - 1))];
            escape += __popc(all);
            code = (code & ((1 << MANTISSA) - 1)) | exponent << MANTISSA
                   | code >> (MANTISSA + FIELD) << 15;
        }
        if (k < total) values[staged(k)] = code;
    }
}

struct Pair {
    u32 first, second;  // 0 or 1
    __device__ __forceinline__ u32 masks() const { return (first | second << 16) * 0xffff; }
};

// The lane's next values of its two columns, zero where the bit is not set. What is read for nothing
// lies in the array: ranks go to 4096.
static __device__ __forceinline__ u32 read_pair(
    const u16* values, u32 rank, u32 second_rank, const Pair& bits) {
    u32 pair = values[staged(rank)] | values[staged(second_rank)] << 16;
    return pair & bits.masks();
}

#define MASK const u32 *mask, const u8 *buckets, const u32 *bucket_offsets
#define UP_MASK const u32 *up_mask, const u8 *up_buckets, const u32 *up_bucket_offsets
#define STREAM(name) \
    const void *name, const u8 *name##_exponents, const u8 *name##_escapes, \
        const u32 *name##_escape_offsets

// The hidden tensor, or what is stored if neither GATED nor SQUARED; zero where nothing is kept.
//   offsets: table of the values; gate, up: streams; out: u16 [numel].
template <int SUPPORT, int MANTISSA, int WIDTH, int FIELD, int UP_WIDTH, int UP_FIELD, bool GATED,
          bool SQUARED, bool TWO_MASKS, bool LATE>
__global__ void __launch_bounds__(32 * WARPS)
decode(MASK, UP_MASK, const u32* offsets, STREAM(gate), STREAM(up), u16* out, i64 rows, i64 cols,
       i64 tiles) {
    __shared__ u16 storage[GATED ? 2 : 1][WARPS][STAGE];
    Tile t = locate(tiles, rows, cols);
    if (t.index >= tiles) return;
    int lane = threadIdx.x & 31;
    u16 *gates = storage[0][threadIdx.x >> 5], *ups = storage[GATED ? 1 : 0][threadIdx.x >> 5];

    uint4 w = read_words<SUPPORT>(t, lane, mask, buckets, bucket_offsets, (u8*)gates);
    if (TWO_MASKS) {
        uint4 m = read_words<SUPPORT>(
            t, lane, up_mask, up_buckets, up_bucket_offsets, (u8*)gates);
        w = make_uint4(w.x & m.x, w.y & m.y, w.z & m.z, w.w & m.w);
    }
    u32 mine = count(w);
    u32 total = __reduce_add_sync(ALL, mine);
    i64 offset = entry(offsets, t.index);
    read_values<WIDTH, FIELD, MANTISSA>(
        gates, total, offset, t, lane, gate, gate_exponents, gate_escapes, gate_escape_offsets);
    if (GATED)
        read_values<UP_WIDTH, UP_FIELD, MANTISSA>(
            ups, total, offset, t, lane, up, up_exponents, up_escapes, up_escape_offsets);
    u32 rank = exclusive_scan(mine, lane), second_rank = rank + __popc(w.x) + __popc(w.y);
    __syncwarp();
    u16* to = out + t.base + 2 * lane;
    u32 stride = cols;  // at most 2**24: offsets in a tile fit in 32 bits
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 first = half ? w.y : w.x, second = half ? w.w : w.z;
#pragma unroll 16
        for (int i = 0; i < 32; i++) {
            u32 row = half * 32 + i;
            Pair bits{first >> i & 1, second >> i & 1};
            u32 a = read_pair(gates, rank, second_rank, bits), b = 0;
            if (GATED) b = read_pair(ups, rank, second_rank, bits);
            rank += bits.first;
            second_rank += bits.second;
            a = product<MANTISSA, GATED, SQUARED, LATE>(a, b);
            if (row < t.rows) __stcs((u32*)(to + row * stride), a);
        }
    }
}

// Gradients of the pre-activations. With neither GATED nor SQUARED the mask says where the incoming
// gradient passes, and no values are read.
//   grad: u16 [numel], the gradient of the hidden tensor; grad_gate, grad_up: u16 [numel], written,
//   may be `grad`.
template <int SUPPORT, int MANTISSA, int WIDTH, int FIELD, int UP_WIDTH, int UP_FIELD, bool GATED,
          bool SQUARED, bool TWO_MASKS, bool LATE, bool NEED_GATE, bool NEED_UP>
__global__ void __launch_bounds__(32 * WARPS)
gradient(const u16* grad, u16* grad_gate, u16* grad_up, MASK, UP_MASK, const u32* offsets,
         STREAM(gate), STREAM(up), i64 rows, i64 cols, i64 tiles) {
    constexpr bool VALUES = GATED || SQUARED;
    __shared__ u16 storage[GATED ? 2 : 1][WARPS][VALUES ? STAGE : BUCKET_BYTES / 2 + 1];
    Tile t = locate(tiles, rows, cols);
    if (t.index >= tiles) return;
    int lane = threadIdx.x & 31;
    u16 *gates = storage[0][threadIdx.x >> 5], *ups = storage[GATED ? 1 : 0][threadIdx.x >> 5];

    uint4 w = read_words<SUPPORT>(t, lane, mask, buckets, bucket_offsets, (u8*)gates), own = w, other = w;
    if (TWO_MASKS) {
        other = read_words<SUPPORT>(
            t, lane, up_mask, up_buckets, up_bucket_offsets, (u8*)gates);
        w = make_uint4(w.x & other.x, w.y & other.y, w.z & other.z, w.w & other.w);
    }
    u32 rank = 0, second_rank = 0;
    if (VALUES) {
        u32 mine = count(w);
        u32 total = __reduce_add_sync(ALL, mine);
        i64 offset = entry(offsets, t.index);
        read_values<WIDTH, FIELD, MANTISSA>(
            gates, total, offset, t, lane, gate, gate_exponents, gate_escapes, gate_escape_offsets);
        if (GATED)
            read_values<UP_WIDTH, UP_FIELD, MANTISSA>(
                ups, total, offset, t, lane, up, up_exponents, up_escapes, up_escape_offsets);
        rank = exclusive_scan(mine, lane);
        second_rank = rank + __popc(w.x) + __popc(w.y);
        __syncwarp();
    }
    i64 at = t.base + 2 * lane;
    u32 stride = cols;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 first = half ? w.y : w.x, second = half ? w.w : w.z;
        u32 own_first = half ? own.y : own.x, own_second = half ? own.w : own.z;
        u32 other_first = half ? other.y : other.x, other_second = half ? other.w : other.z;
#pragma unroll
        for (int begin = 0; begin < 32; begin += 16) {
            u32 incoming[16];
#pragma unroll
            for (int i = 0; i < 16; i++) {
                u32 row = half * 32 + begin + i;
                // Where no factor is kept only the gradient of `up` depends on the incoming one.
                bool wanted = NEED_UP ? row < t.rows : (own_first | own_second) >> (begin + i) & 1;
                incoming[i] = wanted ? __ldcs((const u32*)(grad + at + row * stride)) : 0;
            }
#pragma unroll
            for (int i = 0; i < 16; i++) {
                u32 row = half * 32 + begin + i, n = begin + i;
                Pair bits{first >> n & 1, second >> n & 1};
                u32 a = 0, b = 0, kept = bits.masks();
                if (VALUES) {
                    a = read_pair(gates, rank, second_rank, bits);
                    if (GATED) b = read_pair(ups, rank, second_rank, bits);
                    rank += bits.first;
                    second_rank += bits.second;
                }
                // What is not kept has factors of zero, which are multiplied by, as eager does: the
                // product may be -0.0 or NaN. Only where relu's derivative is 0 eager selects 0.
                u32 fires = VALUES ? nonzero(a) * 0xffff : kept, up_fires = ~0u;
                if (TWO_MASKS) {
                    // Where both masks are set the values decide; elsewhere the masks do.
                    Pair mine{own_first >> n & 1, own_second >> n & 1};
                    Pair theirs{other_first >> n & 1, other_second >> n & 1};
                    fires = (fires & kept) | (mine.masks() & ~kept);
                    up_fires = (nonzero(b) * 0xffff & kept) | (theirs.masks() & ~kept);
                }
                float2 x = to_float<MANTISSA>(incoming[i]), g = to_float<MANTISSA>(a);
                if (NEED_UP) {
                    float2 factor = g;
                    if (SQUARED) factor = multiply<MANTISSA, LATE>(g, g);
                    u32 result = from_float<MANTISSA>(make_float2(x.x * factor.x, x.y * factor.y));
                    if (row < t.rows) __stcs((u32*)(grad_up + at + row * stride), result & up_fires);
                }
                if (NEED_GATE) {
                    u32 result = incoming[i];
                    if (VALUES) {
                        if (GATED && SQUARED) x = multiply<MANTISSA, LATE>(x, to_float<MANTISSA>(b));
                        else if (GATED) {
                            float2 y = to_float<MANTISSA>(b);
                            x = make_float2(x.x * y.x, x.y * y.y);
                        }
                        if (SQUARED) {
                            // 2 * gate may overflow to infinity in the dtype.
                            g = multiply<MANTISSA, LATE>(g, make_float2(2.f, 2.f));
                            x = make_float2(x.x * g.x, x.y * g.y);
                        }
                        result = from_float<MANTISSA>(x);
                    }
                    if (row < t.rows) __stcs((u32*)(grad_gate + at + row * stride), result & fires);
                }
            }
        }
    }
}
