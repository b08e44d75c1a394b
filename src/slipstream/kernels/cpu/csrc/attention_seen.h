// Which keys of its segment a token sees.
//
// A draft tree's node sees what it would see if its path were a chain, and in that order: its result is that of plain decoding,
// bit for bit.
//
//   nodes    r a b c d           a, b: children of r; c: child of a; d: child of c; base 5
//   keys     0 1 2 3 4 r a c d   of node d, numbered 0..8: key base + i is that of the i-th node on its path
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

// Token t sees the keys in this range, all of them.
inline KeyRange seen_range(const slip_attention_batch& batch, int64_t segment, int64_t t, int64_t window) {
    const int64_t depth = in_tree(batch, segment) ? batch.depths[t] : batch.index[t];
    const int64_t end = batch.base_lens[segment] + depth + 1;
    const int64_t stop = std::clamp<int64_t>(end, 0, batch.read_width);
    return {window > 0 ? std::clamp<int64_t>(end - window, 0, stop) : 0, stop};
}

// Bit i: whether `start` + i is in the range.
inline uint64_t seen_keys(KeyRange range, int64_t start) {
    const int64_t first = std::clamp<int64_t>(range.first - start, 0, 64), end = std::clamp<int64_t>(range.end - start, 0, 64);
    if (first >= end) return 0;
    return (end == 64 ? ~0ull : (1ull << end) - 1) & (~0ull << first);
}

}  // namespace slip
