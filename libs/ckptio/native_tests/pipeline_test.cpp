// Chunks on their way to devices, with the stand-in runtime: nothing is lost, overtaken, or left behind.
#include "native/pipeline.hpp"

#include <memory>
#include <set>

#include "native/errors.hpp"
#include "support.hpp"

namespace ckptio::tests {

namespace {

constexpr std::size_t kFileBytes = 12 * kChunkBytes + 4096;

// Page-locked memory for a ring, as a pool has it.
class Ring {
  public:
    explicit Ring(std::size_t chunks) : memory_(Region::anonymous(chunks * kChunkBytes)) {
        const CudaRuntime& cuda = *CudaRuntime::get();
        check_cuda(cuda.host_register(memory_.data(), memory_.size_bytes(), kCudaHostRegisterPortable),
                   "cudaHostRegister");
        for (std::size_t number = 0; number < chunks; ++number) {
            places.push_back(memory_.data() + number * kChunkBytes);
        }
    }
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;
    ~Ring() { CudaRuntime::get()->host_unregister(memory_.data()); }

    std::byte* data() const { return memory_.data(); }
    std::vector<std::byte*> places;

  private:
    Region memory_;
};

std::vector<ChunkCopy> copies_of(const File& file, std::uint64_t target = 0) {
    std::vector<ChunkCopy> copies;
    for (const auto& chunk : file.chunks(nullptr))
        copies.push_back({target, chunk.offset_bytes, chunk.size_bytes});
    return copies;
}

CopyResult finish(CopyPipeline& sink, bool is_dropping) {
    sink.end(is_dropping);
    while (!sink.wait(50)) {
    }
    return sink.result();
}

bool holds(const DeviceMemory& memory, const File& file) {
    std::vector<std::byte> bytes(file.bytes.size());
    memory.read(bytes.data(), 0, bytes.size());
    return bytes == file.bytes;
}

}  // namespace

TEST_CASE("a file larger than the ring arrives whole on a GPU") {
    const StandIn standin;
    {
        const File file(kFileBytes);
        ReaderThreads threads(2);
        for (const std::size_t chunks : {1U, 2U, 3U, 20U}) {
            const Ring ring(chunks);
            const auto memory = DeviceMemory::allocate(0, file.bytes.size());
            const auto sink = std::make_shared<CopyPipeline>(std::vector<CopyTarget>{{0, memory.data()}},
                                                             copies_of(file), ring.places, true);
            const auto job =
                threads.submit({{file.descriptors()}, true, true, file.chunks(nullptr), {}, sink});
            CHECK(wait_for(*job).outcome == Outcome::done);
            const auto result = finish(*sink, false);
            CHECK(result.error == 0);
            CHECK(result.copied_bytes == file.bytes.size());
            CHECK(holds(memory, file));
        }
        CHECK(standin.count("standin_pageable_copies") == 0);
    }
    standin.check_nothing_left();
}

TEST_CASE("two files go to two GPUs at once, and without pipelining only after the last read") {
    const StandIn standin;
    {
        const File first(kFileBytes, 1), second(kFileBytes, 2);
        ReaderThreads threads(2);
        for (const bool is_pipelined : {true, false}) {
            const Ring ring(2 * 13);
            const auto left = DeviceMemory::allocate(0, kFileBytes),
                       right = DeviceMemory::allocate(1, kFileBytes);
            auto copies = copies_of(first, 0);
            for (const auto& copy : copies_of(second, 1)) copies.push_back(copy);
            auto chunks = first.chunks(ring.data());
            for (const auto& chunk : second.chunks(ring.data() + 13 * kChunkBytes, true, 1))
                chunks.push_back(chunk);
            const auto sink =
                std::make_shared<CopyPipeline>(std::vector<CopyTarget>{{0, left.data()}, {1, right.data()}},
                                               copies, std::vector<std::byte*>{}, is_pipelined);
            const auto job =
                threads.submit({{first.descriptors(), second.descriptors()}, true, false, chunks, {}, sink});
            CHECK(wait_for(*job).outcome == Outcome::done);
            CHECK(finish(*sink, false).error == 0);
            CHECK(holds(left, first));
            CHECK(holds(right, second));
        }
    }
    standin.check_nothing_left();
}

// The missing wait is a race on purpose, which ThreadSanitizer would stop at.
#ifndef __SANITIZE_THREAD__
TEST_CASE("a copy that has not been waited for has not arrived") {
    const StandIn standin;
    {
        const Ring ring(1);
        const auto memory = DeviceMemory::allocate(0, kChunkBytes);
        const auto stream = make_stream(0);
        std::fill_n(ring.data(), kChunkBytes, std::byte{7});
        stream->copy(memory.data(), ring.data(), kChunkBytes);
        std::byte early{}, late{};
        memory.read(&early, 0, 1);
        stream->wait(stream->mark());
        memory.read(&late, 0, 1);
        CHECK(early == std::byte{0xA5});
        CHECK(late == std::byte{7});
    }
    standin.check_nothing_left();
}
#endif

TEST_CASE("cancelling at every chunk ends the load, and a place is never written while a copy reads it") {
    const StandIn standin;
    {
        const File file(kFileBytes);
        ReaderThreads threads(2);
        for (std::uint64_t stop_at = 0; stop_at <= kFileBytes; stop_at += kChunkBytes) {
            const Ring ring(2);
            const auto memory = DeviceMemory::allocate(0, file.bytes.size());
            const auto cancel = std::make_shared<CancelFlag>(false);
            const auto sink = std::make_shared<CopyPipeline>(std::vector<CopyTarget>{{0, memory.data()}},
                                                             copies_of(file), ring.places, true);
            const auto job =
                threads.submit({{file.descriptors()}, true, false, file.chunks(nullptr), cancel, sink});
            while (job->done_bytes() < stop_at && !job->wait(job->done_bytes(), 50)) {
            }
            *cancel = true;
            const auto outcome = wait_for(*job).outcome;
            CHECK((outcome == Outcome::cancelled || outcome == Outcome::done));
            CHECK(finish(*sink, true).error == 0);
            // The ring is ours again: writing to it must not race with a copy (ThreadSanitizer looks).
            std::fill_n(ring.data(), 2 * kChunkBytes, std::byte{0});
        }
    }
    standin.check_nothing_left();
}

TEST_CASE("a copy that fails, at every chunk, ends the load with the runtime's code") {
    const StandIn standin;
    {
        const File file(kFileBytes);
        ReaderThreads threads(2);
        for (std::int64_t number = 0; number < 13; ++number) {
            const Ring ring(3);
            const auto memory = DeviceMemory::allocate(0, file.bytes.size());
            const auto sink = std::make_shared<CopyPipeline>(std::vector<CopyTarget>{{0, memory.data()}},
                                                             copies_of(file), ring.places, true);
            standin.fail_after(number);
            const auto job =
                threads.submit({{file.descriptors()}, true, false, file.chunks(nullptr), {}, sink});
            const auto outcome = wait_for(*job).outcome;
            CHECK((outcome == Outcome::cancelled || outcome == Outcome::done));
            const auto result = finish(*sink, false);
            standin.fail_after(-1);
            CHECK(result.error == 2);
            CHECK(std::string(result.operation) == "cudaMemcpyAsync");
            CHECK(result.copied_bytes < file.bytes.size());
        }
    }
    standin.check_nothing_left();
}

TEST_CASE("chunks that are resident go straight on, the others are read") {
    const StandIn standin;
    {
        const File file(kFileBytes);
        ReaderThreads threads(2);
        const Ring ring(13);
        std::copy(file.bytes.begin(), file.bytes.begin() + 5 * kChunkBytes, ring.data());
        auto chunks = file.chunks(ring.data());
        for (std::size_t number = 0; number < 5; ++number) chunks[number].is_resident = true;
        const auto memory = DeviceMemory::allocate(2, file.bytes.size());
        const auto sink = std::make_shared<CopyPipeline>(std::vector<CopyTarget>{{2, memory.data()}},
                                                         copies_of(file), std::vector<std::byte*>{}, true);
        const FaultsGuard guard;
        faults.read_error = 5;
        faults.read_error_offset = 4 * kChunkBytes;  // nobody may read there
        faults.times = 1000;
        CHECK(wait_for(*threads.submit({{file.descriptors()}, true, false, chunks, {}, sink})).outcome ==
              Outcome::done);
        CHECK(finish(*sink, false).error == 0);
        CHECK(holds(memory, file));
    }
    standin.check_nothing_left();
}

TEST_CASE("a pipeline that is dropped without finish leaves nothing running") {
    const StandIn standin;
    {
        const File file(kFileBytes);
        const Ring ring(13);
        const auto memory = DeviceMemory::allocate(0, file.bytes.size());
        CopyPipeline sink({{0, memory.data()}}, copies_of(file), ring.places, true);
        for (std::size_t number = 0; number < 6; ++number) {
            sink.deliver(number, sink.acquire([] { return false; }));
        }
    }
    standin.check_nothing_left();
}

}  // namespace ckptio::tests
