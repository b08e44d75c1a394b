// Memory that grows and is used again: aligned to a cache line, contents not kept.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace slip {

class Buffer {
public:
    Buffer() = default;
    ~Buffer() { std::free(data_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    // At least that many bytes, until the next call. Throws std::bad_alloc.
    uint8_t* at_least(int64_t bytes) {
        if (bytes > size_) {
            std::free(data_);
            size_ = 0;
            const int64_t wanted = (bytes + bytes / 4 + 63) / 64 * 64;
            data_ = static_cast<uint8_t*>(std::aligned_alloc(64, wanted));
            if (!data_) throw std::bad_alloc();
            size_ = wanted;
        }
        return data_;
    }

private:
    uint8_t* data_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace slip
