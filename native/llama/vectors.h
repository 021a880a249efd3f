// Sixteen floats, or eight, at once: the little that attention needs of AVX-512 and AVX2, under one set of names.
#pragma once

#include <immintrin.h>

#include "ggml.h"

namespace kvasir_attention {

#if defined(__AVX512F__)

constexpr int LANES = 16;
using Vec = __m512;
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec all(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float *p) { return _mm512_loadu_ps(p); }
inline void store(float *p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec halves(const ggml_fp16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec nearest(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec times_two_to(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
inline Vec where_not_below(Vec x, float least, Vec value) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all(least), _CMP_GE_OQ), value);
}
inline Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline float sum(Vec x) { return _mm512_reduce_add_ps(x); }
inline float most(Vec x) { return _mm512_reduce_max_ps(x); }

#else

constexpr int LANES = 8;
using Vec = __m256;
inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec all(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float *p) { return _mm256_loadu_ps(p); }
inline void store(float *p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec halves(const ggml_fp16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec nearest(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec times_two_to(Vec x, Vec n) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return mul(x, _mm256_castsi256_ps(exponent));
}
inline Vec where_not_below(Vec x, float least, Vec value) {
    return _mm256_and_ps(_mm256_cmp_ps(x, all(least), _CMP_GE_OQ), value);
}
inline Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline float sum(Vec x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float most(Vec x) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

#endif

// e^x for x <= 0, to about one unit in the last place; 0 below -87, where a float would be denormal.
inline Vec exp_of(Vec x) {
    constexpr float least = -87.0f;
    const Vec n = nearest(mul(x, all(1.44269504f)));
    Vec r = fma(n, all(-0.693359375f), x);
    r = fma(n, all(2.12194440e-4f), r);
    Vec y = all(1.9875691500e-4f);
    y = fma(y, r, all(1.3981999507e-3f));
    y = fma(y, r, all(8.3334519073e-3f));
    y = fma(y, r, all(4.1665795894e-2f));
    y = fma(y, r, all(1.6666665459e-1f));
    y = fma(y, r, all(5.0000001201e-1f));
    y = add(fma(mul(r, r), y, r), all(1.0f));
    return where_not_below(x, least, times_two_to(y, n));
}

}  // namespace kvasir_attention
