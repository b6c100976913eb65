#include "native/region.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <thread>
#include <utility>

#include "native/errors.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace ckptio {

namespace {

// Ranges start on a huge page, so that the kernel can use them and hugetlbfs accepts the addresses.
constexpr std::uint64_t kHugePageBytes = 2 * 1024 * 1024;

// Small enough that threads end together, large enough that the system call does not count.
constexpr std::uint64_t kPrefaultStepBytes = 16 * 1024 * 1024;

constexpr long kCachestat = 451;  // the same number on every architecture

std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) noexcept {
    return (value + multiple - 1) / multiple * multiple;
}

void* map(void* address, std::uint64_t size_bytes, int protection, int flags, int descriptor,
          std::uint64_t offset_bytes) {
    void* result =
        ::mmap(address, size_bytes, protection, flags, descriptor, static_cast<off_t>(offset_bytes));
    if (result == MAP_FAILED) throw_errno("mmap");
    return result;
}

// Writes to every page what is there.
void touch(std::byte* data, std::uint64_t size_bytes) noexcept {
    const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    for (std::uint64_t offset = 0; offset < size_bytes; offset += page_bytes) {
        volatile std::byte* const place = data + offset;
        *place = *place;
    }
}

// Whether mincore(2) tells the truth about a file: it does to its owner and to those who may write it.
bool may_ask_for_residency(int descriptor) noexcept {
    struct stat status{};
    if (::fstat(descriptor, &status) != 0) return false;
    if (status.st_uid == ::geteuid() || ::geteuid() == 0) return true;
    char path[64];
    std::snprintf(path, sizeof(path), "/proc/self/fd/%d", descriptor);
    return ::access(path, W_OK) == 0;
}

}  // namespace

Region::Region(Region&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_bytes_(std::exchange(other.size_bytes_, 0)) {}

Region& Region::operator=(Region&& other) noexcept {
    if (this != &other) {
        release();
        data_ = std::exchange(other.data_, nullptr);
        size_bytes_ = std::exchange(other.size_bytes_, 0);
    }
    return *this;
}

Region::~Region() { release(); }

void Region::release() noexcept {
    if (data_ != nullptr) ::munmap(data_, size_bytes_);
    data_ = nullptr;
    size_bytes_ = 0;
}

Region Region::reserve(std::uint64_t size_bytes) {
    size_bytes = round_up(size_bytes, static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)));
    const std::uint64_t total = size_bytes + kHugePageBytes;
    auto* start = static_cast<std::byte*>(
        map(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    const auto address = reinterpret_cast<std::uint64_t>(start);
    const std::uint64_t before = round_up(address, kHugePageBytes) - address;
    if (before > 0) ::munmap(start, before);
    ::munmap(start + before + size_bytes, total - before - size_bytes);
    return Region(start + before, size_bytes);
}

Region Region::shared(int descriptor, std::uint64_t size_bytes) {
    Region region = reserve(size_bytes);
    map(region.data_, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor, 0);
    return region;
}

Region Region::anonymous(std::uint64_t size_bytes) {
    Region region = reserve(size_bytes);
    map(region.data_, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return region;
}

Region Region::stitched(int descriptor, std::uint64_t chunk_size_bytes,
                        const std::vector<std::uint64_t>& chunk_indices, std::uint64_t size_bytes) {
    Region region = reserve(chunk_size_bytes * chunk_indices.size());
    std::size_t first = 0;
    while (first < chunk_indices.size()) {
        // Neighbours in the pool become one mapping: fewer system calls, and far from the kernel's limit of
        // mappings.
        std::size_t last = first + 1;
        while (last < chunk_indices.size() && chunk_indices[last] == chunk_indices[last - 1] + 1) ++last;
        map(region.data_ + first * chunk_size_bytes, (last - first) * chunk_size_bytes,
            PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, descriptor,
            chunk_indices[first] * chunk_size_bytes);
        first = last;
    }
    // Bytes of the last chunk after the end are nobody's business.
    const std::uint64_t page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const std::uint64_t used = round_up(size_bytes, page_bytes);
    if (used < region.size_bytes_ && ::munmap(region.data_ + used, region.size_bytes_ - used) == 0) {
        region.size_bytes_ = used;
    }
    return region;
}

int Region::advise_huge_pages() const noexcept {
    return ::madvise(data_, size_bytes_, MADV_HUGEPAGE) == 0 ? 0 : errno;
}

int Region::lock_in_memory() const noexcept { return ::mlock(data_, size_bytes_) == 0 ? 0 : errno; }

void Region::prefault(unsigned threads) const {
    std::atomic<std::uint64_t> next{0};
    std::atomic<int> failure{0};
    auto work = [&]() noexcept {
        while (failure == 0) {
            const std::uint64_t start = next.fetch_add(kPrefaultStepBytes);
            if (start >= size_bytes_) return;
            const std::uint64_t count = std::min(kPrefaultStepBytes, size_bytes_ - start);
            while (::madvise(data_ + start, count, MADV_POPULATE_WRITE) != 0) {
                if (errno == EINTR || errno == EAGAIN) continue;
                if (errno == EINVAL) {
                    // Linux before 5.14. A page that the file system can't give is a signal there, not an
                    // error.
                    touch(data_ + start, count);
                    break;
                }
                // A full tmpfs shows as a bad address here; say what it is.
                failure = errno == EFAULT ? ENOSPC : errno;
                return;
            }
        }
    };
    {
        std::vector<std::jthread> helpers;
        for (unsigned number = 1; number < threads; ++number) helpers.emplace_back(work);
        work();
    }
    if (failure != 0) throw SystemError(failure, "madvise");
}

std::uint64_t resident_bytes(int descriptor, std::uint64_t offset_bytes, std::uint64_t size_bytes) noexcept {
    struct Range {
        std::uint64_t offset, length;
    } range{offset_bytes, size_bytes};
    struct Status {
        std::uint64_t cached, dirty, writeback, evicted, recently_evicted;
    } status{};
    const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    if (::syscall(kCachestat, descriptor, &range, &status, 0) == 0) {
        return std::min(status.cached * page_bytes, size_bytes);
    }
    if (errno != ENOSYS || !may_ask_for_residency(descriptor)) return 0;

    // Kernels before 6.5: look at the pages of a mapping that is never touched.
    void* view =
        ::mmap(nullptr, size_bytes, PROT_READ, MAP_SHARED, descriptor, static_cast<off_t>(offset_bytes));
    if (view == MAP_FAILED) return 0;
    std::uint64_t resident = 0;
    try {
        std::vector<unsigned char> pages(round_up(size_bytes, page_bytes) / page_bytes);
        if (::mincore(view, size_bytes, pages.data()) == 0) {
            for (const unsigned char page : pages) resident += page & 1U;
        }
    } catch (const std::bad_alloc&) {
        resident = 0;
    }
    ::munmap(view, size_bytes);
    return std::min(resident * page_bytes, size_bytes);
}

}  // namespace ckptio
