# The header of the bindings: what the C++ offers, and the fields of the classes that wrap it.

from libc.stdint cimport int64_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector
from posix.types cimport pid_t


cdef extern from *:
    """
    #include <new>
    #include <system_error>
    #include "native/errors.hpp"
    // A GPU runtime's code becomes ckptio.DeviceError.
    static void ckptio_raise_device_error(int code, const char* operation) {
        PyObject* module = PyImport_ImportModule("ckptio.devices");
        PyObject* error =
            module == nullptr ? nullptr : PyObject_CallMethod(module, "device_error", "is", code, operation);
        if (error != nullptr) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
        Py_XDECREF(error);
        Py_XDECREF(module);
    }
    // The one translator: an errno becomes the OSError subclass that Python has for it; callers add the path.
    static void ckptio_translate() {
        try {
            throw;
        } catch (const ckptio::SystemError& error) {
            errno = error.code();
            PyErr_SetFromErrno(PyExc_OSError);
        } catch (const ckptio::DeviceError& error) {
            ckptio_raise_device_error(error.code(), error.what());
        } catch (const std::bad_alloc&) {
            PyErr_NoMemory();
        } catch (const std::system_error& error) {
            // Threads that could not be started.
            errno = error.code().value();
            PyErr_SetFromErrno(PyExc_OSError);
        } catch (const std::exception& error) {
            PyErr_SetString(PyExc_RuntimeError, error.what());
        }
    }
    """
    void ckptio_translate() noexcept


cdef extern from "<cstddef>" namespace "std" nogil:
    ctypedef struct byte:
        pass


cdef extern from "native/region.hpp" namespace "ckptio" nogil:
    cdef cppclass Region:
        Region() noexcept
        byte* data() noexcept
        uint64_t size_bytes() noexcept
        int advise_huge_pages() noexcept
        int lock_in_memory() noexcept
        void prefault(unsigned threads) except +ckptio_translate

    Region region_shared "ckptio::Region::shared"(int descriptor, uint64_t size_bytes) except +ckptio_translate
    Region region_anonymous "ckptio::Region::anonymous"(uint64_t size_bytes) except +ckptio_translate
    Region region_stitched "ckptio::Region::stitched"(
        int descriptor, uint64_t chunk_size_bytes, const vector[uint64_t]& chunk_indices, uint64_t size_bytes
    ) except +ckptio_translate
    uint64_t c_resident_bytes "ckptio::resident_bytes"(
        int descriptor, uint64_t offset_bytes, uint64_t size_bytes
    ) noexcept


cdef extern from "native/reader.hpp" namespace "ckptio" nogil:
    cdef uint64_t DIRECT_ALIGNMENT_BYTES "ckptio::kDirectAlignmentBytes"

    cdef cppclass CancelFlag:
        CancelFlag(cbool value) noexcept
        cbool load() noexcept
        void store(cbool value) noexcept

    cdef enum class Outcome(int):
        done
        cancelled
        failed
        truncated
        corrupt

    cdef struct ChunkRead:
        byte* target
        uint64_t file
        uint64_t offset_bytes
        uint64_t size_bytes
        uint64_t digest
        cbool is_direct
        cbool is_resident

    cdef struct ReadFile:
        int buffered_descriptor
        int direct_descriptor

    cdef cppclass ChunkSink:
        pass

    cdef struct ReadRequest:
        vector[ReadFile] files
        cbool is_verified
        cbool is_bounced
        vector[ChunkRead] chunks
        shared_ptr[CancelFlag] cancel
        shared_ptr[ChunkSink] sink

    cdef struct ReadResult:
        Outcome outcome
        int error
        uint64_t chunk_index
        uint64_t offset_bytes
        uint64_t direct_bytes
        uint64_t reread_chunks
        double read_s
        double verify_s

    cdef cppclass ReadJob:
        cbool wait(uint64_t seen_bytes, int timeout_ms) except +ckptio_translate
        uint64_t done_bytes() noexcept
        void cancel() noexcept
        ReadResult result() except +ckptio_translate
        vector[size_t] take_arrived() except +ckptio_translate

    cdef cppclass CReaderThreads "ckptio::ReaderThreads":
        shared_ptr[ReadJob] submit(ReadRequest request) except +ckptio_translate


cdef extern from "native/cuda.hpp" namespace "ckptio" nogil:
    cdef struct CudaIpcHandle:
        unsigned char bytes[64]

    cdef cppclass CudaRuntime:
        int get_device_count(int* count) noexcept
        int host_register(void* data, size_t size_bytes, unsigned flags) noexcept
        int host_unregister(void* data) noexcept

    const CudaRuntime* cuda_get "ckptio::CudaRuntime::get"() noexcept
    string cuda_load "ckptio::CudaRuntime::load"(const string& name, cbool is_loaded_only) except +ckptio_translate
    string cuda_describe "ckptio::CudaRuntime::describe"(int code) except +ckptio_translate
    void check_cuda(int code, const char* operation) except +ckptio_translate
    cdef unsigned HOST_REGISTER_PORTABLE "ckptio::kCudaHostRegisterPortable"


cdef extern from "native/device.hpp" namespace "ckptio" nogil:
    cdef cppclass CDeviceMemory "ckptio::DeviceMemory":
        CDeviceMemory() noexcept
        CDeviceMemory(CDeviceMemory other) noexcept
        int device() noexcept
        byte* data() noexcept
        uint64_t size_bytes() noexcept
        CudaIpcHandle ipc_handle() except +ckptio_translate
        void read(byte* target, uint64_t offset_bytes, uint64_t size_bytes) except +ckptio_translate

    CDeviceMemory memory_allocate "ckptio::DeviceMemory::allocate"(
        int device, uint64_t size_bytes
    ) except +ckptio_translate
    CDeviceMemory memory_open "ckptio::DeviceMemory::open"(
        int device, const CudaIpcHandle& handle, uint64_t size_bytes
    ) except +ckptio_translate
    CDeviceMemory memory_borrow "ckptio::DeviceMemory::borrow"(int device, byte* data, uint64_t size_bytes) noexcept


cdef extern from "native/pipeline.hpp" namespace "ckptio" nogil:
    cdef struct CopyTarget:
        int device
        byte* data

    cdef struct ChunkCopy:
        uint64_t target
        uint64_t offset_bytes
        uint64_t size_bytes

    cdef struct CopyResult:
        int error
        const char* operation
        uint64_t copied_bytes
        double seconds

    cdef cppclass CCopyPipeline "ckptio::CopyPipeline"(ChunkSink):
        void deliver(size_t chunk_index, byte* data) noexcept
        cbool has_failed() noexcept
        uint64_t copied_bytes() noexcept
        size_t chunk_count() noexcept
        void end(cbool is_dropping) noexcept
        cbool wait(int timeout_ms) except +ckptio_translate
        CopyResult result() except +ckptio_translate


cdef extern from *:
    """
    #include <memory>
    #include "native/pipeline.hpp"
    // What make_shared throws would not go through our translator.
    static std::shared_ptr<ckptio::ReaderThreads> ckptio_make_threads(unsigned threads) {
        return std::make_shared<ckptio::ReaderThreads>(threads);
    }
    static std::shared_ptr<ckptio::CopyPipeline> ckptio_make_pipeline(std::vector<ckptio::CopyTarget> targets,
                                                                      std::vector<ckptio::ChunkCopy> copies,
                                                                      std::vector<std::byte*> ring,
                                                                      bool is_pipelined) {
        return std::make_shared<ckptio::CopyPipeline>(std::move(targets), std::move(copies), std::move(ring),
                                                      is_pipelined);
    }
    """
    shared_ptr[CReaderThreads] ckptio_make_threads(unsigned threads) except +ckptio_translate
    shared_ptr[CCopyPipeline] ckptio_make_pipeline(
        vector[CopyTarget] targets, vector[ChunkCopy] copies, vector[byte*] ring, cbool is_pipelined
    ) except +ckptio_translate nogil


cdef extern from "native/faults.hpp" namespace "ckptio" nogil:
    # Atomics take the plain assignment that Cython writes.
    cdef cppclass Faults:
        cbool is_active
        uint64_t read_bytes_max
        int read_error
        int64_t read_error_offset
        int64_t corrupt_offset
        int times
        unsigned read_delay_us
        int copy_error
        int64_t copy_error_after
        void clear() noexcept

    Faults faults


cdef class Mapping:
    cdef Region region
    # Views that are alive: buffers given out, and pins for owners that drop their buffer but keep the address.
    cdef readonly Py_ssize_t views
    cdef readonly bint is_closed

    cdef _ensure_open(self)


cdef class Pin:
    cdef Mapping mapping


cdef class CancelToken:
    cdef shared_ptr[CancelFlag] flag


cdef class ReaderThreads:
    # Threads do not survive a fork: in a child there is nothing to end.
    cdef pid_t owner_pid
    # Shared with reads that are just being submitted, so that a concurrent close is safe.
    cdef shared_ptr[CReaderThreads] threads

    cdef _read(self, Mapping target, chunks, files, bint is_verified, bint is_bounced, CancelToken cancel,
               CopyPipeline sink, progress, arrived)


cdef class DeviceMemory:
    cdef CDeviceMemory memory
    # Copies that are under way: a close waits for nobody, so it refuses.
    cdef Py_ssize_t users
    cdef readonly bint is_closed
    cdef pid_t owner_pid
    cdef object owner

    cdef _ensure_open(self)
    cdef _free(self)


cdef class CopyPipeline:
    cdef pid_t owner_pid
    cdef shared_ptr[CCopyPipeline] pipeline
    cdef uint64_t ring_chunk_bytes
    # What the copies go to and come from, kept open until `finish`.
    cdef list targets
    cdef Mapping ring_mapping
    # What progress was reported up to.
    cdef uint64_t told_bytes

    cdef _ensure_open(self)
    cdef _tell(self, progress)
    cdef _release(self)
