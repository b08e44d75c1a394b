// The largest number of each row, and where it comes first.
#include <immintrin.h>

#include <cstdint>
#include <limits>

#include "error.h"
#include "pool.h"
#include "vector.h"

namespace slip {
namespace {

// Where `wanted` holds first; columns if it does nowhere.
template <class F>
int64_t first(const float* x, int64_t columns, F&& wanted) {
    for (int64_t i = 0; i < columns; i += 16) {
        const __mmask16 there = lanes(columns - i);
        if (const __mmask16 found = wanted(there, _mm512_maskz_loadu_ps(there, x + i))) return i + __builtin_ctz(found);
    }
    return columns;
}

int64_t first_largest(const float* x, int64_t columns) {
    constexpr int kChains = 4;  // maxima of their own: each waits for its last one
    const __m512 least = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 most[kChains] = {least, least, least, least};
    __mmask16 nan = 0;
    int64_t i = 0;
    for (; i + 16 * kChains <= columns; i += 16 * kChains) {
        for (int c = 0; c < kChains; ++c) {
            const __m512 v = _mm512_loadu_ps(x + i + 16 * c);
            nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
            most[c] = _mm512_max_ps(most[c], v);
        }
    }
    for (; i < columns; i += 16) {
        const __m512 v = _mm512_mask_loadu_ps(least, lanes(columns - i), x + i);
        nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        most[0] = _mm512_max_ps(most[0], v);
    }
    if (nan) return first(x, columns, [](__mmask16 m, __m512 v) { return _mm512_mask_cmp_ps_mask(m, v, v, _CMP_UNORD_Q); });
    const __m512 both = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
    const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(both));
    return first(x, columns, [&](__mmask16 m, __m512 v) { return _mm512_mask_cmp_ps_mask(m, v, largest, _CMP_EQ_OQ); });
}

}  // namespace
}  // namespace slip

// ids [rows], values [rows] of x [rows, columns], `stride` floats from row to row. A NaN counts as largest; of equals the first.
extern "C" int slip_argmax(const float* x, int64_t stride, int64_t rows, int64_t columns, int64_t* ids, float* values) {
    using namespace slip;
    if (rows < 0 || columns < 1) return kBadShape;
    if (stride < columns) return kBadStride;
    if (rows && (!x || !ids || !values)) return kNullPointer;
    pool().run(rows, [&](int64_t row, int) {
        const float* const from = x + row * stride;
        ids[row] = first_largest(from, columns);
        values[row] = from[ids[row]];
    });
    return kOk;
}
