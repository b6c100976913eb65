# cython: language_level=3, embedsignature=True
"""Bindings: convert arguments, release the GIL, make one call, wrap the result. No decisions here."""

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.exc cimport PyErr_CheckSignals
from cython.operator cimport dereference as deref
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy
from libcpp cimport bool as cbool
from libcpp.memory cimport make_shared, shared_ptr, static_pointer_cast
from libcpp.utility cimport move
from libcpp.vector cimport vector
from posix.unistd cimport _SC_PAGESIZE, getpid, sysconf

cimport cython

ctypedef byte* bytep


# How long a waiting caller may go without looking at signals (Ctrl-C).
cdef int WAIT_MS = 50

cdef uint64_t PAGE_BYTES = sysconf(_SC_PAGESIZE)


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

    @property
    def address(self):
        """Where the range starts."""
        return <uint64_t>self.region.data()

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

    def __dealloc__(self):
        # Unmapping gigabytes takes a while, in which others can run.
        cdef Region region = move(self.region)
        with nogil:
            region = Region()

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
        self.owner_pid = getpid()
        self.threads = ckptio_make_threads(threads)

    def close(self):
        """Cancels what has chunks left to read, and joins the threads."""
        cdef shared_ptr[CReaderThreads] threads
        threads.swap(self.threads)
        if getpid() != self.owner_pid:
            new shared_ptr[CReaderThreads](threads)  # never deleted: its threads are in another process
            return
        with nogil:
            threads.reset()

    def __dealloc__(self):
        self.close()

    def read(self, Mapping target not None, chunks, files, bint is_verified, bint is_bounced, CancelToken cancel,
             CopyPipeline sink, progress, arrived=None):
        """Reads `chunks`, tuples of (target_offset_bytes or None, file, offset_bytes, size_bytes, digest, is_direct,
        is_resident), from `files`, tuples of (buffered_descriptor, direct_descriptor or -1).

        A chunk without a target is read to a place of the sink. Returns (outcome name, errno, chunk_index,
        offset_bytes, done_bytes, direct_bytes, reread_chunks, read_s, verify_s). `progress` is called in this thread
        with the bytes done so far, `arrived` with the numbers of the chunks that are there since its last call, also
        when the read ends badly; what they raise cancels the read.
        """
        target._ensure_open()
        # From here on nobody can close the target: its addresses are about to be handed out.
        target.views += 1
        try:
            return self._read(target, chunks, files, is_verified, is_bounced, cancel, sink, progress, arrived)
        finally:
            target.views -= 1

    cdef _read(self, Mapping target, chunks, files, bint is_verified, bint is_bounced, CancelToken cancel,
               CopyPipeline sink, progress, arrived):
        cdef ReadRequest request
        cdef ChunkRead chunk
        cdef ReadFile file
        cdef uint64_t target_offset
        cdef uint64_t room_bytes
        # Mappings are whole pages, also where their size is not.
        cdef uint64_t mapped_bytes = (target.region.size_bytes() + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES
        request.is_verified = is_verified
        request.is_bounced = is_bounced
        if cancel is not None:
            request.cancel = cancel.flag
        if sink is not None:
            sink._ensure_open()
            request.sink = static_pointer_cast[ChunkSink, CCopyPipeline](sink.pipeline)
        for file.buffered_descriptor, file.direct_descriptor in files:
            request.files.push_back(file)
        for target_offset_or_none, chunk.file, chunk.offset_bytes, chunk.size_bytes, chunk.digest, chunk.is_direct, \
                chunk.is_resident in chunks:
            if chunk.file >= request.files.size():
                raise ValueError("a chunk of a file that was not given")
            if chunk.offset_bytes % DIRECT_ALIGNMENT_BYTES:
                raise ValueError("a chunk is not aligned for direct reads")
            room_bytes = (chunk.size_bytes + DIRECT_ALIGNMENT_BYTES - 1) // DIRECT_ALIGNMENT_BYTES * DIRECT_ALIGNMENT_BYTES
            if target_offset_or_none is None:
                if sink is None or room_bytes > sink.ring_chunk_bytes:
                    raise ValueError("a chunk without a target needs a sink with places as large")
                chunk.target = NULL
            else:
                target_offset = target_offset_or_none
                if target_offset % DIRECT_ALIGNMENT_BYTES:
                    raise ValueError("a chunk is not aligned for direct reads")
                if room_bytes > mapped_bytes or target_offset > mapped_bytes - room_bytes:
                    raise ValueError("a chunk ends after its target")
                chunk.target = target.region.data() + target_offset
            request.chunks.push_back(chunk)
        if sink is not None and sink.pipeline.get().chunk_count() != request.chunks.size():
            raise ValueError("the sink was made for another number of chunks")
        cdef shared_ptr[ReadJob] job
        cdef shared_ptr[CReaderThreads] threads = self.threads
        if threads.get() == NULL:
            raise ValueError("the reader threads are closed")
        with nogil:
            job = threads.get().submit(move(request))
            threads.reset()
        _follow(job.get(), None if sink is not None else progress, sink, progress, arrived)
        return _wrap(job.get())


cdef _follow(ReadJob* job, progress, CopyPipeline sink, sink_progress, arrived):
    """Waits for a job. With a sink, what counts as progress is what has arrived there."""
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
            if arrived is not None:
                _tell_arrived(job, arrived)
            if sink is not None:
                sink._tell(sink_progress)
            seen_bytes = done_bytes
            PyErr_CheckSignals()
    finally:
        # The threads write into the caller's memory: nobody returns before they are done with it.
        job.cancel()
        while not has_ended:
            with nogil:
                has_ended = job.wait(seen_bytes, WAIT_MS)
                seen_bytes = job.done_bytes()


cdef _tell_arrived(ReadJob* job, arrived):
    cdef vector[size_t] numbers = job.take_arrived()
    if not numbers.empty():
        arrived(numbers)


cdef _wrap(ReadJob* job):
    cdef ReadResult result = job.result()
    names = {Outcome.done: "done", Outcome.cancelled: "cancelled", Outcome.failed: "failed",
             Outcome.truncated: "truncated", Outcome.corrupt: "corrupt"}
    return (names[result.outcome], result.error, result.chunk_index, result.offset_bytes, job.done_bytes(),
            result.direct_bytes, result.reread_chunks, result.read_s, result.verify_s)


@cython.no_gc_clear
cdef class DeviceMemory:
    """Memory of a GPU (device number), or of the host (-1). Made by `allocate`, `open` and `borrow`."""

    def __init__(self):
        raise TypeError("use ckptio.DeviceBuffer")

    @staticmethod
    def allocate(int device, uint64_t size_bytes):
        """New memory, of nobody knows which content."""
        cdef DeviceMemory self = DeviceMemory.__new__(DeviceMemory)
        self.owner_pid = getpid()
        with nogil:
            self.memory = memory_allocate(device, size_bytes)
        return self

    @staticmethod
    def open(int device, const unsigned char[:] handle, uint64_t size_bytes):
        """Memory that another process described with `ipc_handle`."""
        cdef DeviceMemory self = DeviceMemory.__new__(DeviceMemory)
        self.owner_pid = getpid()
        cdef CudaIpcHandle c_handle
        if handle.shape[0] != sizeof(c_handle.bytes):
            raise ValueError(f"a handle has {sizeof(c_handle.bytes)} bytes, not {handle.shape[0]}")
        memcpy(c_handle.bytes, &handle[0], sizeof(c_handle.bytes))
        with nogil:
            self.memory = memory_open(device, c_handle, size_bytes)
        return self

    @staticmethod
    def borrow(int device, uint64_t address, uint64_t size_bytes, owner):
        """Memory that `owner` owns; it lives as long as this object."""
        cdef DeviceMemory self = DeviceMemory.__new__(DeviceMemory)
        self.owner_pid = getpid()
        self.memory = memory_borrow(device, <byte*>address, size_bytes)
        self.owner = owner
        return self

    @property
    def device(self):
        """Number of the GPU, -1 for the host."""
        return self.memory.device()

    @property
    def address(self):
        """Where it starts, in the device's terms."""
        return <uint64_t>self.memory.data()

    @property
    def size_bytes(self):
        """Size of the memory; 0 when closed."""
        return self.memory.size_bytes()

    def ipc_handle(self):
        """The 64 bytes with which another process opens this memory."""
        self._ensure_open()
        cdef CudaIpcHandle handle = self.memory.ipc_handle()
        return <bytes>(<char*>handle.bytes)[:sizeof(handle.bytes)]

    def read_into(self, unsigned char[::1] target not None, uint64_t offset_bytes):
        """Copies from the device to host memory."""
        self._ensure_open()
        cdef uint64_t size_bytes = target.shape[0]
        if offset_bytes > self.memory.size_bytes() or size_bytes > self.memory.size_bytes() - offset_bytes:
            raise ValueError("the range ends after the memory")
        if size_bytes == 0:
            return
        self.users += 1
        try:
            with nogil:
                self.memory.read(<byte*>&target[0], offset_bytes, size_bytes)
        finally:
            self.users -= 1

    def close(self):
        """Gives the memory back. Raises BufferError while copies use it. Closing twice is fine."""
        if self.users > 0:
            raise BufferError(f"{self.users} copies use the memory")
        self.is_closed = True
        self._free()
        self.owner = None

    def __dealloc__(self):
        self._free()

    cdef _free(self):
        cdef CDeviceMemory memory = move(self.memory)
        if getpid() != self.owner_pid:
            new CDeviceMemory(move(memory))  # never deleted: it belongs to another process
            return
        with nogil:
            memory = CDeviceMemory()

    cdef _ensure_open(self):
        if self.is_closed:
            raise ValueError("the device memory is closed")


@cython.no_gc_clear
cdef class CopyPipeline:
    """Copiers that take chunks as they are read: one per target."""

    def __cinit__(self, targets, copies, Mapping ring_mapping not None, ring_offsets_bytes, uint64_t ring_chunk_bytes,
                  bint is_pipelined):
        """`targets` are DeviceMemory; `copies` are (target, offset_bytes, size_bytes) of each chunk of the read."""
        cdef vector[CopyTarget] c_targets
        cdef vector[ChunkCopy] c_copies
        cdef vector[bytep] ring
        cdef CopyTarget c_target
        cdef ChunkCopy copy
        cdef DeviceMemory memory
        cdef uint64_t offset
        self.owner_pid = getpid()
        self.ring_chunk_bytes = ring_chunk_bytes
        self.targets = []
        # From here on nobody can close what the addresses are of.
        ring_mapping._ensure_open()
        self.ring_mapping = ring_mapping
        ring_mapping.views += 1
        for memory in targets:
            memory._ensure_open()
            memory.users += 1
            self.targets.append(memory)
            c_target.device = memory.memory.device()
            c_target.data = memory.memory.data()
            c_targets.push_back(c_target)
        for copy.target, copy.offset_bytes, copy.size_bytes in copies:
            if copy.target >= c_targets.size():
                raise ValueError("a copy to a target that was not given")
            memory = targets[copy.target]
            if copy.size_bytes > memory.memory.size_bytes() or \
                    copy.offset_bytes > memory.memory.size_bytes() - copy.size_bytes:
                raise ValueError("a copy ends after its target")
            c_copies.push_back(copy)
        for offset in ring_offsets_bytes:
            if offset % DIRECT_ALIGNMENT_BYTES or offset + ring_chunk_bytes > ring_mapping.region.size_bytes():
                raise ValueError("a place of the ring is not in the mapping")
            ring.push_back(ring_mapping.region.data() + offset)
        with nogil:
            self.pipeline = ckptio_make_pipeline(c_targets, c_copies, ring, is_pipelined)

    @property
    def copied_bytes(self):
        """What has arrived; 0 when the pipeline has finished."""
        return self.pipeline.get().copied_bytes() if self.pipeline.get() != NULL else 0

    @property
    def has_failed(self):
        """Whether a copy has failed; `finish` says how."""
        return self.pipeline.get() != NULL and self.pipeline.get().has_failed()

    def deliver(self, uint64_t chunk_index, uint64_t offset_bytes):
        """Gives the pipeline a chunk, once, that is in the ring's mapping at `offset_bytes`."""
        self._ensure_open()
        cdef uint64_t mapped_bytes = self.ring_mapping.region.size_bytes()
        if chunk_index >= self.pipeline.get().chunk_count():
            raise ValueError("the pipeline has no such chunk")
        if self.ring_chunk_bytes > mapped_bytes or offset_bytes > mapped_bytes - self.ring_chunk_bytes:
            raise ValueError("a chunk ends after the mapping")
        self.pipeline.get().deliver(chunk_index, self.ring_mapping.region.data() + offset_bytes)

    def finish(self, bint is_dropping, CancelToken cancel, progress):
        """Waits for the copies, or drops what has not started, also when `cancel` or an exception says so.

        Returns (code, operation, copied_bytes, seconds, was_cancelled).
        """
        self._ensure_open()
        cdef shared_ptr[CCopyPipeline] pipeline = self.pipeline
        cdef cbool has_ended = False
        cdef cbool was_cancelled = False
        cdef CopyResult result
        pipeline.get().end(is_dropping)
        try:
            while not has_ended:
                with nogil:
                    has_ended = pipeline.get().wait(WAIT_MS)
                if not is_dropping:
                    self._tell(progress)
                if not has_ended and not was_cancelled and cancel is not None and cancel.flag.get().load():
                    was_cancelled = True
                    pipeline.get().end(True)
                PyErr_CheckSignals()
        finally:
            # What is on its way reads from chunks and writes to targets: nobody returns before it has arrived.
            if not has_ended:
                pipeline.get().end(True)
            while not has_ended:
                with nogil:
                    has_ended = pipeline.get().wait(WAIT_MS)
            result = pipeline.get().result()
            pipeline.reset()
            self._release()
        return result.error, result.operation.decode(), result.copied_bytes, result.seconds, was_cancelled

    cdef _tell(self, progress):
        cdef uint64_t arrived = self.pipeline.get().copied_bytes()
        if progress is not None and arrived > self.told_bytes:
            self.told_bytes = arrived
            progress(arrived)

    cdef _ensure_open(self):
        if self.pipeline.get() == NULL:
            raise ValueError("the pipeline has finished")

    cdef _release(self):
        cdef shared_ptr[CCopyPipeline] pipeline
        pipeline.swap(self.pipeline)
        if getpid() != self.owner_pid:
            new shared_ptr[CCopyPipeline](pipeline)  # never deleted: its threads are in another process
        else:
            with nogil:
                pipeline.reset()
        if self.targets is not None:
            for memory in self.targets:
                (<DeviceMemory>memory).users -= 1
            self.targets = []
        if self.ring_mapping is not None:
            self.ring_mapping.views -= 1
            self.ring_mapping = None

    def __dealloc__(self):
        self._release()


def load_cuda(name, *, bint is_loaded_only=False):
    """Loads the CUDA runtime library `name` if it sees a GPU; returns why it could not, or an empty string."""
    return cuda_load(name.encode(), is_loaded_only).decode()


def cuda_device_count():
    """GPUs that the loaded runtime has. Raises DeviceError."""
    cdef int count = 0
    if cuda_get() == NULL:
        return 0
    check_cuda(deref(cuda_get()).get_device_count(&count), b"cudaGetDeviceCount")
    return count


def describe_cuda_error(int code):
    """The runtime's own words for an error code; empty without a runtime."""
    return cuda_describe(code).decode()


def register_host_memory(Mapping mapping not None):
    """Page-locks a mapping for every GPU. Raises DeviceError."""
    mapping._ensure_open()
    cdef void* data = mapping.region.data()
    cdef size_t size_bytes = mapping.region.size_bytes()
    cdef int code
    with nogil:
        code = deref(cuda_get()).host_register(data, size_bytes, HOST_REGISTER_PORTABLE)
    check_cuda(code, b"cudaHostRegister")


def unregister_host_memory(Mapping mapping not None):
    """Undoes `register_host_memory`. Raises DeviceError."""
    mapping._ensure_open()
    cdef void* data = mapping.region.data()
    cdef int code
    with nogil:
        code = deref(cuda_get()).host_unregister(data)
    check_cuda(code, b"cudaHostUnregister")


def set_faults(*, uint64_t read_bytes_max=0, int read_error=0, int64_t read_error_offset=-1, int64_t corrupt_offset=-1,
               int times=0, unsigned read_delay_us=0, int copy_error=0, int64_t copy_error_after=0):
    """Fault injection for tests; see native/faults.hpp."""
    faults.is_active = False
    faults.read_bytes_max = read_bytes_max
    faults.read_error = read_error
    faults.read_error_offset = read_error_offset
    faults.corrupt_offset = corrupt_offset
    faults.times = times
    faults.read_delay_us = read_delay_us
    faults.copy_error = copy_error
    faults.copy_error_after = copy_error_after
    faults.is_active = True


def clear_faults():
    """The devices are healthy again."""
    faults.clear()
