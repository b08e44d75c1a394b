#include "operand.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "buffer.h"
#include "error.h"
#include "vector.h"

namespace slip {
namespace {

constexpr uint32_t kInfinityBits = 0x7f800000;
// Below it 127 / largest would overflow; such a group is taken for zero.
constexpr float kSmallest = 0x1p-118f;

// Where a row's values come from, 16 at a time; past the end they are 0. Both give a value without regard to what is made of it,
// so that a fused kernel's results are those of the separate ones.
struct Plain {
    const float* row;
    int64_t columns;
    __m512 load(int64_t k) const { return _mm512_maskz_loadu_ps(lanes(columns - k), row + k); }
};

struct Normed {
    const float* row;
    int64_t columns;
    const float* weight;
    __m512 factor, offset;

    Normed(const float* row_, int64_t columns_, const Norm& norm)
        : row(row_), columns(columns_), weight(norm.weight), offset(_mm512_set1_ps(norm.offset)) {
        __m512 squares = _mm512_setzero_ps();
        for (int64_t k = 0; k < columns; k += 16) {
            const __m512 x = _mm512_maskz_loadu_ps(lanes(columns - k), row + k);
            squares = _mm512_fmadd_ps(x, x, squares);
        }
        factor = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / float(columns) + norm.eps));
    }
    __m512 load(int64_t k) const {
        const __mmask16 mask = lanes(columns - k);
        const __m512 scale = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, weight + k), offset);
        return _mm512_mul_ps(_mm512_mul_ps(_mm512_maskz_loadu_ps(mask, row + k), factor), scale);
    }
};

template <class Source>
void quantize(const Source& source, int64_t columns, ActivationGroup* out) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    for (int64_t k = 0; k < columns; k += kGroup, ++out) {
        const __m512 low = source.load(k), high = source.load(k + 16);
        // The largest magnitude as an integer: NaN and infinity are above all others there.
        const uint32_t bits = _mm512_reduce_max_epu32(
            _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(low), magnitude),
                             _mm512_and_si512(_mm512_castps_si512(high), magnitude)));
        float largest;
        std::memcpy(&largest, &bits, sizeof largest);
        const bool is_finite = bits < kInfinityBits;
        const bool is_zero = is_finite && largest < kSmallest;
        const __m512 inverse = _mm512_set1_ps(127.0f / largest);
        const __mmask16 mask = is_finite && !is_zero ? 0xffff : 0;
        const __m512i a = _mm512_maskz_cvtps_epi32(mask, _mm512_mul_ps(low, inverse));
        const __m512i b = _mm512_maskz_cvtps_epi32(mask, _mm512_mul_ps(high, inverse));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out->codes), _mm512_cvtsepi32_epi8(a));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out->codes + 16), _mm512_cvtsepi32_epi8(b));
        const int32_t first = _mm512_reduce_add_epi32(a), sum = first + _mm512_reduce_add_epi32(b);
        out->scale = !is_finite ? NAN : is_zero ? 0.0f : largest * (1.0f / 127);
        out->scaled_sum = out->scale * float(sum);
        out->correction = -128 * sum;
        out->half_correction = -128 * first;
    }
}

template <class Source>
void round_to_bfloat16(const Source& source, int64_t columns, uint16_t* out) {
    for (int64_t k = 0; k < columns; k += 16) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + k), (__m256i)_mm512_cvtneps_pbh(source.load(k)));
    }
}

template <class Source>
void copy(const Source& source, int64_t columns, float* out) {
    for (int64_t k = 0; k < columns; k += 16) _mm512_mask_storeu_ps(out + k, lanes(columns - k), source.load(k));
}

template <class Source>
void convert(Mode mode, const Source& source, int64_t columns, uint8_t* out) {
    if (mode == kQuantized) {
        quantize(source, columns, reinterpret_cast<ActivationGroup*>(out));
    } else if (mode == kBfloat16Mode) {
        round_to_bfloat16(source, columns, reinterpret_cast<uint16_t*>(out));
    } else {
        copy(source, columns, reinterpret_cast<float*>(out));
    }
}

// Rows in chunks of some 8 K values: less is not worth a hand-over.
template <class F>
void each_row(Pool& pool, int64_t rows, int64_t columns, F&& f) {
    const int64_t per_chunk = std::max<int64_t>(1, 8192 / columns);
    pool.run((rows + per_chunk - 1) / per_chunk, [&](int64_t chunk, int) {
        const int64_t end = std::min(rows, (chunk + 1) * per_chunk);
        for (int64_t row = chunk * per_chunk; row < end; ++row) f(row);
    });
}

void convert_rows(Pool& pool, Mode mode, const Rows& x, const Norm* norm, uint8_t* out, int64_t row_bytes) {
    each_row(pool, x.rows, x.columns, [&](int64_t r) {
        const float* row = x.data + r * x.stride;
        if (norm) {
            convert(mode, Normed(row, x.columns, *norm), x.columns, out + r * row_bytes);
        } else {
            convert(mode, Plain{row, x.columns}, x.columns, out + r * row_bytes);
        }
    });
}

int64_t bytes_of_row(Mode mode, int64_t columns) {
    const int64_t padded = round_up(columns, kGroup);
    return mode == kQuantized ? padded / kGroup * int64_t(sizeof(ActivationGroup)) : mode == kBfloat16Mode ? 2 * padded : 4 * padded;
}

}  // namespace

Operand prepare(Pool& pool, Mode mode, const Rows& x, const Norm* norm) {
    if (mode == kExact && !norm) {
        return {mode, reinterpret_cast<const uint8_t*>(x.data), x.stride * 4, x.rows, x.columns};
    }
    thread_local Buffer buffer;
    const int64_t row_bytes = bytes_of_row(mode, x.columns);
    uint8_t* const data = buffer.at_least(x.rows * row_bytes);
    convert_rows(pool, mode, x, norm, data, row_bytes);
    return {mode, data, row_bytes, x.rows, x.columns};
}

void rmsnorm(Pool& pool, const Rows& x, const Norm& norm, float* out, int64_t out_stride) {
    convert_rows(pool, kExact, x, &norm, reinterpret_cast<uint8_t*>(out), out_stride * 4);
}

void add_rmsnorm(Pool& pool, const Rows& x, const Norm& norm, float* out, int64_t out_stride) {
    each_row(pool, x.rows, x.columns, [&](int64_t r) {
        const Normed source(x.data + r * x.stride, x.columns, norm);
        float* target = out + r * out_stride;
        for (int64_t k = 0; k < x.columns; k += 16) {
            const __mmask16 mask = lanes(x.columns - k);
            const __m512 sum = _mm512_add_ps(source.load(k), _mm512_maskz_loadu_ps(mask, target + k));
            _mm512_mask_storeu_ps(target + k, mask, sum);
        }
    });
}

void gate(Pool& pool, int32_t activation, const Rows& gate, const Rows& up, float* out, int64_t out_stride) {
    each_row(pool, gate.rows, gate.columns, [&](int64_t r) {
        const float *g = gate.data + r * gate.stride, *u = up.data + r * up.stride;
        for (int64_t k = 0; k < gate.columns; k += 16) {
            const __mmask16 mask = lanes(gate.columns - k);
            const __m512 active = activate16(activation, _mm512_maskz_loadu_ps(mask, g + k));
            _mm512_mask_storeu_ps(out + r * out_stride + k, mask, _mm512_mul_ps(active, _mm512_maskz_loadu_ps(mask, u + k)));
        }
    });
}

}  // namespace slip

extern "C" int slip_rmsnorm(const float* x, int64_t x_stride, int64_t rows, int64_t columns, const float* weight, float eps,
                            float offset, float* out, int64_t out_stride) {
    if (rows == 0) return slip::kOk;
    if (!x || !weight || !out) return slip::kNullPointer;
    if (rows < 0 || columns < 1) return slip::kBadShape;
    if ((x_stride < columns || out_stride < columns) && rows > 1) return slip::kBadStride;
    slip::rmsnorm(slip::pool(), {x, x_stride, rows, columns}, {weight, eps, offset}, out, out_stride);
    return slip::kOk;
}

extern "C" int slip_gate(int32_t activation, const float* gate, int64_t gate_stride, const float* up, int64_t up_stride,
                         int64_t rows, int64_t columns, float* out, int64_t out_stride) {
    if (activation < slip::kNoActivation || activation > slip::kGeluTanh) return slip::kBadMode;
    if (rows == 0) return slip::kOk;
    if (!gate || !up || !out) return slip::kNullPointer;
    if (rows < 0 || columns < 1) return slip::kBadShape;
    if ((gate_stride < columns || up_stride < columns || out_stride < columns) && rows > 1) return slip::kBadStride;
    slip::gate(slip::pool(), activation, {gate, gate_stride, rows, columns}, {up, up_stride, rows, columns}, out, out_stride);
    return slip::kOk;
}

extern "C" int slip_quantize(const float* x, int64_t x_stride, int64_t rows, int64_t columns, const float* weight, float eps,
                             float offset, void* out) {
    if (rows == 0) return slip::kOk;
    if (!x || !out) return slip::kNullPointer;
    if (rows < 0 || columns < 1) return slip::kBadShape;
    if (x_stride < columns && rows > 1) return slip::kBadStride;
    const slip::Norm norm{weight, eps, offset};
    slip::convert_rows(slip::pool(), slip::kQuantized, {x, x_stride, rows, columns}, weight ? &norm : nullptr,
                       static_cast<uint8_t*>(out), slip::bytes_of_row(slip::kQuantized, columns));
    return slip::kOk;
}
