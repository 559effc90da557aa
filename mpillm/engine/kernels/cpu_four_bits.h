/* Weights of four bits, two in a byte, for cpu_products.c: the first half of a panel's row in the lower ones.

   With -DMXFP4=1 a number is one of e2m1, and BLOCK inputs of an output share an exponent. With -DINT4=1 it is from 0 to
   15, less a zero from 0 to 16, and BLOCK inputs share a zero and a factor. Both are summed without their factor, and
   int4 without its zero: what that takes away is the zero times the sum of those inputs. */

#define ROW_BYTES (WIDTH * TAKEN / 2) /* of a panel */
typedef uint8_t weight;
typedef int32_t codes __attribute__((vector_size(4 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

#if MXFP4
typedef uint8_t scale;                      /* exponents [WIDTH], less 127 */
#define SCALES WIDTH                        /* of a block */
typedef struct { floats factor[2]; } block; /* of either half */

static inline block block_of(const scale *exponents)
{
    block of;
    for (int v = 0; v < 2; v++) /* a float's bits; with the exponent 0 numbers count as zero */
        of.factor[v] = (floats)(__builtin_convertvector(*(const bytes *)(exponents + v * LANES), codes) << 23);
    return of;
}

#define MAGNITUDES(of) of(0), of(0.5), of(1), of(1.5), of(2), of(3), of(4), of(6)
#define NEGATIVE(x) -(x)
#define SAME(x) x
static const float number_of_code[16] = {MAGNITUDES(SAME), MAGNITUDES(NEGATIVE)};
#else
typedef float scale; /* factors [WIDTH], zeros [WIDTH] */
#define SCALES (2 * WIDTH)
typedef struct { floats factor[2], zero[2]; } block; /* zeros times factors */

static inline block block_of(const scale *scales)
{
    block of;
    for (int v = 0; v < 2; v++) {
        of.factor[v] = *(const floats *)(scales + v * LANES);
        of.zero[v] = *(const floats *)(scales + WIDTH + v * LANES) * of.factor[v];
    }
    return of;
}

static const float number_of_code[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#endif

#if PAIRS
/* As bfloat16, the upper halves of floats: twice, as one bit too many chooses, which spares taking it away. */
static inline __m512i table(void)
{
    __m512i upper = _mm512_srli_epi32(_mm512_loadu_si512(number_of_code), 16);
    return _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(upper));
}

static inline __m512i both_halves(const weight *w) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)w)); }
static inline floats first(const weight *w) { return (floats)_mm512_permutexvar_epi16(both_halves(w), table()); }

static inline floats second(const weight *w)
{
    return (floats)_mm512_permutexvar_epi16(_mm512_srli_epi16(both_halves(w), 4), table());
}
#else
static inline codes both_halves(const weight *w)
{
#if defined __AVX512F__ /* GCC converts number by number */
    return (codes)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)w));
#elif defined __AVX2__
    return (codes)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)w));
#else
    return __builtin_convertvector(*(const bytes *)w, codes);
#endif
}

/* Of the lower four bits of each code. */
static inline floats numbers_of(codes code)
{
#if defined __AVX512F__
    return (floats)_mm512_permutexvar_ps((__m512i)code, _mm512_loadu_ps(number_of_code));
#elif INT4
    return __builtin_convertvector(code & 15, floats);
#elif defined __AVX2__ /* a table of eight, and the sign */
    __m256 magnitude = _mm256_permutevar8x32_ps(_mm256_loadu_ps(number_of_code), (__m256i)code);
    return (floats)((codes)magnitude | (code >> 3 & 1) << 31);
#else
    floats number;
    for (int i = 0; i < LANES; i++)
        number[i] = number_of_code[code[i] & 15];
    return number;
#endif
}

static inline floats first(const weight *w) { return numbers_of(both_halves(w)); }
static inline floats second(const weight *w) { return numbers_of(both_halves(w) >> 4); }
#endif
