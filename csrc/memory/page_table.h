// PageTable: from a page of the address space to the registry's first piece in it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace locked_tensor {

// One stretch of locked memory; pieces never overlap. Never freed, only used again: a reader that
// came too late finds another piece, not freed memory, and the registry's sequence count tells it
// so.
struct Piece {
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};
  std::atomic<uint64_t> id{0};
  std::atomic<bool> is_registrable{true};
  std::atomic<Piece*> next{nullptr};  // by address
  uint32_t count = 0;                 // adds that cover it; the writer's
};

// Three levels of 4096 over the 36-bit page numbers of a 48-bit address space. The middle level's
// entry is a piece when that piece covers all 16 MiB, so a gibibyte is entered in 64 stores.
// Readers are lock-free; writers are serialised by the registry. Tables are kept once made.
class PageTable {
 public:
  PageTable() = default;
  ~PageTable();
  PageTable(const PageTable&) = delete;
  PageTable& operator=(const PageTable&) = delete;

  // The piece entered for the page, or nullptr.
  Piece* find(uint64_t page) const noexcept;
  // Enters `piece` (nullptr: nothing) for the pages [first, last].
  void set(uint64_t first, uint64_t last, Piece* piece);

 private:
  static constexpr unsigned kBits = 12;
  static constexpr uint64_t kEntries = uint64_t{1} << kBits;

  struct Leaf {
    std::array<std::atomic<Piece*>, kEntries> pieces{};
  };
  // A piece, or a Leaf with the lowest bit set.
  using Entry = std::atomic<uintptr_t>;
  struct Middle {
    std::array<Entry, kEntries> entries{};
  };

  static Leaf* leaf_of(uintptr_t entry);
  Leaf* make_leaf(uintptr_t filled_with);

  std::array<std::atomic<Middle*>, kEntries> root_{};
  std::vector<std::unique_ptr<Leaf>> leaves_;
  std::vector<Leaf*> spare_leaves_;
};

}  // namespace locked_tensor
