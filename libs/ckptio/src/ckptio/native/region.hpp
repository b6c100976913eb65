// Owned address ranges: the chunk pool, private buffers, and chunks mapped back to back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ckptio {

class Region {
  public:
    // The whole of a file, shared: the owner's view of a chunk pool.
    static Region shared(int descriptor, std::uint64_t size_bytes);
    // Private zeroed memory.
    static Region anonymous(std::uint64_t size_bytes);
    // Chunks of a file one after the other, private: what is written here stays here. The caller has checked
    // that the file has these chunks; `size_bytes` ends in the last of them.
    static Region stitched(int descriptor, std::uint64_t chunk_size_bytes,
                           const std::vector<std::uint64_t>& chunk_indices, std::uint64_t size_bytes);

    Region() noexcept = default;
    Region(Region&& other) noexcept;
    Region& operator=(Region&& other) noexcept;
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;
    ~Region();

    std::byte* data() const noexcept { return data_; }
    std::uint64_t size_bytes() const noexcept { return size_bytes_; }

    // Each returns 0 or an errno: the caller decides whether it can do without.
    int advise_huge_pages() const noexcept;
    int lock_in_memory() const noexcept;

    // Backs every page with memory now, so that no load ever waits for a page fault.
    void prefault(unsigned threads) const;

  private:
    Region(std::byte* data, std::uint64_t size_bytes) noexcept : data_(data), size_bytes_(size_bytes) {}
    static Region reserve(std::uint64_t size_bytes);
    void release() noexcept;

    std::byte* data_ = nullptr;
    std::uint64_t size_bytes_ = 0;
};

// Bytes of a range of a file that are in the page cache; 0 where the kernel does not tell.
std::uint64_t resident_bytes(int descriptor, std::uint64_t offset_bytes, std::uint64_t size_bytes) noexcept;

}  // namespace ckptio
