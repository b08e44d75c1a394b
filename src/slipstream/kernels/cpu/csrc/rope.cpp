#include "rope.h"

#include <immintrin.h>

#include <cmath>

namespace slip {
namespace {

// x / sqrt(mean(x^2) + eps) * weight. `dim` is a multiple of 16.
void norm_head(const float* weight, float eps, const float* from, float* to, int dim) {
    __m512 squares = _mm512_setzero_ps();
    for (int i = 0; i < dim; i += 16) {
        const __m512 x = _mm512_loadu_ps(from + i);
        squares = _mm512_fmadd_ps(x, x, squares);
    }
    const __m512 by = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / float(dim) + eps));
    for (int i = 0; i < dim; i += 16) {
        _mm512_storeu_ps(to + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(from + i), by), _mm512_loadu_ps(weight + i)));
    }
}

}  // namespace

void turn_head(const slip_rope& rope, const float* norm, int64_t t, const float* from, float* to, int dim) {
    if (norm) {
        norm_head(norm, rope.eps, from, to, dim);
    } else if (to != from) {
        for (int i = 0; i < dim; i += 16) _mm512_storeu_ps(to + i, _mm512_loadu_ps(from + i));
    }
    const int half = rope.dim / 2;
    const int64_t angle = rope.angles ? rope.angles[t] : t;
    for (int i = 0; i < half; i += 16) {
        const __mmask16 lanes = half - i >= 16 ? 0xffff : __mmask16((1u << (half - i)) - 1);
        const __m512 cos = _mm512_maskz_loadu_ps(lanes, rope.cos + angle * half + i);
        const __m512 sin = _mm512_maskz_loadu_ps(lanes, rope.sin + angle * half + i);
        const __m512 low = _mm512_maskz_loadu_ps(lanes, to + i), high = _mm512_maskz_loadu_ps(lanes, to + half + i);
        _mm512_mask_storeu_ps(to + i, lanes, _mm512_fmsub_ps(low, cos, _mm512_mul_ps(high, sin)));
        _mm512_mask_storeu_ps(to + half + i, lanes, _mm512_fmadd_ps(high, cos, _mm512_mul_ps(low, sin)));
    }
}

}  // namespace slip
