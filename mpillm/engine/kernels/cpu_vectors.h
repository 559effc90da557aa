/* Vectors of floats as wide as this CPU's, and the model's numbers in memory: float, or with -DBF16=1 bfloat16. */

#include <stdint.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef union { float real; uint32_t bits; } both;

#if BF16
typedef uint16_t number;
typedef uint16_t numbers __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(2), may_alias));

static inline float get(number x) { return ((both){.bits = (uint32_t)x << 16}).real; }

static inline number put(float x) /* to the nearest, ties to even */
{
    uint32_t bits = ((both){.real = x}).bits;
    return x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0;
}

static inline floats load(const number *x)
{
#if defined __AVX512F__
    words wide = (words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
#elif defined __AVX2__ /* GCC makes five instructions of what this one does */
    words wide = (words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x));
#else
    words wide = __builtin_convertvector(*(const numbers *)x, words);
#endif
    return (floats)(wide << 16);
}

static inline void store(number *to, floats x)
{
#if defined __AVX512BF16__ /* numbers below 2^-126 become zero */
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    words bits = (words)x, nan = (words)(x != x);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    *(numbers *)to = __builtin_convertvector((bits & ~nan) | (nan & 0x7fc0), numbers);
#endif
}
#else
typedef float number;

static inline float get(number x) { return x; }
static inline number put(float x) { return x; }
static inline floats load(const number *x) { return *(const floats *)x; }
static inline void store(number *to, floats x) { *(floats *)to = x; }
#endif
