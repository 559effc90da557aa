/* What is between a model's matrix products, for CPUs: cpu_kernels.py compiles and calls it.

   Numbers are float, or with -DBF16=1 bfloat16, computed as float. -DD: head_dim, a multiple of 16;
   -DGROUP: query heads of a KV head. */

#include "cpu_vectors.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* TILE: query heads that go together; PIECE: vectors of their outputs whose sums are in registers at once. */
#ifdef __AVX512F__
#define TILE (GROUP % 4 == 0 ? 4 : GROUP % 3 == 0 ? 3 : GROUP % 2 == 0 ? 2 : 1)
#else
#define TILE (GROUP % 3 == 0 ? 3 : GROUP % 2 == 0 ? 2 : 1)
#endif
#define VECTORS (D / LANES)
#define PIECE (VECTORS % 4 == 0 ? 4 : VECTORS % 2 == 0 ? 2 : 1)
#define PARTS (GROUP / TILE)

static inline float total(floats x)
{
    typedef float quarter __attribute__((vector_size(16)));
    union { floats all; quarter parts[LANES / 4]; } parts = {x};
    quarter sum = parts.parts[0] + parts.parts[1];
#if LANES == 16
    sum += parts.parts[2] + parts.parts[3];
#endif
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* e to the power of x, at most 88, within 2 ulp; 0 becomes as little as 1e-38 below -87 (Cephes' expf). */
static inline float exponential(float x)
{
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504f), r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return (p * r * r + r + 1.0f) * ((both){.bits = (uint32_t)((int32_t)n + 127) << 23}).real;
}

/* Add delta (or nothing, NULL) to x in place; out is its RMS norm times weight: [n, width]. */
void add_norm(number *x, const number *delta, const number *weight, number *out, int64_t n, int64_t width,
              float eps)
{
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++) {
        number *row = x + i * width, *normed = out + i * width;
        float squares = 0;
        if (delta)
            for (int64_t j = 0; j < width; j++)
                row[j] = put(get(row[j]) + get(delta[i * width + j]));
#pragma omp simd reduction(+ : squares)
        for (int64_t j = 0; j < width; j++)
            squares += get(row[j]) * get(row[j]);
        float scale = 1 / sqrtf(squares / width + eps);
#pragma omp simd
        for (int64_t j = 0; j < width; j++)
            normed[j] = put(get(row[j]) * scale * get(weight[j]));
    }
}

/* out [n, width] = silu(gate) * up, from rows of gate, then up. */
void silu_mul(const number *gate_up, number *out, int64_t n, int64_t width)
{
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++) {
        const number *gate = gate_up + 2 * i * width, *up = gate + width;
        number *row = out + i * width;
#pragma omp simd
        for (int64_t j = 0; j < width; j++) {
            float x = get(gate[j]);
            row[j] = put(x / (1 + exponential(-x)) * get(up[j]));
        }
    }
}

/* Rotate queries and keys of qkv [n, heads + 2 * kv_heads, D] in place; store keys and values in a cache
   [blocks, kv_heads, size, D]. rotations: [n, D], (cos, sin) pairs; slots: [n], block * size + place. */
void rotate_store(number *qkv, const float *rotations, const int64_t *slots, number *keys, number *values,
                  int64_t n, int64_t heads, int64_t kv_heads, int64_t size)
{
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++) {
        number *row = qkv + i * (heads + 2 * kv_heads) * D;
        const float *turn = rotations + i * D;
        for (int64_t head = 0; head < heads + kv_heads; head++)
            for (int64_t j = 0; j < D; j += 2) {
                number *pair = row + head * D + j;
                float a = get(pair[0]), b = get(pair[1]);
                pair[0] = put(a * turn[j] - b * turn[j + 1]);
                pair[1] = put(a * turn[j + 1] + b * turn[j]);
            }
        for (int64_t head = 0; head < kv_heads; head++) {
            int64_t to = ((slots[i] / size * kv_heads + head) * size + slots[i] % size) * D;
            __builtin_memcpy(keys + to, row + (heads + head) * D, D * sizeof(number));
            if (values != keys) /* latents */
                __builtin_memcpy(values + to, row + (heads + kv_heads + head) * D, D * sizeof(number));
        }
    }
}

/* TILE heads of a query attend to the tokens [begin, tokens) in `blocks` of a KV head; scores: [TILE, stride].

   sinks: of the heads, scores that take their share and add nothing; or NULL. */
static void attend_tile(const number *q, number *out, const number *keys, const number *values,
                        const int64_t *blocks, int64_t begin, int64_t tokens, int64_t kv_heads, int64_t size,
                        float *scores, int64_t stride, const float *sinks)
{
    floats query[TILE][VECTORS], sums[TILE][VECTORS];
    float scale = 1 / sqrtf(D);
    for (int h = 0; h < TILE; h++)
        for (int c = 0; c < VECTORS; c++) {
            query[h][c] = load(q + h * D + c * LANES) * scale;
            sums[h][c] = (floats){0};
        }
    for (int64_t first = begin / size * size; first < tokens; first += size) {
        int64_t start = first < begin ? begin : first, end = first + size < tokens ? first + size : tokens;
        const number *key = keys + (blocks[first / size] * kv_heads * size + start - first) * D;
        for (int64_t t = start; t < end; t++, key += D) {
            floats products[TILE];
#pragma GCC unroll 64
            for (int c = 0; c < VECTORS; c++) {
                floats part = load(key + c * LANES);
#pragma GCC unroll 4
                for (int h = 0; h < TILE; h++)
                    products[h] = c ? products[h] + query[h][c] * part : query[h][c] * part;
            }
            for (int h = 0; h < TILE; h++)
                scores[h * stride + t] = total(products[h]);
        }
    }
    float shares[TILE];
    for (int h = 0; h < TILE; h++) {
        float *score = scores + h * stride, most = sinks ? sinks[h] : -INFINITY, all = 0;
        for (int64_t t = tokens; t % LANES; t++) /* so that no loop has a rest */
            score[t] = -INFINITY;
        int64_t from = begin / LANES * LANES, n = (tokens + LANES - 1) / LANES * LANES;
        for (int64_t t = from; t < begin; t++)
            score[t] = -INFINITY;
#pragma omp simd reduction(max : most)
        for (int64_t t = from; t < n; t++)
            most = score[t] > most ? score[t] : most;
#pragma omp simd reduction(+ : all)
        for (int64_t t = from; t < n; t++)
            all += score[t] = exponential(score[t] - most);
        if (sinks)
            all += exponential(sinks[h] - most);
        shares[h] = 1 / all;
    }
    for (int64_t first = begin / size * size; first < tokens; first += size) {
        int64_t start = first < begin ? begin : first, end = first + size < tokens ? first + size : tokens;
        const number *value = values + (blocks[first / size] * kv_heads * size + start - first) * D;
        int64_t n = end - start;
        for (int c = 0; c < VECTORS; c += PIECE) {
            floats held[TILE][PIECE];
            for (int h = 0; h < TILE; h++)
                for (int v = 0; v < PIECE; v++)
                    held[h][v] = sums[h][c + v];
            for (int64_t t = 0; t < n; t++)
#pragma GCC unroll 4
                for (int h = 0; h < TILE; h++)
#pragma GCC unroll 4
                    for (int v = 0; v < PIECE; v++)
                        held[h][v] += scores[h * stride + start + t] * load(value + t * D + (c + v) * LANES);
            for (int h = 0; h < TILE; h++)
                for (int v = 0; v < PIECE; v++)
                    sums[h][c + v] = held[h][v];
        }
    }
    for (int h = 0; h < TILE; h++)
        for (int c = 0; c < VECTORS; c++)
            store(out + h * D + c * LANES, sums[h][c] * shares[h]);
}

/* Attention of rows of qkv, as `rotate_store` leaves it, to a cache; out: [rows, heads * D].

   rows: [n, 4], each a row, where its sequence's blocks begin in `tables`, and the first token that it sees
   and the one behind the last, at most `longest`. sinks: of all heads, as in `attend_tile`. */
void attend(const number *qkv, number *out, const number *keys, const number *values, const int64_t *rows,
            const int64_t *tables, const float *sinks, int64_t n, int64_t kv_heads, int64_t size,
            int64_t longest)
{
    int64_t heads = kv_heads * GROUP, tiles = kv_heads * PARTS;
    int64_t stride = (longest + LANES - 1) / LANES * LANES;
#pragma omp parallel
    {
        float *scores = malloc(TILE * stride * sizeof(float));
        if (!scores)
            abort();
#pragma omp for schedule(dynamic, 8)
        for (int64_t i = 0; i < n * tiles; i++) {
            const int64_t *row = rows + i / tiles * 4;
            int64_t head = i % tiles * TILE, kv_head = i % tiles / PARTS;
            attend_tile(qkv + (row[0] * (heads + 2 * kv_heads) + head) * D,
                        out + (row[0] * heads + head) * D, keys + kv_head * size * D,
                        values + kv_head * size * D, tables + row[1], row[2], row[3], kv_heads, size, scores,
                        stride, sinks ? sinks + head : NULL);
        }
        free(scores);
    }
}

#include "cpu_layers.h"
