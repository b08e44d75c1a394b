// The first phase of a layer: heads turn, keys and values go to the cache.
#include <cstring>

#include "attention.h"
#include "error.h"

namespace slip {

void store_kv(Pool& pool, const slip_attention_batch& batch, const slip_kv& kv, const slip_attention_io& io, const slip_rope* rope) {
    const int size = io.type == kFloat32 ? 4 : 2;
    const int64_t key_row = row_bytes(kv.type, kv.key_dim), value_row = row_bytes(kv.type, kv.value_dim);
    const int64_t first_node = batch.starts[batch.num_chunks];
    each_token(pool, batch.num_tokens, [&](int64_t t) {
        alignas(64) float row[kMaxDim];
        const auto load = [&](const uint8_t* from, int dim) {
            for (int i = 0; i < dim; i += 16) _mm512_store_ps(row + i, load_16(from, io.type, i));
        };
        if (rope) {
            for (int head = 0; head < io.heads; ++head) {
                float* query = reinterpret_cast<float*>(const_cast<uint8_t*>(io.query)) + t * io.query_token + head * io.query_head;
                turn_head(*rope, rope->query_norm, t, query, query, kv.key_dim);
            }
        }
        uint8_t* keys = kv.keys + batch.write_slots[t] * kv.kv_heads * key_row;
        uint8_t* values = kv.values + batch.write_slots[t] * kv.kv_heads * value_row;
        bool finite = true;
        for (int head = 0; head < kv.kv_heads; ++head) {
            load(io.key + (t * io.key_token + head * io.key_head) * size, kv.key_dim);
            if (rope) turn_head(*rope, rope->key_norm, t, row, row, kv.key_dim);
            finite &= write_row(keys + head * key_row, kv.type, row, kv.key_dim);
            load(io.value + (t * io.value_token + head * io.value_head) * size, kv.value_dim);
            finite &= write_row(values + head * value_row, kv.type, row, kv.value_dim);
        }
        batch.sick[t] = !finite && t >= first_node;
        if (batch.sick[t]) {
            std::memset(keys, 0, size_t(kv.kv_heads * key_row));
            std::memset(values, 0, size_t(kv.kv_heads * value_row));
        }
    });
}

int check_rope(const slip_kv& kv, const slip_attention_io& io, const slip_rope& rope) {
    if (io.type != kFloat32) return kBadFormat;
    if (rope.dim < 0 || rope.dim % 2 || rope.dim > kv.key_dim) return kBadShape;
    return rope.dim > 0 && (!rope.cos || !rope.sin) ? kNullPointer : kOk;
}

}  // namespace slip
