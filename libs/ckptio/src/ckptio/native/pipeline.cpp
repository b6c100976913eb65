#include "native/pipeline.hpp"

#include <algorithm>
#include <cassert>
#include <new>
#include <utility>

#include "native/errors.hpp"

namespace ckptio {

namespace {

// Enough that the copy engine never waits for the thread that feeds it; few, so that places come back soon.
constexpr std::size_t kInFlightMax = 4;

// A reader that waits for a place looks at its cancel flag this often.
constexpr std::chrono::milliseconds kStopPoll{5};

// What a failure that is no error of the device counts as: the runtime's "out of memory".
constexpr int kOutOfMemory = 2;

}  // namespace

CopyPipeline::CopyPipeline(std::vector<CopyTarget> targets, std::vector<ChunkCopy> copies,
                           std::vector<std::byte*> ring, bool is_pipelined)
    : copies_(std::move(copies)),
      ring_(ring.begin(), ring.end()),
      is_pipelined_(is_pipelined),
      free_(ring.rbegin(), ring.rend()),
      is_held_(!is_pipelined),
      lanes_(targets.size()) {
    try {
        for (std::size_t number = 0; number < targets.size(); ++number) {
            lanes_[number].target = targets[number];
            {
                const std::lock_guard lock(mutex_);
                ++working_;
            }
            lanes_[number].thread = std::thread([this, number] { serve(lanes_[number]); });
        }
    } catch (...) {
        close();
        throw;
    }
}

CopyPipeline::~CopyPipeline() { close(); }

std::byte* CopyPipeline::acquire(const std::function<bool()>& is_stopping) {
    std::unique_lock lock(mutex_);
    while (free_.empty()) {
        changed_.wait_for(lock, kStopPoll);
        if (is_stopping()) return nullptr;
    }
    std::byte* place = free_.back();
    free_.pop_back();
    return place;
}

void CopyPipeline::deliver(std::size_t chunk_index, std::byte* data) noexcept {
    try {
        const std::lock_guard lock(mutex_);
        assert(!is_ended_ && chunk_index < copies_.size());
        lanes_[copies_[chunk_index].target].queue.push_back({chunk_index, data});
    } catch (const std::bad_alloc&) {
        fail(kOutOfMemory, "deliver");
    }
    if (is_pipelined_) changed_.notify_all();
}

void CopyPipeline::end(bool is_dropping) noexcept {
    {
        const std::lock_guard lock(mutex_);
        is_ended_ = true;
        is_held_ = false;
        if (is_dropping) {
            for (Lane& lane : lanes_) lane.queue.clear();
        }
    }
    changed_.notify_all();
}

bool CopyPipeline::wait(int timeout_ms) {
    std::unique_lock lock(mutex_);
    assert(is_ended_);
    changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] { return working_ == 0; });
    return working_ == 0;
}

CopyResult CopyPipeline::result() const {
    const std::lock_guard lock(mutex_);
    assert(working_ == 0);
    CopyResult result = result_;
    result.copied_bytes = copied_bytes_;
    for (const Lane& lane : lanes_) result.seconds = std::max(result.seconds, lane.seconds);
    return result;
}

void CopyPipeline::close() noexcept {
    end(true);
    for (Lane& lane : lanes_) {
        if (lane.thread.joinable()) lane.thread.join();
    }
}

void CopyPipeline::serve(Lane& lane) noexcept {
    try {
        copy_all(lane);
    } catch (const DeviceError& error) {
        fail(error.code(), error.what());
    } catch (const std::bad_alloc&) {
        fail(kOutOfMemory, "copy");
    }
    {
        const std::lock_guard lock(mutex_);
        --working_;
    }
    changed_.notify_all();
}

void CopyPipeline::copy_all(Lane& lane) {
    const std::unique_ptr<CopyStream> stream = make_stream(lane.target.device);
    std::deque<InFlight> in_flight;
    Clock::time_point busy_since{};
    const auto retire = [&] {
        stream->wait(in_flight.front().mark);
        arrived(in_flight.front().item);
        in_flight.pop_front();
        if (!in_flight.empty()) return;
        const std::lock_guard lock(mutex_);
        lane.seconds += std::chrono::duration<double>(Clock::now() - busy_since).count();
    };
    for (;;) {
        Item item{};
        if (next(lane, !in_flight.empty(), item)) {
            if (in_flight.empty()) busy_since = Clock::now();
            const ChunkCopy& copy = copies_[item.chunk_index];
            stream->copy(lane.target.data + copy.offset_bytes, item.data, copy.size_bytes);
            in_flight.push_back({stream->mark(), item});
            if (in_flight.size() > kInFlightMax) retire();
        } else if (!in_flight.empty()) {
            retire();
        } else {
            return;
        }
    }
}

// The next chunk to copy. Does not wait when `is_busy`: then there is something else to wait for.
bool CopyPipeline::next(Lane& lane, bool is_busy, Item& item) {
    std::unique_lock lock(mutex_);
    const auto has_work = [&] { return !is_held_ && !lane.queue.empty() && !has_failed_; };
    if (!is_busy) changed_.wait(lock, [&] { return has_work() || is_ended_ || has_failed_; });
    if (!has_work()) return false;
    item = lane.queue.front();
    lane.queue.pop_front();
    return true;
}

void CopyPipeline::arrived(const Item& item) {
    copied_bytes_ += copies_[item.chunk_index].size_bytes;
    {
        const std::lock_guard lock(mutex_);
        if (ring_.contains(item.data)) free_.push_back(item.data);
    }
    changed_.notify_all();
}

void CopyPipeline::fail(int code, const char* operation) noexcept {
    {
        const std::lock_guard lock(mutex_);
        if (!has_failed_) {
            result_.error = code;
            result_.operation = operation;
        }
        has_failed_ = true;
    }
    changed_.notify_all();
}

}  // namespace ckptio
