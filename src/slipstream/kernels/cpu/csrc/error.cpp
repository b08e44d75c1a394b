#include "error.h"

extern "C" const char* slip_error(int code) {
    switch (code) {
        case slip::kOk: return "no error";
        case slip::kNullPointer: return "pointers must not be null";
        case slip::kBadShape: return "sizes must be positive and fit each other";
        case slip::kBadFormat: return "the format must be one that this function knows";
        case slip::kMisaligned: return "packed panels must be aligned to 64 bytes";
        case slip::kBadThreads: return "threads must be from 1 to 64";
        case slip::kBadMode: return "the mode must be one that this format has";
        case slip::kOutOfMemory: return "there must be memory for the work buffers";
        case slip::kBadStride: return "strides must be at least as wide as what they separate";
        case slip::kBadSlot: return "KV slots must be those of the cache";
        default: return "unknown error code";
    }
}

extern "C" int slip_abi() { return 6; }
