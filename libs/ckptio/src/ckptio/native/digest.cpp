#include "native/digest.hpp"

#include <new>

#if !__has_include(<xxhash.h>)
#error "xxhash.h is missing: install libxxhash-dev (Debian, Ubuntu) or xxhash-devel (Fedora)"
#endif
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ckptio {

static_assert(sizeof(XXH3_state_t) <= sizeof(Digest));
static_assert(alignof(XXH3_state_t) <= alignof(Digest));

namespace {

XXH3_state_t* as_state(std::byte* bytes) noexcept { return reinterpret_cast<XXH3_state_t*>(bytes); }
const XXH3_state_t* as_state(const std::byte* bytes) noexcept {
    return reinterpret_cast<const XXH3_state_t*>(bytes);
}

}  // namespace

Digest::Digest() noexcept : state_{} {
    ::new (state_.data()) XXH3_state_t;
    XXH3_64bits_reset(as_state(state_.data()));
}

void Digest::update(const std::byte* data, std::uint64_t size_bytes) noexcept {
    XXH3_64bits_update(as_state(state_.data()), data, size_bytes);
}

std::uint64_t Digest::value() const noexcept { return XXH3_64bits_digest(as_state(state_.data())); }

}  // namespace ckptio
