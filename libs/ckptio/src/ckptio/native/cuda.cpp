#include "native/cuda.hpp"

#include <dlfcn.h>

#include <atomic>
#include <mutex>

#include "native/errors.hpp"

namespace ckptio {

namespace {

// Never unloaded: the runtime has state of its own that outlives any object of ours, up to the end of the
// process.
std::atomic<const CudaRuntime*> loaded{nullptr};
std::mutex load_mutex;

template <typename Function>
bool find(void* library, const char* name, Function*& function) noexcept {
    function = reinterpret_cast<Function*>(::dlsym(library, name));
    return function != nullptr;
}

bool find_all(void* library, CudaRuntime& cuda) noexcept {
    return find(library, "cudaGetDeviceCount", cuda.get_device_count) &&
           find(library, "cudaGetDevice", cuda.get_device) &&
           find(library, "cudaSetDevice", cuda.set_device) && find(library, "cudaMalloc", cuda.malloc) &&
           find(library, "cudaFree", cuda.free) && find(library, "cudaMemcpy", cuda.memcpy) &&
           find(library, "cudaMemcpyAsync", cuda.memcpy_async) &&
           find(library, "cudaStreamCreateWithFlags", cuda.stream_create) &&
           find(library, "cudaStreamDestroy", cuda.stream_destroy) &&
           find(library, "cudaStreamSynchronize", cuda.stream_synchronize) &&
           find(library, "cudaEventCreateWithFlags", cuda.event_create) &&
           find(library, "cudaEventDestroy", cuda.event_destroy) &&
           find(library, "cudaEventRecord", cuda.event_record) &&
           find(library, "cudaEventSynchronize", cuda.event_synchronize) &&
           find(library, "cudaHostRegister", cuda.host_register) &&
           find(library, "cudaHostUnregister", cuda.host_unregister) &&
           find(library, "cudaIpcGetMemHandle", cuda.ipc_get_handle) &&
           find(library, "cudaIpcOpenMemHandle", cuda.ipc_open_handle) &&
           find(library, "cudaIpcCloseMemHandle", cuda.ipc_close_handle) &&
           find(library, "cudaGetLastError", cuda.get_last_error) &&
           find(library, "cudaGetErrorString", cuda.get_error_string);
}

}  // namespace

const CudaRuntime* CudaRuntime::get() noexcept { return loaded; }

std::string CudaRuntime::load(const std::string& name, bool is_loaded_only) {
    const std::lock_guard lock(load_mutex);
    if (loaded != nullptr) return {};
    void* library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | (is_loaded_only ? RTLD_NOLOAD : 0));
    if (library == nullptr) return is_loaded_only ? name + " is not loaded" : ::dlerror();
    auto* cuda = new CudaRuntime{};
    if (!find_all(library, *cuda)) {
        delete cuda;
        ::dlclose(library);
        return name + " is not a CUDA runtime, or too old: it lacks a call that is needed";
    }
    // One that is newer than the driver sees no GPU: another may. It stays loaded, since it may have started
    // threads.
    int count = 0;
    if (const int code = cuda->get_device_count(&count); code != kCudaSuccess || count == 0) {
        std::string reason =
            name + ": " + (code == kCudaSuccess ? "it sees no GPU" : cuda->get_error_string(code));
        delete cuda;
        return reason;
    }
    loaded = cuda;
    return {};
}

std::string CudaRuntime::describe(int code) {
    const CudaRuntime* cuda = get();
    return cuda == nullptr ? std::string() : cuda->get_error_string(code);
}

CurrentDevice::CurrentDevice(int device) {
    const CudaRuntime& cuda = *CudaRuntime::get();
    check_cuda(cuda.get_device(&before_), "cudaGetDevice");
    check_cuda(cuda.set_device(device), "cudaSetDevice");
}

CurrentDevice::~CurrentDevice() { CudaRuntime::get()->set_device(before_); }

void check_cuda(int code, const char* operation) {
    if (code == kCudaSuccess) return;
    CudaRuntime::get()->get_last_error();
    throw DeviceError(code, operation);
}

}  // namespace ckptio
