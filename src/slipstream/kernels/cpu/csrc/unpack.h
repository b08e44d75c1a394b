// Panels of other formats as float32 ones, for the exact mode.
#pragma once

#include <cstdint>

namespace slip {

// The panel as F32's layout: inputs x 32 floats, in a buffer of this thread until its next call. Throws std::bad_alloc.
const uint8_t* unpacked(int32_t format, int64_t inputs, const uint8_t* panel);

}  // namespace slip
