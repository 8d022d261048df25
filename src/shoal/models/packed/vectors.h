/* Vectors as wide as the processor's. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

/* Bytes of the processor's vectors. */
#if defined(__AVX512BW__)
#define WIDTH 64
#elif defined(__AVX2__)
#define WIDTH 32
#else
#define WIDTH 16
#endif

typedef float floats __attribute__((vector_size(WIDTH)));

static inline float total(floats of)
{
#if WIDTH == 64
    return _mm512_reduce_add_ps((__m512)of);
#else
    float part[WIDTH / 4];
    memcpy(part, &of, WIDTH);
    for (int count = WIDTH / 8; count; count /= 2)
        for (int i = 0; i < count; i++)
            part[i] += part[i + count];
    return part[0];
#endif
}

/* One part of `compiled.py`'s library: see `products.c`. */
int shoal_multiply(int bits, const float *input, int64_t rows, int64_t columns, int64_t outputs, const uint8_t *matrix, float *results,
                   int threads);
