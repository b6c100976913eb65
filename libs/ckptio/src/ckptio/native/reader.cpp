#include "native/reader.hpp"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "native/digest.hpp"
#include "native/errors.hpp"
#include "native/faults.hpp"

namespace ckptio {

namespace {

using Clock = std::chrono::steady_clock;

// A buffered read is a copy by the processor: in steps of this size the digest finds the bytes still in its
// cache.
constexpr std::uint64_t kBufferedStepBytes = 1024 * 1024;

// Half of what a core's second-level cache usually holds, for the same reason.
constexpr std::uint64_t kCopyStepBytes = 256 * 1024;

double seconds_since(Clock::time_point start) noexcept {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

std::uint64_t round_up(std::uint64_t value) noexcept {
    return (value + kDirectAlignmentBytes - 1) / kDirectAlignmentBytes * kDirectAlignmentBytes;
}

}  // namespace

std::byte* BounceBuffer::data() noexcept {
    if (region_.data() == nullptr) {
        try {
            region_ = Region::anonymous(kSizeBytes);
            region_.advise_huge_pages();
            region_.prefault(1);
        } catch (const SystemError&) {
            region_ = Region();
        }
    }
    return region_.data();
}

ReadJob::ReadJob(ReadRequest request)
    : request_(std::move(request)), has_direct_(new std::atomic<bool>[request_.files.size()]) {
    // So that noting an arrival never fails.
    arrived_.reserve(request_.chunks.size());
    for (std::size_t file = 0; file < request_.files.size(); ++file) has_direct_[file] = true;
}

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

std::vector<std::size_t> ReadJob::take_arrived() {
    const std::lock_guard lock(mutex_);
    std::vector<std::size_t> taken(arrived_);
    arrived_.clear();
    return taken;
}

bool ReadJob::is_stopping() const noexcept {
    return is_cancelled_ || (request_.cancel != nullptr && *request_.cancel) ||
           (request_.sink != nullptr && request_.sink->has_failed());
}

ReadJob::Next ReadJob::take(Task& task) {
    const std::lock_guard lock(mutex_);
    const bool has_chunks = next_ < request_.chunks.size();
    if (result_.outcome == Outcome::done && (has_chunks || !unverified_.empty()) && is_stopping()) {
        const std::size_t chunk_index = unverified_.empty() ? next_ : unverified_.front().chunk_index;
        result_.outcome = Outcome::cancelled;
        result_.chunk_index = chunk_index;
        result_.offset_bytes = request_.chunks[chunk_index].offset_bytes;
    }
    if (result_.outcome != Outcome::done || (!has_chunks && unverified_.empty() && reading_ == 0)) {
        unverified_.clear();
        is_exhausted_ = true;
        if (running_ == 0) changed_.notify_all();
        return Next::never;
    }
    // Reading goes first, so that the device always has something to do, unless verification falls behind.
    const bool may_read = request_.readers_max == 0 || reading_ < request_.readers_max;
    const bool is_behind = unverified_.size() > 2 * request_.readers_max;
    if (has_chunks && may_read && !is_behind) {
        task = {next_++, true, {}};
        ++reading_;
    } else if (!unverified_.empty()) {
        task = unverified_.front();
        unverified_.pop_front();
    } else {
        return Next::later;
    }
    ++running_;
    return Next::task;
}

void ReadJob::run(Task& task, BounceBuffer& bounce) noexcept {
    const ChunkRead& chunk = request_.chunks[task.chunk_index];
    if (task.is_read) {
        task.attempt = handle(task.chunk_index, bounce);
        const std::lock_guard lock(mutex_);
        --reading_;
        if (task.attempt.outcome == Outcome::done && is_digested_later(chunk)) {
            unverified_.push_back({task.chunk_index, false, task.attempt});
            --running_;
            return;
        }
    } else {
        verify(task.chunk_index, task.attempt, bounce);
        deliver(task.chunk_index, chunk.target, task.attempt);
    }
    finish(task.chunk_index, task.attempt);
}

// A direct read needs no processor and a digest no device, so others can do the one while this thread goes on
// with the other: threads that did both would read in step, verify in step, and let the device wait
// meanwhile.
bool ReadJob::is_digested_later(const ChunkRead& chunk) const noexcept {
    // A place of a ring is not kept for longer than it must be; a bounce buffer is needed again at once.
    return request_.readers_max > 0 && request_.is_verified && chunk.is_direct && !chunk.is_resident &&
           chunk.target != nullptr && !request_.is_bounced;
}

ReadJob::Attempt ReadJob::handle(std::size_t chunk_index, BounceBuffer& bounce) noexcept {
    const ChunkRead& chunk = request_.chunks[chunk_index];
    Attempt attempt;
    std::byte* target = chunk.target;
    if (target == nullptr) target = request_.sink->acquire([this] { return is_stopping(); });
    if (target == nullptr) {
        attempt.outcome = Outcome::cancelled;
        return attempt;
    }
    const bool is_later = is_digested_later(chunk);
    if (!chunk.is_resident) {
        attempt = read(chunk, target, chunk.is_direct, !is_later, bounce);
        if (attempt.outcome == Outcome::corrupt) attempt = reread(chunk, target, attempt, bounce);
    }
    if (!is_later) deliver(chunk_index, target, attempt);
    return attempt;
}

void ReadJob::verify(std::size_t chunk_index, Attempt& attempt, BounceBuffer& bounce) noexcept {
    const ChunkRead& chunk = request_.chunks[chunk_index];
    const auto start = Clock::now();
    Digest digest;
    // In steps, so that a cancellation is heard.
    for (std::uint64_t done = 0; done < chunk.size_bytes; done += kBufferedStepBytes) {
        if (is_stopping()) {
            attempt.outcome = Outcome::cancelled;
            return;
        }
        digest.update(chunk.target + done, std::min(kBufferedStepBytes, chunk.size_bytes - done));
    }
    attempt.verify_s += seconds_since(start);
    if (digest.value() != chunk.digest) attempt = reread(chunk, chunk.target, attempt, bounce);
}

// Once more, past the page cache where possible: the bad copy may be there, or in the transfer.
ReadJob::Attempt ReadJob::reread(const ChunkRead& chunk, std::byte* target, const Attempt& first,
                                 BounceBuffer& bounce) noexcept {
    Attempt attempt = read(chunk, target, true, true, bounce);
    attempt.is_reread = true;
    attempt.direct_bytes += first.direct_bytes;
    attempt.read_s += first.read_s;
    attempt.verify_s += first.verify_s;
    return attempt;
}

void ReadJob::deliver(std::size_t chunk_index, std::byte* target, const Attempt& attempt) noexcept {
    if (attempt.outcome != Outcome::done || request_.sink == nullptr) return;
    request_.sink->deliver(chunk_index, target);
}

// One pass over a chunk: a loop of reads, each followed by the digest of what it gave.
class ReadJob::Pass {
  public:
    Pass(ReadJob& job, const ChunkRead& chunk, std::byte* target, bool is_direct, bool is_digested,
         BounceBuffer& bounce) noexcept
        : job_(job),
          file_(job.request_.files[chunk.file]),
          chunk_(chunk),
          target_(target),
          is_verified_(is_digested && job.request_.is_verified) {
        uses_direct_ = is_direct && file_.direct_descriptor >= 0 && job.has_direct_[chunk.file];
        if (uses_direct_ && job.request_.is_bounced) bounce_ = bounce.data();
    }

    Attempt run() noexcept {
        while (attempt_.done_bytes < chunk_.size_bytes) {
            if (job_.is_stopping()) return ended(Outcome::cancelled);
            const ssize_t count = read_some();
            if (count < 0) {
                if (attempt_.error == EINTR) continue;
                if (attempt_.error == EINVAL && uses_direct_) {
                    uses_direct_ = job_.has_direct_[chunk_.file] = false;
                    continue;
                }
                return ended(Outcome::failed);
            }
            if (count == 0) return ended(Outcome::truncated);
            accept(std::min(static_cast<std::uint64_t>(count), chunk_.size_bytes - attempt_.done_bytes));
        }
        const bool is_good = !is_verified_ || digest_.value() == chunk_.digest;
        return ended(is_good ? Outcome::done : Outcome::corrupt);
    }

  private:
    ssize_t read_some() noexcept {
        // Direct reads are for whole blocks: the last one asks for more than the file has, and gets what
        // there is.
        std::uint64_t wanted = uses_direct_
                                   ? round_up(chunk_.size_bytes) - attempt_.done_bytes
                                   : std::min(chunk_.size_bytes - attempt_.done_bytes, kBufferedStepBytes);
        std::byte* to = target_ + attempt_.done_bytes;
        if (uses_direct_ && bounce_ != nullptr) {
            wanted = std::min(wanted, BounceBuffer::kSizeBytes);
            to = bounce_;
        }
        const auto start = Clock::now();
        const ssize_t count = read_at(uses_direct_ ? file_.direct_descriptor : file_.buffered_descriptor, to,
                                      wanted, chunk_.offset_bytes + attempt_.done_bytes);
        attempt_.error = count < 0 ? errno : 0;
        attempt_.read_s += seconds_since(start);
        return count;
    }

    void accept(std::uint64_t size_bytes) noexcept {
        std::byte* to = target_ + attempt_.done_bytes;
        if (!uses_direct_ || bounce_ == nullptr) {
            digest(to, size_bytes);
        } else {
            // In steps that stay in the cache between the copy and the digest.
            for (std::uint64_t done = 0; done < size_bytes; done += kCopyStepBytes) {
                const std::uint64_t step = std::min(kCopyStepBytes, size_bytes - done);
                const auto start = Clock::now();
                std::memcpy(to + done, bounce_ + done, step);
                attempt_.read_s += seconds_since(start);
                digest(bounce_ + done, step);
            }
        }
        attempt_.done_bytes += size_bytes;
        if (!uses_direct_) return;
        attempt_.direct_bytes += size_bytes;
        // A short read may end inside a block, from where a direct read cannot go on.
        if (size_bytes % kDirectAlignmentBytes != 0) uses_direct_ = false;
    }

    void digest(const std::byte* data, std::uint64_t size_bytes) noexcept {
        if (!is_verified_) return;
        const auto start = Clock::now();
        digest_.update(data, size_bytes);
        attempt_.verify_s += seconds_since(start);
    }

    Attempt ended(Outcome outcome) noexcept {
        attempt_.outcome = outcome;
        return attempt_;
    }

    ReadJob& job_;
    const ReadFile& file_;
    const ChunkRead& chunk_;
    std::byte* const target_;
    const bool is_verified_;
    std::byte* bounce_ = nullptr;
    bool uses_direct_;
    Digest digest_;
    Attempt attempt_;
};

ReadJob::Attempt ReadJob::read(const ChunkRead& chunk, std::byte* target, bool is_direct, bool is_digested,
                               BounceBuffer& bounce) noexcept {
    return Pass(*this, chunk, target, is_direct, is_digested, bounce).run();
}

void ReadJob::finish(std::size_t chunk_index, const Attempt& attempt) {
    const ChunkRead& chunk = request_.chunks[chunk_index];
    const std::lock_guard lock(mutex_);
    result_.read_s += attempt.read_s;
    result_.verify_s += attempt.verify_s;
    result_.direct_bytes += attempt.direct_bytes;
    result_.reread_chunks += attempt.is_reread ? 1 : 0;
    if (attempt.outcome == Outcome::done) {
        arrived_.push_back(chunk_index);
        done_bytes_ += chunk.size_bytes;
    } else if (result_.outcome == Outcome::done) {
        result_.outcome = attempt.outcome;
        result_.error = attempt.error;
        result_.chunk_index = chunk_index;
        result_.offset_bytes = chunk.offset_bytes;
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
    // One thread is enough to verify what a device gives; a thread that is alone does both.
    request.readers_max = threads_.size() - 1;
    auto job = std::make_shared<ReadJob>(std::move(request));
    {
        const std::lock_guard lock(mutex_);
        jobs_.push_back(job);
    }
    wake_.notify_all();
    return job;
}

void ReaderThreads::serve() {
    BounceBuffer bounce;
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [this] { return is_closing_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
        const std::shared_ptr<ReadJob> job = jobs_.front();
        ReadJob::Task task;
        switch (job->take(task)) {
            case ReadJob::Next::never:
                if (!jobs_.empty() && jobs_.front() == job) jobs_.pop_front();
                break;
            case ReadJob::Next::later:
                wake_.wait(lock);
                break;
            case ReadJob::Next::task:
                lock.unlock();
                job->run(task, bounce);
                lock.lock();
                // There may be something to verify now, or the last read has ended.
                wake_.notify_all();
                break;
        }
    }
}

}  // namespace ckptio
