/* Products with weights, for CPUs: cpu_products.py compiles and calls it.

   Rows are float, or with -DBF16=1 bfloat16, weights the same, with -DINT8=1 int8, or with -DMXFP4=1 or -DINT4=1 four
   bits, of which each BLOCK inputs of an output have a scale (cpu_four_bits.h); all are multiplied and added as float. Weights lie in panels of WIDTH outputs, rows are copied into tiles of up to ROWS, and a tile's sums
   with a panel stay in registers (the way of GotoBLAS and BLIS: Goto and van de Geijn, ACM TOMS 34(3), 2008).

   Where the CPU multiplies pairs of bfloat16, PAIRS of inputs lie side by side, and a pair is taken where else a float
   is. Where it multiplies matrices of them, and Linux lets it, cpu_matrices.h does instead. */

#include "cpu_vectors.h"

#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__ /* 32 registers of 16 floats: 24 sums */
#define ROWS 12
#else /* 16 of 8: 12 sums */
#define ROWS 6
#endif
#define WIDTH (2 * LANES)
#if BF16 && defined __AVX512BF16__
#define PAIRS 1
#else
#define PAIRS 0
#endif
#define TAKEN (1 + PAIRS) /* inputs at a time */
#define FOUR_BITS (MXFP4 || INT4)
#define DEPTH 600    /* inputs, or pairs, at most of a panel's piece, which stays in a core's cache for all tiles */
#define AHEAD 4      /* blocks whose scales are fetched: those of the next one come too late */
#define MOST_ROWS 96 /* that are copied at once */

/* `first` and `second` are the halves of a panel's row, of floats or of pairs. */
#if FOUR_BITS
#include "cpu_four_bits.h"
#elif INT8
typedef int8_t weight;

static inline floats widened(const weight *w)
{
#if defined __AVX512F__
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)w)));
#elif defined __AVX2__
    return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)w)));
#else
    floats wide;
    for (int i = 0; i < LANES; i++)
        wide[i] = w[i];
    return wide;
#endif
}

static inline floats first(const weight *w)
{
#if PAIRS /* bfloat16 holds them exactly */
    return (floats)_mm512_cvtne2ps_pbh((__m512)widened(w + LANES), (__m512)widened(w));
#else
    return widened(w);
#endif
}
static inline floats second(const weight *w) { return first(w + TAKEN * LANES); }
#elif BF16 && !PAIRS
typedef number weight;

/* Numbers LANES apart lie side by side: widening them takes an instruction each. */
static inline floats first(const weight *w) { return (floats)(*(const words *)w << 16); }
static inline floats second(const weight *w) { return (floats)(*(const words *)w & 0xffff0000); }
#else
typedef number weight;

static inline floats first(const weight *w) { return *(const floats *)w; }
static inline floats second(const weight *w) { return first(w + TAKEN * LANES); }
#endif

#if !FOUR_BITS
#define BLOCK 1
#define SCALES 1
#define ROW_BYTES (WIDTH * TAKEN * (int64_t)sizeof(weight)) /* of a panel */
typedef float scale;
#endif
#define ROW (ROW_BYTES / (int64_t)sizeof(weight))

const int64_t width = WIDTH;

/* sum + w x; of pairs, plus both products, where numbers below 2^-126 count as zero */
static inline floats add_product(floats sum, floats w, float x)
{
#if PAIRS
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_ps(x));
#else
    return sum + w * x;
#endif
}

/* GCC 12 keeps a tile's sums of pairs in registers only as a type with its own alignment. */
typedef float aligned_floats __attribute__((vector_size(4 * LANES)));

/* Add to sums [rows, WIDTH], or begin them, what `depth` inputs of x [depth, rows] and w [depth, WIDTH] give. Of four
   bits these are a block, with `scales`, and for int4 `totals` [rows] of its inputs.

   What is needed next is fetched meanwhile, `step` bytes for each input: memory is read all the time, not only
   while a panel meets its first tile. */
static inline __attribute__((always_inline)) void multiply_tile(const int rows, const float *x, const weight *w,
                                                                const scale *scales, const float *totals,
                                                                float *sums, int64_t depth, int begins,
                                                                const char *next, int64_t step)
{
    aligned_floats held[ROWS][2];
    (void)totals;
#if FOUR_BITS
    const block of = block_of(scales);
#else
    (void)scales;
#endif
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++)
            held[r][v] = begins || FOUR_BITS ? (floats){0} : *(floats *)(sums + r * WIDTH + v * LANES);
    for (int64_t k = 0; k < depth; k++, x += rows, w += ROW, next += step) {
        floats some = first(w), others = second(w);
        __builtin_prefetch(next, 0, 1);
        if (step > 64)
            __builtin_prefetch(next + 64, 0, 1);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            held[r][0] = add_product(held[r][0], some, x[r]);
            held[r][1] = add_product(held[r][1], others, x[r]);
        }
    }
#if FOUR_BITS
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++) {
            floats before = begins ? (floats){0} : *(floats *)(sums + r * WIDTH + v * LANES);
            held[r][v] = before + held[r][v] * of.factor[v];
#if INT4
            held[r][v] -= of.zero[v] * totals[r];
#endif
        }
    /* before the loop above, GCC 12 would keep sums in memory for it */
    for (int64_t i = 0; i < SCALES * (int64_t)sizeof(scale); i += 64)
        __builtin_prefetch((const char *)(scales + AHEAD * SCALES) + i, 0, 2);
#endif
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++)
            *(floats *)(sums + r * WIDTH + v * LANES) = held[r][v];
}

/* The same for `blocks`, which for other weights is one; for each number of rows the compiler makes loops of its own,
   whose sums are registers. */
static void multiply_rows(int rows, const float *x, const weight *w, const scale *scales, const float *totals,
                          float *sums, int64_t blocks, int64_t depth, int begins, const char *next, int64_t step)
{
#define CASE(n) \
    case n: \
        for (; blocks > 0; blocks--, begins = 0) { \
            multiply_tile(n, x, w, scales, totals, sums, depth, begins, next, step); \
            x += n * depth, w += depth * ROW, scales += SCALES * FOUR_BITS, totals += n * INT4, next += depth * step; \
        } \
        break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if ROWS > 6
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
#undef CASE
}

/* Rows of x in tiles, as `multiply_tile` reads them: tile t has the rows from `tile_start` t to t + 1. */
static inline int64_t tile_start(int64_t t, int64_t rows)
{
    return rows * t / ((rows + ROWS - 1) / ROWS);
}

typedef int32_t places __attribute__((vector_size(4 * LANES)));

/* Transpose v [LANES], of LANES floats each: what lies on either side of the diagonal changes places, in squares half
   as large each time. */
static inline void transpose(floats *v)
{
    places at;
    for (int i = 0; i < LANES; i++)
        at[i] = i;
#pragma GCC unroll 4
    for (int size = LANES / 2; size; size /= 2) {
        places upper = at + ((at & size) != 0 & (LANES - size)), lower = upper + size;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & size)) {
                floats some = v[i], others = v[i + size];
                v[i] = __builtin_shuffle(some, others, upper);
                v[i + size] = __builtin_shuffle(some, others, lower);
            }
    }
}

#if PAIRS
static inline floats take(const number *x) { return (floats)*(const words *)x; }

static inline float take_last(const number *x, int64_t left) /* with zero for what is missing */
{
    return ((both){.bits = x[0] | (uint32_t)(left > 1 ? x[1] : 0) << 16}).real;
}
#else
static inline floats take(const number *x) { return load(x); }
static inline float take_last(const number *x, int64_t left) { (void)left; return get(x[0]); }
#endif

/* Copy x [rows, inputs] to a tile [inputs, rows], or [pairs, rows], and something to the LANES floats behind it. */
static void copy_tile(const number *x, float *tile, int64_t rows, int64_t inputs)
{
    int64_t k = 0;
    for (; k + TAKEN * LANES <= inputs; k += TAKEN * LANES) {
        floats v[LANES];
#pragma GCC unroll 16
        for (int r = 0; r < LANES; r++)
            v[r] = r < ROWS && r < rows ? take(x + r * inputs + k) : (floats){0};
        transpose(v);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++, tile += rows)
            *(floats *)tile = v[i]; /* what is too much is overwritten by the next */
    }
    for (; k < inputs; k += TAKEN)
        for (int64_t r = 0; r < rows; r++)
            *tile++ = take_last(x + r * inputs + k, inputs - k);
}

#if INT4
/* Add up each block's inputs of a tile [inputs, rows], or of pairs: totals [blocks, rows]. */
static void add_up_blocks(const float *tile, float *totals, int64_t rows, int64_t inputs)
{
    for (int64_t k = 0; k < inputs; k++, tile += rows) {
        float *of = totals + k / (BLOCK / TAKEN) * rows;
        for (int64_t r = 0; r < rows; r++) {
            both x = {.real = tile[r]};
            float some = PAIRS ? ((both){.bits = x.bits << 16}).real + ((both){.bits = x.bits & 0xffff0000}).real : x.real;
            of[r] = k % (BLOCK / TAKEN) ? of[r] + some : some;
        }
    }
}
#endif

/* Store sums [rows, WIDTH], times scales or NULL, to rows of out [rows, outputs], WIDTH of its columns or fewer. */
static inline void store_rows(const float *sums, const float *scales, number *out, int64_t rows, int64_t columns,
                              int64_t outputs)
{
    for (int64_t r = 0; r < rows; r++) {
        number row[WIDTH], *to = columns == WIDTH ? out + r * outputs : row;
        for (int v = 0; v < WIDTH; v += LANES) {
            floats some = *(const floats *)(sums + r * WIDTH + v);
            if (scales)
                some *= *(const floats *)(scales + v);
            store(to + v, some);
        }
        if (to == row)
            memcpy(out + r * outputs, row, columns * sizeof(number));
    }
}

/* out [rows, outputs], WIDTH of its columns or fewer, from tiles of rows, what `add_up_blocks` makes of them, and a
   panel's weights and scales, one for each output. `inputs` are inputs or pairs. */
static void multiply_panel(const float *tiles, const float *totals, const weight *panel, const scale *scales,
                           number *out, int64_t rows, int64_t inputs, int64_t columns, int64_t outputs)
{
    (void)totals;
    int64_t n_tiles = (rows + ROWS - 1) / ROWS, step = ROW_BYTES / n_tiles;
#if FOUR_BITS
    const int64_t block = BLOCK / TAKEN, depth = block < DEPTH ? DEPTH / block * block : block;
#else
    int64_t pieces = (inputs + DEPTH - 1) / DEPTH, depth = (inputs + pieces - 1) / pieces;
#endif
    float sums[MOST_ROWS * WIDTH];
    for (int64_t k = 0; k < inputs; k += depth) {
        int64_t some = inputs - k < depth ? inputs - k : depth;
        const weight *piece = panel + k * ROW;
        const char *next = (const char *)(piece + some * ROW);
        for (int64_t t = 0; t < n_tiles; t++) {
            int64_t start = tile_start(t, rows), n = tile_start(t + 1, rows) - start;
            const float *x = tiles + start * inputs + t * LANES + k * n;
#if FOUR_BITS
            multiply_rows(n, x, piece, scales + k / block * SCALES, totals + start * (inputs / block) + k / block * n,
                          sums + start * WIDTH, some / block, block, k == 0, next + t * step * some, step);
#else
            multiply_rows(n, x, piece, NULL, NULL, sums + start * WIDTH, 1, some, k == 0, next + t * step * some, step);
#endif
        }
    }
    store_rows(sums, FOUR_BITS ? NULL : (const float *)scales, out, rows, columns, outputs);
}

#if BF16 && !INT8 && !FOUR_BITS && defined __AMX_BF16__ && defined __AVX512F__ && defined __linux__
#define MATRICES 1
#include "cpu_matrices.h"
#endif

/* Of how many inputs weights must have a multiple: if more than 1, pairs of them lie side by side. */
int64_t multiple_of_inputs(void)
{
#if MATRICES
    if (has_matrices())
        return 2 * SIDE;
#endif
    return TAKEN;
}

/* out [n, outputs] = x [n, inputs] times weights [panels, inputs, WIDTH], or pairs of them, times scales [panels *
   WIDTH], or NULL; of four bits [panels, inputs / BLOCK, SCALES]. The last panel is filled up. */
void multiply(const number *x, const weight *weights, const scale *scales, number *out, int64_t n,
              int64_t inputs, int64_t outputs)
{
    if (n == 0)
        return;
#if MATRICES
    if (has_matrices()) {
        multiply_by_matrices(x, weights, out, n, inputs, outputs);
        return;
    }
#endif
    int64_t most = n < MOST_ROWS ? n : MOST_ROWS, taken = (inputs + TAKEN - 1) / TAKEN;
    int64_t blocks = INT4 ? inputs / BLOCK : 0, all = most * taken + MOST_ROWS / ROWS * LANES;
    float *tiles = malloc((all + most * blocks) * sizeof(float)), *totals = tiles + all;
    if (!tiles)
        abort();
    for (; n > 0; n -= MOST_ROWS, x += MOST_ROWS * inputs, out += MOST_ROWS * outputs) {
        int64_t rows = n < MOST_ROWS ? n : MOST_ROWS;
#pragma omp parallel
        {
#pragma omp for
            for (int64_t t = 0; t < (rows + ROWS - 1) / ROWS; t++) {
                int64_t start = tile_start(t, rows), some = tile_start(t + 1, rows) - start;
                float *tile = tiles + start * taken + t * LANES;
                copy_tile(x + start * inputs, tile, some, inputs);
#if INT4
                add_up_blocks(tile, totals + start * blocks, some, taken);
#endif
            }
#pragma omp for nowait /* the end of the region waits */
            for (int64_t j = 0; j < outputs; j += WIDTH)
                multiply_panel(tiles, totals, weights + j / WIDTH * taken * ROW,
                               scales ? scales + j / WIDTH * (FOUR_BITS ? inputs / BLOCK * SCALES : WIDTH) : NULL, out + j, rows, taken,
                               outputs - j < WIDTH ? outputs - j : WIDTH, outputs);
        }
    }
    free(tiles);
}
