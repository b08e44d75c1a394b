// A whole decoder's forward pass, from embeddings to the final norm, in one call: the kernels of products, norms and attention
// one after the other from one thread.
//
//   residual ─┬─ norm ─ qkv ─ (norm) ─ turn ─ KV, attention ─ out ─ (norm) ─ + ─┬─ norm ─ gate, up ─ down ─ (norm) ─ + ─►
//             └─────────────────────────────────────────────────────────────────┘└────────────────────────────────────┘
//             tapped here
//
// The residual lies in one place and is added to. A norm behind which a product follows is not written: it becomes that product's
// operand. All kernels give a row what it would get alone, so the whole does.
#pragma once

#include <cstdint>

#include "attention.h"
#include "matmul.h"

extern "C" {

struct slip_norm {
    const float* weight;  // [columns]; null: there is no such norm
    float eps;
    float offset;         // added to the weight
};

// One of the matrices of a product.
struct slip_part {
    const slip_matrix* matrix;
    int64_t mode;  // slip::Mode
};

// The parts' outputs side by side; with `gate` the first half of them is a gate's, the second what it gates.
struct slip_product {
    const slip_part* parts;
    int32_t num_parts;
    int32_t gate;  // slip::Activation, or none
};

struct slip_layer {
    slip_norm attention_norm;   // missing in a first layer whose qkv reads the pass's input
    slip_norm after_attention;  // may be missing
    slip_norm mlp_norm;
    slip_norm after_mlp;        // may be missing
    slip_product qkv;           // queries, keys, values, head by head
    slip_product out;
    slip_product inner;         // gated
    slip_product down;
    const float* query_norm;    // [head_dim] of each head, or null
    const float* key_norm;
    float head_eps;
    int32_t heads;
    int32_t kv_heads;
    int32_t head_dim;
    int32_t rotary;             // which of the pass's turns; -1: none
    float scale;
    float softcap;              // 0: none
    int64_t window;             // 0: none
};

// Angles of positions 0, 1, ...
struct slip_turn {
    const float* cos;  // [count, dim / 2]
    const float* sin;
    int64_t count;
    int64_t dim;
};

struct slip_pass {
    const slip_attention_batch* batch;
    const slip_kv* const* kv;  // [layers]
    const slip_turn* turns;    // [rotaries of the decoder]
    const int64_t* positions;  // [T]
    float* residual;           // [T, hidden]; changed
    const float* input;        // [T, inputs of the first qkv], where the first layer has no norm; may be the residual
    float* out;                // [T, hidden] after the final norm
    const int64_t* taps;       // layers whose entering residual is wanted; the number of layers: what leaves the last one
    float* states;             // [T, num_taps * hidden]
    int64_t num_taps;
};

struct slip_decoder;  // with work buffers of its own

// Copies the layers; what they point to must stay. Checks all that does not depend on a pass.
int slip_decoder_make(const slip_layer* layers, int64_t num_layers, int64_t hidden, int32_t num_rotaries, const slip_norm* norm,
                      slip_decoder** made);
// Always 0.
int slip_decoder_free(slip_decoder* decoder);

// One pass. A second thread waits for the first one's.
int slip_decoder_forward(slip_decoder* decoder, const slip_pass* pass);
}
