// The arithmetic of up to 6 rows over one block of 64 keys: scores, weights, weighted values.
//
//            keys [word][64]                    values [pair][dim]
//   rows     +---------+     softmax     +----------+
//   q[r] ->  | R x 64  |  ------------>  | weights  |  ->  out[r][dim] = out[r] * fade[r] + weights * values
//            +---------+                 +----------+
//
// Each row's numbers come out of the same operations in the same order for any R.
#pragma once

#include <cmath>

#include "attention_block.h"
#include "attention_math.h"

namespace slip {

constexpr int kTileRows = 6;  // 24 accumulators; more would spill

// A block in the order of attention_block.h.
struct Block {
    const uint32_t* keys;
    const uint32_t* values;      // bfloat16 pairs
    const BlockRows* value_rows;  // float32
    const float* key_scales;     // int8
    const float* value_scales;
    int count;                   // keys that are there
};

// How raw products become scores in units of log 2.
struct Scoring {
    float factor;        // scale * log2(e), with softcap scale / softcap
    float cap;           // softcap * log2(e), or 0
};

// The online softmax of some rows: largest score so far, sum of weights in 16 lanes, weighted values.
struct RowStates {
    float* largest;  // [rows]
    float* sums;     // [rows][16]
    float* out;      // [rows][value_dim]
};

// Not inlined, as the other loop over accumulators below: tests look at what the compiler made of them.
template <int Type, int R>
__attribute__((noinline)) void score_rows(const uint32_t* keys, const uint32_t* query, int words, float* scores) {
    __m512 sum[R][4];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sum[r][i] = _mm512_setzero_ps();
    }
    for (int word = 0; word < words; ++word) {
        __m512i key[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) key[i] = _mm512_load_si512(keys + word * kBlock + 16 * i);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const __m512i q = _mm512_set1_epi32(int(query[r * words + word]));
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                if constexpr (Type == kFloat32) {
                    sum[r][i] = _mm512_fmadd_ps(_mm512_castsi512_ps(q), _mm512_castsi512_ps(key[i]), sum[r][i]);
                } else {
                    sum[r][i] = _mm512_dpbf16_ps(sum[r][i], (__m512bh)key[i], (__m512bh)q);
                }
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) _mm512_store_ps(scores + r * kBlock + 16 * i, sum[r][i]);
    }
}

// One row's scores -> weights (float32 [64], or bfloat16 pairs [32]); updates its largest score and its sum.
// Returns by what its earlier values fade. Keys outside `seen` get exactly 0.
template <int Type>
inline float weigh_row(const Block& block, const Scoring& scoring, uint64_t seen, const float* scores, float& largest, float* sum,
                       uint32_t* weights) {
    const __m512 minus_infinity = _mm512_set1_ps(-INFINITY);
    __m512 s[4], most = minus_infinity;
    if (seen) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            __m512 factor = _mm512_set1_ps(scoring.factor);
            if constexpr (Type == kInt8) factor = _mm512_mul_ps(factor, _mm512_load_ps(block.key_scales + 16 * i));
            __m512 x = _mm512_mul_ps(_mm512_load_ps(scores + 16 * i), factor);
            if (scoring.cap != 0) x = _mm512_mul_ps(tanh_16(x), _mm512_set1_ps(scoring.cap));
            s[i] = _mm512_mask_mov_ps(minus_infinity, __mmask16(seen >> (16 * i)), x);
            most = _mm512_max_ps(most, s[i]);
        }
    }
    const float here = seen ? _mm512_reduce_max_ps(most) : -INFINITY;
    const float now = here > largest ? here : largest;
    if (!seen || now == -INFINITY) {
        constexpr int kWords = Type == kFloat32 ? kBlock : kBlock / 2;
        for (int i = 0; i < kWords; i += 16) _mm512_store_si512(weights + i, _mm512_setzero_si512());
        // A NaN among scores of minus infinity must not get lost.
        bool lost = false;
        if (seen) {
            for (int i = 0; i < 4; ++i) lost |= _mm512_cmp_ps_mask(s[i], s[i], _CMP_UNORD_Q) != 0;
        }
        if (lost) _mm512_store_ps(sum, _mm512_set1_ps(NAN));
        return 1.0f;
    }
    const __m512 shift = _mm512_set1_ps(now);
    const __m512 fade = exp2_neg(_mm512_sub_ps(_mm512_set1_ps(largest), shift));
    largest = now;
    __m512 p[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        p[i] = _mm512_maskz_mov_ps(__mmask16(seen >> (16 * i)), exp2_neg(_mm512_sub_ps(s[i], shift)));
    }
    __m512 total = _mm512_mul_ps(_mm512_load_ps(sum), fade);
    if constexpr (Type == kBfloat16) {
        // The sum is of the rounded weights, those that the values are multiplied by: their errors cancel.
        const __m512bh low = _mm512_cvtne2ps_pbh(p[1], p[0]), high = _mm512_cvtne2ps_pbh(p[3], p[2]);
        const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
        total = _mm512_dpbf16_ps(_mm512_dpbf16_ps(total, low, ones), high, ones);
        _mm512_store_si512(weights, (__m512i)low);
        _mm512_store_si512(weights + 16, (__m512i)high);
    } else {
        total = _mm512_add_ps(total, _mm512_add_ps(_mm512_add_ps(p[0], p[1]), _mm512_add_ps(p[2], p[3])));
        if constexpr (Type == kInt8) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                p[i] = _mm512_maskz_mul_ps(__mmask16(seen >> (16 * i)), p[i], _mm512_load_ps(block.value_scales + 16 * i));
            }
            _mm512_store_si512(weights, (__m512i)_mm512_cvtne2ps_pbh(p[1], p[0]));
            _mm512_store_si512(weights + 16, (__m512i)_mm512_cvtne2ps_pbh(p[3], p[2]));
        } else {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) _mm512_store_ps(weights + 16 * i, p[i]);
        }
    }
    _mm512_store_ps(sum, total);
    return _mm512_cvtss_f32(fade);
}

// Columns [at, at + 16 * C) of R rows.
template <int Type, int R, int C>
__attribute__((noinline)) void mix_columns(const Block& block, const uint32_t* weights, const float* fade, int at, int dim, float* out) {
    constexpr int kStride = Type == kFloat32 ? kBlock : kBlock / 2;
    __m512 sum[R][C];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            sum[r][c] = _mm512_mul_ps(_mm512_load_ps(out + r * dim + at + 16 * c), _mm512_set1_ps(fade[r]));
        }
    }
    const int steps = Type == kFloat32 ? block.count : (block.count + 1) / 2;
    for (int k = 0; k < steps; ++k) {
        __m512i value[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            if constexpr (Type == kFloat32) {
                value[c] = _mm512_loadu_si512(block.value_rows->row[k] + 4 * (at + 16 * c));
            } else {
                value[c] = _mm512_load_si512(block.values + k * dim + at + 16 * c);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const __m512i w = _mm512_set1_epi32(int(weights[r * kStride + k]));
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) {
                if constexpr (Type == kFloat32) {
                    sum[r][c] = _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(value[c]), sum[r][c]);
                } else {
                    sum[r][c] = _mm512_dpbf16_ps(sum[r][c], (__m512bh)value[c], (__m512bh)w);
                }
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) _mm512_store_ps(out + r * dim + at + 16 * c, sum[r][c]);
    }
}

// Rows [first, first + R) over one block. seen[r]: which of its keys each of them sees.
template <int Type, int R>
void attend_tile(const Block& block, const Scoring& scoring, const uint32_t* query, int words, int dim, const uint64_t* seen,
                 const RowStates& rows, int first) {
    alignas(64) float scores[R * kBlock];
    alignas(64) uint32_t weights[R * kBlock];
    float fade[R];
    score_rows<Type, R>(block.keys, query + int64_t(first) * words, words, scores);
    constexpr int kStride = Type == kFloat32 ? kBlock : kBlock / 2;
    for (int r = 0; r < R; ++r) {
        const int row = first + r;
        fade[r] = weigh_row<Type>(block, scoring, seen[r], scores + r * kBlock, rows.largest[row], rows.sums + row * 16,
                                  weights + r * kStride);
    }
    float* out = rows.out + int64_t(first) * dim;
    int at = 0;
    for (; at + 64 <= dim; at += 64) mix_columns<Type, R, 4>(block, weights, fade, at, dim, out);
    if (at + 32 <= dim) {
        mix_columns<Type, R, 2>(block, weights, fade, at, dim, out);
        at += 32;
    }
    if (at < dim) mix_columns<Type, R, 1>(block, weights, fade, at, dim, out);
}

template <int Type>
void attend_rows(int count, const Block& block, const Scoring& scoring, const uint32_t* query, int words, int dim,
                 const uint64_t* seen, const RowStates& rows, int first) {
    switch (count) {
        case 1: return attend_tile<Type, 1>(block, scoring, query, words, dim, seen, rows, first);
        case 2: return attend_tile<Type, 2>(block, scoring, query, words, dim, seen, rows, first);
        case 3: return attend_tile<Type, 3>(block, scoring, query, words, dim, seen, rows, first);
        case 4: return attend_tile<Type, 4>(block, scoring, query, words, dim, seen, rows, first);
        case 5: return attend_tile<Type, 5>(block, scoring, query, words, dim, seen, rows, first);
        default: return attend_tile<Type, 6>(block, scoring, query, words, dim, seen, rows, first);
    }
}

}  // namespace slip
