#include "attention.h"

#include <algorithm>
#include <cmath>

#include "attention_seen.h"
#include "attention_tile.h"
#include "buffer.h"
#include "error.h"

namespace slip {
namespace {

constexpr int kPrefetchRows = 32;  // tasks of so few rows wait for memory

alignas(64) const uint8_t kZeros[4 * kMaxDim] = {};

// `Buffer` of a type. Some hundred kilobytes: without them there is nothing left to go on with.
class Memory {
public:
    template <class T>
    T* get(int64_t count) noexcept {
        return reinterpret_cast<T*>(buffer_.at_least(count * int64_t(sizeof(T))));
    }

private:
    Buffer buffer_;
};

struct Scratch {
    Memory keys, values, wide, scales, query, ranges, seen, largest, sums, out, total;
};

thread_local Scratch scratch_of_thread;
thread_local Memory partials_of_caller;

// Of one row: [largest, sum, 14 unused | out].
int64_t partial_floats(int dim) { return 16 + dim; }

// total = total and part, which saw other keys.
void merge(float* total, const float* part, int dim) {
    const auto empty = [](const float* x) { return x[0] == -INFINITY && x[1] == 0; };
    if (empty(part)) return;
    if (empty(total)) {
        std::copy(part, part + partial_floats(dim), total);
        return;
    }
    const float largest = part[0] > total[0] ? part[0] : total[0];
    const __m512 shift = _mm512_set1_ps(largest);
    const __m512 a = exp2_neg(_mm512_sub_ps(_mm512_set1_ps(total[0]), shift));
    const __m512 b = exp2_neg(_mm512_sub_ps(_mm512_set1_ps(part[0]), shift));
    const auto mixed = [&](__m512 x, __m512 y) { return _mm512_fmadd_ps(y, b, _mm512_mul_ps(x, a)); };
    total[0] = largest;
    total[1] = _mm512_cvtss_f32(mixed(_mm512_set1_ps(total[1]), _mm512_set1_ps(part[1])));
    for (int i = 16; i < 16 + dim; i += 16) {
        _mm512_store_ps(total + i, mixed(_mm512_load_ps(total + i), _mm512_load_ps(part + i)));
    }
}

void write_out(const slip_attention_io& io, int dim, int64_t token, int head, bool sick, const float* row) {
    uint8_t* to = io.out + (token * io.heads + head) * dim * (io.type == kFloat32 ? 4 : 2);
    const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_set1_ps(row[1]));
    for (int i = 0; i < dim; i += 16) {
        // + 0: a block of weights 0 may or may not have turned -0 into 0.
        const __m512 x = _mm512_fmadd_ps(_mm512_load_ps(row + 16 + i), inverse, _mm512_setzero_ps());
        store_16(to, io.type, i, sick ? _mm512_set1_ps(NAN) : x);
    }
}

// One pass over a layer: what all its tasks share.
class Layer {
public:
    Layer(const slip_attention_batch& batch, const slip_kv& kv, const slip_attention_io& io, float* partials)
        : batch_(batch), kv_(kv), io_(io), partials_(partials), groups_(io.heads / kv.kv_heads),
          words_(kv.type == kFloat32 ? kv.key_dim : kv.key_dim / 2), dim_(kv.value_dim),
          key_row_(row_bytes(kv.type, kv.key_dim)), value_row_(row_bytes(kv.type, kv.value_dim)) {
        scoring_.factor = io.softcap > 0 ? io.scale / io.softcap : io.scale * kLog2E;
        scoring_.cap = io.softcap > 0 ? io.softcap * kLog2E : 0;
    }

    void run(const slip_attention_task& task) const {
        switch (kv_.type) {
            case kFloat32: return run_typed<kFloat32>(task);
            case kBfloat16: return run_typed<kBfloat16>(task);
            default: return run_typed<kInt8>(task);
        }
    }

    // A split task's partial results, merged and written by the task of its first span.
    void finish(const slip_attention_task& first, const slip_attention_task* tasks, int64_t num_tasks) const {
        const int rows = int(first.end_token - first.first_token) * groups_;
        const int64_t stride = partial_floats(dim_);
        alignas(64) float total[16 + kMaxDim];
        for (int row = 0; row < (first.end_head - first.first_head) * rows; ++row) {
            const float* part = partials_ + (int64_t(first.partial) + row) * stride;
            std::copy(part, part + stride, total);
            for (int64_t span = 1;; ++span) {
                const int64_t at = find(tasks, num_tasks, first, int32_t(first.first_span + span));
                if (at < 0) break;
                merge(total, partials_ + (int64_t(tasks[at].partial) + row) * stride, dim_);
            }
            write(first, row, rows, total);
        }
    }

    static bool is_first(const slip_attention_task* tasks, int64_t num_tasks, const slip_attention_task& task) {
        return task.partial >= 0 && find(tasks, num_tasks, task, task.first_span - 1) < 0;
    }

private:
    // There are few split tasks (see plan_attention), so looking through them is all right.
    static int64_t find(const slip_attention_task* tasks, int64_t num_tasks, const slip_attention_task& like, int32_t span) {
        for (int64_t i = 0; i < num_tasks; ++i) {
            if (tasks[i].partial >= 0 && tasks[i].first_token == like.first_token && tasks[i].first_head == like.first_head &&
                tasks[i].first_span == span) {
                return i;
            }
        }
        return -1;
    }

    void write(const slip_attention_task& task, int row, int rows, const float* result) const {
        const int64_t token = token_of(task, row, rows);
        write_out(io_, dim_, token, int(head_of(task, row, rows)), batch_.sick[token] != 0, result);
    }

    // Of all the task's KV heads, one after the other: [heads][rows][words].
    const uint32_t* load_queries(const slip_attention_task& task, int rows, Scratch& scratch) const {
        const int heads = task.end_head - task.first_head, size = io_.type == kFloat32 ? 4 : 2;
        uint32_t* queries = scratch.query.get<uint32_t>(int64_t(heads) * rows * words_);
        for (int row = 0; row < heads * rows; ++row) {
            const uint8_t* from = io_.query + (token_of(task, row, rows) * io_.query_token + head_of(task, row, rows) * io_.query_head) * size;
            uint8_t* to = reinterpret_cast<uint8_t*>(queries + int64_t(row) * words_);
            for (int i = 0; i < kv_.key_dim; i += 16) {
                store_16(to, kv_.type == kFloat32 ? kFloat32 : kBfloat16, i, load_16(from, io_.type, i));
            }
        }
        return queries;
    }

    // A task's rows are numbered by KV head, then token, then query head of the group; `rows` is their number in one KV head.
    int64_t token_of(const slip_attention_task& task, int row, int rows) const { return task.first_token + row % rows / groups_; }
    int64_t head_of(const slip_attention_task& task, int row, int rows) const {
        return (task.first_head + row / rows) * groups_ + row % groups_;
    }

    template <int Type>
    void run_typed(const slip_attention_task& task) const {
        Scratch& scratch = scratch_of_thread;
        const int tokens = int(task.end_token - task.first_token), rows = tokens * groups_;
        const int all_rows = (task.end_head - task.first_head) * rows;
        KeyRange* ranges = scratch.ranges.get<KeyRange>(tokens);
        KeyRange all{batch_.read_width, 0};
        for (int i = 0; i < tokens; ++i) {
            ranges[i] = seen_range(batch_, task.segment, task.first_token + i, io_.window);
            all = {std::min(all.first, ranges[i].first), std::max(all.end, ranges[i].end)};
        }
        const uint32_t* queries = load_queries(task, rows, scratch);
        const RowStates states{scratch.largest.get<float>(all_rows), scratch.sums.get<float>(int64_t(all_rows) * 16),
                               scratch.out.get<float>(int64_t(all_rows) * dim_)};
        const int64_t stride = partial_floats(dim_);
        float* total = scratch.total.get<float>(all_rows * stride);
        for (int row = 0; row < all_rows; ++row) {
            total[row * stride] = -INFINITY;
            std::fill(total + row * stride + 1, total + (row + 1) * stride, 0.0f);
        }
        for (int64_t span = task.first_span; span < task.end_span; ++span) {
            std::fill(states.largest, states.largest + all_rows, -INFINITY);
            std::fill(states.sums, states.sums + int64_t(all_rows) * 16, 0.0f);
            std::fill(states.out, states.out + int64_t(all_rows) * dim_, 0.0f);
            const int64_t first = std::max(span * kSpan, all.first / kBlock * kBlock);
            const int64_t end = std::min((span + 1) * kSpan, all.end);
            for (int64_t start = first; start < end; start += kBlock) {
                const int count = int(std::min<int64_t>(kBlock, all.end - start));
                for (int head = task.first_head; head < task.end_head; ++head) {
                    if (rows <= kPrefetchRows) prefetch_share(task, head, start + kBlock, all.end);
                    const int64_t skip = int64_t(head - task.first_head) * rows;
                    const RowStates of{states.largest + skip, states.sums + skip * 16, states.out + skip * dim_};
                    one_block<Type>(task, head, start, count, ranges, queries + skip * words_, of, scratch);
                }
            }
            alignas(64) float part[16 + kMaxDim];
            for (int row = 0; row < all_rows; ++row) {
                part[0] = states.largest[row];
                part[1] = _mm512_reduce_add_ps(_mm512_load_ps(states.sums + row * 16));
                std::copy(states.out + int64_t(row) * dim_, states.out + int64_t(row + 1) * dim_, part + 16);
                merge(total + row * stride, part, dim_);
            }
        }
        if (task.partial >= 0) {
            std::copy(total, total + all_rows * stride, partials_ + task.partial * stride);
            return;
        }
        for (int row = 0; row < all_rows; ++row) write(task, row, rows, total + row * stride);
    }

    // The block that comes next, a head's share of its tokens: all heads of a token lie together, and in this order the
    // processor sees one stream of keys and one of values.
    void prefetch_share(const slip_attention_task& task, int head, int64_t start, int64_t end) const {
        const int heads = task.end_head - task.first_head, share = head - task.first_head;
        const int64_t count = std::min<int64_t>(kBlock, end - start);
        if (count <= 0) return;
        const int64_t first = count * share / heads, last = count * (share + 1) / heads;
        const int64_t* slots = batch_.read_slots + task.segment * batch_.read_width + start;
        const auto fetch = [&](const uint8_t* cache, int64_t row) {
            prefetch_rows(cache + task.first_head * row, slots + first, int(last - first), kv_.kv_heads * row, heads * row);
        };
        fetch(kv_.keys, key_row_);
        fetch(kv_.values, value_row_);
    }

    template <int Type>
    void one_block(const slip_attention_task& task, int head, int64_t start, int count, const KeyRange* ranges,
                   const uint32_t* query, const RowStates& of, Scratch& scratch) const {
        const int tokens = int(task.end_token - task.first_token), rows = tokens * groups_;
        uint64_t* seen = scratch.seen.get<uint64_t>(rows);
        uint64_t any = 0;
        for (int i = 0; i < tokens; ++i) {
            const uint64_t keys = seen_keys(ranges[i], start);
            std::fill(seen + i * groups_, seen + (i + 1) * groups_, keys);
            any |= keys;
        }
        if (!any) return;

        // In a tree, each node puts the nodes of its path behind the earlier keys, which all share.
        const int64_t base = batch_.base_lens[task.segment];
        const bool by_node = in_tree(batch_, task.segment) && start + kBlock > base;
        const int shared = by_node ? int(std::clamp<int64_t>(base - start, 0, count)) : count;
        Made made{scratch.keys.get<uint32_t>(int64_t(words_) * kBlock), nullptr, scratch.scales.get<float>(2 * kBlock), {}};
        if (Type != kFloat32) made.values = scratch.values.get<uint32_t>(int64_t(kBlock / 2) * dim_);
        make<Type>(made, head, batch_.read_slots + task.segment * batch_.read_width + start, shared, by_node, scratch);
        Block block{made.keys, made.values, &made.value_rows, made.scales, made.scales + kBlock, count};
        if (!by_node) return tiles<Type>(block, 0, rows, query, seen, of);
        int64_t in_place[kBlock];
        std::fill(in_place, in_place + kBlock, -1);
        for (int i = 0; i < tokens; ++i) {
            if (!seen[i * groups_]) continue;
            put_path<Type>(made, head, task.segment, task.first_token + i, start, in_place);
            block.count = int(std::min<int64_t>(ranges[i].end - start, kBlock));
            tiles<Type>(block, i * groups_, groups_, query, seen, of);
        }
    }

    // A block in the order that the products read.
    struct Made {
        uint32_t* keys;
        uint32_t* values;  // not for float32, whose values are read in place
        float* scales;     // [2][64] of int8 keys and values
        BlockRows value_rows;
    };

    template <int Type>
    void make(Made& made, int head, const int64_t* slots, int count, bool whole, Scratch& scratch) const {
        BlockRows keys;
        keys.find(kv_.keys + head * key_row_, slots, count, kv_.kv_heads * key_row_, kZeros);
        made.value_rows.find(kv_.values + head * value_row_, slots, count, kv_.kv_heads * value_row_, kZeros);
        uint8_t* wide = Type == kInt8 ? scratch.wide.get<uint8_t>(int64_t(kBlock) * 2 * kMaxDim) : nullptr;
        if (Type == kInt8) widen_rows(keys, count, kv_.key_dim, wide, made.scales);
        transpose_words(keys, words_, made.keys);
        if (Type == kInt8) widen_rows(made.value_rows, count, dim_, wide, made.scales + kBlock);
        if (Type != kFloat32) pair_values(made.value_rows, whole ? kBlock / 2 : (count + 1) / 2, dim_, made.values);
    }

    // The nodes on token t's path to their places in the block. `in_place`: the slot that each place holds; -1: an earlier key.
    template <int Type>
    void put_path(Made& made, int head, int64_t segment, int64_t t, int64_t start, int64_t* in_place) const {
        const int64_t base = batch_.base_lens[segment];
        const int64_t* slots = batch_.read_slots + segment * batch_.read_width;
        const uint8_t* path = batch_.ancestors + t * batch_.tree_width;
        int64_t key = base;
        for (int64_t node = 0; node < batch_.tree_width && key < start + kBlock; ++node) {
            if (!path[node]) continue;
            const int64_t place = key++ - start;
            if (place < 0 || base + node < 0 || base + node >= batch_.read_width) continue;
            const int64_t slot = slots[base + node];
            if (in_place[place] == slot) continue;
            in_place[place] = slot;
            const uint8_t* key_row = kv_.keys + (slot * kv_.kv_heads + head) * key_row_;
            const uint8_t* value_row = kv_.values + (slot * kv_.kv_heads + head) * value_row_;
            alignas(64) uint8_t wide_key[2 * kMaxDim], wide_value[2 * kMaxDim];
            if constexpr (Type == kInt8) {
                made.scales[place] = widen_row(key_row, kv_.key_dim, wide_key);
                made.scales[kBlock + place] = widen_row(value_row, dim_, wide_value);
                key_row = wide_key;
                value_row = wide_value;
            }
            put_key(made.keys, int(place), key_row, words_);
            if constexpr (Type == kFloat32) {
                made.value_rows.row[place] = value_row;
            } else {
                put_value(made.values, int(place), value_row, dim_);
            }
        }
    }

    // Rows [first, first + rows) over one block, in tiles of about the same size.
    template <int Type>
    void tiles(const Block& block, int first, int rows, const uint32_t* query, const uint64_t* seen, const RowStates& of) const {
        const int count = (rows + kTileRows - 1) / kTileRows;
        for (int tile = 0, row = first; tile < count; ++tile) {
            const int size = (first + rows - row + count - tile - 1) / (count - tile);
            const bool some = std::any_of(seen + row, seen + row + size, [](uint64_t keys) { return keys != 0; });
            if (some) attend_rows<Type>(size, block, scoring_, query, words_, dim_, seen + row, of, row);
            row += size;
        }
    }

    const slip_attention_batch& batch_;
    const slip_kv& kv_;
    const slip_attention_io& io_;
    float* partials_;
    const int groups_;
    const int words_;  // of a key
    const int dim_;    // of a value
    const int64_t key_row_, value_row_;
    Scoring scoring_{};
};

}  // namespace

void attend(Pool& pool, const slip_attention_batch& batch, const slip_kv& kv, const slip_attention_io& io,
            const slip_attention_task* tasks, int64_t num_tasks) {
    int64_t partial_rows = 0;
    for (int64_t i = 0; i < num_tasks; ++i) {
        const int64_t heads = (tasks[i].end_head - tasks[i].first_head) * (io.heads / kv.kv_heads);
        const int64_t rows = (tasks[i].end_token - tasks[i].first_token) * heads;
        if (tasks[i].partial >= 0) partial_rows = std::max(partial_rows, tasks[i].partial + rows);
    }
    float* partials = partials_of_caller.get<float>(partial_rows * partial_floats(kv.value_dim));
    const Layer layer(batch, kv, io, partials);
    pool.run(num_tasks, [&](int64_t i, int) { layer.run(tasks[i]); });
    if (!partial_rows) return;
    pool.run(num_tasks, [&](int64_t i, int) {
        if (Layer::is_first(tasks, num_tasks, tasks[i])) layer.finish(tasks[i], tasks, num_tasks);
    });
}

}  // namespace slip

extern "C" {

// Checks the batch and its slots and writes its tasks to `tasks`, of which there is room for `capacity`; `count` gets their
// number. Where there is too little room nothing is written but `count`.
int slip_attention_plan(const slip_attention_batch* batch, int64_t num_slots, int32_t heads, int32_t kv_heads, int64_t window,
                        slip_attention_task* tasks, int64_t capacity, int64_t* count) {
    using namespace slip;
    if (!batch || !count || (capacity > 0 && !tasks)) return kNullPointer;
    if (heads < 1 || kv_heads < 1 || heads % kv_heads || window < 0) return kBadShape;
    if (const int error = check_batch(*batch, num_slots)) return error;
    const std::vector<slip_attention_task> planned = plan_attention(*batch, heads, kv_heads, window, pool().threads());
    *count = int64_t(planned.size());
    if (*count <= capacity) std::copy(planned.begin(), planned.end(), tasks);
    return kOk;
}

// One layer: keys and values to the cache, then attention. The tasks are those of slip_attention_plan for the same batch,
// number of slots, heads and window. `rope`: null, or heads are turned first, and queries are changed where they lie.
int slip_attention(const slip_attention_batch* batch, const slip_kv* kv, const slip_attention_io* io, const slip_rope* rope,
                   const slip_attention_task* tasks, int64_t num_tasks) {
    using namespace slip;
    if (!batch || !kv || !io || !tasks) return kNullPointer;
    if (num_tasks < 1) return kBadShape;
    if (const int error = check_layer(*batch, *kv, *io)) return error;
    if (rope) {
        if (const int error = check_rope(*kv, *io, *rope)) return error;
    }
    store_kv(pool(), *batch, *kv, *io, rope);
    attend(pool(), *batch, *kv, *io, tasks, num_tasks);
    return kOk;
}

}  // extern "C"
