// Products of rows with a weight matrix that lies in panels.
//
//   panel p: outputs 32 p .. 32 p + 31, all inputs; one stream that a tile reads from its beginning to its end
//
//     F32   for each input:       32 floats                                                        128 bytes
//     BF16  for each input pair:  [2 halves of the outputs][16 outputs][2 inputs] bfloat16          128 bytes
//     Q8    for each 32 inputs:   [8 fours of inputs][2 halves][16 outputs][4 inputs] code + 128   1024 bytes
//                                 32 float16 scales                                                  64
//     Q4    for each 32 inputs:   [8 fours of inputs][16 outputs][4 inputs], low four bits: outputs 0-15, high: 16-31    512 bytes
//                                 32 float16 scales, 32 float16 mins                                 128
//     Q4K   as Q4 with float32 scales and mins                                                 512 + 256
//     Q5    as Q4 the low four bits of code + 16, then one bit plane: the fifth bits            512 + 128
//                                 32 float16 scales                                                  64
//     Q6K   as Q5 the bits of code + 32, with two planes: the fifth bits, the sixth bits        512 + 256
//                                 float32 scales [2 halves of the inputs][32 outputs]               256
//
//     A bit plane: [8 fours of inputs][2 halves][16 outputs][4 inputs], a bit each, the first in the lowest bit of a byte.
//
// Inputs are padded with zeros to a multiple of 32 (Q formats) or 8 (BF16), outputs to a multiple of 32.
// A paired matrix holds the gate's outputs 16 q .. 16 q + 15 and the up's beside them in panel q; its product has half the outputs.
//
// A row's result depends on that row alone: each output is one accumulator over all inputs in their order, whatever the number of
// rows in the tile.
#pragma once

#include <cstdint>

#include "operand.h"
#include "pool.h"

namespace slip {

enum Format : int32_t { kF32 = 0, kBF16 = 1, kQ8 = 2, kQ4 = 3, kQ4K = 4, kQ6K = 5, kQ5 = 6 };
constexpr int64_t kPanel = 32;

}  // namespace slip

extern "C" {

struct slip_matrix {
    int32_t format;       // slip::Format
    int32_t activation;   // slip::Activation of the gate, where paired
    int32_t paired;       // 0 or 1
    int32_t reserved;
    int64_t outputs;      // of the product: half of the weight's rows where paired
    int64_t inputs;
    const void* panels;   // aligned to 64 bytes
    const float* bias;    // [panels * 32] in the panels' order, or null
};

// Bytes of a panel; 0 for an unknown format.
int64_t slip_panel_bytes(int32_t format, int64_t inputs);

// out = x W^T + b, or out += x W^T + b with `add`: float32 [rows, outputs], strides in floats. mode: slip::Mode, which must be
// exact or the one of the format.
int slip_matmul(const slip_matrix* matrix, int32_t mode, const float* x, int64_t x_stride, int64_t rows, float* out,
                int64_t out_stride, int32_t add);

// The same of rmsnorm(x), without writing that one.
int slip_norm_matmul(const slip_matrix* matrix, int32_t mode, const float* x, int64_t x_stride, int64_t rows, const float* weight,
                     float eps, float offset, float* out, int64_t out_stride, int32_t add);

// Rows of the weight itself, not paired, each value as it is dequantised: out [count, inputs].
int slip_matrix_rows(const slip_matrix* matrix, const int64_t* rows, int64_t count, float* out);
}

namespace slip {

struct Output {
    float* data;
    int64_t stride;
    bool add;
};

// The mode that a format's own kernel takes; the other that it takes is kExact.
inline Mode native_mode(int32_t format) { return format == kF32 ? kExact : format == kBF16 ? kBfloat16Mode : kQuantized; }

// Error code of a matrix that is none, or does not take that mode; 0 if all is well.
int check_matrix(const slip_matrix* matrix, int32_t mode);

// `x` may serve any number of matrices with as many inputs. Its mode must be one that the format takes.
void multiply(Pool& pool, const slip_matrix& matrix, const Operand& x, const Output& out);

}  // namespace slip
