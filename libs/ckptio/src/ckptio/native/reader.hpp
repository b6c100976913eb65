// Reader threads: they fill chunks from a file and verify each chunk right after reading it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ckptio {

// Set once, read by everybody; shared by the caller and its jobs.
using CancelFlag = std::atomic<bool>;

// `target` is aligned for direct I/O and has room for `size_bytes` rounded up to kDirectAlignmentBytes.
struct ChunkRead {
    std::byte* target;
    std::uint64_t offset_bytes;
    std::uint64_t size_bytes;
    std::uint64_t digest;
    bool is_direct;
};

inline constexpr std::uint64_t kDirectAlignmentBytes = 4096;

struct ReadRequest {
    int buffered_descriptor;
    int direct_descriptor;  // -1 where the file system has no direct I/O
    bool is_verified;
    std::vector<ChunkRead> chunks;
    std::shared_ptr<CancelFlag> cancel;  // may be empty
};

enum class Outcome : int { done, cancelled, failed, truncated, corrupt };

struct ReadResult {
    Outcome outcome = Outcome::done;
    int error = 0;                    // errno of `failed`
    std::uint64_t chunk_index = 0;    // of the chunk that ended the job
    std::uint64_t offset_bytes = 0;   // in the file: where the chunk starts, or where the file ended
    std::uint64_t direct_bytes = 0;   // how much was read past the page cache
    std::uint64_t reread_chunks = 0;  // how many had to be read twice
    double read_s = 0;                // summed over threads
    double verify_s = 0;              // summed over threads
};

// One request on its way. Threads take chunks from it in order; the first failure stops the rest.
class ReadJob {
  public:
    explicit ReadJob(ReadRequest request) noexcept : request_(std::move(request)) {}

    // Waits until more than `seen_bytes` are done, the job has ended, or `timeout_ms` went by; true when it
    // has ended.
    bool wait(std::uint64_t seen_bytes, int timeout_ms);
    std::uint64_t done_bytes() const noexcept { return done_bytes_; }
    void cancel() noexcept { is_cancelled_ = true; }
    // Only after the job has ended.
    ReadResult result() const;

    // For reader threads: the next chunk to handle, or false when there is none; and the handling of one.
    bool take(std::size_t& chunk_index);
    void run(std::size_t chunk_index) noexcept;

  private:
    struct Attempt;

    bool is_stopping() const noexcept;
    Attempt read(const ChunkRead& chunk, bool is_direct) noexcept;
    void finish(std::size_t chunk_index, std::uint64_t size_bytes, const Attempt& attempt, bool is_reread);

    const ReadRequest request_;
    std::atomic<bool> is_cancelled_{false};
    std::atomic<bool> has_direct_{true};
    std::atomic<std::uint64_t> done_bytes_{0};

    mutable std::mutex mutex_;  // guards what follows
    std::condition_variable changed_;
    std::size_t next_ = 0;
    std::size_t running_ = 0;
    bool is_exhausted_ = false;
    ReadResult result_;
};

// Threads that live as long as their owner: a small load would otherwise pay for starting them.
class ReaderThreads {
  public:
    explicit ReaderThreads(unsigned threads);
    // Cancels what still runs, and waits for it.
    ~ReaderThreads();
    ReaderThreads(const ReaderThreads&) = delete;
    ReaderThreads& operator=(const ReaderThreads&) = delete;

    // Jobs run in order of submission; a job that has no chunk left to hand out makes room for the next.
    std::shared_ptr<ReadJob> submit(ReadRequest request);

  private:
    void serve();

    std::mutex mutex_;  // guards jobs_ and is_closing_
    std::condition_variable wake_;
    std::deque<std::shared_ptr<ReadJob>> jobs_;
    bool is_closing_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace ckptio
