// A tile: up to so many rows of an operand times one panel, all inputs, accumulators in registers.
#pragma once

#include <cstdint>

namespace slip {

struct TileInput {
    const uint8_t* panel;
    const uint8_t* rows;     // the operand's first row of the tile
    int64_t row_bytes;
    int64_t inputs;
    const uint8_t* ahead;    // what is brought to L2 meanwhile: `ahead_lines` cache lines for each step of a tile
    int64_t ahead_lines;
};

using Tile = void (*)(const TileInput&, float* out);  // out [rows][32], aligned to 64 bytes

// Tiles of one kind, by their number of rows: tiles[0] has one. Steps are what a panel is read in.
struct Tiles {
    const Tile* tiles;
    int64_t max_rows;
    int64_t inputs_per_step;
};

// Integer tiles of a Q format, the bfloat16 tiles, and the float32 ones; `format` as in matmul.h.
Tiles integer_tiles(int32_t format);
Tiles bfloat16_tiles();
Tiles float_tiles();

}  // namespace slip
