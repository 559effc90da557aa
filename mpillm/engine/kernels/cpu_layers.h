/* The layers of a dense model, one after the other, for a step whose rows all go to `attend`. Part of cpu_kernels.c.

   cpu_layers.py has the same structures. */

typedef struct {
    void (*multiply)(const number *, const void *, const float *, number *, int64_t, int64_t, int64_t);
    const void *weights;
    const float *scales; /* or NULL */
    int64_t inputs, outputs;
} linear; /* of cpu_products.c */

typedef struct {
    const number *input_norm, *post_norm;
    linear qkv, o, gate_up, down;
    number *keys, *values; /* of its cache */
    int64_t feature; /* which of the features its output is, or -1 */
} layer;

/* What a step has beside its rows: as `rotate_store` and `attend` take it. */
typedef struct {
    const float *rotations;
    const int64_t *slots, *rows, *tables;
    int64_t n_rows, longest;
} attention;

static void multiply(const linear *by, const number *x, number *out, int64_t n)
{
    by->multiply(x, by->weights, by->scales, out, n, by->inputs, by->outputs);
}

/* Compute up to the last layer's attention: x [n, hidden] becomes its residual, `attended` [n, heads * D].

   room: [n, 2 * hidden + (heads + 2 * kv_heads) * D + 3 * the feed-forward's width]. features: [n, n_features *
   hidden], of no layer the last one. */
void run_layers(const layer *layers, int64_t n_layers, const attention *step, number *x, number *attended,
                number *room, number *features, int64_t n_features, int64_t n, int64_t hidden, int64_t kv_heads,
                int64_t size, float eps)
{
    const int64_t heads = kv_heads * GROUP, width = layers->down.inputs;
    number *normed = room, *delta = normed + n * hidden, *qkv = delta + n * hidden;
    number *gate_up = qkv + n * (heads + 2 * kv_heads) * D, *inner = gate_up + 2 * n * width;
    for (const layer *now = layers;; now++) {
        add_norm(x, now == layers ? NULL : delta, now->input_norm, normed, n, hidden, eps);
        if (now != layers && now[-1].feature >= 0)
            for (int64_t i = 0; i < n; i++)
                memcpy(features + (i * n_features + now[-1].feature) * hidden, x + i * hidden,
                       hidden * sizeof(number));
        multiply(&now->qkv, normed, qkv, n);
        rotate_store(qkv, step->rotations, step->slots, now->keys, now->values, n, heads, kv_heads, size);
        attend(qkv, attended, now->keys, now->values, step->rows, step->tables, NULL, step->n_rows, kv_heads, size,
               step->longest);
        if (now == layers + n_layers - 1)
            return;
        multiply(&now->o, attended, delta, n);
        add_norm(x, delta, now->post_norm, normed, n, hidden, eps);
        multiply(&now->gate_up, normed, gate_up, n);
        silu_mul(gate_up, inner, n, width);
        multiply(&now->down, inner, delta, n);
    }
}
