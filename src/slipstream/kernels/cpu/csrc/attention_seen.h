// Which keys of its segment a token sees.
#pragma once

#include <algorithm>

#include "attention.h"

namespace slip {

struct KeyRange {
    int64_t first, end;
};

inline bool in_tree(const slip_attention_batch& batch, int64_t segment) {
    return batch.tree_width > 0 && segment >= batch.num_chunks;
}

// All keys that token t sees lie in this range; of a chunk or chain it sees them all.
//
//   keys     e e e e e e | r n n n        base 6, t the last node
//   chain          [-------------)        window 7
//   tree         [---------------)        depth 2, window 7: earlier keys by their distance, then those of the nodes on its path
inline KeyRange seen_range(const slip_attention_batch& batch, int64_t segment, int64_t t, int64_t window) {
    const int64_t base = batch.base_lens[segment], end = base + batch.index[t] + 1;
    int64_t first = 0;
    if (window > 0) {
        const int64_t depth = in_tree(batch, segment) ? batch.depths[t] : batch.index[t];
        first = base + depth + 1 - window;
        if (in_tree(batch, segment)) first = std::min(first, base);
    }
    const int64_t stop = std::clamp<int64_t>(end, 0, batch.read_width);
    return {std::clamp<int64_t>(first, 0, stop), stop};
}

// Bits [first, end) of a word, cut to 0..64.
inline uint64_t bits_between(int64_t first, int64_t end) {
    first = std::clamp<int64_t>(first, 0, 64);
    end = std::clamp<int64_t>(end, 0, 64);
    const uint64_t below = end == 64 ? ~0ull : (1ull << end) - 1;
    return first >= end ? 0 : below & (~0ull << first);
}

// Bit i: token t sees key `start` + i. `range` is its `seen_range`.
inline uint64_t seen_keys(const slip_attention_batch& batch, int64_t segment, int64_t t, int64_t window, KeyRange range,
                          int64_t start) {
    const uint64_t all = bits_between(range.first - start, range.end - start);
    const int64_t base = batch.base_lens[segment];
    if (!all || !in_tree(batch, segment) || start + kBlock <= base) return all;
    const int64_t node = start - base;  // of bit 0; below 0 where earlier keys come first
    const uint64_t nodes = bits_between(-node, batch.tree_width - node);
    // Lanes that are masked off are not read.
    const uint8_t* row = batch.ancestors + t * batch.tree_width + node;
    const __m512i path = _mm512_maskz_loadu_epi8(nodes, row);
    uint64_t on_path = _mm512_test_epi8_mask(path, path);
    if (window > 0) {
        for (uint64_t left = on_path; left; left &= left - 1) {
            const int bit = __builtin_ctzll(left);
            if (batch.depths[batch.starts[segment] + node + bit] <= batch.depths[t] - window) on_path &= ~(1ull << bit);
        }
    }
    return all & (bits_between(0, -node) | on_path);
}

}  // namespace slip
