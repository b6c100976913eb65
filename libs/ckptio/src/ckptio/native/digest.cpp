#include "native/digest.hpp"

#include <new>

#if !__has_include(<xxhash.h>)
#error "xxhash.h is missing: install libxxhash-dev (Debian, Ubuntu) or xxhash-devel (Fedora)"
#endif
#define XXH_INLINE_ALL
#include <xxhash.h>

#define CKPTIO_DIGEST_CODE kDigestBaseline
#include "native/digest_code.inc"

namespace ckptio {

namespace {

const DigestCode& choose() noexcept {
#if defined(__x86_64__)
    if (kDigestAvx2 != nullptr && __builtin_cpu_supports("avx2")) return *kDigestAvx2;
#endif
    return kDigestBaseline;
}

const DigestCode& code() noexcept {
    static const DigestCode& chosen = choose();
    return chosen;
}

}  // namespace

Digest::Digest() noexcept : state_{} { code().reset(state_.data()); }

void Digest::update(const std::byte* data, std::uint64_t size_bytes) noexcept {
    code().update(state_.data(), data, size_bytes);
}

std::uint64_t Digest::value() const noexcept { return code().value(state_.data()); }

}  // namespace ckptio
