/* Products of rows with a packed matrix of 4 or 8 bits, on a CPU. `compiled.py` compiles this file and calls it.

A row of the input is rounded to 16 bits: whole steps of its largest number / (127 * 254). The sums of steps times codes are exact.

Shapes: M rows of the input, N outputs, D inputs, G groups of 32 inputs. */

#include <stdlib.h>

#include "vectors.h"

enum {
    GROUP = 32,              /* inputs that share a scale and an offset in int4 */
    TILE = 4,                /* outputs whose codes of a group lie side by side in int4, 16 bytes of each */
    TOGETHER = WIDTH / 16,   /* outputs of a tile that are computed together */
    ROWS = 4,                /* rows of the input that are multiplied with codes once these are unpacked */
    MOST_ROWS = 64,          /* rows whose steps stay in the processor's cache */
    AHEAD = 2048,            /* bytes of the matrix that are fetched before they are needed */
    STEPS = 127 * 254,       /* as in `products.py` */
    BEFORE_OVERFLOW = 1024,  /* products that four sums of 32 bits hold for certain: 1024 / 4 * 127 * STEPS < 2^31 */
    NOT_FINITE = 0x7f800000, /* the bits of infinity; those of NaN are more */
};

typedef int32_t ints __attribute__((vector_size(WIDTH)));
typedef uint32_t words __attribute__((vector_size(WIDTH)));
typedef int16_t shorts __attribute__((vector_size(WIDTH)));
typedef uint16_t codes __attribute__((vector_size(WIDTH)));
typedef int8_t half_of_bytes __attribute__((vector_size(WIDTH / 2)));

/* Sums of 32 bits plus products of 16 bits, two for each sum. All of them belong to the same 16 bytes. */
static inline ints plus_products(ints sums, shorts left, shorts right)
{
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)left, (__m512i)right);
#elif defined(__AVX512BW__)
    return sums + (ints)_mm512_madd_epi16((__m512i)left, (__m512i)right);
#elif defined(__AVX2__)
    return sums + (ints)_mm256_madd_epi16((__m256i)left, (__m256i)right);
#elif defined(__SSE2__)
    return sums + (ints)_mm_madd_epi16((__m128i)left, (__m128i)right);
#elif defined(__ARM_NEON)
    int32x4_t low = vmlal_s16((int32x4_t)sums, vget_low_s16((int16x8_t)left), vget_low_s16((int16x8_t)right));
    return (ints)vmlal_s16(low, vget_high_s16((int16x8_t)left), vget_high_s16((int16x8_t)right));
#else
    ints one = (ints)left, other = (ints)right;
    return sums + (one << 16 >> 16) * (other << 16 >> 16) + (one >> 16) * (other >> 16);
#endif
}

/* 16 bytes, as often as a vector has them. */
static inline shorts repeated(const int16_t *from)
{
#if WIDTH == 64
    return (shorts)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)from));
#elif WIDTH == 32
    return (shorts)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)from));
#else
    shorts made;
    memcpy(&made, from, 16);
    return made;
#endif
}

/* The next words, each four times. */
static inline words each_four_times(const uint8_t *from)
{
#if WIDTH == 64
    const __m512i places = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    return (words)_mm512_permutexvar_epi32(places, _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)from)));
#elif WIDTH == 32
    const __m256i places = _mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0);
    return (words)_mm256_permutevar8x32_epi32(_mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *)from)), places);
#else
    uint32_t word;
    memcpy(&word, from, 4);
    return (words){word, word, word, word};
#endif
}

/* Rounds a row of the input, and returns the size of a step: NaN, and steps of 0, where a number is not finite. */
static float rounded(const float *x_D, int64_t columns, int16_t *steps_D)
{
    int32_t largest = 0;
    for (int64_t d = 0; d < columns; d++) {
        int32_t bits;
        memcpy(&bits, x_D + d, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    if (largest >= NOT_FINITE) {
        memset(steps_D, 0, 2 * columns);
        return NAN;
    }
    float size;
    memcpy(&size, &largest, 4);
    size = (size > 1e-30f ? size : 1e-30f) / STEPS;
    for (int64_t d = 0; d < columns; d++)
        steps_D[d] = (int16_t)rintf(x_D[d] / size);
    return size;
}

/* The steps in the order in which int4 unpacks its codes: of each group first inputs 0, 4, 8 ..., then 1, 5, 9 ... Four times each value
of `sums_G` is the sum of a group. */
static void reordered(int16_t *steps_D, int64_t columns, float *sums_G)
{
    for (int64_t g = 0; g < columns / GROUP; g++) {
        int16_t before[GROUP], *after = steps_D + g * GROUP;
        int32_t sum = 0;
        memcpy(before, after, sizeof before);
        for (int i = 0; i < GROUP; i++) {
            after[i] = before[4 * (i % 8) + i / 8];
            sum += before[i];
        }
        sums_G[g] = (float)sum / 4;
    }
}

/* A rounded input [M, D], and where the results go [M, N]. */
struct input {
    const int16_t *steps;
    const float *sizes, *sums;
    int64_t columns, outputs;
    float *results;
};

/* The products of `count` rows, from row m on, with some outputs, from output n on. Always inlined, so that `count` is a constant. */
static inline __attribute__((always_inline)) void int4_tile(const int count, int64_t m, int64_t n, const uint8_t *matrix, struct input x)
{
    const int64_t groups = x.columns / GROUP;
    const uint8_t *tile = matrix + n / TILE * TILE * x.columns / 2 + n % TILE * 16, *scales;
    scales = matrix + x.outputs * x.columns / 2 + 4 * (n / TILE * TILE * groups + n % TILE);
    floats found[ROWS] = {0};
    for (int64_t g = 0; g < groups; g++) {
        codes all;
        __builtin_prefetch(tile + 16 * TILE * g + AHEAD);
        memcpy(&all, tile + 16 * TILE * g, WIDTH);
        words both = each_four_times(scales + 4 * TILE * g);
        floats scale = (floats)(both << 16), offset = (floats)(both & 0xffff0000u) - 8 * scale;
        shorts first = (shorts)(all & 15), second = (shorts)(all >> 4 & 15), third = (shorts)(all >> 8 & 15), fourth = (shorts)(all >> 12);
        for (int i = 0; i < count; i++) {
            const int16_t *steps = x.steps + (m + i) * x.columns + g * GROUP;
            ints sums = plus_products((ints){0}, first, repeated(steps));
            sums = plus_products(sums, second, repeated(steps + 8));
            sums = plus_products(sums, third, repeated(steps + 16));
            sums = plus_products(sums, fourth, repeated(steps + 24));
            found[i] += scale * __builtin_convertvector(sums, floats);
            found[i] += offset * x.sums[(m + i) * groups + g];
        }
    }
    for (int i = 0; i < count; i++)
        for (int k = 0; k < TOGETHER; k++) {
            const int at = 4 * k;
            float sum = (found[i][at] + found[i][at + 1]) + (found[i][at + 2] + found[i][at + 3]);
            x.results[(m + i) * x.outputs + n + k] = x.sizes[m + i] * sum;
        }
}

/* The products of `count` rows, from row m on, with one output. */
static inline __attribute__((always_inline)) void int8_row(const int count, int64_t m, int64_t n, const uint8_t *matrix, struct input x)
{
    const int8_t *row = (const int8_t *)matrix + n * x.columns;
    uint32_t bits = 0;
    float scale, found[ROWS] = {0};
    memcpy((char *)&bits + 2, matrix + x.outputs * x.columns + 2 * n, 2);
    memcpy(&scale, &bits, 4);
    for (int64_t start = 0, d = 0; start < x.columns; start += BEFORE_OVERFLOW) {
        const int64_t end = start + BEFORE_OVERFLOW < x.columns ? start + BEFORE_OVERFLOW : x.columns;
        ints sums[ROWS] = {0};
        for (d = start; d + WIDTH / 2 <= end; d += WIDTH / 2) {
            half_of_bytes bytes;
            __builtin_prefetch(row + d + AHEAD);
            memcpy(&bytes, row + d, WIDTH / 2);
            shorts wide = __builtin_convertvector(bytes, shorts), steps;
            for (int i = 0; i < count; i++) {
                memcpy(&steps, x.steps + (m + i) * x.columns + d, WIDTH);
                sums[i] = plus_products(sums[i], wide, steps);
            }
        }
        for (int i = 0; i < count; i++) {
            found[i] += total(__builtin_convertvector(sums[i], floats));
            for (int64_t rest = d; rest < end; rest++)
                found[i] += (float)(row[rest] * x.steps[(m + i) * x.columns + rest]);
        }
    }
    for (int i = 0; i < count; i++)
        x.results[(m + i) * x.outputs + n] = found[i] * x.sizes[m + i] * scale;
}

#define FOR_ALL_ROWS(function, rows, ...)                                                                                                  \
    {                                                                                                                                      \
        int64_t m = 0;                                                                                                                     \
        for (; m + 4 <= rows; m += 4)                                                                                                      \
            function(4, m, __VA_ARGS__);                                                                                                   \
        if (rows - m == 3)                                                                                                                 \
            function(3, m, __VA_ARGS__);                                                                                                   \
        else if (rows - m == 2)                                                                                                            \
            function(2, m, __VA_ARGS__);                                                                                                   \
        else if (rows - m == 1)                                                                                                            \
            function(1, m, __VA_ARGS__);                                                                                                   \
    }

static void multiply(int bits, int64_t rows, const uint8_t *matrix, struct input x, int threads)
{
    (void)threads;
    if (bits == 8) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int64_t n = 0; n < x.outputs; n++)
            FOR_ALL_ROWS(int8_row, rows, n, matrix, x)
    } else {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int64_t t = 0; t < x.outputs / TOGETHER; t++)
            FOR_ALL_ROWS(int4_tile, rows, TOGETHER * t, matrix, x)
    }
}

/* results_MN = input_MD times the matrix [N, D], transposed. int8: the bytes of `formats.py`. int4: the same, but of every four rows the
16 bytes of a group side by side, and their scales; N must be a multiple of 4. Returns 0; 1 where there is no memory. */
int shoal_multiply(int bits, const float *input, int64_t rows, int64_t columns, int64_t outputs, const uint8_t *matrix, float *results,
                   int threads)
{
    const int64_t most = rows < MOST_ROWS ? rows : MOST_ROWS, groups = columns / GROUP + 1;
    char *room = malloc(most * (2 * columns + 4 + 4 * groups));
    if (room == NULL)
        return 1;
    float *sizes = (float *)room, *sums = sizes + most;
    int16_t *steps = (int16_t *)(sums + most * groups);
    for (int64_t start = 0; start < rows; start += MOST_ROWS) {
        const int64_t count = rows - start < MOST_ROWS ? rows - start : MOST_ROWS;
        for (int64_t m = 0; m < count; m++) {
            sizes[m] = rounded(input + (start + m) * columns, columns, steps + m * columns);
            if (bits == 4)
                reordered(steps + m * columns, columns, sums + m * (columns / GROUP));
        }
        struct input x = {steps, sizes, sums, columns, outputs, results + start * outputs};
        multiply(bits, count, matrix, x, threads);
    }
    free(room);
    return 0;
}
