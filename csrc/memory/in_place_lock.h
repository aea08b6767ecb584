// Locking memory that somebody else allocated: page-rounded, counted, byte-exact in the registry.
#pragma once

#include <cstddef>

namespace locked_tensor {

// Locks the pages of [data, data + bytes) and registers the span. Nests: pages shared with other
// such spans are counted (mlock itself does not nest). Throws LockRefused; then nothing changed.
void lock_in_place(void* data, size_t bytes, bool is_registrable = true);

// Undoes one lock_in_place of exactly this span; pages that another span needs stay locked.
// Throws std::invalid_argument when the span was not locked in place.
void unlock_in_place(void* data, size_t bytes);

}  // namespace locked_tensor
