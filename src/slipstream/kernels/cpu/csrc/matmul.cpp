#include "matmul.h"

#include <algorithm>
#include <new>

#include "buffer.h"
#include "error.h"
#include "tiles.h"
#include "unpack.h"
#include "vector.h"

namespace slip {
namespace {

constexpr int64_t kMaxTileRows = 12;
constexpr int64_t kSlabBytes = 256 << 10;    // of the operand: stays in L2 while a chunk's panels pass
constexpr int64_t kChunkBytes = 128 << 10;   // of panels: stay in L2 while the slabs pass
constexpr int64_t kChunksPerThread = 8;

// How a product is cut. A chunk is some panels times one slab of rows; the slabs of a panel group follow each other.
//
//              panels 0-3   4-7   8-11
//     slab 0   chunk 0      2     4
//     slab 1         1      3     5
struct Cut {
    int64_t panels, groups, slabs;

    Cut(int64_t outputs_in_panels, int64_t panel_bytes, const Operand& x, bool one_slab, int threads) : panels(outputs_in_panels) {
        const int64_t rows_per_slab = std::max(kMaxTileRows, kSlabBytes / x.row_bytes);
        slabs = one_slab ? 1 : (x.rows + rows_per_slab - 1) / rows_per_slab;
        const int64_t by_bytes = panels * panel_bytes / kChunkBytes;
        groups = std::min(panels, std::max<int64_t>(by_bytes, threads * kChunksPerThread));
    }
};

// Writes a tile: bias, gate, sum with what is there.
void finish(const slip_matrix& matrix, const Output& out, int64_t panel, int64_t row, int64_t rows, const float* tile) {
    const int64_t width = matrix.paired ? kPanel / 2 : kPanel, first = panel * width;
    const __mmask16 low_mask = lanes(matrix.outputs - first);
    const __mmask16 high_mask = matrix.paired ? 0 : lanes(matrix.outputs - first - 16);
    __m512 low_bias = _mm512_setzero_ps(), high_bias = low_bias;
    if (matrix.bias) {
        low_bias = _mm512_loadu_ps(matrix.bias + panel * kPanel);
        high_bias = _mm512_loadu_ps(matrix.bias + panel * kPanel + 16);
    }
    float* target = out.data + row * out.stride + first;
    for (int64_t r = 0; r < rows; ++r, tile += kPanel, target += out.stride) {
        __m512 low = _mm512_load_ps(tile), high = _mm512_load_ps(tile + 16);
        if (matrix.bias) {
            low = _mm512_add_ps(low, low_bias);
            high = _mm512_add_ps(high, high_bias);
        }
        if (matrix.paired) low = _mm512_mul_ps(activate16(matrix.activation, low), high);
        if (out.add) {
            low = _mm512_add_ps(_mm512_maskz_loadu_ps(low_mask, target), low);
            high = _mm512_add_ps(_mm512_maskz_loadu_ps(high_mask, target + 16), high);
        }
        _mm512_mask_storeu_ps(target, low_mask, low);
        _mm512_mask_storeu_ps(target + 16, high_mask, high);
    }
}

Tiles tiles_for(const slip_matrix& matrix, Mode mode) {
    return mode == kExact ? float_tiles() : mode == kBfloat16Mode ? bfloat16_tiles() : integer_tiles(matrix.format);
}

}  // namespace

void multiply(Pool& pool, const slip_matrix& matrix, const Operand& x, const Output& out) {
    const Tiles tiles = tiles_for(matrix, x.mode);
    const bool unpacks = x.mode == kExact && matrix.format != kF32;  // float32 tiles of a panel made on the way
    const int64_t panel_bytes = slip_panel_bytes(matrix.format, matrix.inputs);
    const int64_t width = matrix.paired ? kPanel / 2 : kPanel;
    const Cut cut((matrix.outputs + width - 1) / width, panel_bytes, x, unpacks, pool.threads());
    const auto* const panels = static_cast<const uint8_t*>(matrix.panels);
    const auto* const panels_end = panels + cut.panels * panel_bytes;
    const int64_t steps = (matrix.inputs + tiles.inputs_per_step - 1) / tiles.inputs_per_step;

    pool.run(cut.groups * cut.slabs, [&](int64_t chunk, int thread) {
        alignas(64) float result[kMaxTileRows * kPanel];
        const int64_t group = chunk / cut.slabs, slab = chunk % cut.slabs;
        const int64_t first_panel = cut.panels * group / cut.groups, end_panel = cut.panels * (group + 1) / cut.groups;
        const int64_t first_row = x.rows * slab / cut.slabs, end_row = x.rows * (slab + 1) / cut.slabs;
        const int64_t blocks = (end_row - first_row + tiles.max_rows - 1) / tiles.max_rows;
        // Each block brings its share of the panel that this thread comes to next.
        const int64_t share = (panel_bytes / 64 + blocks * steps - 1) / (blocks * steps);
        for (int64_t i = first_panel; i < end_panel; ++i) {
            const int64_t panel = thread == 0 ? i : first_panel + end_panel - 1 - i;
            const uint8_t* const weights = panels + panel * panel_bytes;
            const uint8_t* ahead = thread == 0 ? weights + panel_bytes : weights - panel_bytes;
            if (ahead < panels || ahead >= panels_end) ahead = nullptr;
            const uint8_t* const ahead_end = ahead + panel_bytes;
            TileInput in{weights, nullptr, x.row_bytes, matrix.inputs, nullptr, 0};
            if (unpacks) in.panel = unpacked(matrix.format, matrix.inputs, weights);
            int64_t row = first_row;
            for (int64_t block = 0; block < blocks; ++block) {
                const int64_t rows = (end_row - row + blocks - block - 1) / (blocks - block);
                in.rows = x.data + row * x.row_bytes;
                in.ahead = ahead;
                in.ahead_lines = ahead && ahead < ahead_end ? share : 0;
                tiles.tiles[rows - 1](in, result);
                if (ahead) ahead += share * steps * 64;
                finish(matrix, out, panel, row, rows, result);
                row += rows;
            }
        }
    });
}

int check_matrix(const slip_matrix* matrix, int32_t mode) {
    if (!matrix || !matrix->panels) return kNullPointer;
    if (matrix->format < kF32 || matrix->format > kQ5) return kBadFormat;
    if (mode != kExact && mode != native_mode(matrix->format)) return kBadMode;
    if (matrix->activation < kNoActivation || matrix->activation > kGeluTanh) return kBadMode;
    if (matrix->outputs < 1 || matrix->inputs < 1) return kBadShape;
    return reinterpret_cast<uintptr_t>(matrix->panels) % 64 ? kMisaligned : kOk;
}

namespace {

int check(const slip_matrix* matrix, int32_t mode, const float* x, int64_t x_stride, int64_t rows, const float* out,
          int64_t out_stride) {
    if (const int code = check_matrix(matrix, mode)) return code;
    if (rows < 0) return kBadShape;
    if (rows == 0) return kOk;
    if (!x || !out) return kNullPointer;
    if (rows > 1 && (x_stride < matrix->inputs || out_stride < matrix->outputs)) return kBadStride;
    return kOk;
}

int run(const slip_matrix* matrix, int32_t mode, const Rows& x, const Norm* norm, const Output& out) {
    if (const int code = check(matrix, mode, x.data, x.stride, x.rows, out.data, out.stride)) return code;
    if (x.rows == 0) return kOk;
    try {
        const Operand operand = prepare(pool(), Mode(mode), {x.data, x.stride, x.rows, matrix->inputs}, norm);
        multiply(pool(), *matrix, operand, out);
    } catch (const std::bad_alloc&) {
        return kOutOfMemory;
    }
    return kOk;
}

}  // namespace
}  // namespace slip

extern "C" int slip_matmul(const slip_matrix* matrix, int32_t mode, const float* x, int64_t x_stride, int64_t rows, float* out,
                           int64_t out_stride, int32_t add) {
    return slip::run(matrix, mode, {x, x_stride, rows, 0}, nullptr, {out, out_stride, add != 0});
}

extern "C" int slip_norm_matmul(const slip_matrix* matrix, int32_t mode, const float* x, int64_t x_stride, int64_t rows,
                                const float* weight, float eps, float offset, float* out, int64_t out_stride, int32_t add) {
    if (!weight) return slip::kNullPointer;
    const slip::Norm norm{weight, eps, offset};
    return slip::run(matrix, mode, {x, x_stride, rows, 0}, &norm, {out, out_stride, add != 0});
}
