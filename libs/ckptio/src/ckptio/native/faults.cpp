#include "native/faults.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace ckptio {

Faults faults;

namespace {

bool covers(std::uint64_t offset_bytes, std::size_t size_bytes, std::int64_t place) noexcept {
    if (place < 0) return false;
    const auto position = static_cast<std::uint64_t>(place);
    return position >= offset_bytes && position - offset_bytes < size_bytes;
}

bool take_one() noexcept { return faults.times > 0 && faults.times.fetch_sub(1) > 0; }

ssize_t faulty_read_at(int descriptor, std::byte* target, std::size_t size_bytes,
                       std::uint64_t offset_bytes) noexcept {
    if (const unsigned delay_us = faults.read_delay_us; delay_us > 0) ::usleep(delay_us);
    if (faults.read_error != 0 && covers(offset_bytes, size_bytes, faults.read_error_offset) && take_one()) {
        errno = faults.read_error;
        return -1;
    }
    if (const std::uint64_t most = faults.read_bytes_max; most > 0) size_bytes = std::min(size_bytes, most);
    const ssize_t count = ::pread(descriptor, target, size_bytes, static_cast<off_t>(offset_bytes));
    if (count > 0 && covers(offset_bytes, static_cast<std::size_t>(count), faults.corrupt_offset) &&
        take_one()) {
        std::byte& victim = target[static_cast<std::uint64_t>(faults.corrupt_offset) - offset_bytes];
        victim ^= std::byte{0x40};
    }
    return count;
}

}  // namespace

void Faults::clear() noexcept {
    is_active = false;
    read_bytes_max = 0;
    read_error = 0;
    read_error_offset = -1;
    corrupt_offset = -1;
    times = 0;
    read_delay_us = 0;
    copy_error = 0;
    copy_error_after = 0;
}

ssize_t read_at(int descriptor, std::byte* target, std::size_t size_bytes,
                std::uint64_t offset_bytes) noexcept {
    if (faults.is_active) return faulty_read_at(descriptor, target, size_bytes, offset_bytes);
    return ::pread(descriptor, target, size_bytes, static_cast<off_t>(offset_bytes));
}

int copy_fault() noexcept {
    if (!faults.is_active || faults.copy_error == 0) return 0;
    return faults.copy_error_after.fetch_sub(1) <= 0 ? faults.copy_error.load() : 0;
}

}  // namespace ckptio
