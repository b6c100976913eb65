// Address ranges: what is stitched together is contiguous, private, and gone afterwards.
#include <sys/mman.h>

#include <cstring>

#include "native/errors.hpp"
#include "support.hpp"

namespace ckptio::tests {

TEST_CASE("chunks in any order become one range, and writes to it stay there") {
    const int descriptor = ::memfd_create("pool", MFD_CLOEXEC);
    REQUIRE(::ftruncate(descriptor, 8 * kChunkBytes) == 0);
    Region pool = Region::shared(descriptor, 8 * kChunkBytes);
    pool.prefault(2);
    const auto bytes = random_bytes(8 * kChunkBytes, 4);
    std::memcpy(pool.data(), bytes.data(), bytes.size());
    const std::vector<std::uint64_t> order{5, 6, 0, 7, 2};
    Region view = Region::stitched(descriptor, kChunkBytes, order, 5 * kChunkBytes - 100);
    for (std::size_t number = 0; number < order.size(); ++number) {
        CHECK(std::memcmp(view.data() + number * kChunkBytes, bytes.data() + order[number] * kChunkBytes,
                          kChunkBytes - 4096) == 0);
    }
    view.data()[0] = ~bytes[5 * kChunkBytes];
    CHECK(pool.data()[5 * kChunkBytes] == bytes[5 * kChunkBytes]);
    ::close(descriptor);
    CHECK(view.data()[1] == bytes[5 * kChunkBytes + 1]);
}

TEST_CASE("memory that can't be had is an error with its number") {
    CHECK_THROWS_AS(Region::shared(-1, 4096), SystemError);
    try {
        Region::shared(-1, 4096);
    } catch (const SystemError& error) {
        CHECK(error.code() == EBADF);
    }
}

}  // namespace ckptio::tests
