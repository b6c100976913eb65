// Reader threads: they fill chunks from a file and verify each chunk right after reading it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "native/region.hpp"

namespace ckptio {

// Set once, read by everybody; shared by the caller and its jobs.
using CancelFlag = std::atomic<bool>;

inline constexpr std::uint64_t kDirectAlignmentBytes = 4096;

// `target` is aligned for direct I/O and has room for `size_bytes` rounded up to kDirectAlignmentBytes. It
// may be null where the request has a sink: the sink then gives the place.
struct ChunkRead {
    std::byte* target;
    std::uint64_t file;  // number of the file in the request
    std::uint64_t offset_bytes;
    std::uint64_t size_bytes;
    std::uint64_t digest;
    bool is_direct;
    bool is_resident;  // the bytes are at `target` already, and only go on to the sink
};

struct ReadFile {
    int buffered_descriptor;
    int direct_descriptor;  // -1 where the file system has no direct I/O
};

// The next tier: takes chunks as they arrive. Called by several reader threads at once.
class ChunkSink {
  public:
    virtual ~ChunkSink() = default;
    // Where to read a chunk to; waits for a place, and gives null when `is_stopping` or nothing more can be
    // taken.
    virtual std::byte* acquire(const std::function<bool()>& is_stopping) = 0;
    // The verified bytes of a chunk. A place that was acquired belongs to the sink again.
    virtual void deliver(std::size_t chunk_index, std::byte* data) noexcept = 0;
    // Whether there is no use in reading on.
    virtual bool has_failed() const noexcept = 0;
};

struct ReadRequest {
    std::vector<ReadFile> files;
    bool is_verified;
    // The target consists of small pages: direct reads go through a buffer of huge ones, since the kernel
    // would cut them into requests of as many pages as the device takes segments.
    bool is_bounced;
    std::vector<ChunkRead> chunks;
    std::shared_ptr<CancelFlag> cancel;  // may be empty
    std::shared_ptr<ChunkSink> sink;     // may be empty
    // How many threads read while others verify; 0 when whoever read a chunk verifies it at once. Set by the
    // threads.
    std::size_t readers_max = 0;
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

// Huge pages for one thread's direct reads, made when they are first needed.
class BounceBuffer {
  public:
    static constexpr std::uint64_t kSizeBytes = 4 * 1024 * 1024;
    // Null where there is no memory for it.
    std::byte* data() noexcept;

  private:
    Region region_;
};

// One request on its way. Threads take chunks from it in order; the first failure stops the rest.
class ReadJob {
  public:
    explicit ReadJob(ReadRequest request);

    // Waits until more than `seen_bytes` are done, the job has ended, or `timeout_ms` went by; true when it
    // has ended.
    bool wait(std::uint64_t seen_bytes, int timeout_ms);
    std::uint64_t done_bytes() const noexcept { return done_bytes_; }
    void cancel() noexcept { is_cancelled_ = true; }
    // Only after the job has ended.
    ReadResult result() const;
    // The chunks whose bytes are there, and verified, since this was last asked.
    std::vector<std::size_t> take_arrived();

    // What handling a chunk gave so far.
    struct Attempt {
        Outcome outcome = Outcome::done;
        int error = 0;
        bool is_reread = false;
        std::uint64_t done_bytes = 0;
        std::uint64_t direct_bytes = 0;
        double read_s = 0;
        double verify_s = 0;
    };
    // A chunk to read, or one that was read and is to be verified.
    struct Task {
        std::size_t chunk_index = 0;
        bool is_read = false;
        Attempt attempt{};
    };
    enum class Next { task, later, never };

    // For reader threads: what to do next, or whether there will be something later, or never again; and the
    // doing of it, with a buffer that the thread owns.
    Next take(Task& task);
    void run(Task& task, BounceBuffer& bounce) noexcept;

  private:
    class Pass;

    bool is_stopping() const noexcept;
    Attempt handle(std::size_t chunk_index, BounceBuffer& bounce) noexcept;
    Attempt read(const ChunkRead& chunk, std::byte* target, bool is_direct, bool is_digested,
                 BounceBuffer& bounce) noexcept;
    Attempt reread(const ChunkRead& chunk, std::byte* target, const Attempt& first,
                   BounceBuffer& bounce) noexcept;
    void verify(std::size_t chunk_index, Attempt& attempt, BounceBuffer& bounce) noexcept;
    bool is_digested_later(const ChunkRead& chunk) const noexcept;
    void deliver(std::size_t chunk_index, std::byte* target, const Attempt& attempt) noexcept;
    void finish(std::size_t chunk_index, const Attempt& attempt);

    const ReadRequest request_;
    std::atomic<bool> is_cancelled_{false};
    // By file: whether direct reads of it work.
    std::unique_ptr<std::atomic<bool>[]> has_direct_;
    std::atomic<std::uint64_t> done_bytes_{0};

    mutable std::mutex mutex_;  // guards what follows
    std::condition_variable changed_;
    std::size_t next_ = 0;
    std::size_t reading_ = 0;
    std::size_t running_ = 0;
    std::deque<Task> unverified_;
    std::vector<std::size_t> arrived_;
    bool is_exhausted_ = false;
    ReadResult result_;
};

// Threads that live as long as their owner: a small load would otherwise pay for starting them.
class ReaderThreads {
  public:
    explicit ReaderThreads(unsigned threads);
    // Cancels what has chunks left to hand out, and waits for what was handed out.
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
