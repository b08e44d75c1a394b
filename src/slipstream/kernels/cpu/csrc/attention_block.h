// Turns a block of up to 64 keys and values of one head into the order in which the products read them.
//
//   cache, one row a token        words of 4 bytes                      keys      [word][64 tokens]
//   t0  | w0 w1 w2 w3 ...         float32: a word is one number                   w0 of t0..t63, w1 of t0..t63, ...
//   t1  | w0 w1 w2 w3 ...         bfloat16: two numbers, which          values    bfloat16 [32 pairs][dim] of (t2k, t2k+1)
//   ...                           vdpbf16ps multiplies and adds                   float32  in place, by their rows' addresses
//
// int8 codes become bfloat16 first, exactly; their scales go to the scores and to the weights.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention.h"

namespace slip {

// Addresses of a block's rows, of keys or of values. Rows that nobody sees are zeros, whatever the cache holds.
struct BlockRows {
    const uint8_t* row[kBlock];

    void find(const uint8_t* cache, const int64_t* slots, int count, int64_t slot_bytes, const uint8_t* zeros) {
        for (int i = 0; i < count; ++i) row[i] = cache + slots[i] * slot_bytes;
        for (int i = count; i < kBlock; ++i) row[i] = zeros;
    }
};

inline __m128i load_128(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }

// [64 rows][4 * words bytes] -> [words][64] words. `words` is a multiple of 4.
inline void transpose_words(const BlockRows& rows, int words, uint32_t* out) {
    for (int group = 0; group < kBlock; group += 16) {
        const uint8_t* const* row = rows.row + group;
        for (int word = 0; word < words; word += 4) {
            // Lane l of line j: words word..word+3 of row 4 * l + j. Four lines make a 4x4 transposition in every lane.
            __m512i line[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                __m512i x = _mm512_castsi128_si512(load_128(row[j] + 4 * word));
                x = _mm512_inserti32x4(x, load_128(row[4 + j] + 4 * word), 1);
                x = _mm512_inserti32x4(x, load_128(row[8 + j] + 4 * word), 2);
                line[j] = _mm512_inserti32x4(x, load_128(row[12 + j] + 4 * word), 3);
            }
            const __m512i a = _mm512_unpacklo_epi32(line[0], line[1]), b = _mm512_unpackhi_epi32(line[0], line[1]);
            const __m512i c = _mm512_unpacklo_epi32(line[2], line[3]), d = _mm512_unpackhi_epi32(line[2], line[3]);
            uint32_t* to = out + word * kBlock + group;
            _mm512_store_si512(to, _mm512_unpacklo_epi64(a, c));
            _mm512_store_si512(to + kBlock, _mm512_unpackhi_epi64(a, c));
            _mm512_store_si512(to + 2 * kBlock, _mm512_unpacklo_epi64(b, d));
            _mm512_store_si512(to + 3 * kBlock, _mm512_unpackhi_epi64(b, d));
        }
    }
}

// bfloat16 rows -> [pairs][dim] words of two tokens' numbers, the even token's below. `dim` is a multiple of 16.
inline void pair_values(const BlockRows& rows, int pairs, int dim, uint32_t* out) {
    for (int pair = 0; pair < pairs; ++pair, out += dim) {
        const uint8_t *even = rows.row[2 * pair], *odd = rows.row[2 * pair + 1];
        for (int i = 0; i < dim; i += 16) {
            const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + 2 * i)));
            const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd + 2 * i)));
            _mm512_store_si512(out + i, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
    }
}

// An int8 row -> bfloat16; returns its scale.
inline float widen_row(const uint8_t* from, int dim, uint8_t* to) {
    for (int at = 0; at < dim; at += 16) {
        store_bf16(to + 2 * at, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_128(from + at))));
    }
    float scale;
    std::memcpy(&scale, from + dim, 4);
    return scale;
}

// int8 rows -> bfloat16 rows [64][dim] in `wide`, whose addresses replace the rows', and their scales [64].
inline void widen_rows(BlockRows& rows, int count, int dim, uint8_t* wide, float* scales) {
    for (int i = 0; i < count; ++i) {
        uint8_t* to = wide + int64_t(i) * 2 * dim;
        scales[i] = widen_row(rows.row[i], dim, to);
        rows.row[i] = to;
    }
    std::fill(scales + count, scales + kBlock, 0.0f);
}

// Replace one token of a block that transpose_words or pair_values made.
inline void put_key(uint32_t* keys, int token, const uint8_t* row, int words) {
    for (int word = 0; word < words; ++word) std::memcpy(keys + word * kBlock + token, row + 4 * word, 4);
}

inline void put_value(uint32_t* pairs, int token, const uint8_t* row, int dim) {
    uint8_t* to = reinterpret_cast<uint8_t*>(pairs + int64_t(token / 2) * dim) + 2 * (token % 2);
    for (int i = 0; i < dim; ++i) std::memcpy(to + 4 * i, row + 2 * i, 2);
}

inline void prefetch_rows(const uint8_t* cache, const int64_t* slots, int count, int64_t slot_bytes, int64_t bytes) {
    for (int i = 0; i < count; ++i) {
        const uint8_t* row = cache + slots[i] * slot_bytes;
        for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch(reinterpret_cast<const char*>(row + at), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(row + bytes - 1), _MM_HINT_T0);
    }
}

}  // namespace slip
