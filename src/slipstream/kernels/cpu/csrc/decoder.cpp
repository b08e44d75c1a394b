#include "decoder.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <tuple>
#include <vector>

#include "buffer.h"
#include "error.h"
#include "vector.h"

namespace slip {
namespace {

// Rows of float32 that a product or norm writes.
struct Matrix {
    float* data;
    int64_t columns;
};

// Outputs of all parts, the gate's and what it gates both counted.
int64_t outputs_of(const slip_product& product) {
    int64_t sum = 0;
    for (int32_t i = 0; i < product.num_parts; ++i) sum += product.parts[i].matrix->outputs;
    return sum;
}

int check_product(const slip_product& product, int64_t inputs, int64_t outputs) {
    if (!product.parts) return kNullPointer;
    if (product.num_parts < 1) return kBadShape;
    if (product.gate < kNoActivation || product.gate > kGeluTanh) return kBadMode;
    for (int32_t i = 0; i < product.num_parts; ++i) {
        const slip_part& part = product.parts[i];
        if (const int error = check_matrix(part.matrix, int32_t(part.mode))) return error;
        if (part.matrix->inputs != inputs) return kBadShape;
    }
    return outputs_of(product) == outputs ? kOk : kBadShape;
}

int check_layer(const slip_layer& layer, int64_t hidden, int32_t num_rotaries, bool is_first) {
    if (!layer.mlp_norm.weight || !layer.query_norm != !layer.key_norm) return kNullPointer;
    if (!is_dim(layer.head_dim) || layer.kv_heads < 1 || layer.heads < 1 || layer.heads % layer.kv_heads) return kBadShape;
    if (layer.rotary < -1 || layer.rotary >= num_rotaries || layer.window < 0 || !(layer.softcap >= 0)) return kBadShape;
    const int64_t queries = int64_t(layer.heads) * layer.head_dim, all = queries + 2 * int64_t(layer.kv_heads) * layer.head_dim;
    if (layer.qkv.gate || layer.out.gate || layer.down.gate) return kBadMode;
    if (!layer.attention_norm.weight && (!is_first || !layer.qkv.parts || !layer.qkv.parts[0].matrix)) return kNullPointer;
    const int64_t inputs = layer.attention_norm.weight ? hidden : layer.qkv.parts[0].matrix->inputs;
    if (const int error = check_product(layer.qkv, inputs, all)) return error;
    if (const int error = check_product(layer.out, queries, hidden)) return error;
    if (!layer.inner.parts || layer.inner.num_parts < 1 || !layer.down.parts || !layer.down.parts[0].matrix) return kNullPointer;
    const int64_t inner = layer.down.parts[0].matrix->inputs;
    if (const int error = check_product(layer.inner, hidden, layer.inner.gate ? 2 * inner : inner)) return error;
    return check_product(layer.down, inner, hidden);
}

Norm norm_of(const slip_norm& norm) { return {norm.weight, norm.eps, norm.offset}; }

}  // namespace
}  // namespace slip

struct slip_decoder {
    std::vector<slip_layer> layers;
    int64_t hidden;
    int32_t num_rotaries;
    slip_norm norm;
    std::mutex mutex;  // held for a pass; guards the buffers
    slip::Buffer qkv, mixed, inner, gated, added;
};

namespace slip {
namespace {

// Tasks of a pass, for each shape and window of its layers.
class Plans {
public:
    Plans(const slip_attention_batch& batch, int threads) : batch_(batch), threads_(threads) {}

    const std::vector<slip_attention_task>& of(int32_t heads, int32_t kv_heads, int64_t window) {
        auto& tasks = plans_[{heads, kv_heads, window}];
        if (tasks.empty()) tasks = plan_attention(batch_, heads, kv_heads, window, threads_);
        return tasks;
    }

private:
    const slip_attention_batch& batch_;
    const int threads_;
    std::map<std::tuple<int32_t, int32_t, int64_t>, std::vector<slip_attention_task>> plans_;
};

class Pass {
public:
    Pass(Pool& pool, slip_decoder& decoder, const slip_pass& pass)
        : pool_(pool), decoder_(decoder), pass_(pass), rows_(pass.batch->num_tokens), hidden_(decoder.hidden),
          plans_(*pass.batch, pool.threads()) {}

    void run() {
        for (size_t i = 0; i < decoder_.layers.size(); ++i) {
            tap(int64_t(i));
            attention(decoder_.layers[i], *pass_.kv[i]);
            mlp(decoder_.layers[i]);
        }
        tap(int64_t(decoder_.layers.size()));
        rmsnorm(pool_, residual(), norm_of(decoder_.norm), pass_.out, hidden_);
    }

private:
    Rows residual() const { return {pass_.residual, hidden_, rows_, hidden_}; }

    float* at_least(Buffer& buffer, int64_t columns) const {
        return reinterpret_cast<float*>(buffer.at_least(rows_ * columns * int64_t(sizeof(float))));
    }

    void tap(int64_t layer) {
        for (int64_t i = 0; i < pass_.num_taps; ++i) {
            if (pass_.taps[i] != layer) continue;
            each_token(pool_, rows_, [&](int64_t t) {
                float* target = pass_.states + (t * pass_.num_taps + i) * hidden_;
                std::memcpy(target, pass_.residual + t * hidden_, size_t(hidden_) * sizeof(float));
            });
        }
    }

    // out [rows, columns] = product of x, of norm(x) where there is one; or that much more with `add`.
    void multiply_parts(const slip_product& product, const Rows& x, const Norm* norm, const Matrix& out, bool add = false) {
        Operand operand{};
        int64_t first = 0;
        for (int32_t i = 0; i < product.num_parts; ++i) {
            const slip_part& part = product.parts[i];
            if (i == 0 || operand.mode != part.mode) operand = prepare(pool_, Mode(part.mode), x, norm);
            multiply(pool_, *part.matrix, operand, {out.data + first, out.columns, add});
            first += part.matrix->outputs;
        }
    }

    // The residual's sum with a product, or with a norm of it.
    void add_product(const slip_product& product, const Rows& x, const slip_norm& after) {
        if (!after.weight) return multiply_parts(product, x, nullptr, {pass_.residual, hidden_}, true);
        float* const added = at_least(decoder_.added, hidden_);
        multiply_parts(product, x, nullptr, {added, hidden_});
        add_rmsnorm(pool_, {added, hidden_, rows_, hidden_}, norm_of(after), pass_.residual, hidden_);
    }

    void attention(const slip_layer& layer, const slip_kv& kv) {
        const int64_t dim = layer.head_dim, queries = layer.heads * dim, keys = layer.kv_heads * dim, all = queries + 2 * keys;
        float* const qkv = at_least(decoder_.qkv, all);
        float* const mixed = at_least(decoder_.mixed, queries);
        if (layer.attention_norm.weight) {
            const Norm norm = norm_of(layer.attention_norm);
            multiply_parts(layer.qkv, residual(), &norm, {qkv, all});
        } else {
            const int64_t inputs = layer.qkv.parts[0].matrix->inputs;
            multiply_parts(layer.qkv, {pass_.input, inputs, rows_, inputs}, nullptr, {qkv, all});
        }

        slip_attention_io io{};
        io.query = reinterpret_cast<const uint8_t*>(qkv);
        io.key = reinterpret_cast<const uint8_t*>(qkv + queries);
        io.value = reinterpret_cast<const uint8_t*>(qkv + queries + keys);
        io.out = reinterpret_cast<uint8_t*>(mixed);
        io.query_token = io.key_token = io.value_token = all;
        io.query_head = io.key_head = io.value_head = dim;
        io.heads = layer.heads;
        io.type = kFloat32;
        io.scale = layer.scale;
        io.softcap = layer.softcap;
        io.window = layer.window < pass_.batch->read_width ? layer.window : 0;  // one that hides no key is none
        slip_rope rope{nullptr, nullptr, nullptr, layer.query_norm, layer.key_norm, layer.head_eps, 0};
        if (layer.rotary >= 0) {
            const slip_turn& turn = pass_.turns[layer.rotary];
            rope.cos = turn.cos;
            rope.sin = turn.sin;
            rope.angles = pass_.positions;
            rope.dim = int32_t(turn.dim);
        }
        const auto& tasks = plans_.of(layer.heads, layer.kv_heads, io.window);
        store_kv(pool_, *pass_.batch, kv, io, rope.dim || rope.query_norm ? &rope : nullptr);
        attend(pool_, *pass_.batch, kv, io, tasks.data(), int64_t(tasks.size()));
        add_product(layer.out, {mixed, queries, rows_, queries}, layer.after_attention);
    }

    void mlp(const slip_layer& layer) {
        const int64_t columns = outputs_of(layer.inner), inner = layer.inner.gate ? columns / 2 : columns;
        const Norm norm = norm_of(layer.mlp_norm);
        float* made = at_least(decoder_.inner, columns);
        multiply_parts(layer.inner, residual(), &norm, {made, columns});
        if (layer.inner.gate) {
            float* const gated = at_least(decoder_.gated, inner);
            gate(pool_, layer.inner.gate, {made, columns, rows_, inner}, {made + inner, columns, rows_, inner}, gated, inner);
            made = gated;
        }
        add_product(layer.down, {made, inner, rows_, inner}, layer.after_mlp);
    }

    Pool& pool_;
    slip_decoder& decoder_;
    const slip_pass& pass_;
    const int64_t rows_, hidden_;
    Plans plans_;
};

int check_pass(const slip_decoder& decoder, const slip_pass& pass) {
    const int64_t num_layers = int64_t(decoder.layers.size());
    if (!pass.batch || !pass.kv || !pass.residual || !pass.out) return kNullPointer;
    if (!decoder.layers[0].attention_norm.weight && !pass.input) return kNullPointer;
    if (decoder.num_rotaries && (!pass.turns || !pass.positions)) return kNullPointer;
    if (pass.num_taps < 0) return kBadShape;
    if (pass.num_taps && (!pass.taps || !pass.states)) return kNullPointer;
    for (int64_t i = 0; i < pass.num_taps; ++i) {
        if (pass.taps[i] < 0 || pass.taps[i] > num_layers) return kBadShape;
    }
    int64_t num_slots = INT64_MAX;
    for (int64_t i = 0; i < num_layers; ++i) {
        const slip_kv* const kv = pass.kv[i];
        const slip_layer& layer = decoder.layers[i];
        if (!kv || !kv->keys || !kv->values) return kNullPointer;
        if (kv->type < kFloat32 || kv->type > kInt8) return kBadFormat;
        if (kv->kv_heads != layer.kv_heads || kv->key_dim != layer.head_dim || kv->value_dim != layer.head_dim) return kBadShape;
        if (layer.rotary >= 0) {
            const slip_turn& turn = pass.turns[layer.rotary];
            if (!turn.cos || !turn.sin) return kNullPointer;
            if (turn.dim < 2 || turn.dim % 2 || turn.dim > layer.head_dim) return kBadShape;
        }
        num_slots = std::min(num_slots, kv->num_slots);
    }
    if (const int error = check_batch(*pass.batch, num_slots)) return error;
    for (int32_t i = 0; i < decoder.num_rotaries; ++i) {
        for (int64_t t = 0; t < pass.batch->num_tokens; ++t) {
            if (pass.positions[t] < 0 || pass.positions[t] >= pass.turns[i].count) return kBadShape;
        }
    }
    return kOk;
}

}  // namespace
}  // namespace slip

extern "C" int slip_decoder_make(const slip_layer* layers, int64_t num_layers, int64_t hidden, int32_t num_rotaries,
                                 const slip_norm* norm, slip_decoder** made) {
    using namespace slip;
    if (!layers || !norm || !norm->weight || !made) return kNullPointer;
    if (num_layers < 1 || hidden < 1 || num_rotaries < 0) return kBadShape;
    for (int64_t i = 0; i < num_layers; ++i) {
        if (const int error = check_layer(layers[i], hidden, num_rotaries, i == 0)) return error;
    }
    try {
        auto decoder = std::make_unique<slip_decoder>();
        decoder->layers.assign(layers, layers + num_layers);
        decoder->hidden = hidden;
        decoder->num_rotaries = num_rotaries;
        decoder->norm = *norm;
        *made = decoder.release();
    } catch (const std::bad_alloc&) {
        return kOutOfMemory;
    }
    return kOk;
}

extern "C" int slip_decoder_free(slip_decoder* decoder) {
    delete decoder;
    return slip::kOk;
}

extern "C" int slip_decoder_forward(slip_decoder* decoder, const slip_pass* pass) {
    using namespace slip;
    if (!decoder || !pass) return kNullPointer;
    if (const int error = check_pass(*decoder, *pass)) return error;
    const std::lock_guard<std::mutex> hold(decoder->mutex);
    try {
        Pass(pool(), *decoder, *pass).run();
    } catch (const std::bad_alloc&) {
        return kOutOfMemory;
    }
    return kOk;
}
