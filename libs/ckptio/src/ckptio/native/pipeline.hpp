// The second half of a load onto devices: chunks that were read go on to their device while the next ones are
// read.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_set>
#include <vector>

#include "native/device.hpp"
#include "native/reader.hpp"

namespace ckptio {

struct CopyTarget {
    int device;
    std::byte* data;
};

// Where chunk number i of a read request goes: its place in one of the targets.
struct ChunkCopy {
    std::uint64_t target;
    std::uint64_t offset_bytes;
    std::uint64_t size_bytes;
};

struct CopyResult {
    int error = 0;               // of the device runtime, 0 when every copy arrived
    const char* operation = "";  // the call that failed
    std::uint64_t copied_bytes = 0;
    double seconds = 0;  // while something was on its way, of the busiest target
};

// One copier, that is one thread and one stream, for each target (L5). Chunks that have no place of their own
// are read into a ring: a place is free again when its copy has arrived.
class CopyPipeline final : public ChunkSink {
  public:
    // Without `is_pipelined` every copy waits for the last read; each chunk then needs a place of its own.
    CopyPipeline(std::vector<CopyTarget> targets, std::vector<ChunkCopy> copies, std::vector<std::byte*> ring,
                 bool is_pipelined);
    // Drops what has not been started and waits for what has: nothing reads from a chunk afterwards.
    ~CopyPipeline() override;

    std::byte* acquire(const std::function<bool()>& is_stopping) override;
    void deliver(std::size_t chunk_index, std::byte* data) noexcept override;
    bool has_failed() const noexcept override { return has_failed_; }

    std::uint64_t copied_bytes() const noexcept { return copied_bytes_; }
    std::size_t chunk_count() const noexcept { return copies_.size(); }

    // No chunk comes any more; those that wait are copied, or dropped.
    void end(bool is_dropping) noexcept;
    // After `end`: waits until nothing is on its way, or `timeout_ms` went by; true when nothing is.
    bool wait(int timeout_ms);
    // After `wait` has said so.
    CopyResult result() const;

  private:
    using Clock = std::chrono::steady_clock;
    struct Item {
        std::size_t chunk_index;
        std::byte* data;
    };
    struct Lane {
        CopyTarget target{};
        std::deque<Item> queue;
        double seconds = 0;
        std::thread thread;
    };
    struct InFlight {
        std::uint64_t mark;
        Item item;
    };

    void serve(Lane& lane) noexcept;
    void copy_all(Lane& lane);
    bool next(Lane& lane, bool is_busy, Item& item);
    void arrived(const Item& item);
    void fail(int code, const char* operation) noexcept;
    void close() noexcept;

    const std::vector<ChunkCopy> copies_;
    const std::unordered_set<std::byte*> ring_;
    const bool is_pipelined_;
    std::atomic<bool> has_failed_{false};
    std::atomic<std::uint64_t> copied_bytes_{0};

    mutable std::mutex mutex_;  // guards what follows, and the lanes' queues and numbers
    std::condition_variable changed_;
    std::vector<std::byte*> free_;
    bool is_held_;
    bool is_ended_ = false;
    std::size_t working_ = 0;  // lanes that have not come to their end
    CopyResult result_;
    std::vector<Lane> lanes_;
};

}  // namespace ckptio
