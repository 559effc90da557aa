/* Products of bfloat16 by a CPU's matrix registers (AMX: Intel's "Architecture Instruction Set Extensions", chapter
   3). Each has up to SIDE rows of SIDE floats, or of SIDE pairs of bfloat16. Part of cpu_products.c.

   Weights: panels [inputs / 2, WIDTH] of pairs, inputs filled up to a multiple of 2 * SIDE. */

#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SIDE 16
#define MOST_IN_MATRICES 256 /* rows that are copied at once */
#define DEPTH_IN_MATRICES 144 /* pairs at most of a panel's piece, which stays in a core's first cache */
#define TOGETHER 16 /* panels that meet a piece of those rows while it is in the second one */

/* Ask the kernel, once, for registers that it saves only for those who ask: it may refuse. */
static int has_matrices(void)
{
    static int granted = -1;
    if (granted < 0)
        granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */) == 0;
    return granted;
}

/* Give the calling thread's registers their sizes, until `_tile_release`: x with few rows needs no more. */
static void begin_matrices(int64_t rows)
{
    struct { uint8_t palette, rest[15]; uint16_t row_bytes[16]; uint8_t rows[16]; } sizes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        int of_first_rows = i == 0 || i == 1 || i == 6; /* as `multiply_pass` uses them */
        sizes.row_bytes[i] = 64;
        sizes.rows[i] = of_first_rows && rows < SIDE ? rows : SIDE;
    }
    _tile_loadconfig(&sizes);
}

/* Copy `rows` rows of x, from the `first` one on, to matrices [inputs / 2 / SIDE, SIDE, SIDE] of pairs, zeros behind its
   inputs and up to row `filled`. */
static void copy_matrices(const product *of, int64_t first, float *to, int64_t rows, int64_t filled)
{
    const int64_t inputs = of->inputs;
    const number *x[SIDE];
    for (int64_t r = 0; r < rows; r++)
        x[r] = row_of_x(of, first + r);
    for (int64_t k = 0; k < inputs; k += 2 * SIDE, to += SIDE * SIDE)
        for (int64_t r = 0; r < filled; r++) {
            int64_t n = r >= rows ? 0 : inputs - k < 2 * SIDE ? inputs - k : 2 * SIDE;
            floats some = {0};
            if (n == 2 * SIDE)
                some = *(const floats *)(x[r] + k);
            else if (n)
                memcpy(&some, x[r] + k, n * sizeof(number));
            *(floats *)(to + r * SIDE) = some;
        }
}

/* Add to sums [2 * SIDE, WIDTH], or begin them, what `pairs` inputs of a panel give with one or two SIDEs of rows of
   x; the second is `below` floats behind the first.

   Meanwhile `lines` of 64 bytes are fetched, from `next`, for each 2 * SIDE lines of the panel. */
static inline __attribute__((always_inline)) void multiply_pass(const int two, const float *x, int64_t below,
                                                                const weight *panel, float *sums, int64_t pairs,
                                                                int begins, const char *next, int64_t lines)
{
    const int stride = WIDTH * sizeof(float);
    if (begins) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, stride);
        _tile_loadd(1, sums + SIDE, stride);
        if (two) {
            _tile_loadd(2, sums + SIDE * WIDTH, stride);
            _tile_loadd(3, sums + SIDE * WIDTH + SIDE, stride);
        }
    }
    for (int64_t k = 0; k < pairs; k += SIDE) {
        const float *w = (const float *)panel + k * WIDTH;
        for (int64_t line = 0; line < lines; line++)
            __builtin_prefetch(next + (k * 2 + line) * 64, 0, 1);
        _tile_loadd(4, w, stride);
        _tile_loadd(5, w + SIDE, stride);
        _tile_loadd(6, x + k * SIDE, 64);
        _tile_dpbf16ps(0, 6, 4);
        _tile_dpbf16ps(1, 6, 5);
        if (two) {
            _tile_loadd(7, x + below + k * SIDE, 64);
            _tile_dpbf16ps(2, 7, 4);
            _tile_dpbf16ps(3, 7, 5);
        }
    }
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + SIDE, stride);
    if (two) {
        _tile_stored(2, sums + SIDE * WIDTH, stride);
        _tile_stored(3, sums + SIDE * WIDTH + SIDE, stride);
    }
}

/* Columns of `rows` rows of out, from the `first` one on: x as `copy_matrices` leaves it, times panels `from` to `to`, up to
   TOGETHER.

   sums: [TOGETHER, rows up to a multiple of SIDE, WIDTH]. */
static void multiply_panels(const product *of, int64_t first, const float *x, const weight *weights, float *sums,
                            int64_t from, int64_t to, int64_t rows, int64_t pairs)
{
    int64_t passes = (rows + 2 * SIDE - 1) / (2 * SIDE), lines = 0, depth = pairs;
    int64_t size = 2 * pairs * WIDTH, filled = (rows + SIDE - 1) / SIDE * SIDE;
    if (passes > 2) { /* with fewer the CPU fetches as well by itself */
        int64_t pieces = (pairs + DEPTH_IN_MATRICES - 1) / DEPTH_IN_MATRICES;
        depth = (pairs / SIDE + pieces - 1) / pieces * SIDE;
        lines = (2 * SIDE + passes - 1) / passes;
    }
    for (int64_t k = 0; k < pairs; k += depth) {
        int64_t some = pairs - k < depth ? pairs - k : depth;
        for (int64_t j = from; j < to; j++) {
            const weight *piece = weights + j * size + 2 * k * WIDTH;
            const char *next = (const char *)(piece + (j + 1 < to ? size : 2 * some * WIDTH - (j - from) * size));
            for (int64_t r = 0; r < rows; r += 2 * SIDE, next += lines * 64) {
                const float *some_x = x + r * pairs + k * SIDE;
                float *held = sums + ((j - from) * filled + r) * WIDTH;
                if (rows - r > SIDE)
                    multiply_pass(1, some_x, pairs * SIDE, piece, held, some, k == 0, next, lines);
                else
                    multiply_pass(0, some_x, pairs * SIDE, piece, held, some, k == 0, next, lines);
            }
        }
    }
    for (int64_t j = from; j < to; j++)
        store_rows(sums + (j - from) * filled * WIDTH, NULL, of, first, rows, j * WIDTH);
}

/* `n` rows, from the `begin`th on, times one expert's weights. Threads share the panels, or, if there are many, the rows:
   then none reads what another has copied, which takes longer than to read weights once more. */
static void multiply_by_matrices(const product *of, const weight *weights, int64_t begin, int64_t n)
{
    int64_t pairs = (of->inputs + 2 * SIDE - 1) / (2 * SIDE) * SIDE, panels = (of->outputs + WIDTH - 1) / WIDTH;
    int64_t threads = omp_get_max_threads(), share_rows = threads > 1 && n > (threads - 1) * MOST_IN_MATRICES;
    int64_t at_once = share_rows ? threads : 1, parts = at_once * ((n - 1) / (at_once * MOST_IN_MATRICES) + 1);
    int64_t most = ((n - 1) / parts / (2 * SIDE) + 1) * (2 * SIDE); /* rows of a part */
    int64_t size = most * (pairs + TOGETHER * WIDTH); /* of a thread's rows and sums */
    float *room = aligned_alloc(64, threads * size * sizeof(float));
    if (!room)
        abort();
#pragma omp parallel num_threads(threads)
    {
        int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
        float *copied = room + (share_rows ? me * size : 0), *sums = room + me * size + most * pairs;
        begin_matrices(n);
        for (int64_t first = share_rows ? me * most : 0; first < n; first += share_rows ? all * most : most) {
            int64_t rows = n - first < most ? n - first : most;
            int64_t from = share_rows ? 0 : panels * me / all, to = share_rows ? panels : panels * (me + 1) / all;
            for (int64_t r = share_rows ? 0 : me * SIDE; r < rows; r += share_rows ? SIDE : all * SIDE) {
                int64_t some = rows - r < SIDE ? rows - r : SIDE;
                copy_matrices(of, begin + first + r, copied + r * pairs, some, n < SIDE ? n : SIDE);
            }
            if (!share_rows) {
#pragma omp barrier
            }
            for (int64_t j = from, next; j < to; j = next) {
                next = j + TOGETHER < to ? j + TOGETHER : to;
                multiply_panels(of, begin + first, copied, weights, sums, j, next, rows, pairs);
            }
            if (!share_rows) {
#pragma omp barrier
            }
        }
        _tile_release();
    }
    free(room);
}
