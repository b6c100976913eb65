// XXH3-64 of a stream of bytes, with the widest vectors that the processor has.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace ckptio {

class Digest {
  public:
    static constexpr std::size_t kStateBytes = 576;
    static constexpr std::size_t kStateAlignment = 64;

    Digest() noexcept;
    void update(const std::byte* data, std::uint64_t size_bytes) noexcept;
    std::uint64_t value() const noexcept;

  private:
    // The state of xxhash, opaque here so that its header is seen by the two sources that compute only.
    alignas(kStateAlignment) std::array<std::byte, kStateBytes> state_;
};

// One compilation of the algorithm; `state` is the array above.
struct DigestCode {
    void (*reset)(void* state) noexcept;
    void (*update)(void* state, const void* data, std::size_t size_bytes) noexcept;
    std::uint64_t (*value)(const void* state) noexcept;
};

extern const DigestCode kDigestBaseline;
// The same for AVX2, where this build has it; only to be called where the processor has it too.
extern const DigestCode* const kDigestAvx2;

}  // namespace ckptio
