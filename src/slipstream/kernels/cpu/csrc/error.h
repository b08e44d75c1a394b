// What the exported functions return: 0, or one of these. slip_error(code) is its text.
#pragma once

namespace slip {

enum Error : int {
    kOk = 0,
    kNullPointer = 1,
    kBadShape = 2,
    kBadFormat = 3,
    kMisaligned = 4,
    kBadThreads = 5,
    kBadMode = 6,
    kOutOfMemory = 7,
    kBadStride = 8,
    kBadSlot = 9,
};

}  // namespace slip

extern "C" {
// Text of an error code: what must hold.
const char* slip_error(int code);
// Changes whenever a struct or function of the library changes; the Python side checks it when it loads one.
int slip_abi();
}
