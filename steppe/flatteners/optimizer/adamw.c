/* AdamW in one pass over host memory: gradient in, float32 state updated in place, parameter out.
 *
 * One element function; the kinds of gradient and output are constants at every call, so that each pair is its own
 * vectorised loop. The arithmetic is plain IEEE in the order written here (no contraction, no reassociation): numpy
 * gives the same bits, and kernel.py checks that when the file is loaded.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__FAST_MATH__)
#error "fast-math would change the bits: build this file with -fno-fast-math"
#endif

#define INLINE static inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__GLIBC__)
#define CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define CLONES /* aarch64, musl, macOS: the baseline is vectorised anyway */
#endif

#if defined(__SSE2__)
#include <emmintrin.h>
#define STREAM(to, from) _mm_stream_si128((__m128i *)(to), *(const __m128i *)(from))
#define FENCE _mm_sfence
#endif

enum { F32, BF16, F16 };
enum { GROUP = 64 }; /* elements that are stored together */
enum { LANES = 32 }; /* partial sums of squares; part of the result's definition, as the block length is */

typedef struct { float scale, shrink, rate, one_b1, b2, one_b2, eps; } Step;

INLINE float as_float(uint32_t x) { float f; memcpy(&f, &x, 4); return f; }
INLINE uint32_t as_bits(float f) { uint32_t x; memcpy(&x, &f, 4); return x; }

/* Selects are written as masks on integers, so that every compiler vectorises them. */
INLINE uint32_t pick(int yes, uint32_t a, uint32_t b) { return yes ? a : b; }

INLINE float from_half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, body = (uint32_t)(h & 0x7fffu) << 13;
    uint32_t normal = body + (112u << 23);
    uint32_t small = as_bits(as_float(body + (113u << 23)) - as_float(113u << 23)); /* no subnormal operand: DAZ-proof */
    uint32_t huge = body + (224u << 23);                                            /* infinities and NaNs */
    uint32_t x = pick(body < (1u << 23), small, pick(body >= (31u << 23), huge, normal));
    return as_float(sign | x);
}

INLINE uint16_t to_half(float f) {
    uint32_t x = as_bits(f), sign = (x >> 16) & 0x8000u, a = x & 0x7fffffffu;
    uint32_t normal = (a - (112u << 23) + 0xfffu + ((a >> 13) & 1u)) >> 13;
    uint32_t small = as_bits(as_float(a) + 0.5f) - as_bits(0.5f); /* one ulp of [0.5, 1) is the smallest half */
    uint32_t finite = pick(a < (113u << 23), small, normal);
    uint32_t h = pick(a > 0x7f800000u, 0x7e00u, pick(a >= 0x477ff000u, 0x7c00u, finite));
    return (uint16_t)(sign | h);
}

INLINE uint16_t to_bfloat(float f) {
    uint32_t x = as_bits(f), rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
    return (uint16_t)pick((x & 0x7fffffffu) > 0x7f800000u, 0x7fc0u, rounded);
}

INLINE float load(const void *x, int kind, int64_t i) {
    if (kind == F32) return ((const float *)x)[i];
    if (kind == BF16) return as_float((uint32_t)((const uint16_t *)x)[i] << 16);
    return from_half(((const uint16_t *)x)[i]);
}

INLINE void store(void *x, int kind, int64_t i, float f) {
    if (kind == F32) ((float *)x)[i] = f;
    else ((uint16_t *)x)[i] = kind == BF16 ? to_bfloat(f) : to_half(f);
}

INLINE float element(float *p, float *m, float *v, const void *g, int gk, int64_t i, const Step *s) {
    float x = load(g, gk, i) * s->scale;
    float a = m[i] + s->one_b1 * (x - m[i]);
    float b = v[i] * s->b2 + (s->one_b2 * x) * x;
    float w = p[i] + ((s->rate * a) / (sqrtf(b) + s->eps) - s->shrink * p[i]);
    p[i] = w;
    m[i] = a;
    v[i] = b;
    return w;
}

/* The output is written and not read again soon: where the machine can, its lines go past the cache, which saves
 * reading them first (28 instead of 30 bytes of traffic for a 16-bit parameter). */
INLINE void update(float *restrict p, float *restrict m, float *restrict v, const void *restrict g, int gk,
                   void *restrict out, int ok, int64_t n, Step s) {
    int64_t i = 0;
#if defined(STREAM)
    int64_t itemsize = ok == F32 ? 4 : 2;
    if ((uintptr_t)out % 16 == 0) {
        union { float f[GROUP]; uint16_t h[GROUP]; char bytes[GROUP * 4]; } line __attribute__((aligned(64)));
        for (; i + GROUP <= n; i += GROUP) {
            for (int64_t j = 0; j < GROUP; j++) store(&line, ok, j, element(p, m, v, g, gk, i + j, &s));
            for (int64_t k = 0; k < GROUP * itemsize; k += 16) STREAM((char *)out + i * itemsize + k, line.bytes + k);
        }
        FENCE();
    }
#endif
    for (; i < n; i++) store(out, ok, i, element(p, m, v, g, gk, i, &s));
}

/* A float32 parameter that is its own master: 28 bytes of traffic. */
INLINE void update_in_place(float *restrict p, float *restrict m, float *restrict v, const void *restrict g, int gk,
                            int64_t n, Step s) {
    for (int64_t i = 0; i < n; i++) element(p, m, v, g, gk, i, &s);
}

/* Returns 1 for an unknown pair of kinds. `out` is `p` itself (float32 then) or, as `g`, overlaps nothing written. */
CLONES int steppe_adamw(float *p, float *m, float *v, const void *g, int gk, void *out, int ok, int64_t n,
                        const Step *s) {
    if (out == p && ok == F32) {
        if (gk == F32) update_in_place(p, m, v, g, F32, n, *s);
        else if (gk == BF16) update_in_place(p, m, v, g, BF16, n, *s);
        else if (gk == F16) update_in_place(p, m, v, g, F16, n, *s);
        else return 1;
        return 0;
    }
#define CASE(G, O)                              \
    if (gk == G && ok == O) {                   \
        update(p, m, v, g, G, out, O, n, *s);   \
        return 0;                               \
    }
    CASE(F32, F32) CASE(BF16, BF16) CASE(F16, F16)
    CASE(F32, BF16) CASE(F32, F16) CASE(BF16, F32) CASE(F16, F32) CASE(BF16, F16) CASE(F16, BF16)
#undef CASE
    return 1;
}

INLINE void add(float *restrict sum, const void *restrict g, int gk, int64_t n, int fresh) {
    if (fresh)
        for (int64_t i = 0; i < n; i++) sum[i] = load(g, gk, i);
    else
        for (int64_t i = 0; i < n; i++) sum[i] += load(g, gk, i);
}

/* sum = g (fresh) or sum + g, in float32. */
CLONES int steppe_add(float *sum, const void *g, int gk, int64_t n, int fresh) {
    if (gk == F32) add(sum, g, F32, n, fresh);
    else if (gk == BF16) add(sum, g, BF16, n, fresh);
    else if (gk == F16) add(sum, g, F16, n, fresh);
    else return 1;
    return 0;
}

INLINE double squares(const void *restrict g, int gk, int64_t n) {
    double lane[LANES] = {0}, tail[LANES] = {0};
    int64_t whole = n - n % LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int j = 0; j < LANES; j++) {
            double x = load(g, gk, i + j); /* the square of a float32 is exact in double */
            lane[j] += x * x;
        }
    for (int64_t i = whole; i < n; i++) tail[i - whole] = load(g, gk, i);
    for (int j = 0; j < LANES; j++) lane[j] += tail[j] * tail[j];
    for (int width = LANES / 2; width; width /= 2)
        for (int j = 0; j < width; j++) lane[j] += lane[j + width];
    return lane[0];
}

/* out[k] = sum of squares of the k-th block of `block` elements, in double and in one fixed order. */
CLONES int steppe_squares(const void *g, int gk, int64_t n, int64_t block, double *out) {
    int64_t itemsize = gk == F32 ? 4 : 2;
    if (gk < F32 || gk > F16) return 1;
    for (int64_t start = 0; start < n; start += block) {
        int64_t length = n - start < block ? n - start : block;
        const void *x = (const char *)g + start * itemsize;
        *out++ = gk == F32 ? squares(x, F32, length) : gk == BF16 ? squares(x, BF16, length) : squares(x, F16, length);
    }
    return 0;
}

/* The instruction set that the clones above were resolved to. */
const char *steppe_instructions(void) {
#if defined(__x86_64__) && defined(__GLIBC__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return "x86-64-v4";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "x86-64-v3";
    return "x86-64";
#elif defined(__aarch64__)
    return "aarch64";
#else
    return "baseline";
#endif
}
