// The digest for AVX2, about twice as fast as with the vectors that every x86-64 has. A processor without it
// never gets here: digest.cpp asks first.
#include <cstring>
#include <new>

#include "native/digest.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2")
#define XXH_VECTOR 2  // XXH_AVX2
#define XXH_INLINE_ALL
#include <xxhash.h>

#define CKPTIO_DIGEST_CODE kDigestForAvx2
namespace ckptio {
extern const DigestCode kDigestForAvx2;
}
#include "native/digest_code.inc"
#pragma GCC pop_options

namespace ckptio {
const DigestCode* const kDigestAvx2 = &kDigestForAvx2;
}

#else

namespace ckptio {
const DigestCode* const kDigestAvx2 = nullptr;
}

#endif
