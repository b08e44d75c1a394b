// KV rows in the cache: one head of one token, `dim` numbers of one of three types.
//
//   float32   dim x 4 bytes
//   bfloat16  dim x 2 bytes
//   int8      dim codes and a float32 scale behind them (unaligned): value = scale * code
//
// A layer's keys lie as [num_slots][kv_heads][row], its values likewise with rows of their own length.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

extern "C" {
// One layer's keys and values.
struct slip_kv {
    uint8_t* keys;
    uint8_t* values;
    int64_t num_slots;
    int32_t kv_heads;
    int32_t key_dim;    // multiples of 16, from 16 to 256
    int32_t value_dim;
    int32_t type;       // slip::Type
};
}

namespace slip {

enum Type : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

constexpr int kMaxDim = 256;

inline int64_t row_bytes(int32_t type, int64_t dim) { return type == kFloat32 ? 4 * dim : type == kBfloat16 ? 2 * dim : dim + 4; }

inline bool is_dim(int32_t dim) { return dim >= 16 && dim <= kMaxDim && dim % 16 == 0; }

inline __m512 load_bf16(const uint8_t* from) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline void store_bf16(uint8_t* to, __m512 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
}

// 16 numbers of an activation row, which is float32 or bfloat16.
inline __m512 load_16(const uint8_t* row, int32_t type, int64_t at) {
    return type == kFloat32 ? _mm512_loadu_ps(row + 4 * at) : load_bf16(row + 2 * at);
}

inline void store_16(uint8_t* row, int32_t type, int64_t at, __m512 x) {
    if (type == kFloat32) {
        _mm512_storeu_ps(row + 4 * at, x);
    } else {
        store_bf16(row + 2 * at, x);
    }
}

// True if none of the 16 is infinite or NaN.
inline bool all_finite(__m512 x) { return _mm512_fpclass_ps_mask(x, 0x99) == 0; }  // quiet and signalling NaN, both infinities

// Writes `dim` float32 numbers as one row of the cache. Returns whether what it wrote is finite.
//
// int8: scale = largest / 127, codes rounded to even. A row with infinity or NaN gets the scale NaN and codes 0, so that
// whoever reads it gets NaN; one of numbers below 1e-30 becomes zeros, because 127 / largest would overflow.
inline bool write_row(uint8_t* to, int32_t type, const float* from, int dim) {
    if (type == kFloat32) {
        bool finite = true;
        for (int i = 0; i < dim; i += 16) {
            const __m512 x = _mm512_loadu_ps(from + i);
            finite &= all_finite(x);
            _mm512_storeu_ps(to + 4 * i, x);
        }
        return finite;
    }
    if (type == kBfloat16) {
        bool finite = true;
        for (int i = 0; i < dim; i += 16) {
            store_bf16(to + 2 * i, _mm512_loadu_ps(from + i));
            finite &= all_finite(load_bf16(to + 2 * i));  // what was finite may have rounded to infinity
        }
        return finite;
    }
    bool finite = true;
    __m512 largest = _mm512_setzero_ps();
    for (int i = 0; i < dim; i += 16) {
        const __m512 x = _mm512_loadu_ps(from + i);
        finite &= all_finite(x);
        largest = _mm512_max_ps(largest, _mm512_abs_ps(x));
    }
    const float most = _mm512_reduce_max_ps(largest);
    const bool empty = !finite || most < 1e-30f;
    const float scale = !finite ? __builtin_nanf("") : empty ? 0.0f : most / 127.0f;
    const __m512 inverse = _mm512_set1_ps(empty ? 0.0f : 127.0f / most);
    for (int i = 0; i < dim; i += 16) {
        const __m512 x = finite ? _mm512_loadu_ps(from + i) : _mm512_setzero_ps();
        const __m512i codes = _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtsepi32_epi8(codes));
    }
    std::memcpy(to + dim, &scale, 4);
    return finite;
}

}  // namespace slip
