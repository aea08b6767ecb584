// cuFile's functions over ordinary memory, for tests of how they are called: at most 100,000 bytes a transfer.
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct { int operation; int driver; } CuError;
typedef struct {
  int type;
  union { int fd; void* handle; } file;
  const void* operations;
} CuDescription;

static CuError ok = {0, 0};
static int drivers = 0, files = 0;
static const void* registered = NULL;

CuError cuFileDriverOpen(void) {
  ++drivers;
  CuError refused = {5001, 3};
  return getenv("STAND_IN_REFUSES") ? refused : ok;
}
CuError cuFileHandleRegister(void** handle, CuDescription* description) {
  CuError refused = {5027, 0};
  if (description->type != 1 || description->operations != NULL || lseek(description->file.fd, 0, SEEK_CUR) < 0) {
    return refused;
  }
  *handle = malloc(sizeof(int));
  *(int*)*handle = description->file.fd;
  ++files;
  return ok;
}
void cuFileHandleDeregister(void* handle) { free(handle); --files; }
CuError cuFileBufRegister(const void* base, size_t bytes, int flags) {
  CuError refused = {5011, 0};
  if (registered != NULL || bytes == 0 || flags != 0) return refused;
  registered = base;
  return ok;
}
CuError cuFileBufDeregister(const void* base) {
  CuError refused = {5012, 0};
  if (registered != base || base == NULL) return refused;
  registered = NULL;
  return ok;
}
static ssize_t least(size_t bytes) { return bytes < 100000 ? bytes : 100000; }
ssize_t cuFileRead(void* handle, void* base, size_t bytes, int64_t file_offset, int64_t offset) {
  if (file_offset == 77) return -5030;
  return pread(*(int*)handle, (char*)base + offset, least(bytes), file_offset);
}
ssize_t cuFileWrite(void* handle, const void* base, size_t bytes, int64_t file_offset, int64_t offset) {
  return pwrite(*(int*)handle, (const char*)base + offset, least(bytes), file_offset);
}
int open_files(void) { return files; }
