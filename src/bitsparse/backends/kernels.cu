// CUDA C++ kernels for 16-bit dtypes, compiled at run time (see cuda.py).
//
// One warp works on one tile of 64 rows by 64 columns, without any barrier wider than the warp. The
// tensor's columns are a multiple of 64, so that a tile lies inside one block of rows; rows that the
// last block lacks hold nothing. Of mask words lane l holds those of the groups (columns) l, in .x and
// .y, and l + 32, in .z and .w.
//
// Packed values pass through shared memory twice: as a list, where neighbouring lanes hold neighbouring
// values, and as rows, where they hold neighbouring columns. The work in between follows the nonzeros.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define WARPS 2  // tiles a block: 8.5 KiB of shared memory each, 17 if gated
#define ALL 0xffffffffu
#define TILE 4096
#define MOST_SLOTS 1024  // as in cuda.py

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

// ------------------------------------------------------------- work that follows the nonzeros
// Half of a tile at a time, 64 rows by 32 columns, is staged in shared memory. A list of its buckets
// that are not empty (eight rows of a column, in slot order) is made first; then each lane takes one
// of them after another and moves its values between the rows and a list in slot order. So silent
// neurons cost nothing, and busy ones are shared out among the lanes.
//
// Rows are read and written 16 bytes a lane: lane 4 b + j has rows 8 b to 8 b + 7 of the columns 8 j
// to 8 j + 7. The 16-byte pieces are staged in an order that lets the lanes meet different banks, in
// this access as well as where they visit several buckets of one column.

// Shared memory is addressed by numbers: the compiler would work out the address of an array anew for
// each access, in five instructions, and would branch where an access may be left out.

// The address of an array, in a register (where it stays, since a shuffle cannot be repeated).
static __device__ __forceinline__ u32 shared_address(const void* array) {
    return __shfl_sync(ALL, (u32)__cvta_generic_to_shared(array), 0);
}
static __device__ __forceinline__ u32 load_shared(u32 from) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}
static __device__ __forceinline__ uint4 load_piece(u32 from) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
    return x;
}
static __device__ __forceinline__ void store_piece(u32 to, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
// Store the lower half of `x` if `wanted`.
static __device__ __forceinline__ void store_half(u32 to, u32 x, bool wanted) {
    asm volatile("{ .reg .pred p; .reg .b16 low; cvt.u16.u32 low, %1; setp.ne.u32 p, %2, 0;"
                 " @p st.shared.u16 [%0], low; }" :: "r"(to), "r"(x), "r"((u32)wanted) : "memory");
}

constexpr int PIECES = 256;   // of 16 bytes, in half a tile
constexpr int BUCKETS = 256;  // in half a tile
constexpr int GROUP = 256;    // values that 32 buckets have at most

// Entries of the list: the bucket's bits; from bit 8, where its first row is staged (in elements);
// from bit 19, how many values the half tile has before it. The last entry is empty.
// Returns how many there are before that; `values`: how many values.
static __device__ __forceinline__ u32 list_buckets(
    u32 list, uint4 w, int half, int lane, u32& values) {
    u32 words[2] = {half ? w.z : w.x, half ? w.w : w.y};
    u32 mine = (__popc(words[0]) + __popc(words[1])) << 16
             | (nonzero_bytes(words[0]) + nonzero_bytes(words[1]));
    u32 before = exclusive_scan(mine, lane), all = __shfl_sync(ALL, before + mine, 31);
    u32 to = list + (before & 0xffff) * 4, rank = before >> 16 << 19;
#pragma unroll
    for (int b = 0; b < 8; b++) {
        u32 bits = words[b >> 2] >> (8 * (b & 3)) & 0xff;
        u32 at = (lane ^ b >> 1 << 3) + 256 * b;
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; @p st.shared.u32 [%0], %2;"
                     " @p add.u32 %0, %0, 4; }"
                     : "+r"(to) : "r"(bits), "r"((at << 8) + (bits | rank)) : "memory");
        rank += __popc(bits) << 19;
    }
    if (lane == 31)
        asm volatile("st.shared.u32 [%0], %1;"
                     :: "r"(list + (all & 0xffff) * 4), "r"(all >> 16 << 19) : "memory");
    values = all >> 16;
    return all & 0xffff;
}

// Move the values of a bucket between a list, where the first one is at the address `values`, and the
// staged rows.
template <bool TO_ROWS>
static __device__ __forceinline__ void move_bucket(u32 entry, u32 values, u32 rows) {
    u32 at = rows + (entry >> 7 & 0xffe), odd = entry >> 10 & 64;  // in odd buckets pairs of rows are swapped
#define ROW_BIT(i) "and.b32 t, %1, 1 << " #i "; setp.ne.u32 p" #i ", t, 0;"
#define ROW_LOAD(i, base) ROW_BIT(i) "@p" #i " ld.shared.u16 v" #i ", [" base "];"
#define ROW_NEXT(i) "@p" #i " add.u32 %0, %0, 2;"
#define ROW_STORE(i, base) "@p" #i " st.shared.u16 [" base "], v" #i ";"
#define ROW_REGISTERS "{ .reg .pred p<8>; .reg .b16 v<8>; .reg .b32 t;"
    if (TO_ROWS)
        asm volatile(ROW_REGISTERS
                     ROW_LOAD(0, "%0") ROW_NEXT(0) ROW_LOAD(1, "%0") ROW_NEXT(1)
                     ROW_LOAD(2, "%0") ROW_NEXT(2) ROW_LOAD(3, "%0") ROW_NEXT(3)
                     ROW_STORE(0, "%2") ROW_STORE(1, "%3 + 64")
                     ROW_STORE(2, "%2 + 128") ROW_STORE(3, "%3 + 192")
                     ROW_LOAD(4, "%0") ROW_NEXT(4) ROW_LOAD(5, "%0") ROW_NEXT(5)
                     ROW_LOAD(6, "%0") ROW_NEXT(6) ROW_LOAD(7, "%0") ROW_NEXT(7)
                     ROW_STORE(4, "%2 + 256") ROW_STORE(5, "%3 + 320")
                     ROW_STORE(6, "%2 + 384") ROW_STORE(7, "%3 + 448") "}"
                     : "+r"(values) : "r"(entry), "r"(at + odd), "r"(at - odd) : "memory");
    else
        asm volatile(ROW_REGISTERS
                     ROW_LOAD(0, "%2") ROW_LOAD(1, "%3 + 64") ROW_LOAD(2, "%2 + 128") ROW_LOAD(3, "%3 + 192")
                     ROW_STORE(0, "%0") ROW_NEXT(0) ROW_STORE(1, "%0") ROW_NEXT(1)
                     ROW_STORE(2, "%0") ROW_NEXT(2) ROW_STORE(3, "%0") ROW_NEXT(3)
                     ROW_LOAD(4, "%2 + 256") ROW_LOAD(5, "%3 + 320") ROW_LOAD(6, "%2 + 384") ROW_LOAD(7, "%3 + 448")
                     ROW_STORE(4, "%0") ROW_NEXT(4) ROW_STORE(5, "%0") ROW_NEXT(5)
                     ROW_STORE(6, "%0") ROW_NEXT(6) ROW_STORE(7, "%0") ROW_NEXT(7) "}"
                     : "+r"(values) : "r"(entry), "r"(at + odd), "r"(at - odd) : "memory");
}

static __device__ __forceinline__ u32 row_in_tile(int i, int lane) { return (lane >> 2) * 8 + i; }

// The lane's first element of half a tile.
static __device__ __forceinline__ i64 first_element(const Tile& t, i64 cols, int half, int lane) {
    return t.base + 32 * half + 8 * (lane & 3) + row_in_tile(0, lane) * cols;
}

// Where the lane's pieces are staged: that of its row i is at `at[i & 1] + 64 * i`.
struct Pieces {
    u32 at[2];
    __device__ __forceinline__ Pieces(u32 rows, int lane) {
        u32 b = lane >> 2, odd = 64 * (b & 1);
        u32 first = rows + 16 * (32 * b + ((lane & 3) ^ (b >> 1)));
        at[0] = first + odd;
        at[1] = first - odd;
    }
    __device__ __forceinline__ u32 operator[](int i) const { return at[i & 1] + 64 * i; }
};

static __device__ __forceinline__ uint4 load_words(const uint2* words, const Tile& t, int lane) {
    const uint2* from = words + t.index * (u64)64 + lane;
    uint2 first = from[0], second = from[32];
    return make_uint4(first.x, first.y, second.x, second.y);
}

// Mask words by columns, in shared memory; a word is left out after 8 columns for the banks' sake.
constexpr int COLUMNS = 64 + 8;
static __device__ __forceinline__ void store_columns(uint2* columns, uint4 w, int lane) {
    uint2* to = columns + lane + (lane >> 3);
    to[0] = make_uint2(w.x, w.y);
    to[32 + 4] = make_uint2(w.z, w.w);
}

// Bits of the lane's 8 rows (from bit 0, from bit 16) in its 8 columns, two a register.
static __device__ __forceinline__ void column_bits(
    u32 (&bits)[4], const uint2* columns, int half, int lane) {
    const u8* from = (const u8*)(columns + 9 * (4 * half + (lane & 3))) + (lane >> 2);
#pragma unroll
    for (int n = 0; n < 4; n++) bits[n] = from[16 * n] | from[16 * n + 8] << 16;
}

// In which of its 8 rows the lane has anything kept; which of them the tensor has. 8 bits.
static __device__ __forceinline__ u32 kept_rows(const u32 (&bits)[4]) {
    u32 any = bits[0] | bits[1] | bits[2] | bits[3];
    return any | any >> 16;
}
static __device__ __forceinline__ u32 rows_inside(u32 rows, int lane) {
    int n = (int)rows - (int)row_in_tile(0, lane);
    return n >= 8 ? 0xff : n <= 0 ? 0 : (1u << n) - 1;
}

// The lane's pieces of those of its next N rows that are `wanted`, zero for others.
//   from: the lane's element of the first of them.
template <int N>
static __device__ __forceinline__ void read_rows(
    uint4 (&pieces)[N], const u16* from, i64 cols, u32 wanted) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        pieces[i] = wanted >> i & 1 ? __ldcs((const uint4*)from) : make_uint4(0, 0, 0, 0);
        from += cols;
    }
}

// ---------------------------------------------------------------------------------- first pass
// Rows 16 q to 16 q + 15 and columns 8 j to 8 j + 7 of the tile are lane 8 q + j's, in registers: eight
// neighbouring lanes read a row, and what a lane finds in a column are 16 bits in a row.

// From the bits of 8 columns (two a register) to the mask words of columns 8 j + 2 q and 8 j + 2 q + 1.
static __device__ __forceinline__ uint4 gather_words(u32 (&bits)[4], int q) {
    // Transpose among four lanes: lane q gets pair q of columns from all of them.
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
        u32 got = __shfl_xor_sync(ALL, q & 1 ? bits[k] : bits[k + 1], 8);
        if (q & 1) bits[k] = got; else bits[k + 1] = got;
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
        u32 got = __shfl_xor_sync(ALL, q & 2 ? bits[k] : bits[k + 2], 16);
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

// The kept values of a tile, one after the other in slot order: where the second pass finds them, so
// that it need not read the dense tensor again. 64 of them are a row of the tile's own memory, or, if
// that is needed for something else, of `capacity` slots; a tile of more values is then left out.
struct Slots {
    u16* at;
    i64 row;  // elements from a row to the next one
    __device__ __forceinline__ Slots(u16* slots, i64 capacity, const Tile& t, i64 cols)
        : at(slots + (capacity ? t.index * capacity : t.base)), row(capacity ? 64 : cols) {}
    // Of eight values.
    __device__ __forceinline__ uint4* piece(u32 p) const {
        return (uint4*)(at + (p >> 3) * row + 8 * (p & 7));
    }
};

// Where, in bytes, the lane's first kept value in each of its 8 columns comes in slot order.
//   bits: of its 16 rows (from bit 0, from bit 16), two columns a register; w: their words.
static __device__ __forceinline__ void slot_offsets(
    u32 (&offsets)[8], const u32 (&bits)[4], uint4 w, int lane) {
    int q = lane >> 3, j = lane & 7;
    // Columns come in the order of j, then q: by turning the lanes they can be added up.
    u32 first = __popc(w.x) + __popc(w.y), both = first + __popc(w.z) + __popc(w.w);
    u32 before = exclusive_scan(__shfl_sync(ALL, both, (lane & 3) << 3 | lane >> 2), lane);
    u32 pair = __shfl_sync(ALL, before, 4 * j + q) | first << 16;
    u32 above[2];  // values of the same column in the rows of other lanes, a byte each
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u32 even = bits[2 * h], odd = bits[2 * h + 1];
        u32 mine = __popc(even & 0xffff) | __popc(even >> 16) << 8
                 | __popc(odd & 0xffff) << 16 | __popc(odd >> 16) << 24;
        u32 sum = mine, other = __shfl_up_sync(ALL, sum, 8);
        if (q >= 1) sum += other;
        other = __shfl_up_sync(ALL, sum, 16);
        if (q >= 2) sum += other;
        above[h] = sum - mine;
    }
#pragma unroll
    for (int p = 0; p < 4; p++) {
        u32 start = __shfl_sync(ALL, pair, 8 * p + j), bytes = above[p >> 1] >> (16 * (p & 1));
        offsets[2 * p] = 2 * ((start & 0xffff) + (bytes & 0xff));
        offsets[2 * p + 1] = 2 * ((start & 0xffff) + (start >> 16) + (bytes >> 8 & 0xff));
    }
}

// bfloat16 from 2**-60 up to below 2**60: squared ReLU can be undone, see base.py.
constexpr u32 ROOT_LEAST = (127 - 60) << 7, ROOT_LIMIT = (127 + 60) << 7;

// In bits 15 and 31: whether that half lies outside (NaN does too).
static __device__ __forceinline__ u32 outside(u32 x) {
    u32 magnitude = x & 0x7fff7fff;
    return ~(magnitude + (0x8000 - ROOT_LEAST) * 0x10001u) | (magnitude + (0x8000 - ROOT_LIMIT) * 0x10001u);
}

// Write the values `v` that are kept into slots, by way of shared memory. If ROOTS, bits 15 and 31 of
// the result say whether any of those that this lane has written lies outside.
template <bool ROOTS>
static __device__ __forceinline__ u32 store_slots(
    const Slots& slots, u32 staged, const u32 (&v)[64], const u32 (&bits)[4],
    const u32 (&offsets)[8], u32 nnz, int lane) {
    u32 to[8];
#pragma unroll
    for (int k = 0; k < 8; k++) to[k] = staged + offsets[k];
#pragma unroll
    for (int i = 0; i < 64; i++) {
        asm volatile("{ .reg .pred p, q; .reg .b16 low, high; .reg .b32 b;"
                     " mov.b32 {low, high}, %2;"
                     " and.b32 b, %3, %4; setp.ne.u32 p, b, 0;"
                     " and.b32 b, %3, %5; setp.ne.u32 q, b, 0;"
                     " @p st.shared.u16 [%0], low; @p add.u32 %0, %0, 2;"
                     " @q st.shared.u16 [%1], high; @q add.u32 %1, %1, 2; }"
                     : "+r"(to[2 * (i & 3)]), "+r"(to[2 * (i & 3) + 1])
                     : "r"(v[i]), "r"(bits[i & 3]), "r"(1u << (i >> 2)), "r"(0x10000u << (i >> 2))
                     : "memory");
    }
    u32 found = 0;
    if (ROOTS) {  // make the last piece whole, with ones
        u32 past = nnz + lane;
        if (past < (nnz + 7 & ~7u))
            asm volatile("st.shared.u16 [%0], %1;" :: "r"(staged + 2 * past), "h"((u16)0x3f80) : "memory");
    }
    __syncwarp();
    for (u32 p = lane; 8 * p < nnz; p += 32) {
        uint4 piece = load_piece(staged + 16 * p);
        *slots.piece(p) = piece;
        if (ROOTS) found |= outside(piece.x) | outside(piece.y) | outside(piece.z) | outside(piece.w);
    }
    __syncwarp();
    return found;
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
    int lane = threadIdx.x & 31, q = lane >> 3, j = lane & 7;
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
    words[t.index * (u64)32 + 4 * j + q] = w;
    u32 nnz = __reduce_add_sync(ALL, count(w));
    bool sign = __any_sync(ALL, seen & 0x80008000);
    if (lane == 0) counts[t.index] = nnz | (u32)sign << 16;
    if (STATISTICS) {
        u32 bytes = bucket_bytes(w);
        if (lane == 0) counts[tiles + t.index] = bytes;
        count_exponents<MANTISSA>(v, nnz, lane, t.index, tiles, counts + 2 * tiles, exponents);
    }
}

// Activation, positions and counts. Bit 17 of the first row's counts: the sign of `up`'s values; after
// SQUARED without GATED, of bfloat16: whether any value kept lies outside the range above.
//   gate, up, hidden: u16 [numel], hidden may be gate; words: where relu(gate) counts; up_words: the
//   same of relu(up) if RELU_UP; counts, exponents, up_exponents (if GATED): as above; slots: u16
//   [tiles, capacity]. If `capacity` is 0, the slots are in `gate` and `up`, which must not be `hidden`.
template <int MANTISSA, bool GATED, bool SQUARED, bool RELU_UP, bool LATE, bool STATISTICS>
__global__ void __launch_bounds__(32 * WARPS, GATED ? 6 : 10)
activate(u16* gate, u16* up, u16* hidden, uint4* words, uint4* up_words, int* counts, u8* exponents,
         u8* up_exponents, u16* slots, i64 capacity, i64 rows, i64 cols, i64 tiles) {
    __shared__ uint4 storage[WARPS][GATED || SQUARED ? TILE / 8 : MOST_SLOTS / 8];
    Tile t = locate(tiles, rows, cols);
    if (t.index >= tiles) return;
    u32 staged = shared_address(storage[threadIdx.x >> 5]);
    int lane = threadIdx.x & 31, q = lane >> 3, j = lane & 7;
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
    u32 lane_bits[4];
#pragma unroll
    for (int k = 0; k < 4; k++) lane_bits[k] = RELU_UP ? kept_bits[k] : bits[k];
    uint4 w = gather_words(bits, q), kept_w = w;
    words[t.index * (u64)32 + 4 * j + q] = w;
    if (RELU_UP) {
        uint4 up_w = gather_words(up_bits, q);
        up_words[t.index * (u64)32 + 4 * j + q] = up_w;
        if (STATISTICS) {
            u32 bytes = bucket_bytes(up_w);
            if (lane == 0) counts[6 * tiles + t.index] = bytes;
        }
        kept_w = gather_words(kept_bits, q);
    }
    u32 nnz = __reduce_add_sync(ALL, count(kept_w));
    if (GATED || SQUARED || nnz <= MOST_SLOTS) {
        u32 offsets[8];
        slot_offsets(offsets, lane_bits, kept_w, lane);
        constexpr bool ROOTS = SQUARED && !GATED && MANTISSA == 7;
        u32 found = store_slots<ROOTS>(Slots(capacity ? slots : gate, capacity, t, cols), staged, g,
                                       lane_bits, offsets, nnz, lane);
        if (ROOTS) up_seen = found;  // there is no `up`
        // One after the other: the registers of the first are then free.
        if constexpr (GATED)
            store_slots<false>(Slots(up, 0, t, cols), staged, u, lane_bits, offsets, nnz, lane);
    }
    u32 sign = __any_sync(ALL, seen & 0x80008000) ? 1u << 16 : 0;
    if (__any_sync(ALL, up_seen & 0x80008000)) sign |= 1u << 17;
    if (lane == 0) counts[t.index] = nnz | sign;
    if (STATISTICS) {
        u32 bytes = bucket_bytes(w);
        if (lane == 0) counts[tiles + t.index] = bytes;
        count_exponents<MANTISSA>(g, nnz, lane, t.index, tiles, counts + 2 * tiles, exponents);
        if constexpr (GATED)
            count_exponents<MANTISSA>(u, nnz, lane, t.index, tiles, counts + 4 * tiles, up_exponents);
    }
}

// Offset tables and totals of the counts; a block takes a part of one row, a thread 16 tiles.
//   counts: i32 [rows, tiles], the first row with the sign flags; table0, ...: u32 [table_words], one
//   for each row; totals: i64 [2 + rows].
// What precedes its part a block adds up by itself: without waiting for others, and from the cache.
__global__ void __launch_bounds__(512)
scan(const int* counts, u32* table0, u32* table1, u32* table2, u32* table3, u32* table4,
     u32* table5, u32* table6, i64* totals, i64 tiles, i64 table_words) {
    u32* const tables[] = {table0, table1, table2, table3, table4, table5, table6};
    __shared__ u64 sums[16];
    __shared__ u32 parts[16];
    int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, row = blockIdx.y;
    counts += row * tiles;
    i64 first = (i64)blockIdx.x * (512 * 16), block = (i64)blockIdx.x * 512 + thread;
    u64 before = 0;
    u32 flags = 0;
#pragma unroll 16
    for (i64 i = thread; i < first; i += 512) {
        u32 packed = counts[i];
        before += packed & 0xffff;
        flags |= packed >> 16;
    }
    u32 pairs[8], sum = 0;
#pragma unroll
    for (int n = 0; n < 16; n++) {
        i64 tile = block * 16 + n;
        u32 packed = tile < tiles ? counts[tile] : 0;
        if (n & 1) pairs[n >> 1] |= sum << 16;
        else pairs[n >> 1] = sum;
        sum += packed & 0xffff;
        flags |= packed >> 16;
    }
    u32 preceding = exclusive_scan(sum, lane);
    for (int step = 16; step; step /= 2) before += __shfl_xor_sync(ALL, before, step);
    if (lane == 31) parts[warp] = preceding + sum;
    if (lane == 0) sums[warp] = before;
    bool gate_sign = __syncthreads_or(flags & 1), up_sign = __syncthreads_or(flags >> 1 & 1);
    u64 base = 0;
    u32 here = 0;
    for (int n = 0; n < 16; n++) {
        base += sums[n];
        if (n < warp) preceding += parts[n];
        here += parts[n];
    }
    if (block * 10 < table_words) {
        u32* to = tables[row] + block * 10;
        u64 start = base + preceding;
        to[0] = (u32)start;
        to[1] = (u32)(start >> 32);
#pragma unroll
        for (int n = 0; n < 8; n++) to[2 + n] = pairs[n];
    }
    if (blockIdx.x == gridDim.x - 1 && thread == 0) {
        totals[2 + row] = base + here;
        if (row == 0) {
            totals[0] = gate_sign;
            totals[1] = up_sign;
        }
    }
}

// ------------------------------------------------------------------------------------- encode

// A flat mask in buckets.
//   words: the flat mask; groups: u32 [2 * tiles]; buckets: u8; bucket_offsets: their table.
__global__ void __launch_bounds__(32 * WARPS)
bucket(const uint2* words, u32* groups, u8* buckets, const u32* bucket_offsets, i64 rows, i64 cols,
       i64 tiles) {
    Tile t = locate(tiles, rows, cols);
    if (t.index >= tiles) return;
    int lane = threadIdx.x & 31;
    __shared__ u8 storage[WARPS][BUCKET_BYTES + 32];
    u8* staged_bytes = storage[threadIdx.x >> 5];
    uint4 w = load_words(words, t, lane);
    bool first = w.x | w.y, second = w.z | w.w;
    u32 firsts = __ballot_sync(ALL, first), seconds = __ballot_sync(ALL, second);
    if (lane == 0) ((uint2*)groups)[t.index] = make_uint2(firsts, seconds);
    u32 parts[4] = {w.x, w.y, w.z, w.w}, sixteen = 0;
#pragma unroll
    for (int b = 0; b < 16; b++) sixteen |= (u32)((parts[b >> 2] >> (8 * (b & 3)) & 0xff) != 0) << b;
    u32 below = (1u << lane) - 1, nonempty = __popc(firsts) + __popc(seconds);
    staged_bytes[first ? __popc(firsts & below) : BUCKET_BYTES + lane] = sixteen & 0xff;
    staged_bytes[second ? __popc(firsts) + __popc(seconds & below) : BUCKET_BYTES + lane] = sixteen >> 8;
    u32 mine = __popc(sixteen & 0xff) | __popc(sixteen >> 8) << 16;
    u32 before = exclusive_scan(mine, lane), all = __shfl_sync(ALL, before + mine, 31);
    u32 ranks[2] = {nonempty + (before & 0xffff), nonempty + (all & 0xffff) + (before >> 16)};
#pragma unroll
    for (int b = 0; b < 16; b++) {
        u32 set = sixteen >> b & 1;
        staged_bytes[set ? ranks[b >> 3] : BUCKET_BYTES + lane] = parts[b >> 2] >> (8 * (b & 3));
        ranks[b >> 3] += set;
    }
    __syncwarp();
    u8* stream = buckets + entry(bucket_offsets, t.index);
    u32 bytes = nonempty + (all & 0xffff) + (all >> 16);
    for (u32 k = lane; k < bytes; k += 32) stream[k] = staged_bytes[k];
}

// Where the codes of a tile go.
template <int WIDTH, int FIELD, int MANTISSA>
struct Codes {
    i64 offset;  // of the next value
    void* out;
    u32 top;
    u8* escape;  // where the next one goes

    __device__ __forceinline__ Codes(
        const Tile& t, i64 offset, void* out, const u8* exponents, u8* escapes,
        const u32* escape_offsets)
        : offset(offset), out(out) {
        top = FIELD ? exponents[t.index] : 0;
        escape = FIELD ? escapes + entry(escape_offsets, t.index) : nullptr;
    }

    // Code and store the next `total` values, which are overwritten.
    template <bool RELU>
    __device__ __forceinline__ void store(u16* values, u32 total, int lane) {
        constexpr u32 limit = (1 << FIELD) - 1;
        for (u32 first = 0; first < total; first += 32) {
            u32 k = first + lane;
            u32 code = k < total ? values[k] : 0;
            // relu passes on what is positive or NaN.
            if (RELU && code >> 15 && (code & 0x7fff) <= infinity<MANTISSA>()) code = 0;
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
                else values[k] = code & ((1u << WIDTH) - 1);
            }
        }
        if (WIDTH != 16) {
            __syncwarp();
            // The bits start at bit `shift` of word 0 of `to`. Words at both ends may be shared with
            // what is stored before and after: their bits are distinct, so the order of the writes
            // does not matter.
            u64 bit = (u64)offset * WIDTH;
            u32* to = (u32*)out + (bit >> 5);
            int shift = bit & 31, end = shift + total * WIDTH;
            for (int i = lane; i * 32 < end; i += 32) {
                int begin = i * 32 - shift;  // of the word, in these bits; negative for the first
                int k = begin > 0 ? begin / WIDTH : 0;
                int at = k * WIDTH - begin;  // of the code, in the word
                u32 word = 0;
#pragma unroll
                for (int n = 0; n < (31 + WIDTH - 1) / WIDTH + 1; n++) {
                    if (at < 32 && k < total) {
                        u32 code = values[k];
                        word |= at >= 0 ? code << at : code >> -at;
                    }
                    k++;
                    at += WIDTH;
                }
                if (begin < 0 || i * 32 + 32 > end) atomicOr(to + i, word);
                else to[i] = word;
            }
        }
        offset += total;
        __syncwarp();
    }
};

// Codes of the kept elements.
//   x: u16 [numel]; words, more: flat masks, of which both must be set; offsets: table of the
//   values; out: u16 [nnz] if WIDTH is 16, else zeroed u32 words; exponents: u8 [tiles]; escapes: u8;
//   escape_offsets: their table; least: tiles of fewer values are left out.
template <int WIDTH, int FIELD, int MANTISSA, bool RELU>
__global__ void __launch_bounds__(32 * WARPS)
encode(const u16* x, const uint2* words, const uint2* more, i64 least, const u32* offsets, void* out,
       const u8* exponents, u8* escapes, const u32* escape_offsets, i64 rows, i64 cols, i64 tiles) {
    __shared__ uint4 storage[WARPS][PIECES];
    __shared__ u32 lists[WARPS][BUCKETS + 1];
    __shared__ u16 values[WARPS][TILE / 2];
    __shared__ uint2 columns[WARPS][COLUMNS];
    Tile t = locate(tiles, rows, cols);
    if (t.index >= tiles) return;
    i64 offset = entry(offsets, t.index);
    if (entry(offsets, t.index + 1) - offset < least) return;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    u32 staged_rows = shared_address(storage[warp]), list = shared_address(lists[warp]);
    u32 found = shared_address(values[warp]);
    Pieces pieces(staged_rows, lane);

    uint4 w = load_words(words, t, lane), m = load_words(more, t, lane);
    w = make_uint4(w.x & m.x, w.y & m.y, w.z & m.z, w.w & m.w);
    store_columns(columns[warp], w, lane);
    Codes<WIDTH, FIELD, MANTISSA> codes(t, offset, out, exponents, escapes, escape_offsets);
    __syncwarp();
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        u32 bits[4], total;
        column_bits(bits, columns[warp], half, lane);
        uint4 eight[8];
        read_rows(eight, x + first_element(t, cols, half, lane), cols, kept_rows(bits));
        u32 buckets = list_buckets(list, w, half, lane, total);
#pragma unroll
        for (int i = 0; i < 8; i++) store_piece(pieces[i], eight[i]);
        __syncwarp();
        for (u32 n = lane; n < buckets; n += 32) {
            u32 bucket = load_shared(list + 4 * n);
            move_bucket<false>(bucket, found + (bucket >> 19) * 2, staged_rows);
        }
        __syncwarp();
        codes.template store<RELU>(values[warp], total, lane);
    }
}

// Codes of what the first pass has put into slots.
//   slots, capacity: as in the first pass; offsets to escape_offsets: as above.
template <int WIDTH, int FIELD, int MANTISSA>
__global__ void __launch_bounds__(32 * WARPS)
pack(u16* slots, i64 capacity, const u32* offsets, void* out, const u8* exponents, u8* escapes,
     const u32* escape_offsets, i64 rows, i64 cols, i64 tiles) {
    constexpr u32 PART = MOST_SLOTS;  // values at a time
    __shared__ uint4 storage[WARPS][PART / 8];
    Tile t = locate(tiles, rows, cols);
    if (t.index >= tiles) return;
    i64 offset = entry(offsets, t.index);
    u32 total = entry(offsets, t.index + 1) - offset;
    if (total == 0 || (capacity && total > capacity)) return;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    Slots from(slots, capacity, t, cols);
    Codes<WIDTH, FIELD, MANTISSA> codes(t, offset, out, exponents, escapes, escape_offsets);
    uint4* staged = storage[warp];
#pragma unroll 1
    for (u32 first = 0; first < total; first += PART) {
        u32 here = min(total - first, PART);
#pragma unroll 4
        for (u32 p = lane; 8 * p < here; p += 32) staged[p] = __ldcs(from.piece(first / 8 + p));
        __syncwarp();
        codes.template store<false>((u16*)staged, here, lane);
    }
}

// ------------------------------------------------------------------------------------- decode

// The lane's mask words.
template <int SUPPORT>
static __device__ __forceinline__ uint4 read_words(
    const Tile& t, int lane, const u32* mask, const u8* buckets, const u32* bucket_offsets,
    u8* scratch) {
    if (SUPPORT == flat) return load_words((const uint2*)mask, t, lane);
    if (SUPPORT == full) {
        u64 rows = t.rows == 64 ? ~0ull : (1ull << t.rows) - 1;
        return make_uint4((u32)rows, (u32)(rows >> 32), (u32)rows, (u32)(rows >> 32));
    }
    i64 begin = entry(bucket_offsets, t.index);
    u32 bytes = entry(bucket_offsets, t.index + 1) - begin;
    for (u32 k = lane; k < bytes; k += 32) scratch[k] = buckets[begin + k];
    uint2 groups = ((const uint2*)mask)[t.index];
    u32 below = (1u << lane) - 1, firsts = __popc(groups.x), nonempty = firsts + __popc(groups.y);
    __syncwarp();
    // What is read where nothing is stored lies in the scratch, and is not used.
    u32 first = groups.x >> lane & 1 ? scratch[__popc(groups.x & below)] : 0;
    u32 second = groups.y >> lane & 1 ? scratch[firsts + __popc(groups.y & below)] : 0;
    u32 mine = __popc(first) | __popc(second) << 16;
    u32 before = exclusive_scan(mine, lane), all = __shfl_sync(ALL, before + mine, 31);
    u32 ranks[2] = {nonempty + (before & 0xffff), nonempty + (all & 0xffff) + (before >> 16)};
    u32 parts[4] = {0, 0, 0, 0};
#pragma unroll
    for (int b = 0; b < 16; b++) {
        u32 set = (b < 8 ? first : second) >> (b & 7) & 1;
        u32 byte = scratch[ranks[b >> 3]];
        ranks[b >> 3] += set;
        parts[b >> 2] |= set ? byte << (8 * (b & 3)) : 0;
    }
    __syncwarp();
    return make_uint4(parts[0], parts[1], parts[2], parts[3]);
}

// Have something that was read only for the sake of reading it not left out as unused; `scratch` is the
// address of a word of shared memory, for each lane its own, that is not needed any more.
static __device__ __forceinline__ void keep(uint3 x, u32 scratch) {
    asm volatile("st.shared.u32 [%0], %1;" :: "r"(scratch), "r"(x.x | x.y | x.z) : "memory");
}

// The values of a tile, 32 at a time: lane l gets the pattern of the l-th.
template <int WIDTH, int FIELD, int MANTISSA>
struct Values {
    u64 first;      // bit that the first value starts at
    const u32* in;
    u32 top;
    const u8* escape;       // the next one
    const u32 *low, *high;  // words of the lane's next value; 32 values take WIDTH words
    u32 shift;

    __device__ __forceinline__ Values(
        i64 offset, const Tile& t, const void* in, const u8* exponents, const u8* escapes,
        const u32* escape_offsets)
        : first((u64)offset * WIDTH), in((const u32*)in) {
        top = FIELD ? exponents[t.index] : 0;
        escape = FIELD ? escapes + entry(escape_offsets, t.index) : nullptr;
    }

    // Have all of the tile's `count` values on their way to the first-level cache: later reads of a few
    // at a time would wait for memory, one after the other. What is returned is to be passed to `keep`
    // in the end, and not to be looked at before.
    __device__ __forceinline__ uint3 touch(
        u32 count, const Tile& t, const u32* escape_offsets, int lane) const {
        constexpr u32 SECTOR = 8;  // words
        const u32* from = in + (first >> 5) + SECTOR * lane;
        int words = (((u32)(first & 31) + count * WIDTH + 31) >> 5) - SECTOR * lane;
        uint3 touched = make_uint3(words > 0 ? *from : 0, 0, 0);
#pragma unroll 1
        for (int n = 32 * SECTOR; n < words; n += 32 * SECTOR) touched.y |= from[n];
        if (FIELD) {
            u32 escaped = entry(escape_offsets, t.index + 1) - entry(escape_offsets, t.index);
            if (32 * lane < escaped) touched.z = escape[32 * lane];
        }
        return touched;
    }

    // Go on with value k.
    __device__ __forceinline__ void seek(u32 k, int lane) {
        u64 bit = first + (k + lane) * WIDTH;
        shift = bit & 31;
        low = in + (bit >> 5);
        high = low + (shift + WIDTH > 32);
    }

    // Lanes whose value does not exist get anything.
    __device__ __forceinline__ u32 next(bool exists, int lane) {
        constexpr u32 limit = (1 << FIELD) - 1;
        u32 below = exists ? *low : 0, above = exists && WIDTH != 16 ? *high : 0;
        low += WIDTH;
        high += WIDTH;
        u32 code = __funnelshift_r(below, above, shift) & ((1u << WIDTH) - 1);
        if (FIELD) {
            u32 distance = (code >> MANTISSA) & limit;
            u32 exponent = top - distance;
            bool escaped = distance == limit && exists;
            u32 all = __ballot_sync(ALL, escaped);
            if (all) {
                if (escaped) exponent = escape[__popc(all & ((1u << lane) - 1))];
                escape += __popc(all);
            }
            code = (code & ((1 << MANTISSA) - 1)) | exponent << MANTISSA
                   | code >> (MANTISSA + FIELD) << 15;
        }
        return code;
    }
};

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
    __shared__ uint4 storage[WARPS][PIECES];
    __shared__ u32 lists[WARPS][BUCKETS + 1];
    __shared__ u16 groups[WARPS][GROUP];
    Tile t = locate(tiles, rows, cols);
    if (t.index >= tiles) return;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    u32 staged_rows = shared_address(storage[warp]), list = shared_address(lists[warp]);
    u32 values = shared_address(groups[warp]);
    Pieces pieces(staged_rows, lane);

    i64 offset = entry(offsets, t.index);
    u32 in_tile = entry(offsets, t.index + 1) - offset;
    Values<WIDTH, FIELD, MANTISSA> gates(
        offset, t, gate, gate_exponents, gate_escapes, gate_escape_offsets);
    Values<UP_WIDTH, UP_FIELD, MANTISSA> ups(
        offset, t, up, up_exponents, up_escapes, up_escape_offsets);
    uint3 touched = gates.touch(in_tile, t, gate_escape_offsets, lane), up_touched = touched;
    if (GATED) up_touched = ups.touch(in_tile, t, up_escape_offsets, lane);
    u8* scratch = (u8*)storage[warp];
    uint4 w = read_words<SUPPORT>(t, lane, mask, buckets, bucket_offsets, scratch);
    if (TWO_MASKS) {
        uint4 m = read_words<SUPPORT>(t, lane, up_mask, up_buckets, up_bucket_offsets, scratch);
        w = make_uint4(w.x & m.x, w.y & m.y, w.z & m.z, w.w & m.w);
    }
    u32 done = 0;
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < 8; i++) store_piece(pieces[i], make_uint4(0, 0, 0, 0));
        u32 total, buckets = list_buckets(list, w, half, lane, total);
        __syncwarp();
        for (u32 n = 0, begin = 0; n < buckets; n += 32) {
            u32 bucket = load_shared(list + 4 * min(n + lane, buckets));
            u32 end = load_shared(list + 4 * min(n + 32, buckets)) >> 19;
            gates.seek(done + begin, lane);
            if (GATED) ups.seek(done + begin, lane);
            for (u32 first = begin; first < end; first += 32) {
                bool exists = first + lane < end;
                u32 a = gates.next(exists, lane), b = 0;
                if (GATED) b = ups.next(exists, lane);
                a = product<MANTISSA, GATED, SQUARED, LATE>(a, b);
                store_half(values + 2 * (first - begin + lane), a, exists);
            }
            __syncwarp();
            move_bucket<true>(bucket, values + 2 * ((bucket >> 19) - begin), staged_rows);
            __syncwarp();
            begin = end;
        }
        done += total;
        u16* to = out + first_element(t, cols, half, lane);
        if (t.rows == 64) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                __stcs((uint4*)to, load_piece(pieces[i]));
                to += cols;
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                if (row_in_tile(i, lane) < t.rows) __stcs((uint4*)to, load_piece(pieces[i]));
                to += cols;
            }
        }
        __syncwarp();
    }
    keep(touched, list + 4 * lane);
    if (GATED) keep(up_touched, list + 4 * lane);
}

// Gradients of the pre-activations. With neither GATED nor SQUARED the mask says where the incoming
// gradient passes, and no values are read.
//   grad: u16 [numel], the gradient of the hidden tensor; grad_gate, grad_up: u16 [numel], written,
//   may be `grad`.
template <int SUPPORT, int MANTISSA, int WIDTH, int FIELD, int UP_WIDTH, int UP_FIELD, bool GATED,
          bool SQUARED, bool TWO_MASKS, bool LATE, bool NEED_GATE, bool NEED_UP>
__global__ void __launch_bounds__(32 * WARPS, GATED ? 8 : 12)
gradient(const u16* grad, u16* grad_gate, u16* grad_up, MASK, UP_MASK, const u32* offsets,
         STREAM(gate), STREAM(up), i64 rows, i64 cols, i64 tiles) {
    constexpr bool VALUES = GATED || SQUARED;
    // 2 * relu(gate), rounded as eager does, is worked out once a value where nothing else needs
    // relu(gate) itself. In bfloat16 it has the same bits rounded late or not.
    constexpr bool DOUBLED = SQUARED && !GATED && (!LATE || MANTISSA == 7);
    __shared__ uint4 storage[GATED ? 2 : 1][WARPS][VALUES ? PIECES : BUCKET_BYTES / 16 + 1];
    __shared__ u32 lists[WARPS][VALUES ? BUCKETS + 1 : 1];
    __shared__ u16 groups[GATED ? 2 : 1][WARPS][VALUES ? GROUP : 1];
    __shared__ uint2 columns[TWO_MASKS ? 2 : 1][WARPS][COLUMNS];
    Tile t = locate(tiles, rows, cols);
    if (t.index >= tiles) return;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    uint2 *own = columns[0][warp], *other = columns[TWO_MASKS ? 1 : 0][warp];
    u32 staged_rows = shared_address(storage[0][warp]), list = shared_address(lists[warp]);
    u32 values = shared_address(groups[0][warp]);
    // What belongs to `up` is staged this much further on.
    constexpr u32 UP_ROWS = sizeof(storage[0]), UP_VALUES = sizeof(groups[0]);
    Pieces pieces(staged_rows, lane);

    i64 offset = VALUES ? entry(offsets, t.index) : 0;
    u32 in_tile = VALUES ? entry(offsets, t.index + 1) - offset : 0;
    Values<WIDTH, VALUES ? FIELD : 0, MANTISSA> gates(
        offset, t, gate, gate_exponents, gate_escapes, gate_escape_offsets);
    Values<UP_WIDTH, GATED ? UP_FIELD : 0, MANTISSA> ups(
        offset, t, up, up_exponents, up_escapes, up_escape_offsets);
    uint3 touched = make_uint3(0, 0, 0), up_touched = touched;
    if (VALUES) touched = gates.touch(in_tile, t, gate_escape_offsets, lane);
    if (GATED) up_touched = ups.touch(in_tile, t, up_escape_offsets, lane);
    u8* scratch = (u8*)storage[0][warp];
    uint4 w = read_words<SUPPORT>(t, lane, mask, buckets, bucket_offsets, scratch);
    store_columns(own, w, lane);
    if (TWO_MASKS) {
        uint4 m = read_words<SUPPORT>(t, lane, up_mask, up_buckets, up_bucket_offsets, scratch);
        store_columns(other, m, lane);
        w = make_uint4(w.x & m.x, w.y & m.y, w.z & m.z, w.w & m.w);
    }
    u32 done = 0;
    __syncwarp();
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        u32 own_bits[4], other_bits[4];
        column_bits(own_bits, own, half, lane);
        if (TWO_MASKS) column_bits(other_bits, other, half, lane);
        i64 at = first_element(t, cols, half, lane);
        // Where no factor is kept only the gradient of `up` depends on the incoming one.
        u32 wanted = NEED_UP ? rows_inside(t.rows, lane) : kept_rows(own_bits);
        // All rows at once: they are on their way while the values are unpacked.
        uint4 incoming[8];
        read_rows(incoming, grad + at, cols, wanted);
        if (VALUES) {
            uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                store_piece(pieces[i], zero);
                if (GATED) store_piece(pieces[i] + UP_ROWS, zero);
            }
            u32 total, buckets = list_buckets(list, w, half, lane, total);
            __syncwarp();
            for (u32 n = 0, begin = 0; n < buckets; n += 32) {
                u32 bucket = load_shared(list + 4 * min(n + lane, buckets));
            u32 end = load_shared(list + 4 * min(n + 32, buckets)) >> 19;
            gates.seek(done + begin, lane);
            if (GATED) ups.seek(done + begin, lane);
                for (u32 first = begin; first < end; first += 32) {
                    bool exists = first + lane < end;
                    u32 a = gates.next(exists, lane), b = 0;
                    if (GATED) b = ups.next(exists, lane);
                    if (DOUBLED) {
                        float2 g = to_float<MANTISSA>(a);
                        a = from_float<MANTISSA>(make_float2(g.x * 2.f, g.y * 2.f));
                    }
                    u32 to = values + 2 * (first - begin + lane);
                    store_half(to, a, exists);
                    if (GATED) store_half(to + UP_VALUES, b, exists);
                }
                __syncwarp();
                u32 from = values + 2 * ((bucket >> 19) - begin);
                move_bucket<true>(bucket, from, staged_rows);
                if (GATED) move_bucket<true>(bucket, from + UP_VALUES, staged_rows + UP_ROWS);
                __syncwarp();
                begin = end;
            }
            done += total;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint4 a4 = make_uint4(0, 0, 0, 0), b4 = a4;
            if (VALUES) a4 = load_piece(pieces[i]);
            if (GATED) b4 = load_piece(pieces[i] + UP_ROWS);
            uint4 in4 = incoming[i];
            u32 in[4] = {in4.x, in4.y, in4.z, in4.w};
            u32 as[4] = {a4.x, a4.y, a4.z, a4.w}, bs[4] = {b4.x, b4.y, b4.z, b4.w};
            u32 gate_result[4], up_result[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                u32 a = as[n], b = bs[n];
                // What is not kept has factors of zero, which are multiplied by, as eager does: the
                // product may be -0.0 or NaN. Only where relu's derivative is 0 eager selects 0.
                u32 mine = (own_bits[n] >> i & 0x00010001) * 0xffff;
                u32 fires = GATED ? nonzero(a) * 0xffff : mine, up_fires = ~0u;
                if (TWO_MASKS) {
                    // Where both masks are set the values decide; elsewhere the masks do.
                    u32 theirs = (other_bits[n] >> i & 0x00010001) * 0xffff;
                    fires = (fires | ~theirs) & mine;
                    up_fires = (nonzero(b) * 0xffff | ~mine) & theirs;
                }
                float2 x = to_float<MANTISSA>(in[n]), g = to_float<MANTISSA>(a);
                if (NEED_UP) {
                    float2 factor = g;
                    if (SQUARED) factor = multiply<MANTISSA, LATE>(g, g);
                    up_result[n] =
                        from_float<MANTISSA>(make_float2(x.x * factor.x, x.y * factor.y)) & up_fires;
                }
                if (NEED_GATE) {
                    u32 result = in[n];
                    if (VALUES) {
                        if (GATED && SQUARED) {
                            x = multiply<MANTISSA, LATE>(x, to_float<MANTISSA>(b));
                        } else if (GATED) {
                            float2 y = to_float<MANTISSA>(b);
                            x = make_float2(x.x * y.x, x.y * y.y);
                        }
                        if (SQUARED) {
                            // 2 * gate may overflow to infinity in the dtype.
                            if (!DOUBLED) g = multiply<MANTISSA, LATE>(g, make_float2(2.f, 2.f));
                            x = make_float2(x.x * g.x, x.y * g.y);
                        }
                        result = from_float<MANTISSA>(x);
                    }
                    gate_result[n] = result & fires;
                }
            }
            if (t.rows == 64 || row_in_tile(i, lane) < t.rows) {
                if (NEED_GATE)
                    __stcs((uint4*)(grad_gate + at),
                           make_uint4(gate_result[0], gate_result[1], gate_result[2], gate_result[3]));
                if (NEED_UP)
                    __stcs((uint4*)(grad_up + at),
                           make_uint4(up_result[0], up_result[1], up_result[2], up_result[3]));
            }
            at += cols;
        }
        __syncwarp();
    }
    if (VALUES) keep(touched, list + 4 * lane);
    if (GATED) keep(up_touched, list + 4 * lane);
}
