#include "memory/page_table.h"

#include <algorithm>

#include "os/status.h"

namespace locked_tensor {

namespace {

// Acquire and release order a reader's loads between its two loads of the registry's sequence
// count.
constexpr auto kRead = std::memory_order_acquire;
constexpr auto kWrite = std::memory_order_release;

}  // namespace

PageTable::~PageTable() {
  for (std::atomic<Middle*>& middle : root_) {
    delete middle.load(kRead);
  }
}

PageTable::Leaf* PageTable::leaf_of(uintptr_t entry) {
  return (entry & 1) != 0 ? reinterpret_cast<Leaf*>(entry & ~uintptr_t{1}) : nullptr;
}

Piece* PageTable::find(uint64_t page) const noexcept {
  const uint64_t top = page >> (2 * kBits);
  if (top >= kEntries) {
    return nullptr;  // beyond 48 bits: nothing of ours is mapped there
  }
  const Middle* middle = root_[top].load(kRead);
  if (middle == nullptr) {
    return nullptr;
  }
  const uintptr_t entry = middle->entries[(page >> kBits) % kEntries].load(kRead);
  if (const Leaf* leaf = leaf_of(entry)) {
    return leaf->pieces[page % kEntries].load(kRead);
  }
  return reinterpret_cast<Piece*>(entry);
}

PageTable::Leaf* PageTable::make_leaf(uintptr_t filled_with) {
  if (spare_leaves_.empty()) {
    leaves_.push_back(std::make_unique<Leaf>());
    spare_leaves_.push_back(leaves_.back().get());
  }
  Leaf* leaf = spare_leaves_.back();
  spare_leaves_.pop_back();
  for (std::atomic<Piece*>& piece : leaf->pieces) {
    piece.store(reinterpret_cast<Piece*>(filled_with), kWrite);
  }
  return leaf;
}

void PageTable::set(uint64_t first, uint64_t last, Piece* piece) {
  LT_CHECK((last >> (2 * kBits)) < kEntries, "locked memory lies below 2^48");
  for (uint64_t page = first; page <= last;) {
    std::atomic<Middle*>& root = root_[page >> (2 * kBits)];
    if (root.load(kRead) == nullptr) {
      root.store(new Middle, kWrite);
    }
    Entry& entry = root.load(kRead)->entries[(page >> kBits) % kEntries];
    const uint64_t stop = std::min(last, page | (kEntries - 1));
    const uintptr_t old = entry.load(kRead);
    Leaf* leaf = leaf_of(old);
    if (stop - page + 1 == kEntries) {
      entry.store(reinterpret_cast<uintptr_t>(piece), kWrite);
      if (leaf != nullptr) {
        spare_leaves_.push_back(leaf);
      }
    } else {
      if (leaf == nullptr) {
        leaf = make_leaf(old);
        entry.store(reinterpret_cast<uintptr_t>(leaf) | 1, kWrite);
      }
      for (uint64_t each = page; each <= stop; ++each) {
        leaf->pieces[each % kEntries].store(piece, kWrite);
      }
    }
    page = stop + 1;
  }
}

}  // namespace locked_tensor
