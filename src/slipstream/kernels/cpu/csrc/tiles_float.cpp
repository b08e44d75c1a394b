// bfloat16 and float32 tiles: plain chains of fused sums, two inputs at once or one.
#include <immintrin.h>

#include "matmul.h"
#include "tiles.h"

#define SLIP_UNROLL _Pragma("GCC unroll 16")

namespace slip {
namespace {

constexpr int kStep = 8;  // inputs between two looks at what is to be brought near

inline const uint8_t* bring(const uint8_t* ahead, int64_t lines) {
    for (int64_t i = 0; i < lines; ++i, ahead += 64) _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
    return ahead;
}

template <int R>
inline void store(float* out, const __m512 (&low)[R], const __m512 (&high)[R]) {
    SLIP_UNROLL for (int r = 0; r < R; ++r) {
        _mm512_store_ps(out + r * kPanel, low[r]);
        _mm512_store_ps(out + r * kPanel + 16, high[r]);
    }
}

template <int R>
void bfloat16_tile(const TileInput& in, float* out) {
    __m512 low[R], high[R];
    SLIP_UNROLL for (int r = 0; r < R; ++r) low[r] = high[r] = _mm512_setzero_ps();
    const uint8_t *w = in.panel, *x = in.rows, *ahead = in.ahead;
    for (int64_t k = 0; k < in.inputs; k += kStep, w += kStep * 64, x += kStep * 2) {
        ahead = bring(ahead, in.ahead_lines);
        SLIP_UNROLL for (int pair = 0; pair < kStep / 2; ++pair) {
            const __m512bh a = (__m512bh)_mm512_load_si512(w + pair * 128), b = (__m512bh)_mm512_load_si512(w + pair * 128 + 64);
            SLIP_UNROLL for (int r = 0; r < R; ++r) {
                const auto both = reinterpret_cast<const int32_t*>(x + r * in.row_bytes)[pair];
                const __m512bh v = (__m512bh)_mm512_set1_epi32(both);
                low[r] = _mm512_dpbf16_ps(low[r], a, v);
                high[r] = _mm512_dpbf16_ps(high[r], b, v);
            }
        }
    }
    store(out, low, high);
}

// sum += a * b. Written out: where the compiler is free to, it overwrites a factor instead of the sum and moves registers about.
inline void accumulate(__m512& sum, __m512 a, __m512 b) { asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }

template <int R>
inline void one_input(const uint8_t* w, const uint8_t* x, int64_t row_bytes, __m512 (&low)[R], __m512 (&high)[R]) {
    const __m512 a = _mm512_load_ps(w), b = _mm512_load_ps(w + 64);
    SLIP_UNROLL for (int r = 0; r < R; ++r) {
        const __m512 v = _mm512_set1_ps(*reinterpret_cast<const float*>(x + r * row_bytes));
        accumulate(low[r], a, v);
        accumulate(high[r], b, v);
    }
}

template <int R>
void float_tile(const TileInput& in, float* out) {
    __m512 low[R], high[R];
    SLIP_UNROLL for (int r = 0; r < R; ++r) low[r] = high[r] = _mm512_setzero_ps();
    const uint8_t *w = in.panel, *x = in.rows, *ahead = in.ahead;
    int64_t k = 0;
    for (; k + kStep <= in.inputs; k += kStep) {
        ahead = bring(ahead, in.ahead_lines);
        SLIP_UNROLL for (int i = 0; i < kStep; ++i, w += 128, x += 4) one_input<R>(w, x, in.row_bytes, low, high);
    }
    for (; k < in.inputs; ++k, w += 128, x += 4) one_input<R>(w, x, in.row_bytes, low, high);
    store(out, low, high);
}

}  // namespace

Tiles bfloat16_tiles() {
    static constexpr Tile all[] = {bfloat16_tile<1>, bfloat16_tile<2>, bfloat16_tile<3>, bfloat16_tile<4>,
                                   bfloat16_tile<5>, bfloat16_tile<6>, bfloat16_tile<7>, bfloat16_tile<8>,
                                   bfloat16_tile<9>, bfloat16_tile<10>, bfloat16_tile<11>, bfloat16_tile<12>};
    return {all, 12, kStep};
}

Tiles float_tiles() {
    static constexpr Tile all[] = {float_tile<1>, float_tile<2>, float_tile<3>, float_tile<4>,  float_tile<5>,  float_tile<6>,
                                   float_tile<7>, float_tile<8>, float_tile<9>, float_tile<10>, float_tile<11>, float_tile<12>};
    return {all, 12, kStep};
}

}  // namespace slip
