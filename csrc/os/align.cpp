#include "os/align.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>

#include "os/status.h"

namespace locked_tensor {

namespace {

// The kernel's struct statx as far as we read it: older headers lack the last two fields, which
// came with Linux 6.1 (statx(2)).
struct StatxBuffer {
  uint32_t mask;
  uint8_t other[148];
  uint32_t dio_mem_align;
  uint32_t dio_offset_align;
  uint8_t spare[96];
};
static_assert(sizeof(StatxBuffer) == 256);
constexpr unsigned kStatxDioAlign = 0x2000;

// File systems that store on a disk and have served O_DIRECT since long before they said so.
constexpr long kXfsMagic = 0x58465342;
constexpr long kDiskFileSystems[] = {EXT4_SUPER_MAGIC, kXfsMagic, BTRFS_SUPER_MAGIC,
                                     F2FS_SUPER_MAGIC};

bool is_disk_file_system(int fd) {
  struct statfs status;
  if (::fstatfs(fd, &status) != 0) {
    throw_errno("ask the file system of a descriptor");
  }
  for (const long magic : kDiskFileSystems) {
    if (static_cast<long>(status.f_type) == magic) {
      return true;
    }
  }
  return false;
}

// The logical sector size of a block device, from sysfs; 0 where it does not say. A partition has
// no queue of its own: its disk's folder holds it.
uint32_t sector_bytes(dev_t device) {
  const std::string node =
      "/sys/dev/block/" + std::to_string(major(device)) + ":" + std::to_string(minor(device));
  for (const char* queue : {"/queue/logical_block_size", "/../queue/logical_block_size"}) {
    uint32_t bytes = 0;
    if (std::ifstream(node + queue) >> bytes) {
      return bytes;
    }
  }
  return 0;
}

DioAlignment direct_at(uint32_t bytes) {
  return DioAlignment{bytes, bytes, true};
}

}  // namespace

DioAlignment dio_alignment(int fd) {
  StatxBuffer answer{};
  const bool has_answer = ::syscall(SYS_statx, fd, "", AT_EMPTY_PATH, kStatxDioAlign, &answer) == 0;
  if (!has_answer && errno != ENOSYS && errno != EINVAL) {
    throw_errno("ask the alignment of a descriptor");
  }
  if (has_answer && (answer.mask & kStatxDioAlign) != 0) {
    if (answer.dio_offset_align == 0) {
      return DioAlignment{};
    }
    return DioAlignment{answer.dio_mem_align, answer.dio_offset_align, true};
  }
  struct stat status;
  if (::fstat(fd, &status) != 0) {
    throw_errno("stat a descriptor");
  }
  if (S_ISBLK(status.st_mode)) {
    int bytes = 0;
    if (::ioctl(fd, BLKSSZGET, &bytes) != 0) {
      throw_errno("ask the sector size of a block device");
    }
    return direct_at(static_cast<uint32_t>(bytes));
  }
  if (!S_ISREG(status.st_mode) || !is_disk_file_system(fd)) {
    return DioAlignment{};
  }
  const uint32_t sector = sector_bytes(status.st_dev);
  return direct_at(sector != 0 ? sector : static_cast<uint32_t>(page_bytes()));
}

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace locked_tensor
