// 2^x and tanh of 16 float32 numbers. NaN stays NaN: min and max return their second operand where one is NaN.
#pragma once

#include <immintrin.h>

namespace slip {

constexpr float kLog2E = 1.44269504088896341f;

// 2^x for x <= 0, within 2 ulp; exactly 1 at 0 and 0 below -150.
inline __m512 exp2_neg(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-160.0f), x);
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, whole);
    // Least largest relative error on [-1/2, 1/2] (2e-9 before rounding) among polynomials that are 1 at 0.
    __m512 p = _mm512_set1_ps(0x1.41fbbcp-13f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.5f3e54p-10f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.3b2d4cp-7f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.c6aee8p-5f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ebfbdcp-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62e430p-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

// Within 2e-7 absolutely.
inline __m512 tanh_16(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 e = exp2_neg(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2.0f * kLog2E)));  // e^(-2|x|)
    const __m512 t = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(x));
    return _mm512_mask_sub_ps(t, negative, _mm512_setzero_ps(), t);
}

}  // namespace slip
