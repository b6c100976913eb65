// Reader threads: whatever a device does, the bytes are right or the place of the fault is named.
#include <cerrno>
#include <thread>

#include "support.hpp"

namespace ckptio::tests {

namespace {

constexpr std::size_t kFileBytes = 10 * kChunkBytes + 4096 + 77;

struct Loaded {
    explicit Loaded(const File& file)
        : memory(Region::anonymous(file.bytes.size() + kDirectAlignmentBytes)) {}
    bool equals(const File& file) const {
        return std::equal(file.bytes.begin(), file.bytes.end(), memory.data());
    }
    Region memory;
};

ReadRequest request(const File& file, Region& target, bool is_direct, bool is_bounced) {
    return {{file.descriptors()}, true, is_bounced, file.chunks(target.data(), is_direct), {}, {}};
}

}  // namespace

TEST_CASE("every way of reading gives the same bytes") {
    const File file(kFileBytes);
    ReaderThreads threads(3);
    for (const bool is_direct : {false, true}) {
        for (const bool is_bounced : {false, true}) {
            Loaded loaded(file);
            const auto result =
                wait_for(*threads.submit(request(file, loaded.memory, is_direct, is_bounced)));
            CHECK(result.outcome == Outcome::done);
            CHECK(loaded.equals(file));
        }
    }
}

TEST_CASE("both compilations of the digest agree, at every length around a block") {
    if (kDigestAvx2 == nullptr || !__builtin_cpu_supports("avx2")) return;
    const auto bytes = random_bytes(5000, 3);
    for (std::size_t size = 0; size < bytes.size(); size += size < 600 ? 1 : 97) {
        alignas(64) std::byte first[1024], second[1024];
        kDigestBaseline.reset(first);
        kDigestAvx2->reset(second);
        for (std::size_t done = 0; done < size;) {
            const std::size_t step = std::min<std::size_t>(size - done, 1 + done % 700);
            kDigestBaseline.update(first, bytes.data() + done, step);
            kDigestAvx2->update(second, bytes.data() + done, step);
            done += step;
        }
        CHECK(kDigestBaseline.value(first) == kDigestAvx2->value(second));
    }
}

TEST_CASE("short reads are continued, also where they end inside a block") {
    const File file(kFileBytes);
    ReaderThreads threads(2);
    for (const std::uint64_t most : {1000U, 4096U, 5000U, 20000U}) {
        for (const bool is_bounced : {false, true}) {
            const FaultsGuard guard;
            faults.read_bytes_max = most;
            Loaded loaded(file);
            const auto result = wait_for(*threads.submit(request(file, loaded.memory, true, is_bounced)));
            CHECK(result.outcome == Outcome::done);
            CHECK(loaded.equals(file));
        }
    }
}

TEST_CASE("an input/output error names its chunk, wherever it is, and the next load works") {
    const File file(kFileBytes);
    ReaderThreads threads(2);
    for (std::uint64_t offset = 0; offset < kFileBytes; offset += kChunkBytes) {
        Loaded loaded(file);
        {
            const FaultsGuard guard;
            faults.read_error = EIO;
            faults.read_error_offset = static_cast<std::int64_t>(offset + 5);
            faults.times = 1000;
            const auto result = wait_for(*threads.submit(request(file, loaded.memory, true, true)));
            CHECK(result.outcome == Outcome::failed);
            CHECK(result.error == EIO);
            CHECK(result.offset_bytes == offset);
        }
        CHECK(wait_for(*threads.submit(request(file, loaded.memory, true, true))).outcome == Outcome::done);
        CHECK(loaded.equals(file));
    }
}

TEST_CASE("a chunk that arrives damaged once is read again, one that stays damaged is named") {
    const File file(kFileBytes);
    ReaderThreads threads(2);
    for (const bool is_bounced : {false, true}) {
        const FaultsGuard guard;
        faults.corrupt_offset = 3 * kChunkBytes + 17;
        faults.times = 1;
        Loaded loaded(file);
        auto result = wait_for(*threads.submit(request(file, loaded.memory, true, is_bounced)));
        CHECK(result.outcome == Outcome::done);
        CHECK(result.reread_chunks == 1);
        CHECK(loaded.equals(file));
        faults.times = 1000;
        result = wait_for(*threads.submit(request(file, loaded.memory, true, is_bounced)));
        CHECK(result.outcome == Outcome::corrupt);
        CHECK(result.chunk_index == 3);
        CHECK(result.offset_bytes == 3 * kChunkBytes);
    }
}

TEST_CASE("a file that ends early is told from one that is damaged, with the place") {
    const File file(kFileBytes);
    ReaderThreads threads(2);
    Loaded loaded(file);
    auto wanted = request(file, loaded.memory, true, false);
    wanted.chunks.back().size_bytes += 10;
    const auto result = wait_for(*threads.submit(std::move(wanted)));
    CHECK(result.outcome == Outcome::truncated);
    CHECK(result.offset_bytes == kFileBytes);
}

TEST_CASE("jobs of many threads, some cancelled, end each with its own outcome") {
    const File file(kFileBytes);
    ReaderThreads threads(4);
    const FaultsGuard guard;
    faults.read_delay_us = 50;
    std::vector<std::thread> callers;
    std::atomic<int> wrong{0};
    for (int number = 0; number < 6; ++number) {
        callers.emplace_back([&, number] {
            Loaded loaded(file);
            auto wanted = request(file, loaded.memory, number % 2 == 0, number % 3 == 0);
            const auto cancel = std::make_shared<CancelFlag>(false);
            wanted.cancel = cancel;
            const auto job = threads.submit(std::move(wanted));
            if (number % 2 == 1) *cancel = true;
            const auto result = wait_for(*job);
            const bool is_right =
                result.outcome == Outcome::done ? loaded.equals(file) : result.outcome == Outcome::cancelled;
            if (!is_right || (number % 2 == 0 && result.outcome != Outcome::done)) ++wrong;
        });
    }
    for (auto& caller : callers) caller.join();
    CHECK(wrong == 0);
}

TEST_CASE("closing the threads cancels what runs and waits for it") {
    const File file(kFileBytes);
    Loaded loaded(file);
    const FaultsGuard guard;
    faults.read_delay_us = 1000;
    std::shared_ptr<ReadJob> job;
    {
        ReaderThreads threads(2);
        job = threads.submit(request(file, loaded.memory, true, false));
    }
    CHECK(job->wait(0, 0));
    CHECK((job->result().outcome == Outcome::cancelled || job->result().outcome == Outcome::done));
}

}  // namespace ckptio::tests
