// A product's left side: rows of float32, turned once into what the kernels of a mode read.
#pragma once

#include <cstdint>

#include "pool.h"

namespace slip {

enum Mode : int32_t {
    kExact = 0,         // float32 as it is, multiplied by float32 weights
    kBfloat16Mode = 1,  // rounded to bfloat16, multiplied by bfloat16 weights
    kQuantized = 2,     // int8 with a scale for each 32, multiplied by integer weights
};

constexpr int64_t kGroup = 32;

// 32 activations: x = scale * code. A group with NaN or infinity in it has the scale NaN, so its row's results are NaN.
//
// Weights are unsigned bytes w + 128 in the integer products, so these start at -128 * (sum of the codes).
struct ActivationGroup {
    int8_t codes[kGroup];
    float scale;
    float scaled_sum;         // scale * sum of the codes
    int32_t correction;       // -128 * sum of the codes
    int32_t half_correction;  // the same of the first 16
};
static_assert(sizeof(ActivationGroup) == 48);

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Rows of float32, `stride` floats apart.
struct Rows {
    const float* data;
    int64_t stride;
    int64_t rows;
    int64_t columns;
};

// x / sqrt(mean(x^2) + eps) * (weight + offset)
struct Norm {
    const float* weight;  // [columns]
    float eps;
    float offset;  // 1 where the checkpoint keeps weight - 1, else 0
};

struct Operand {
    Mode mode;
    const uint8_t* data;
    int64_t row_bytes;
    int64_t rows;
    int64_t columns;
};

// The operand of `x`, normalised first where `norm` is given. It lies in a buffer of the calling thread until that thread's
// next prepare(), or is `x` itself. Throws std::bad_alloc.
Operand prepare(Pool& pool, Mode mode, const Rows& x, const Norm* norm = nullptr);

// out [rows, columns], `out_stride` floats apart; it may be x itself.
void rmsnorm(Pool& pool, const Rows& x, const Norm& norm, float* out, int64_t out_stride);

// out += rmsnorm(x), the sum of what rmsnorm() would have written.
void add_rmsnorm(Pool& pool, const Rows& x, const Norm& norm, float* out, int64_t out_stride);

// out[r, i] = activation(gate[r, i]) * up[r, i]; out may be either.
void gate(Pool& pool, int32_t activation, const Rows& gate, const Rows& up, float* out, int64_t out_stride);

}  // namespace slip

extern "C" {
// out = rmsnorm(x): float32 [rows, columns], strides in floats.
int slip_rmsnorm(const float* x, int64_t x_stride, int64_t rows, int64_t columns, const float* weight, float eps, float offset,
                 float* out, int64_t out_stride);
// out = activation(gate) * up; activation: 0 none, 1 silu, 2 gelu with tanh.
int slip_gate(int32_t activation, const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, int64_t rows,
              int64_t columns, float* out, int64_t out_stride);
// Rows as the quantised kernels see them: 48 bytes for each 32 values, as in ActivationGroup; weight null: not normalised.
int slip_quantize(const float* x, int64_t x_stride, int64_t rows, int64_t columns, const float* weight, float eps, float offset,
                  void* out);
}
