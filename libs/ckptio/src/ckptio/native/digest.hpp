// XXH3-64 of a stream of bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace ckptio {

class Digest {
  public:
    Digest() noexcept;
    void update(const std::byte* data, std::uint64_t size_bytes) noexcept;
    std::uint64_t value() const noexcept;

  private:
    // The state of xxhash, opaque here so that its header is seen by one source file only.
    alignas(64) std::array<std::byte, 576> state_;
};

}  // namespace ckptio
