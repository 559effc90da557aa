/* Products with weights, also of several experts, for CPUs: cpu_products.py compiles and calls it.

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

/* The rows of a product, in the experts' order: the i-th is x's row pairs[i] / per_row, and becomes out's row pairs[i].
   Without `pairs` both are the i-th. */
typedef struct {
    const number *x;
    number *out;
    const int64_t *pairs;
    int64_t per_row, inputs, outputs;
} product;

static inline const number *row_of_x(const product *of, int64_t i)
{
    return of->x + (of->pairs ? of->pairs[i] / of->per_row : i) * of->inputs;
}

static inline number *row_of_out(const product *of, int64_t i)
{
    return of->out + (of->pairs ? of->pairs[i] : i) * of->outputs;
}

/* Copy `rows` rows of x, from the `first` one on, to a tile [inputs, rows], or [pairs of inputs, rows], and something
   to the LANES floats behind it. */
static void copy_tile(const product *of, int64_t first, float *tile, int64_t rows)
{
    const number *x[ROWS];
    int64_t k = 0, inputs = of->inputs;
    for (int64_t r = 0; r < rows; r++)
        x[r] = row_of_x(of, first + r);
    for (; k + TAKEN * LANES <= inputs; k += TAKEN * LANES) {
        floats v[LANES];
#pragma GCC unroll 16
        for (int r = 0; r < LANES; r++)
            v[r] = r < ROWS && r < rows ? take(x[r] + k) : (floats){0};
        transpose(v);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++, tile += rows)
            *(floats *)tile = v[i]; /* what is too much is overwritten by the next */
    }
    for (; k < inputs; k += TAKEN)
        for (int64_t r = 0; r < rows; r++)
            *tile++ = take_last(x[r] + k, inputs - k);
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

/* Store sums [rows, WIDTH], times scales or NULL, to rows of out, from the `first` one and from column j on. */
static inline void store_rows(const float *sums, const float *scales, const product *of, int64_t first, int64_t rows,
                              int64_t j)
{
    const int64_t columns = of->outputs - j < WIDTH ? of->outputs - j : WIDTH;
    for (int64_t r = 0; r < rows; r++) {
        number row[WIDTH], *out = row_of_out(of, first + r) + j, *to = columns == WIDTH ? out : row;
        for (int v = 0; v < WIDTH; v += LANES) {
            floats some = *(const floats *)(sums + r * WIDTH + v);
            if (scales)
                some *= *(const floats *)(scales + v);
            store(to + v, some);
        }
        if (to == row)
            memcpy(out, row, columns * sizeof(number));
    }
}

/* Rows that meet an expert's weights together: where they begin, and their first tile among those copied at once. */
typedef struct {
    int64_t expert, first, rows, tile;
} job;

/* WIDTH columns of out, from j on, or fewer, for a job: from its tiles, what `add_up_blocks` makes of them, and a panel's
   weights and scales, one for each output. `inputs` are inputs or pairs. */
static void multiply_panel(const product *of, const job *now, const float *tiles, const float *totals, const weight *panel,
                           const scale *scales, int64_t inputs, int64_t j)
{
    (void)totals;
    const int64_t rows = now->rows;
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
    store_rows(sums, FOUR_BITS ? NULL : (const float *)scales, of, now->first, rows, j);
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

/* Rows that are copied at once: jobs of one expert or several, and where each tile's rows begin. */
typedef struct {
    int64_t rows, n_jobs, n_tiles;
    job jobs[MOST_ROWS];
    struct {
        int64_t first, rows;
    } tiles[MOST_ROWS];
} batch;

/* Fill a batch with rows from `first` on, which are `*expert`'s or later ones'. */
static void fill(batch *of, int64_t first, const int64_t *ends, int64_t experts, int64_t *expert)
{
    of->rows = of->n_jobs = of->n_tiles = 0;
    while (*expert < experts && of->rows < MOST_ROWS) {
        int64_t start = first + of->rows, left = ends[*expert] - start, room = MOST_ROWS - of->rows;
        if (left > room && left <= MOST_ROWS)
            return; /* the next batch has room for all: so its weights are read once */
        if (left > 0) {
            int64_t rows = left < room ? left : room;
            of->jobs[of->n_jobs++] = (job){*expert, start, rows, of->n_tiles};
            for (int64_t t = 0; t < (rows + ROWS - 1) / ROWS; t++, of->n_tiles++) {
                of->tiles[of->n_tiles].first = start + tile_start(t, rows);
                of->tiles[of->n_tiles].rows = tile_start(t + 1, rows) - tile_start(t, rows);
            }
            of->rows += rows;
        }
        *expert += left <= room;
    }
}

/* Multiply the rows of each expert, which end at ends [experts], with its weights [panels, inputs, WIDTH], or pairs of
   them, times scales [panels * WIDTH], or NULL; of four bits [panels, inputs / BLOCK, SCALES]. The last panel is filled
   up. */
static void multiply_all(const product *of, const weight *const *weights, const scale *const *scales, const int64_t *ends,
                         int64_t experts)
{
    const int64_t n = ends[experts - 1], inputs = of->inputs, outputs = of->outputs;
    if (n == 0)
        return;
#if MATRICES
    if (has_matrices()) {
        for (int64_t e = 0, first = 0; e < experts; first = ends[e++])
            if (ends[e] > first)
                multiply_by_matrices(of, weights[e], first, ends[e] - first);
        return;
    }
#endif
    int64_t most = n < MOST_ROWS ? n : MOST_ROWS, taken = (inputs + TAKEN - 1) / TAKEN;
    int64_t blocks = INT4 ? inputs / BLOCK : 0, all = most * (taken + LANES);
    float *tiles = malloc((all + most * blocks) * sizeof(float)), *totals = tiles + all;
    if (!tiles)
        abort();
    batch now;
    for (int64_t first = 0, expert = 0; first < n; first += now.rows) {
        fill(&now, first, ends, experts, &expert);
#pragma omp parallel
        {
#pragma omp for
            for (int64_t t = 0; t < now.n_tiles; t++) {
                int64_t start = now.tiles[t].first - first, rows = now.tiles[t].rows;
                float *tile = tiles + start * taken + t * LANES;
                copy_tile(of, now.tiles[t].first, tile, rows);
#if INT4
                add_up_blocks(tile, totals + start * blocks, rows, taken);
#endif
            }
            for (int64_t i = 0; i < now.n_jobs; i++) {
                const job *one = now.jobs + i;
                const int64_t start = one->first - first;
                const float *copied = tiles + start * taken + one->tile * LANES;
                const scale *by = scales ? scales[one->expert] : NULL;
#pragma omp for nowait /* the end of the region waits */
                for (int64_t j = 0; j < outputs; j += WIDTH)
                    multiply_panel(of, one, copied, totals + start * blocks, weights[one->expert] + j / WIDTH * taken * ROW,
                                   by ? by + j / WIDTH * (FOUR_BITS ? inputs / BLOCK * SCALES : WIDTH) : NULL, taken, j);
            }
        }
    }
    free(tiles);
}

/* out [n, outputs] = x [n, inputs] times weights and scales, as in `multiply_all`. */
void multiply(const number *x, const weight *weights, const scale *scales, number *out, int64_t n, int64_t inputs,
              int64_t outputs)
{
    const product of = {x, out, NULL, 1, inputs, outputs};
    multiply_all(&of, &weights, scales ? &scales : NULL, &n, 1);
}

/* The same for pairs [n] of a row of x [n / per_row, inputs] and an expert, in the order of `experts`, where each ends at
   ends [experts]. What is behind the last end is no expert's, and becomes zero. */
void multiply_experts(const number *x, const weight *const *weights, const scale *const *scales, number *out,
                      const int64_t *pairs, const int64_t *ends, int64_t n, int64_t experts, int64_t per_row,
                      int64_t inputs, int64_t outputs)
{
    const product of = {x, out, pairs, per_row, inputs, outputs};
    multiply_all(&of, weights, scales, ends, experts);
    for (int64_t i = ends[experts - 1]; i < n; i++)
        memset(row_of_out(&of, i), 0, outputs * sizeof(number));
}
