// Places that weights are copied to: a GPU, or host memory, which has the same face and runs everywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "native/cuda.hpp"

namespace ckptio {

// Copies in order, maybe behind the caller's back; from one thread.
class CopyStream {
  public:
    virtual ~CopyStream() = default;
    // Starts a copy. `source` must stay as it is until `wait` has returned for a mark set after it.
    virtual void copy(std::byte* target, const std::byte* source, std::uint64_t size_bytes) = 0;
    // Notes the place in the stream; marks count up from 1.
    virtual std::uint64_t mark() = 0;
    // Returns when everything before this mark has arrived. Marks must be waited for in order.
    virtual void wait(std::uint64_t mark) = 0;
};

inline constexpr int kHostDevice = -1;

// A stream of GPU number `device`, or of host memory for kHostDevice. Must be made in the thread that uses
// it.
std::unique_ptr<CopyStream> make_stream(int device);

// Memory of a device; that of a GPU may belong to another process.
class DeviceMemory {
  public:
    static DeviceMemory allocate(int device, std::uint64_t size_bytes);
    // Memory that another process allocated and described with `ipc_handle`.
    static DeviceMemory open(int device, const CudaIpcHandle& handle, std::uint64_t size_bytes);
    // Memory that somebody else owns and keeps.
    static DeviceMemory borrow(int device, std::byte* data, std::uint64_t size_bytes) noexcept;

    DeviceMemory() noexcept = default;
    DeviceMemory(DeviceMemory&& other) noexcept;
    DeviceMemory& operator=(DeviceMemory&& other) noexcept;
    ~DeviceMemory() { release(); }

    int device() const noexcept { return device_; }
    std::byte* data() const noexcept { return data_; }
    std::uint64_t size_bytes() const noexcept { return size_bytes_; }

    CudaIpcHandle ipc_handle() const;
    // Copies to host memory, and waits for it.
    void read(std::byte* target, std::uint64_t offset_bytes, std::uint64_t size_bytes) const;
    void release() noexcept;

  private:
    enum class Owner { nobody, us, other_process };
    DeviceMemory(int device, std::byte* data, std::uint64_t size_bytes, Owner owner) noexcept
        : device_(device), data_(data), size_bytes_(size_bytes), owner_(owner) {}

    int device_ = kHostDevice;
    std::byte* data_ = nullptr;
    std::uint64_t size_bytes_ = 0;
    Owner owner_ = Owner::nobody;
};

}  // namespace ckptio
