// Attention over paged KV: what a step's tokens look like, and the two phases of a layer.
//
// A pass has T tokens in S segments, prompt chunks first, then verify rows (slipstream/attention/base.py has the picture).
// A row here is one query head of one token. Its result is made of the same operations in the same order whatever else the
// pass holds, so it does not depend on batch, chunk, page order, thread or their number:
//
//   keys     0        64       128      192  ...  1024     1088         from the segment's key 0
//   blocks   |--------|--------|--------|-- ... --|--------|---
//   spans    |------------------------------------|------------         online softmax runs through a span and starts anew in
//                                                                       the next one; a row's spans are merged from left to right
//
// A long row may thus be shared out by spans without changing its bits. Blocks in which a row sees nothing are no operations.
#pragma once

#include <cstdint>
#include <vector>

#include "kv.h"
#include "pool.h"
#include "rope.h"

extern "C" {
// The tokens of a pass, as in `BatchLayout`.
struct slip_attention_batch {
    int64_t num_tokens;
    int64_t num_segments;
    int64_t num_chunks;
    int64_t read_width;          // K
    int64_t tree_width;          // W; 0: chains
    const int64_t* starts;       // [S + 1] first token of each segment
    const int64_t* index;        // [T]
    const int64_t* base_lens;    // [S]
    const int64_t* write_slots;  // [T]
    const int64_t* read_slots;   // [S, K]
    const uint8_t* ancestors;    // [T, W] 0 or 1, or null
    const int64_t* depths;       // [T] of tree nodes below the root, or null
    uint8_t* sick;               // [T] written by the first phase: verify tokens whose key or value is not finite
};

// Queries, keys, values in, mixed values out. Strides in elements, the last axis is dense.
struct slip_attention_io {
    const uint8_t* query;  // [T, heads, key_dim]
    const uint8_t* key;    // [T, kv_heads, key_dim]
    const uint8_t* value;  // [T, kv_heads, value_dim]
    uint8_t* out;          // [T, heads, value_dim], dense
    int64_t query_token, query_head;
    int64_t key_token, key_head;
    int64_t value_token, value_head;
    int32_t heads;
    int32_t type;     // of all four: float32 or bfloat16
    float scale;
    float softcap;    // 0: none
    int64_t window;   // 0: none
};

// Some tokens of a segment, all query heads of some KV heads, some spans of keys.
struct slip_attention_task {
    int32_t segment;
    int32_t first_head, end_head;    // KV heads
    int32_t first_token, end_token;  // of the pass
    int32_t first_span, end_span;
    int32_t partial;                 // -1: the result is final; else its first row among the partial results, which are ordered
                                     // by KV head, token and query head of the group
};
}

namespace slip {

constexpr int kBlock = 64;
constexpr int kSpan = 1024;

// The tasks of a pass. They depend on sizes and on the number of threads, but no result depends on them.
std::vector<slip_attention_task> plan_attention(
    const slip_attention_batch& batch, int32_t heads, int32_t kv_heads, int64_t window, int threads);

// Error code of what does not fit, 0 if all does. Slots are looked at one by one.
int check_batch(const slip_attention_batch& batch, int64_t num_slots);
int check_layer(const slip_attention_batch& batch, const slip_kv& kv, const slip_attention_io& io);
int check_rope(const slip_kv& kv, const slip_attention_io& io, const slip_rope& rope);

// First phase: keys and values to the cache. Non-finite nodes of verify rows are stored as zeros and marked as sick.
// With `rope`, float32 heads are normalised and turned first: queries where they lie, keys on their way to the cache.
void store_kv(Pool& pool, const slip_attention_batch& batch, const slip_kv& kv, const slip_attention_io& io,
              const slip_rope* rope = nullptr);

// Second phase. Reads what the first one wrote. Rows of sick tokens become NaN.
void attend(Pool& pool, const slip_attention_batch& batch, const slip_kv& kv, const slip_attention_io& io,
            const slip_attention_task* tasks, int64_t num_tasks);

}  // namespace slip
