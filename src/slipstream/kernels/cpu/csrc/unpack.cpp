#include "unpack.h"

#include <immintrin.h>

#include <algorithm>

#include "buffer.h"
#include "error.h"
#include "matmul.h"
#include "pool.h"

namespace slip {
namespace {

float half(const uint8_t* p, int64_t i) { return _cvtsh_ss(reinterpret_cast<const uint16_t*>(p)[i]); }
float single(const uint8_t* p, int64_t i) { return reinterpret_cast<const float*>(p)[i]; }

// value = scale * code + min, each rounded as torch rounds it: a product, then a sum. `record`: of the 32 inputs that k counts in.
float value(int32_t format, const uint8_t* record, int64_t k, int64_t output) {
    const int64_t side = output / 16, place = output % 16 * 4 + k % 4;
    if (format == kQ8) return half(record + 1024, output) * float(record[k / 4 * 128 + side * 64 + place] - 128);
    const int code = record[k / 4 * 64 + place] >> (4 * side) & 15;
    const uint8_t* tail = record + 512;
    const int64_t bit = k / 4 * 128 + side * 64 + place;  // of a plane
    const auto further = [&](int plane) { return (tail[plane * 128 + bit / 8] >> (bit % 8) & 1) << (4 + plane); };
    if (format == kQ5) return half(tail + 128, output) * float((code | further(0)) - 16);
    if (format == kQ6K) return single(tail + 256 + k / 16 * 128, output) * float((code | further(0) | further(1)) - 32);
    return format == kQ4 ? half(tail, output) * float(code) + half(tail + 64, output)
                         : single(tail, output) * float(code) + single(tail + 128, output);
}

// Input k of a panel's output.
float weight(int32_t format, const uint8_t* panel, int64_t k, int64_t output) {
    if (format == kF32) return single(panel, k * kPanel + output);
    if (format == kBF16) {
        const uint32_t bits = reinterpret_cast<const uint16_t*>(panel)[k / 2 * 64 + output * 2 + k % 2];
        return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(int32_t(bits << 16))));
    }
    return value(format, panel + k / kGroup * slip_panel_bytes(format, kGroup), k % kGroup, output);
}

}  // namespace

const uint8_t* unpacked(int32_t format, int64_t inputs, const uint8_t* panel) {
    thread_local Buffer buffer;
    uint8_t* const bytes = buffer.at_least(round_up(inputs, kGroup) * kPanel * 4);
    float* out = reinterpret_cast<float*>(bytes);
    if (format == kBF16) {
        for (int64_t k = 0; k < inputs; ++k, out += kPanel) {
            // [pair][2 halves of the outputs][16 outputs][2 inputs]
            const auto* pair = reinterpret_cast<const __m512i*>(panel + k / 2 * 128);
            for (int side = 0; side < 2; ++side) {
                const __m512i both = _mm512_load_si512(pair + side);
                const __m512i bits = k % 2 ? _mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000))) : _mm512_slli_epi32(both, 16);
                _mm512_store_ps(out + side * 16, _mm512_castsi512_ps(bits));
            }
        }
        return bytes;
    }
    const int64_t record_bytes = slip_panel_bytes(format, kGroup);
    for (int64_t k = 0; k < inputs; ++k) {
        for (int64_t output = 0; output < kPanel; ++output) {
            *out++ = value(format, panel + k / kGroup * record_bytes, k % kGroup, output);
        }
    }
    return bytes;
}

}  // namespace slip

extern "C" int64_t slip_panel_bytes(int32_t format, int64_t inputs) {
    const int64_t groups = slip::round_up(inputs, slip::kGroup) / slip::kGroup;
    switch (format) {
        case slip::kF32: return 128 * inputs;
        case slip::kBF16: return 64 * slip::round_up(inputs, 8);
        case slip::kQ8: return 1088 * groups;
        case slip::kQ4: return 640 * groups;
        case slip::kQ4K: return 768 * groups;
        case slip::kQ5: return 704 * groups;
        case slip::kQ6K: return 1024 * groups;
        default: return 0;
    }
}

extern "C" int slip_matrix_rows(const slip_matrix* matrix, const int64_t* rows, int64_t count, float* out) {
    using namespace slip;
    if (const int error = check_matrix(matrix, kExact)) return error;
    if (count && (!rows || !out)) return kNullPointer;
    if (matrix->paired || count < 0) return kBadShape;
    for (int64_t i = 0; i < count; ++i) {
        if (rows[i] < 0 || rows[i] >= matrix->outputs) return kBadShape;
    }
    const int64_t inputs = matrix->inputs, panel_bytes = slip_panel_bytes(matrix->format, inputs);
    each_token(pool(), count, [&](int64_t i) {
        const uint8_t* const panel = static_cast<const uint8_t*>(matrix->panels) + rows[i] / kPanel * panel_bytes;
        for (int64_t k = 0; k < inputs; ++k) out[i * inputs + k] = weight(matrix->format, panel, k, rows[i] % kPanel);
    });
    return kOk;
}
