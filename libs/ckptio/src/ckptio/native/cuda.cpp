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

std::string CudaRuntime::load(const std::string& name) {
    const std::lock_guard lock(load_mutex);
    if (loaded != nullptr) return {};
    void* library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return ::dlerror();
    auto* cuda = new CudaRuntime{};
    if (!find_all(library, *cuda)) {
        delete cuda;
        ::dlclose(library);
        return name + " is not a CUDA runtime, or too old: it lacks a call that is needed";
    }
    loaded = cuda;
    return {};
}

std::string CudaRuntime::describe(int code) {
    const CudaRuntime* cuda = get();
    return cuda == nullptr ? std::string() : cuda->get_error_string(code);
}

void check_cuda(int code, const char* operation) {
    if (code == kCudaSuccess) return;
    CudaRuntime::get()->get_last_error();
    throw DeviceError(code, operation);
}

}  // namespace ckptio
