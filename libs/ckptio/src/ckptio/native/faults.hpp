// Fault injection points, for tests: every value is zero or negative in a process that asked for none.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ckptio {

// A device that fails, is slow, gives less than was asked for, or gives wrong bytes. Offsets are those of the
// file. `times` counts down; a fault that ran out leaves the device healthy.
struct Faults {
    std::atomic<bool> is_active{false};
    std::atomic<std::uint64_t> read_bytes_max{
        0};                          // a read gives at most this much (short reads); 0 is no limit
    std::atomic<int> read_error{0};  // errno of a read that touches `read_error_offset`
    std::atomic<std::int64_t> read_error_offset{-1};
    std::atomic<std::int64_t> corrupt_offset{-1};  // the byte there arrives flipped
    std::atomic<int> times{0};
    std::atomic<unsigned> read_delay_us{0};  // every read takes this much longer
    std::atomic<int> copy_error{0};          // device code of the copy number `copy_error_after`
    std::atomic<std::int64_t> copy_error_after{0};

    void clear() noexcept;
};

extern Faults faults;

// pread(2) with what `faults` adds.
ssize_t read_at(int descriptor, std::byte* target, std::size_t size_bytes,
                std::uint64_t offset_bytes) noexcept;

// The device code that the next copy should fail with, or 0.
int copy_fault() noexcept;

}  // namespace ckptio
