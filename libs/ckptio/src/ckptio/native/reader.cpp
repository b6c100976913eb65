#include "native/reader.hpp"

#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <utility>

#include "native/digest.hpp"

namespace ckptio {

namespace {

using Clock = std::chrono::steady_clock;

// A buffered read is a copy by the processor: in steps of this size the digest finds the bytes still in its
// cache.
constexpr std::uint64_t kBufferedStepBytes = 1024 * 1024;

double seconds_since(Clock::time_point start) noexcept {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

std::uint64_t round_up(std::uint64_t value) noexcept {
    return (value + kDirectAlignmentBytes - 1) / kDirectAlignmentBytes * kDirectAlignmentBytes;
}

}  // namespace

// What one pass over a chunk gave.
struct ReadJob::Attempt {
    Outcome outcome = Outcome::done;
    int error = 0;
    std::uint64_t done_bytes = 0;
    std::uint64_t direct_bytes = 0;
    std::uint64_t digest = 0;
    double read_s = 0;
    double verify_s = 0;
};

bool ReadJob::wait(std::uint64_t seen_bytes, int timeout_ms) {
    std::unique_lock lock(mutex_);
    const auto has_ended = [this] { return is_exhausted_ && running_ == 0; };
    changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                      [&] { return has_ended() || done_bytes_ > seen_bytes; });
    return has_ended();
}

ReadResult ReadJob::result() const {
    const std::lock_guard lock(mutex_);
    assert(is_exhausted_ && running_ == 0);
    return result_;
}

bool ReadJob::is_stopping() const noexcept {
    return is_cancelled_ || (request_.cancel != nullptr && *request_.cancel);
}

bool ReadJob::take(std::size_t& chunk_index) {
    const std::lock_guard lock(mutex_);
    if (result_.outcome == Outcome::done && next_ < request_.chunks.size() && is_stopping()) {
        result_.outcome = Outcome::cancelled;
        result_.chunk_index = next_;
        result_.offset_bytes = request_.chunks[next_].offset_bytes;
    }
    if (result_.outcome != Outcome::done || next_ == request_.chunks.size()) {
        is_exhausted_ = true;
        if (running_ == 0) changed_.notify_all();
        return false;
    }
    chunk_index = next_++;
    ++running_;
    return true;
}

void ReadJob::run(std::size_t chunk_index) noexcept {
    const ChunkRead& chunk = request_.chunks[chunk_index];
    Attempt attempt = read(chunk, chunk.is_direct);
    bool is_reread = false;
    if (attempt.outcome == Outcome::corrupt) {
        // Once more, past the page cache where possible: the bad copy may be there, or in the transfer.
        is_reread = true;
        const Attempt first = attempt;
        attempt = read(chunk, true);
        attempt.read_s += first.read_s;
        attempt.verify_s += first.verify_s;
    }
    finish(chunk_index, chunk.size_bytes, attempt, is_reread);
}

ReadJob::Attempt ReadJob::read(const ChunkRead& chunk, bool is_direct) noexcept {
    Attempt attempt;
    Digest digest;
    bool uses_direct = is_direct && request_.direct_descriptor >= 0 && has_direct_;
    std::uint64_t& done = attempt.done_bytes;
    while (done < chunk.size_bytes) {
        if (is_stopping()) {
            attempt.outcome = Outcome::cancelled;
            return attempt;
        }
        // Direct reads are for whole blocks: the last one asks for more than the file has, and gets what
        // there is.
        const std::uint64_t wanted = uses_direct ? round_up(chunk.size_bytes) - done
                                                 : std::min(chunk.size_bytes - done, kBufferedStepBytes);
        const int descriptor = uses_direct ? request_.direct_descriptor : request_.buffered_descriptor;
        const auto read_start = Clock::now();
        const ssize_t count =
            ::pread(descriptor, chunk.target + done, wanted, static_cast<off_t>(chunk.offset_bytes + done));
        const int error = errno;
        attempt.read_s += seconds_since(read_start);
        if (count < 0) {
            if (error == EINTR) continue;
            if (error == EINVAL && uses_direct) {
                uses_direct = has_direct_ = false;
                continue;
            }
            attempt.outcome = Outcome::failed;
            attempt.error = error;
            return attempt;
        }
        if (count == 0) {
            attempt.outcome = Outcome::truncated;
            return attempt;
        }
        const std::uint64_t fresh = std::min(static_cast<std::uint64_t>(count), chunk.size_bytes - done);
        if (uses_direct) {
            attempt.direct_bytes += fresh;
            // A short read may end inside a block, from where a direct read cannot go on.
            if (fresh % kDirectAlignmentBytes != 0) uses_direct = false;
        }
        if (request_.is_verified) {
            const auto verify_start = Clock::now();
            digest.update(chunk.target + done, fresh);
            attempt.verify_s += seconds_since(verify_start);
        }
        done += fresh;
    }
    if (request_.is_verified && digest.value() != chunk.digest) attempt.outcome = Outcome::corrupt;
    return attempt;
}

void ReadJob::finish(std::size_t chunk_index, std::uint64_t size_bytes, const Attempt& attempt,
                     bool is_reread) {
    const std::lock_guard lock(mutex_);
    result_.read_s += attempt.read_s;
    result_.verify_s += attempt.verify_s;
    result_.direct_bytes += attempt.direct_bytes;
    result_.reread_chunks += is_reread ? 1 : 0;
    if (attempt.outcome == Outcome::done) {
        done_bytes_ += size_bytes;
    } else if (result_.outcome == Outcome::done) {
        result_.outcome = attempt.outcome;
        result_.error = attempt.error;
        result_.chunk_index = chunk_index;
        result_.offset_bytes = request_.chunks[chunk_index].offset_bytes;
        if (attempt.outcome == Outcome::truncated) result_.offset_bytes += attempt.done_bytes;
    }
    --running_;
    changed_.notify_all();
}

ReaderThreads::ReaderThreads(unsigned threads) {
    try {
        for (unsigned number = 0; number < threads; ++number) threads_.emplace_back([this] { serve(); });
    } catch (...) {
        {
            const std::lock_guard lock(mutex_);
            is_closing_ = true;
        }
        wake_.notify_all();
        for (auto& thread : threads_) thread.join();
        throw;
    }
}

ReaderThreads::~ReaderThreads() {
    {
        const std::lock_guard lock(mutex_);
        is_closing_ = true;
        for (const auto& job : jobs_) job->cancel();
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
}

std::shared_ptr<ReadJob> ReaderThreads::submit(ReadRequest request) {
    auto job = std::make_shared<ReadJob>(std::move(request));
    {
        const std::lock_guard lock(mutex_);
        jobs_.push_back(job);
    }
    wake_.notify_all();
    return job;
}

void ReaderThreads::serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [this] { return is_closing_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
        const std::shared_ptr<ReadJob> job = jobs_.front();
        std::size_t chunk_index = 0;
        if (!job->take(chunk_index)) {
            jobs_.pop_front();
            continue;
        }
        lock.unlock();
        job->run(chunk_index);
        lock.lock();
    }
}

}  // namespace ckptio
