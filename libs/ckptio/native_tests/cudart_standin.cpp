// A stand-in for the CUDA runtime, for tests without a GPU. It is stricter than the real one:
//
// * Streams run on threads of their own and take their time, so a missing synchronisation shows.
// * Device memory is filled with a poison when allocated, and its address can't be touched by the host at
// all: its bytes
//   live in a second mapping that only this library knows.
// * A copy from host memory that was not page-locked is made at once, as the real runtime stages it, and
// counted.
// * The source of an asynchronous copy is read when its turn comes, so a chunk that was reused too early
// shows.
//
// Built by the tests as a shared library (loaded by dlopen like the real one) or linked into the native
// tests.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101, kNotReady = 600;
constexpr int kAlreadyRegistered = 712, kNotRegistered = 713;
constexpr int kDevices = 8;
constexpr unsigned char kPoison = 0xA5;

// Long enough that a copy is never done when the call returns, short enough for many tests. STANDIN_COPY_US
// makes a slow device.
std::chrono::microseconds copy_time() {
    static const char* const given = std::getenv("STANDIN_COPY_US");
    return std::chrono::microseconds(given == nullptr ? 200 : std::strtol(given, nullptr, 10));
}

struct Allocation {
    std::size_t size;
    unsigned char* bytes;  // where the library itself reads and writes
    int descriptor;
    bool is_foreign;
};

std::mutex mutex;  // guards the tables
std::map<std::uintptr_t, Allocation> allocations;
std::map<std::uintptr_t, std::size_t> registered;
thread_local int current_device = 0;
thread_local int last_error = kSuccess;
std::atomic<std::int64_t> pageable_copies{0}, live_streams{0}, live_events{0};
std::atomic<std::int64_t> copies_until_failure{-1};

int note(int code) {
    if (code != kSuccess && code != kNotReady) last_error = code;
    return code;
}

// The library's own address of a range of device memory; null when it is not one.
unsigned char* bytes_of(const void* address, std::size_t size) {
    const auto place = reinterpret_cast<std::uintptr_t>(address);
    const std::lock_guard lock(mutex);
    auto found = allocations.upper_bound(place);
    if (found == allocations.begin()) return nullptr;
    --found;
    const std::size_t offset = place - found->first;
    if (offset > found->second.size || size > found->second.size - offset) return nullptr;
    return found->second.bytes + offset;
}

bool is_registered(const void* address, std::size_t size) {
    const auto place = reinterpret_cast<std::uintptr_t>(address);
    const std::lock_guard lock(mutex);
    auto found = registered.upper_bound(place);
    if (found == registered.begin()) return false;
    --found;
    return place - found->first <= found->second && size <= found->second - (place - found->first);
}

int add_allocation(void** result, int descriptor, std::size_t size, bool is_foreign) {
    void* bytes = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    void* address = ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (bytes == MAP_FAILED || address == MAP_FAILED) return kOutOfMemory;
    if (!is_foreign) std::memset(bytes, kPoison, size);
    const std::lock_guard lock(mutex);
    allocations[reinterpret_cast<std::uintptr_t>(address)] = {size, static_cast<unsigned char*>(bytes),
                                                              descriptor, is_foreign};
    *result = address;
    return kSuccess;
}

int remove_allocation(void* address, bool is_foreign) {
    const std::lock_guard lock(mutex);
    const auto found = allocations.find(reinterpret_cast<std::uintptr_t>(address));
    if (found == allocations.end() || found->second.is_foreign != is_foreign) return kInvalidValue;
    ::munmap(found->second.bytes, found->second.size);
    ::munmap(address, found->second.size);
    ::close(found->second.descriptor);
    allocations.erase(found);
    return kSuccess;
}

struct Handle {
    int pid;
    int descriptor;
    std::size_t size;
};

}  // namespace

struct CUevent_st {
    std::mutex mutex;
    std::condition_variable changed;
    std::uint64_t recorded = 0;
    std::uint64_t reached = 0;

    // Whoever waits may destroy the event as soon as the lock is free, so it is told before.
    void reach(std::uint64_t turn) {
        const std::lock_guard lock(mutex);
        reached = turn;
        changed.notify_all();
    }
    void wait() {
        std::unique_lock lock(mutex);
        const std::uint64_t turn = recorded;
        changed.wait(lock, [&] { return reached >= turn; });
    }
};

struct CUstream_st {
    CUstream_st() : thread([this] { serve(); }) {}
    ~CUstream_st() {
        {
            const std::lock_guard lock(mutex);
            is_closing = true;
        }
        changed.notify_all();
        thread.join();
    }

    void push(std::function<void()> work) {
        {
            const std::lock_guard lock(mutex);
            queue.push_back(std::move(work));
        }
        changed.notify_all();
    }
    void synchronize() {
        CUevent_st event;
        event.recorded = 1;
        push([&event] { event.reach(1); });
        event.wait();
    }
    void serve() {
        std::unique_lock lock(mutex);
        for (;;) {
            changed.wait(lock, [this] { return is_closing || !queue.empty(); });
            if (queue.empty()) return;
            std::function<void()> work = std::move(queue.front());
            queue.pop_front();
            lock.unlock();
            work();
            lock.lock();
        }
    }

    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> queue;
    bool is_closing = false;
    std::thread thread;
};

extern "C" {

struct cudaIpcMemHandle {
    unsigned char bytes[64];
};

int cudaGetDeviceCount(int* count) {
    *count = kDevices;
    return kSuccess;
}

int cudaGetDevice(int* device) {
    *device = current_device;
    return kSuccess;
}

int cudaSetDevice(int device) {
    if (device < 0 || device >= kDevices) return note(kInvalidDevice);
    current_device = device;
    return kSuccess;
}

int cudaMalloc(void** result, std::size_t size) {
    if (size == 0) return note(kInvalidValue);
    const int descriptor = ::memfd_create("device-memory", MFD_CLOEXEC);
    if (descriptor < 0 || ::ftruncate(descriptor, static_cast<off_t>(size)) != 0) return note(kOutOfMemory);
    return note(add_allocation(result, descriptor, size, false));
}

int cudaFree(void* address) { return note(remove_allocation(address, false)); }

int cudaMemcpy(void* target, const void* source, std::size_t size, int kind) {
    unsigned char* device = bytes_of(kind == 1 ? target : source, size);
    if (device == nullptr || (kind != 1 && kind != 2)) return note(kInvalidValue);
    if (kind == 1) {
        std::memcpy(device, source, size);
    } else {
        std::memcpy(target, device, size);
    }
    return kSuccess;
}

int cudaMemcpyAsync(void* target, const void* source, std::size_t size, int kind, CUstream_st* stream) {
    unsigned char* device = bytes_of(target, size);
    if (device == nullptr || kind != 1 || stream == nullptr) return note(kInvalidValue);
    if (copies_until_failure >= 0 && copies_until_failure.fetch_sub(1) == 0) return note(kOutOfMemory);
    if (!is_registered(source, size)) {
        ++pageable_copies;
        stream->synchronize();
        std::memcpy(device, source, size);
        return kSuccess;
    }
    stream->push([=] {
        std::this_thread::sleep_for(copy_time());
        std::memcpy(device, source, size);
    });
    return kSuccess;
}

int cudaStreamCreateWithFlags(CUstream_st** stream, unsigned) {
    *stream = new CUstream_st;
    ++live_streams;
    return kSuccess;
}

int cudaStreamDestroy(CUstream_st* stream) {
    delete stream;
    --live_streams;
    return kSuccess;
}

int cudaStreamSynchronize(CUstream_st* stream) {
    stream->synchronize();
    return kSuccess;
}

int cudaEventCreateWithFlags(CUevent_st** event, unsigned) {
    *event = new CUevent_st;
    ++live_events;
    return kSuccess;
}

int cudaEventDestroy(CUevent_st* event) {
    delete event;
    --live_events;
    return kSuccess;
}

int cudaEventRecord(CUevent_st* event, CUstream_st* stream) {
    std::uint64_t turn = 0;
    {
        const std::lock_guard lock(event->mutex);
        turn = ++event->recorded;
    }
    stream->push([=] { event->reach(turn); });
    return kSuccess;
}

int cudaEventSynchronize(CUevent_st* event) {
    event->wait();
    return kSuccess;
}

int cudaHostRegister(void* address, std::size_t size, unsigned) {
    const auto place = reinterpret_cast<std::uintptr_t>(address);
    const std::lock_guard lock(mutex);
    if (size == 0) return note(kInvalidValue);
    if (!registered.emplace(place, size).second) return note(kAlreadyRegistered);
    return kSuccess;
}

int cudaHostUnregister(void* address) {
    const std::lock_guard lock(mutex);
    return note(registered.erase(reinterpret_cast<std::uintptr_t>(address)) == 1 ? kSuccess : kNotRegistered);
}

int cudaIpcGetMemHandle(cudaIpcMemHandle* result, void* address) {
    const std::lock_guard lock(mutex);
    const auto found = allocations.find(reinterpret_cast<std::uintptr_t>(address));
    if (found == allocations.end()) return note(kInvalidValue);
    const Handle handle{::getpid(), found->second.descriptor, found->second.size};
    std::memset(result, 0, sizeof(*result));
    std::memcpy(result, &handle, sizeof(handle));
    return kSuccess;
}

// Like the real runtime, refuses a handle of the process that made it.
int cudaIpcOpenMemHandle(void** result, cudaIpcMemHandle raw, unsigned) {
    Handle handle{};
    std::memcpy(&handle, &raw, sizeof(handle));
    if (handle.pid == ::getpid()) return note(kInvalidDevice);
    char path[64];
    std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", handle.pid, handle.descriptor);
    const int descriptor = ::open(path, O_RDWR | O_CLOEXEC);
    if (descriptor < 0) return note(kInvalidValue);
    return note(add_allocation(result, descriptor, handle.size, true));
}

int cudaIpcCloseMemHandle(void* address) { return note(remove_allocation(address, true)); }

int cudaGetLastError() {
    const int code = last_error;
    last_error = kSuccess;
    return code;
}

const char* cudaGetErrorString(int code) {
    switch (code) {
        case kSuccess:
            return "no error";
        case kInvalidValue:
            return "invalid argument";
        case kOutOfMemory:
            return "out of memory";
        case kInvalidDevice:
            return "invalid device ordinal";
        case kAlreadyRegistered:
            return "this range is registered already";
        case kNotRegistered:
            return "no registered range starts here";
        default:
            return "unknown error";
    }
}

// What tests ask: how much is still there, and how many copies were not asynchronous.
std::int64_t standin_live_allocations() {
    const std::lock_guard lock(mutex);
    return static_cast<std::int64_t>(allocations.size());
}
std::int64_t standin_live_registrations() {
    const std::lock_guard lock(mutex);
    return static_cast<std::int64_t>(registered.size());
}
std::int64_t standin_live_streams() { return live_streams; }
std::int64_t standin_live_events() { return live_events; }
std::int64_t standin_pageable_copies() { return pageable_copies; }
// The copy after `copies` more fails as if memory had run out; a negative number ends that.
void standin_fail_after(std::int64_t copies) { copies_until_failure = copies; }

}  // extern "C"
