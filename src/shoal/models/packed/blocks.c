/* The blocks of a Llama with packed matrices, for a few tokens of each row whose earlier tokens are in the cache.

Shapes: B rows, L new tokens of each, S tokens with those in the cache, D width, H query heads, K key and value heads, E head size, P pairs
of a head, I width of the feed-forward. */

#include <stdlib.h>

#include "vectors.h"

struct block {
    const float *attention_norm, *feed_forward_norm;
    const uint8_t *query_key_value, *output, *up, *down;
    float *keys, *values; /* [B, K, capacity, E] */
    int64_t capacity;
    int32_t query_key_value_bits, output_bits, up_bits, down_bits;
};

struct sizes {
    int64_t rows, length, past, width, heads, kv_heads, head, inner;
    int64_t turns_per_row; /* numbers of `turns` that each row has for itself; 0: all rows share them */
    float eps;
    int32_t threads;
};

static inline float dot(const float *left, const float *right, int64_t count)
{
    const int64_t step = WIDTH / 4;
    floats sums = {0}, one, other;
    int64_t i = 0;
    for (; i + step <= count; i += step) {
        memcpy(&one, left + i, WIDTH);
        memcpy(&other, right + i, WIDTH);
        sums += one * other;
    }
    float sum = total(sums);
    for (; i < count; i++)
        sum += left[i] * right[i];
    return sum;
}

/* e^x within 2 units of the last place, for x from -87 to 88; beyond, that of the nearest of these. */
static inline float exponential(float x)
{
    x = x < -87 ? -87 : x > 88 ? 88 : x;
    const float whole = rintf(x * 1.44269504f), r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float sum = 1 / 720.0f;
    sum = sum * r + 1 / 120.0f;
    sum = sum * r + 1 / 24.0f;
    sum = sum * r + 1 / 6.0f;
    sum = sum * r + 0.5f;
    sum = sum * r + 1;
    sum = sum * r + 1;
    const int32_t bits = ((int32_t)whole + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return sum * power;
}

static void normalise(const float *x, const float *weight, float eps, int64_t rows, int64_t width, float *out)
{
    for (int64_t row = 0; row < rows; row++, x += width, out += width) {
        const float scale = 1 / sqrtf(dot(x, x, width) / width + eps);
        for (int64_t d = 0; d < width; d++)
            out[d] = x[d] * scale * weight[d];
    }
}

/* Turn queries and keys by their positions, and write keys and values into the cache. all: [B, L, H + 2 K, E]. */
static void turn_and_store(struct sizes n, const struct block *block, const float *turns, float *all)
{
    for (int64_t b = 0; b < n.rows; b++)
        for (int64_t l = 0; l < n.length; l++) {
            const float *turn = turns + b * n.turns_per_row + l * n.head;
            for (int64_t h = 0; h < n.heads + 2 * n.kv_heads; h++, all += n.head) {
                if (h < n.heads + n.kv_heads)
                    for (int64_t e = 0; e < n.head; e += 2) {
                        const float first = all[e], second = all[e + 1];
                        all[e] = first * turn[e] - second * turn[e + 1];
                        all[e + 1] = second * turn[e] + first * turn[e + 1];
                    }
                const int64_t k = (h - n.heads) % n.kv_heads;
                float *cache = h < n.heads + n.kv_heads ? block->keys : block->values;
                if (h >= n.heads)
                    memcpy(cache + ((b * n.kv_heads + k) * block->capacity + n.past + l) * n.head, all, n.head * sizeof(float));
            }
        }
}

/* The attention of one query to tokens [0, own] of its row. scores: room for S numbers. */
static void attend(const float *query, const float *keys, const float *values, const uint8_t *real, int64_t own, int64_t head,
                   float *restrict scores, float *restrict out)
{
    const float scale = 1 / sqrtf((float)head);
    float largest = -INFINITY, sum = 0;
    for (int64_t s = 0; s <= own; s++) {
        scores[s] = real && !real[s] && s != own ? -INFINITY : scale * dot(query, keys + s * head, head);
        largest = scores[s] > largest ? scores[s] : largest;
    }
    for (int64_t s = 0; s <= own; s++)
        scores[s] = scores[s] == -INFINITY ? 0 : exponential(scores[s] - largest);
    for (int64_t s = 0; s <= own; s++)
        sum += scores[s];
    memset(out, 0, head * sizeof(float));
    for (int64_t s = 0; s <= own; s++)
        if (scores[s] != 0)
            for (int64_t e = 0; e < head; e++)
                out[e] += scores[s] * values[s * head + e];
    for (int64_t e = 0; e < head; e++)
        out[e] /= sum;
}

/* The attention of all queries. all: as in `turn_and_store`; out: [B, L, H, E]; scores: room for [B, K, S]. */
static void attend_all(struct sizes n, const struct block *block, const float *all, const uint8_t *real, float *scores, float *out)
{
    const int64_t seen = n.past + n.length, together = n.heads / n.kv_heads;
#pragma omp parallel for num_threads(n.threads) schedule(static) if (n.threads > 1)
    for (int64_t i = 0; i < n.rows * n.kv_heads; i++) {
        const int64_t b = i / n.kv_heads, k = i % n.kv_heads;
        const float *keys = block->keys + i * block->capacity * n.head, *values = block->values + i * block->capacity * n.head;
        for (int64_t l = 0; l < n.length; l++)
            for (int64_t h = k * together; h < (k + 1) * together; h++) {
                const int64_t row = b * n.length + l;
                const float *query = all + (row * (n.heads + 2 * n.kv_heads) + h) * n.head;
                attend(query, keys, values, real ? real + b * seen : NULL, n.past + l, n.head, scores + i * seen,
                       out + (row * n.heads + h) * n.head);
            }
    }
}

static void add(float *x, const float *more, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        x[i] += more[i];
}

/* SiLU of the first half of a row times the second half. */
static void gate(const float *both, int64_t rows, int64_t inner, float *out)
{
    for (int64_t row = 0; row < rows; row++, both += 2 * inner, out += inner)
        for (int64_t i = 0; i < inner; i++)
            out[i] = both[i] / (1 + exponential(-both[i])) * both[inner + i];
}

static int64_t larger(int64_t one, int64_t other) { return one > other ? one : other; }

/* Carry the residual stream x [B, L, D] through the blocks, in place. turns: cosines and sines [L, P, 2], or [B, L, P, 2]. real: 0 at
padding, [B, S]; NULL: there is none. Returns 0; 1 where there is no memory. */
int shoal_blocks(const struct block *blocks, int64_t count, const struct sizes *sizes, float *x, const float *turns, const uint8_t *real)
{
    const struct sizes n = *sizes;
    const int64_t tokens = n.rows * n.length, all_heads = n.heads + 2 * n.kv_heads, attended = n.heads * n.head;
    const int64_t wide = larger(all_heads * n.head, larger(2 * n.inner, n.width)), narrow = larger(n.width, larger(n.inner, attended));
    float *first = malloc((tokens * (wide + narrow) + n.rows * n.kv_heads * (n.past + n.length)) * sizeof(float));
    if (first == NULL)
        return 1;
    float *second = first + tokens * wide, *scores = second + tokens * narrow;
    int failed = 0;
    for (const struct block *block = blocks; block < blocks + count && !failed; block++) {
        normalise(x, block->attention_norm, n.eps, tokens, n.width, second);
        failed |= shoal_multiply(block->query_key_value_bits, second, tokens, n.width, all_heads * n.head, block->query_key_value, first,
                                 n.threads);
        turn_and_store(n, block, turns, first);
        attend_all(n, block, first, real, scores, second);
        failed |= shoal_multiply(block->output_bits, second, tokens, attended, n.width, block->output, first, n.threads);
        add(x, first, tokens * n.width);
        normalise(x, block->feed_forward_norm, n.eps, tokens, n.width, second);
        failed |= shoal_multiply(block->up_bits, second, tokens, n.width, 2 * n.inner, block->up, first, n.threads);
        gate(first, tokens, n.inner, second);
        failed |= shoal_multiply(block->down_bits, second, tokens, n.inner, n.width, block->down, first, n.threads);
        add(x, first, tokens * n.width);
    }
    free(first);
    return failed;
}
