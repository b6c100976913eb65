# The header of the bindings: what the C++ offers, and the fields of the classes that wrap it.

from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr
from libcpp.vector cimport vector


cdef extern from *:
    """
    #include <new>
    #include "native/errors.hpp"
    // The one translator: an errno becomes the OSError subclass that Python has for it; callers add the path.
    static void ckptio_translate() {
        try {
            throw;
        } catch (const ckptio::SystemError& error) {
            errno = error.code();
            PyErr_SetFromErrno(PyExc_OSError);
        } catch (const std::bad_alloc&) {
            PyErr_NoMemory();
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
        uint64_t offset_bytes
        uint64_t size_bytes
        uint64_t digest
        cbool is_direct

    cdef struct ReadRequest:
        int buffered_descriptor
        int direct_descriptor
        cbool is_verified
        vector[ChunkRead] chunks
        shared_ptr[CancelFlag] cancel

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

    cdef cppclass CReaderThreads "ckptio::ReaderThreads":
        CReaderThreads(unsigned threads) except +ckptio_translate
        shared_ptr[ReadJob] submit(ReadRequest request) except +ckptio_translate


cdef class Mapping:
    cdef Region region
    # Views that are alive: buffers given out, and pins for owners that drop their buffer but keep the address.
    cdef Py_ssize_t views
    cdef readonly bint is_closed

    cdef _ensure_open(self)


cdef class Pin:
    cdef Mapping mapping


cdef class CancelToken:
    cdef shared_ptr[CancelFlag] flag


cdef class ReaderThreads:
    # Shared with reads that are just being submitted, so that a concurrent close is safe.
    cdef shared_ptr[CReaderThreads] threads

    cdef _read(self, Mapping target, chunks, int buffered_descriptor, int direct_descriptor, bint is_verified,
               CancelToken cancel, progress)
