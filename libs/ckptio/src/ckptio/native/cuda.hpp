// The CUDA runtime, reached by dlopen: one binary runs with and without a GPU, and needs no toolkit to build.
// Declares only the calls that are used; names and numbers are those of the runtime's API, stable since
// CUDA 4.
#pragma once

#include <cstddef>
#include <string>

namespace ckptio {

using CudaStream = struct CUstream_st*;
using CudaEvent = struct CUevent_st*;

struct CudaIpcHandle {
    unsigned char bytes[64];
};

inline constexpr int kCudaSuccess = 0;
inline constexpr int kCudaHostToDevice = 1;
inline constexpr int kCudaDeviceToHost = 2;
inline constexpr unsigned kCudaStreamNonBlocking = 1;
inline constexpr unsigned kCudaEventBlockingSync = 1;
inline constexpr unsigned kCudaEventDisableTiming = 2;
inline constexpr unsigned kCudaHostRegisterPortable = 1;
inline constexpr unsigned kCudaIpcLazyPeerAccess = 1;

struct CudaRuntime {
    int (*get_device_count)(int*);
    int (*get_device)(int*);
    int (*set_device)(int);
    int (*malloc)(void**, std::size_t);
    int (*free)(void*);
    int (*memcpy)(void*, const void*, std::size_t, int kind);
    int (*memcpy_async)(void*, const void*, std::size_t, int kind, CudaStream);
    int (*stream_create)(CudaStream*, unsigned flags);
    int (*stream_destroy)(CudaStream);
    int (*stream_synchronize)(CudaStream);
    int (*event_create)(CudaEvent*, unsigned flags);
    int (*event_destroy)(CudaEvent);
    int (*event_record)(CudaEvent, CudaStream);
    int (*event_synchronize)(CudaEvent);
    int (*host_register)(void*, std::size_t, unsigned flags);
    int (*host_unregister)(void*);
    int (*ipc_get_handle)(CudaIpcHandle*, void*);
    int (*ipc_open_handle)(void**, CudaIpcHandle, unsigned flags);
    int (*ipc_close_handle)(void*);
    int (*get_last_error)();
    const char* (*get_error_string)(int);

    // The loaded runtime; null when `load` has not succeeded in this process.
    static const CudaRuntime* get() noexcept;
    // Loads the library `name`, once and for good if it sees a GPU; returns what went wrong, empty when
    // nothing did. With `is_loaded_only` it must be in this process already.
    static std::string load(const std::string& name, bool is_loaded_only);
    // What the runtime calls an error code; empty without a runtime.
    static std::string describe(int code);
};

// Makes a GPU the current one of this thread, and the one before it again at the end: the runtime is shared
// with whoever else uses it here.
class CurrentDevice {
  public:
    explicit CurrentDevice(int device);
    ~CurrentDevice();
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;

  private:
    int before_ = 0;
};

// Throws DeviceError for any code but success, and clears the runtime's own note of it.
void check_cuda(int code, const char* operation);

}  // namespace ckptio
