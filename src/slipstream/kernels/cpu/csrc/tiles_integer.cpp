// int8 activations times unsigned weights: for each group of 32 inputs an integer sum, then scaled into the float accumulators.
#include <immintrin.h>

#include "matmul.h"
#include "tiles.h"

#define SLIP_UNROLL _Pragma("GCC unroll 16")

namespace slip {
namespace {

struct Scales {
    __m512 low, high;  // outputs 0-15 and 16-31
};

inline Scales halves(const uint8_t* p) {
    return {_mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p))),
            _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p + 32)))};
}
inline Scales floats(const uint8_t* p) { return {_mm512_load_ps(p), _mm512_load_ps(p + 64)}; }

struct Codes {
    __m512i low, high;  // four inputs of outputs 0-15 and 16-31
};

struct Bytes {
    static constexpr int64_t kBytes = 1024;
    static Codes load(const uint8_t* p, int four) {
        return {_mm512_load_si512(p + four * 128), _mm512_load_si512(p + four * 128 + 64)};
    }
};

struct Nibbles {
    static constexpr int64_t kBytes = 512;
    static Codes load(const uint8_t* p, int four) {
        const __m512i both = _mm512_load_si512(p + four * 64), mask = _mm512_set1_epi8(15);
        return {_mm512_and_si512(both, mask), _mm512_and_si512(_mm512_srli_epi16(both, 4), mask)};
    }
};

// Nibbles and further bits of each code in planes of 128 bytes behind them.
template <int kPlanes>
struct Planes {
    static constexpr int64_t kBytes = 512 + 128 * kPlanes;
    static Codes load(const uint8_t* p, int four) {
        Codes codes = Nibbles::load(p, four);
        SLIP_UNROLL for (int plane = 0; plane < kPlanes; ++plane) {
            const auto* bits = reinterpret_cast<const __mmask64*>(p + 512 + plane * 128) + 2 * four;
            const __m512i bit = _mm512_set1_epi8(char(16 << plane));
            codes.low = _mm512_mask_add_epi8(codes.low, bits[0], codes.low, bit);
            codes.high = _mm512_mask_add_epi8(codes.high, bits[1], codes.high, bit);
        }
        return codes;
    }
};

struct Q8 : Bytes {
    static constexpr int64_t kRecord = 1024 + 64;
    static constexpr bool kHasMin = false;
    static constexpr int kParts = 1;  // scales for each group of inputs
    static constexpr int kExcess = 128;  // what each code is too large by
    static Scales scales(const uint8_t* p, int) { return halves(p + kBytes); }
};
struct Q4 : Nibbles {
    static constexpr int64_t kRecord = 512 + 128;
    static constexpr bool kHasMin = true;
    static constexpr int kParts = 1;
    static Scales scales(const uint8_t* p, int) { return halves(p + 512); }
    static Scales mins(const uint8_t* p) { return halves(p + 512 + 64); }
};
struct Q4K : Nibbles {
    static constexpr int64_t kRecord = 512 + 256;
    static constexpr bool kHasMin = true;
    static constexpr int kParts = 1;
    static Scales scales(const uint8_t* p, int) { return floats(p + 512); }
    static Scales mins(const uint8_t* p) { return floats(p + 512 + 128); }
};
struct Q5 : Planes<1> {
    static constexpr int64_t kRecord = kBytes + 64;
    static constexpr bool kHasMin = false;
    static constexpr int kParts = 1;
    static constexpr int kExcess = 16;
    static Scales scales(const uint8_t* p, int) { return halves(p + kBytes); }
};
struct Q6K : Planes<2> {
    static constexpr int64_t kRecord = kBytes + 256;
    static constexpr bool kHasMin = false;
    static constexpr int kParts = 2;
    static constexpr int kExcess = 32;
    static Scales scales(const uint8_t* p, int part) { return floats(p + kBytes + 128 * part); }
};

// What the sum of a part starts with: it takes what each code is too large by out again.
template <class F>
inline __m512i start(const ActivationGroup& x, int part) {
    if constexpr (F::kHasMin) {
        return _mm512_setzero_si512();
    } else {
        const int32_t of_128 = F::kParts == 1 ? x.correction : part == 0 ? x.half_correction : x.correction - x.half_correction;
        return _mm512_set1_epi32(of_128 / (128 / F::kExcess));
    }
}

template <class F, int R>
void tile(const TileInput& in, float* out) {
    __m512 low[R], high[R];
    SLIP_UNROLL for (int r = 0; r < R; ++r) low[r] = high[r] = _mm512_setzero_ps();
    const uint8_t *w = in.panel, *x0 = in.rows, *ahead = in.ahead;
    const int64_t stride = in.row_bytes, lines = in.ahead_lines;
    for (int64_t k = 0; k < in.inputs; k += kGroup, w += F::kRecord, x0 += sizeof(ActivationGroup)) {
        const auto x = [&](int r) -> const ActivationGroup& { return *reinterpret_cast<const ActivationGroup*>(x0 + r * stride); };
        for (int64_t i = 0; i < lines; ++i, ahead += 64) _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
        SLIP_UNROLL for (int part = 0; part < F::kParts; ++part) {
            // Keeps the second part's loads behind the first part's sums: together they need more registers than there are.
            if constexpr (F::kParts > 1) asm volatile("" ::: "memory");
            __m512i a[R], b[R];
            SLIP_UNROLL for (int r = 0; r < R; ++r) a[r] = b[r] = start<F>(x(r), part);
            constexpr int kFours = 8 / F::kParts;
            SLIP_UNROLL for (int four = part * kFours; four < (part + 1) * kFours; ++four) {
                const Codes codes = F::load(w, four);
                SLIP_UNROLL for (int r = 0; r < R; ++r) {
                    const __m512i q = _mm512_set1_epi32(reinterpret_cast<const int32_t*>(x(r).codes)[four]);
                    a[r] = _mm512_dpbusd_epi32(a[r], codes.low, q);
                    b[r] = _mm512_dpbusd_epi32(b[r], codes.high, q);
                }
            }
            const Scales s = F::scales(w, part);
            SLIP_UNROLL for (int r = 0; r < R; ++r) {
                const __m512 scale = _mm512_set1_ps(x(r).scale);
                low[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(a[r]), _mm512_mul_ps(s.low, scale), low[r]);
                high[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(b[r]), _mm512_mul_ps(s.high, scale), high[r]);
            }
        }
        if constexpr (F::kHasMin) {
            const Scales m = F::mins(w);
            SLIP_UNROLL for (int r = 0; r < R; ++r) {
                const __m512 sum = _mm512_set1_ps(x(r).scaled_sum);
                low[r] = _mm512_fmadd_ps(m.low, sum, low[r]);
                high[r] = _mm512_fmadd_ps(m.high, sum, high[r]);
            }
        }
    }
    SLIP_UNROLL for (int r = 0; r < R; ++r) {
        _mm512_store_ps(out + r * kPanel, low[r]);
        _mm512_store_ps(out + r * kPanel + 16, high[r]);
    }
}

template <class F>
Tiles tiles_of() {
    static constexpr Tile all[] = {tile<F, 1>, tile<F, 2>, tile<F, 3>, tile<F, 4>, tile<F, 5>, tile<F, 6>};
    return {all, 6, kGroup};
}

}  // namespace

Tiles integer_tiles(int32_t format) {
    switch (format) {
        case kQ8: return tiles_of<Q8>();
        case kQ4: return tiles_of<Q4>();
        case kQ4K: return tiles_of<Q4K>();
        case kQ5: return tiles_of<Q5>();
        default: return tiles_of<Q6K>();
    }
}

}  // namespace slip
