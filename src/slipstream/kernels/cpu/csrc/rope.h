// Rotary embedding of float32 heads, with their norm where a model has one.
#pragma once

#include <cstdint>

extern "C" {
// How the heads of a pass turn: pairs (i, i + dim / 2) of the first `dim` numbers, by the angle of each token and pair.
struct slip_rope {
    const float* cos;         // [angles, dim / 2]
    const float* sin;         // [angles, dim / 2]
    const int64_t* angles;    // [T] which of them each token takes; null: its own number
    const float* query_norm;  // [head_dim] weights of an RMS norm before the turn, or null
    const float* key_norm;    // likewise
    float eps;                // of the norm
    int32_t dim;              // even, at most the head's; 0: nothing turns
};
}

namespace slip {

// One head of token t: `dim` numbers, of which the first rope.dim turn. `to` may be `from`.
void turn_head(const slip_rope& rope, const float* norm, int64_t t, const float* from, float* to, int dim);

}  // namespace slip
