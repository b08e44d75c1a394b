// Functions on 16 floats. Each gives a lane the same result whatever the other lanes hold.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace slip {

// Lanes that exist where `left` values are left.
inline __mmask16 lanes(int64_t left) { return left >= 16 ? 0xffff : left <= 0 ? 0 : __mmask16((1u << left) - 1); }

// e^x, at most 1 ulp off within [-87, 88], where x is clamped; exactly 1 for 0. NaN is clamped too: callers keep it themselves.
inline __m512 exp16(__m512 x) {
    x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(88.0f)), _mm512_set1_ps(-87.0f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    // x - n ln 2, with ln 2 in two pieces of which the first has few bits, so that its product is exact
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    // e^r on |r| <= ln(2)/2: Taylor's series to r^7, its last terms beyond float's precision
    __m512 p = _mm512_set1_ps(1.0f / 5040);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 720));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

// x / (1 + e^-y): sigmoid(y) x.
inline __m512 gated16(__m512 x, __m512 y) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(x, _mm512_add_ps(one, exp16(_mm512_sub_ps(_mm512_setzero_ps(), y))));
}

inline __m512 silu16(__m512 x) { return gated16(x, x); }

// x (1 + tanh u) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3), which is sigmoid(2u) x.
inline __m512 gelu_tanh16(__m512 x) {
    const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
    return gated16(x, _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.59576912f)), cubic));
}

enum Activation : int32_t { kNoActivation = 0, kSilu = 1, kGeluTanh = 2 };

inline __m512 activate16(int32_t activation, __m512 x) {
    return activation == kSilu ? silu16(x) : activation == kGeluTanh ? gelu_tanh16(x) : x;
}

}  // namespace slip
