// Which tokens see which keys, and how a pass is cut into tasks.
#include <algorithm>

#include "attention_seen.h"
#include "error.h"

namespace slip {
namespace {

constexpr int kTaskRows = 96;       // of one KV head: what a block's transposition is shared by, and fits the cache
constexpr int kFewRows = 32;        // tasks of so few wait for memory: all heads of a segment in one, their reads are one stream
constexpr int kTasksPerThread = 4;  // fewer than that are shared out by spans where there are several

int64_t cost(const slip_attention_batch& batch, const slip_attention_task& task, int groups, int64_t window) {
    int64_t keys = 0;
    for (int64_t t = task.first_token; t < task.end_token; ++t) {
        const KeyRange range = seen_range(batch, task.segment, t, window);
        keys = std::max(keys, std::min<int64_t>(range.end, int64_t(task.end_span) * kSpan) -
                                  std::max<int64_t>(range.first, int64_t(task.first_span) * kSpan));
    }
    const int64_t rows = int64_t(task.end_token - task.first_token) * groups;
    return (task.end_head - task.first_head) * (rows + 8) * std::max<int64_t>(keys, 1);
}

// The caller takes tasks from the front and the workers from the back: the dear ones lie at both ends, the cheap ones, which
// even things out, in the middle.
void deal(std::vector<slip_attention_task>& tasks, std::vector<int64_t>& costs) {
    std::vector<int32_t> order(tasks.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = int32_t(i);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return costs[a] > costs[b]; });
    std::vector<slip_attention_task> dealt(tasks.size());
    size_t front = 0, back = tasks.size();
    for (size_t i = 0; i < order.size(); ++i) dealt[i % 2 ? --back : front++] = tasks[order[i]];
    tasks.swap(dealt);
}

}  // namespace

std::vector<slip_attention_task> plan_attention(
    const slip_attention_batch& batch, int32_t heads, int32_t kv_heads, int64_t window, int threads) {
    const int groups = heads / kv_heads;
    const int64_t step = std::max(1, kTaskRows / groups);
    std::vector<slip_attention_task> blocks;
    for (int64_t s = 0; s < batch.num_segments; ++s) {
        for (int64_t t = batch.starts[s]; t < batch.starts[s + 1]; t += step) {
            const int64_t end = std::min(t + step, batch.starts[s + 1]);
            KeyRange all{batch.read_width, 0};
            for (int64_t i = t; i < end; ++i) {
                const KeyRange one = seen_range(batch, s, i, window);
                all = {std::min(all.first, one.first), std::max(all.end, one.end)};
            }
            const int32_t first_span = int32_t(std::min(all.first, all.end) / kSpan);
            const int32_t end_span = int32_t((all.end + kSpan - 1) / kSpan);
            blocks.push_back({int32_t(s), 0, kv_heads, int32_t(t), int32_t(end), first_span, std::max(end_span, first_span), -1});
        }
    }
    // Enough tasks for all threads, be they of all heads of a segment, of one head, or of one span.
    const int64_t enough = int64_t(kTasksPerThread) * threads;
    int64_t spans = 0;
    for (const slip_attention_task& block : blocks) spans += block.end_span - block.first_span;
    const bool by_span = threads > 1 && int64_t(blocks.size()) * kv_heads < enough;
    const bool whole = int64_t(blocks.size()) >= enough || (by_span && spans >= 2 * threads);
    std::vector<slip_attention_task> tasks;
    int32_t partial = 0;
    for (const slip_attention_task& block : blocks) {
        const int32_t rows = (block.end_token - block.first_token) * groups;
        const int32_t heads = whole && rows <= kFewRows ? kv_heads : 1;
        for (int32_t head = 0; head < kv_heads; head += heads) {
            slip_attention_task task = block;
            task.first_head = head;
            task.end_head = head + heads;
            if (!by_span || block.end_span - block.first_span < 2) {
                tasks.push_back(task);
                continue;
            }
            for (int32_t span = block.first_span; span < block.end_span; ++span) {
                task.first_span = span;
                task.end_span = span + 1;
                task.partial = partial;
                tasks.push_back(task);
                partial += heads * rows;
            }
        }
    }
    std::vector<int64_t> costs;
    costs.reserve(tasks.size());
    for (const slip_attention_task& task : tasks) costs.push_back(cost(batch, task, groups, window));
    deal(tasks, costs);
    return tasks;
}

int check_batch(const slip_attention_batch& batch, int64_t num_slots) {
    if (!batch.starts || !batch.index || !batch.base_lens || !batch.write_slots || !batch.read_slots || !batch.sick) {
        return kNullPointer;
    }
    if (batch.num_tokens < 1 || batch.num_segments < 1 || batch.num_chunks < 0 || batch.num_chunks > batch.num_segments ||
        batch.read_width < 1 || batch.tree_width < 0 || num_slots < 1 || batch.num_tokens > INT32_MAX) {
        return kBadShape;
    }
    if (batch.tree_width > 0 && (!batch.ancestors || !batch.depths)) return kNullPointer;
    if (batch.starts[0] != 0 || batch.starts[batch.num_segments] != batch.num_tokens) return kBadShape;
    const auto outside = [num_slots](int64_t slot) { return slot < 0 || slot >= num_slots; };
    for (int64_t s = 0; s < batch.num_segments; ++s) {
        if (batch.starts[s] > batch.starts[s + 1]) return kBadShape;
        int64_t end = 0;
        for (int64_t t = batch.starts[s]; t < batch.starts[s + 1]; ++t) {
            if (batch.index[t] < 0 || (in_tree(batch, s) && (batch.depths[t] < 0 || batch.depths[t] > batch.index[t]))) return kBadShape;
            if (outside(batch.write_slots[t])) return kBadSlot;
            end = std::max(end, std::min(batch.base_lens[s] + batch.index[t] + 1, batch.read_width));
        }
        const int64_t* slots = batch.read_slots + s * batch.read_width;
        if (std::any_of(slots, slots + end, outside)) return kBadSlot;
    }
    return kOk;
}

int check_layer(const slip_attention_batch& batch, const slip_kv& kv, const slip_attention_io& io) {
    if (!kv.keys || !kv.values || !io.query || !io.key || !io.value || !io.out) return kNullPointer;
    if (kv.type < kFloat32 || kv.type > kInt8 || (io.type != kFloat32 && io.type != kBfloat16)) return kBadFormat;
    if (!is_dim(kv.key_dim) || !is_dim(kv.value_dim) || kv.kv_heads < 1 || io.heads < 1 || io.heads % kv.kv_heads) return kBadShape;
    if (io.window < 0 || !(io.softcap >= 0)) return kBadShape;
    // The stride of an axis of one says nothing.
    const auto strides = [&](int64_t token, int64_t head, int32_t heads, int32_t dim) {
        return (batch.num_tokens == 1 || token >= dim) && (heads == 1 || head >= dim);
    };
    const bool fit = strides(io.query_token, io.query_head, io.heads, kv.key_dim) &&
                     strides(io.key_token, io.key_head, kv.kv_heads, kv.key_dim) &&
                     strides(io.value_token, io.value_head, kv.kv_heads, kv.value_dim);
    return fit ? kOk : kBadStride;
}

}  // namespace slip
