# cython: language_level=3, embedsignature=True
"""Bindings: convert arguments, release the GIL, make one call, wrap the result. No decisions here."""

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport make_shared, shared_ptr
from libcpp.utility cimport move
from libcpp.vector cimport vector

cimport cython


# How long a waiting caller may go without looking at signals (Ctrl-C).
cdef int WAIT_MS = 50


def resident_bytes(int descriptor, uint64_t offset_bytes, uint64_t size_bytes):
    """Bytes of a range of a file that are in the page cache; 0 where the kernel does not tell."""
    cdef uint64_t result
    with nogil:
        result = c_resident_bytes(descriptor, offset_bytes, size_bytes)
    return result


cdef class Mapping:
    """An owned range of memory with the buffer protocol: a pool, a private buffer, or chunks mapped back to back.

    Made by `shared`, `anonymous` and `stitched`. `close` refuses while a buffer or a pin of it is alive.
    """

    def __init__(self):
        raise TypeError("use map_chunks or ChunkPool.create")

    @staticmethod
    def shared(int descriptor, uint64_t size_bytes):
        """The whole of a file, shared."""
        cdef Mapping self = Mapping.__new__(Mapping)
        with nogil:
            self.region = region_shared(descriptor, size_bytes)
        return self

    @staticmethod
    def anonymous(uint64_t size_bytes):
        """Private zeroed memory."""
        cdef Mapping self = Mapping.__new__(Mapping)
        with nogil:
            self.region = region_anonymous(size_bytes)
        return self

    @staticmethod
    def stitched(int descriptor, uint64_t chunk_size_bytes, chunk_indices, uint64_t size_bytes):
        """Chunks of a file back to back, private. The caller has checked them against the file."""
        cdef Mapping self = Mapping.__new__(Mapping)
        cdef vector[uint64_t] indices = chunk_indices
        with nogil:
            self.region = region_stitched(descriptor, chunk_size_bytes, indices, size_bytes)
        return self

    @property
    def size_bytes(self):
        """Size of the range."""
        return self.region.size_bytes()

    def pin(self):
        """An object with the same bytes that keeps this mapping open as long as it lives."""
        self._ensure_open()
        return Pin(self)

    def advise_huge_pages(self):
        """Asks for huge pages; returns 0 or an errno."""
        return self.region.advise_huge_pages()

    def lock_in_memory(self):
        """Locks the range against swapping; returns 0 or an errno."""
        cdef int result
        with nogil:
            result = self.region.lock_in_memory()
        return result

    def prefault(self, unsigned threads):
        """Backs every page with memory."""
        with nogil:
            self.region.prefault(threads)

    def close(self):
        """Unmaps the range. Raises BufferError while views of it are alive. Closing twice is fine."""
        if self.views > 0:
            raise BufferError(f"{self.views} views of the mapping are alive")
        self.is_closed = True
        cdef Region region = move(self.region)
        with nogil:
            region = Region()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __len__(self):
        return self.region.size_bytes()

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        self._ensure_open()
        PyBuffer_FillInfo(buffer, self, self.region.data(), <Py_ssize_t>self.region.size_bytes(), 0, flags)
        self.views += 1

    def __releasebuffer__(self, Py_buffer* buffer):
        self.views -= 1

    cdef _ensure_open(self):
        if self.is_closed:
            raise ValueError("the mapping is closed")


@cython.no_gc_clear
cdef class Pin:
    """Keeps a mapping open, and has its buffer."""

    def __cinit__(self, Mapping mapping not None):
        self.mapping = mapping
        mapping.views += 1

    def __dealloc__(self):
        if self.mapping is not None:  # it is when __cinit__ was given no mapping
            self.mapping.views -= 1

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        cdef Py_ssize_t size_bytes = <Py_ssize_t>self.mapping.region.size_bytes()
        PyBuffer_FillInfo(buffer, self, self.mapping.region.data(), size_bytes, 0, flags)


cdef class CancelToken:
    """Tells running reads to stop before their next chunk. One token may be given to many reads."""

    def __cinit__(self):
        self.flag = make_shared[CancelFlag](False)

    def cancel(self):
        """Stops every read that has this token, now and later."""
        self.flag.get().store(True)

    @property
    def is_cancelled(self):
        """Whether `cancel` was called."""
        return self.flag.get().load()


cdef class ReaderThreads:
    """Persistent threads that fill chunks from files."""

    def __cinit__(self, unsigned threads):
        self.threads = make_shared[CReaderThreads](threads)

    def close(self):
        """Cancels what runs, and joins the threads."""
        cdef shared_ptr[CReaderThreads] threads
        threads.swap(self.threads)
        with nogil:
            threads.reset()

    def read(self, Mapping target not None, chunks, int buffered_descriptor, int direct_descriptor,
             bint is_verified, CancelToken cancel, progress):
        """Reads `chunks`, tuples of (target_offset_bytes, offset_bytes, size_bytes, digest, is_direct).

        Returns (outcome name, errno, chunk_index, offset_bytes, done_bytes, direct_bytes, reread_chunks, read_s,
        verify_s). `progress` is called in this thread with the bytes done so far; what it raises cancels the read.
        """
        target._ensure_open()
        # From here on nobody can close the target: its addresses are about to be handed out.
        target.views += 1
        try:
            return self._read(target, chunks, buffered_descriptor, direct_descriptor, is_verified, cancel, progress)
        finally:
            target.views -= 1

    cdef _read(self, Mapping target, chunks, int buffered_descriptor, int direct_descriptor, bint is_verified,
               CancelToken cancel, progress):
        cdef ReadRequest request
        cdef ChunkRead chunk
        cdef uint64_t target_offset
        request.buffered_descriptor = buffered_descriptor
        request.direct_descriptor = direct_descriptor
        request.is_verified = is_verified
        if cancel is not None:
            request.cancel = cancel.flag
        for target_offset, chunk.offset_bytes, chunk.size_bytes, chunk.digest, chunk.is_direct in chunks:
            if target_offset % DIRECT_ALIGNMENT_BYTES or chunk.offset_bytes % DIRECT_ALIGNMENT_BYTES:
                raise ValueError("a chunk is not aligned for direct reads")
            if target_offset + chunk.size_bytes > target.region.size_bytes():
                raise ValueError("a chunk ends after its target")
            chunk.target = target.region.data() + target_offset
            request.chunks.push_back(chunk)
        cdef shared_ptr[ReadJob] job
        cdef shared_ptr[CReaderThreads] threads = self.threads
        if threads.get() == NULL:
            raise ValueError("the reader threads are closed")
        with nogil:
            job = threads.get().submit(move(request))
            threads.reset()
        _follow(job.get(), progress)
        return _wrap(job.get())


cdef _follow(ReadJob* job, progress):
    cdef uint64_t seen_bytes = 0
    cdef uint64_t done_bytes
    cdef cbool has_ended = False
    try:
        while not has_ended:
            with nogil:
                has_ended = job.wait(seen_bytes, WAIT_MS)
                done_bytes = job.done_bytes()
            if done_bytes > seen_bytes and progress is not None:
                progress(done_bytes)
            seen_bytes = done_bytes
            PyErr_CheckSignals()
    finally:
        # The threads write into the caller's memory: nobody returns before they are done with it.
        job.cancel()
        while not has_ended:
            with nogil:
                has_ended = job.wait(seen_bytes, WAIT_MS)
                seen_bytes = job.done_bytes()


cdef _wrap(ReadJob* job):
    cdef ReadResult result = job.result()
    names = {Outcome.done: "done", Outcome.cancelled: "cancelled", Outcome.failed: "failed",
             Outcome.truncated: "truncated", Outcome.corrupt: "corrupt"}
    return (names[result.outcome], result.error, result.chunk_index, result.offset_bytes, job.done_bytes(),
            result.direct_bytes, result.reread_chunks, result.read_s, result.verify_s)
