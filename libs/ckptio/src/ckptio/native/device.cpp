#include "native/device.hpp"

#include <cassert>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <new>
#include <utility>
#include <vector>

#include "native/errors.hpp"
#include "native/faults.hpp"

namespace ckptio {

namespace {

constexpr std::size_t kHostAlignmentBytes = 4096;

class HostStream final : public CopyStream {
  public:
    void copy(std::byte* target, const std::byte* source, std::uint64_t size_bytes) override {
        if (const int code = copy_fault(); code != 0) throw DeviceError(code, "memcpy");
        std::memcpy(target, source, size_bytes);
    }
    std::uint64_t mark() override { return ++marks_; }
    void wait(std::uint64_t) override {}

  private:
    std::uint64_t marks_ = 0;
};

const CudaRuntime& require_cuda() {
    const CudaRuntime* cuda = CudaRuntime::get();
    assert(cuda != nullptr && "the caller has loaded the runtime");
    return *cuda;
}

class GpuStream final : public CopyStream {
  public:
    explicit GpuStream(int device) : cuda_(require_cuda()) {
        // The current device belongs to the thread, so a thread copies to one GPU only.
        check_cuda(cuda_.set_device(device), "cudaSetDevice");
        check_cuda(cuda_.stream_create(&stream_, kCudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    }

    ~GpuStream() override {
        // Whatever is on its way reads from memory that the caller will reuse.
        cuda_.stream_synchronize(stream_);
        for (const CudaEvent event : waiting_) cuda_.event_destroy(event);
        for (const CudaEvent event : spare_) cuda_.event_destroy(event);
        cuda_.stream_destroy(stream_);
    }

    void copy(std::byte* target, const std::byte* source, std::uint64_t size_bytes) override {
        if (const int code = copy_fault(); code != 0) throw DeviceError(code, "cudaMemcpyAsync");
        check_cuda(cuda_.memcpy_async(target, source, size_bytes, kCudaHostToDevice, stream_),
                   "cudaMemcpyAsync");
    }

    std::uint64_t mark() override {
        if (spare_.empty()) {
            CudaEvent fresh = nullptr;
            check_cuda(cuda_.event_create(&fresh, kCudaEventDisableTiming | kCudaEventBlockingSync),
                       "cudaEventCreateWithFlags");
            spare_.push_back(fresh);
        }
        check_cuda(cuda_.event_record(spare_.back(), stream_), "cudaEventRecord");
        waiting_.push_back(spare_.back());
        spare_.pop_back();
        return waited_ + waiting_.size();
    }

    void wait(std::uint64_t mark) override {
        while (waited_ < mark) {
            const CudaEvent event = waiting_.front();
            check_cuda(cuda_.event_synchronize(event), "cudaEventSynchronize");
            waiting_.pop_front();
            spare_.push_back(event);
            ++waited_;
        }
    }

  private:
    const CudaRuntime& cuda_;
    CudaStream stream_ = nullptr;
    std::deque<CudaEvent> waiting_;
    std::vector<CudaEvent> spare_;
    std::uint64_t waited_ = 0;
};

}  // namespace

std::unique_ptr<CopyStream> make_stream(int device) {
    if (device == kHostDevice) return std::make_unique<HostStream>();
    return std::make_unique<GpuStream>(device);
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : device_(other.device_),
      data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)),
      owner_(std::exchange(other.owner_, Owner::nobody)) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
    if (this != &other) {
        release();
        device_ = other.device_;
        data_ = std::exchange(other.data_, nullptr);
        size_bytes_ = std::exchange(other.size_bytes_, 0);
        owner_ = std::exchange(other.owner_, Owner::nobody);
    }
    return *this;
}

DeviceMemory DeviceMemory::allocate(int device, std::uint64_t size_bytes) {
    void* data = nullptr;
    if (device == kHostDevice) {
        data = std::aligned_alloc(kHostAlignmentBytes,
                                  (size_bytes / kHostAlignmentBytes + 1) * kHostAlignmentBytes);
        if (data == nullptr) throw std::bad_alloc();
    } else {
        const CudaRuntime& cuda = require_cuda();
        const CurrentDevice current(device);
        check_cuda(cuda.malloc(&data, size_bytes), "cudaMalloc");
    }
    return DeviceMemory(device, static_cast<std::byte*>(data), size_bytes, Owner::us);
}

DeviceMemory DeviceMemory::open(int device, const CudaIpcHandle& handle, std::uint64_t size_bytes) {
    const CudaRuntime& cuda = require_cuda();
    void* data = nullptr;
    const CurrentDevice current(device);
    check_cuda(cuda.ipc_open_handle(&data, handle, kCudaIpcLazyPeerAccess), "cudaIpcOpenMemHandle");
    return DeviceMemory(device, static_cast<std::byte*>(data), size_bytes, Owner::other_process);
}

DeviceMemory DeviceMemory::borrow(int device, std::byte* data, std::uint64_t size_bytes) noexcept {
    return DeviceMemory(device, data, size_bytes, Owner::nobody);
}

CudaIpcHandle DeviceMemory::ipc_handle() const {
    CudaIpcHandle handle{};
    check_cuda(require_cuda().ipc_get_handle(&handle, data_), "cudaIpcGetMemHandle");
    return handle;
}

void DeviceMemory::read(std::byte* target, std::uint64_t offset_bytes, std::uint64_t size_bytes) const {
    assert(offset_bytes <= size_bytes_ && size_bytes <= size_bytes_ - offset_bytes);
    if (device_ == kHostDevice) {
        std::memcpy(target, data_ + offset_bytes, size_bytes);
        return;
    }
    const CudaRuntime& cuda = require_cuda();
    const CurrentDevice current(device_);
    check_cuda(cuda.memcpy(target, data_ + offset_bytes, size_bytes, kCudaDeviceToHost), "cudaMemcpy");
}

void DeviceMemory::release() noexcept {
    if (data_ != nullptr && owner_ == Owner::us && device_ == kHostDevice) {
        std::free(data_);
    } else if (data_ != nullptr && owner_ != Owner::nobody) {
        const CudaRuntime& cuda = *CudaRuntime::get();
        try {
            const CurrentDevice current(device_);
            owner_ == Owner::us ? cuda.free(data_) : cuda.ipc_close_handle(data_);
        } catch (const DeviceError&) {
            // The GPU is lost, and its memory with it.
        }
    }
    data_ = nullptr;
    size_bytes_ = 0;
    owner_ = Owner::nobody;
}

}  // namespace ckptio
