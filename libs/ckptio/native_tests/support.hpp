// Places and builders for the native tests.
#pragma once

#include <dlfcn.h>
#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "native/cuda.hpp"
#include "native/digest.hpp"
#include "native/faults.hpp"
#include "native/reader.hpp"
#include "native/region.hpp"

namespace ckptio::tests {

inline constexpr std::uint64_t kChunkBytes = 64 * 1024;

inline std::vector<std::byte> random_bytes(std::size_t size_bytes, unsigned seed) {
    std::mt19937_64 generator(seed);
    std::vector<std::byte> bytes(size_bytes);
    for (auto& byte : bytes) byte = static_cast<std::byte>(generator());
    return bytes;
}

inline std::uint64_t digest_of(const std::byte* data, std::uint64_t size_bytes) {
    Digest digest;
    digest.update(data, size_bytes);
    return digest.value();
}

// A file of random bytes, open both ways, gone at the end.
class File {
  public:
    explicit File(std::size_t size_bytes, unsigned seed = 1) : bytes(random_bytes(size_bytes, seed)) {
        std::string name =
            (std::getenv("TMPDIR") ? std::getenv("TMPDIR") : "/tmp") + std::string("/ckptio-XXXXXX");
        buffered_ = ::mkstemp(name.data());
        REQUIRE(buffered_ >= 0);
        REQUIRE(::write(buffered_, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
        direct_ = ::open(name.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
        ::unlink(name.c_str());
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    ~File() {
        ::close(buffered_);
        if (direct_ >= 0) ::close(direct_);
    }

    ReadFile descriptors() const { return {buffered_, direct_}; }

    // Orders for every chunk of the file, back to back from `target`, or without a target.
    std::vector<ChunkRead> chunks(std::byte* target, bool is_direct = true, std::uint64_t file = 0) const {
        std::vector<ChunkRead> reads;
        for (std::uint64_t offset = 0; offset < bytes.size(); offset += kChunkBytes) {
            const std::uint64_t size = std::min(kChunkBytes, bytes.size() - offset);
            reads.push_back({target == nullptr ? nullptr : target + offset, file, offset, size,
                             digest_of(bytes.data() + offset, size), is_direct, false});
        }
        return reads;
    }

    const std::vector<std::byte> bytes;

  private:
    int buffered_ = -1;
    int direct_ = -1;
};

// Healthy devices at the end, whatever happens.
struct FaultsGuard {
    FaultsGuard() { faults.is_active = true; }
    ~FaultsGuard() { faults.clear(); }
};

inline ReadResult wait_for(ReadJob& job) {
    while (!job.wait(job.done_bytes(), 50)) {
    }
    return job.result();
}

// The stand-in runtime, whose library stands beside the test program.
class StandIn {
  public:
    StandIn() {
        const char* path = std::getenv("CKPTIO_CUDA_RUNTIME");
        REQUIRE_MESSAGE(path != nullptr, "CKPTIO_CUDA_RUNTIME names the stand-in");
        REQUIRE(CudaRuntime::load(path, false) == "");
        library_ = ::dlopen(path, RTLD_NOW);
        REQUIRE(library_ != nullptr);
    }
    ~StandIn() { ::dlclose(library_); }

    std::int64_t count(const char* what) const {
        auto* function = reinterpret_cast<std::int64_t (*)()>(::dlsym(library_, what));
        const bool is_there = function != nullptr;
        REQUIRE(is_there);
        return function();
    }
    void fail_after(std::int64_t copies) const {
        reinterpret_cast<void (*)(std::int64_t)>(::dlsym(library_, "standin_fail_after"))(copies);
    }
    // Whether no object of the runtime outlived its owner.
    void check_nothing_left() const {
        CHECK(count("standin_live_allocations") == 0);
        CHECK(count("standin_live_registrations") == 0);
        CHECK(count("standin_live_streams") == 0);
        CHECK(count("standin_live_events") == 0);
    }

  private:
    void* library_ = nullptr;
};

}  // namespace ckptio::tests
