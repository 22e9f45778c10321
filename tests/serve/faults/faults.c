/* Loaded before the C library: fails, or dies at, the n-th write, sync, truncation, rename or removal below a folder. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { NOTHING, ONCE, ALWAYS, DIE, TEAR };

static char folder[PATH_MAX];
static int mode = NOTHING, error = 0;
static long due = 0, seen = 0;

/* Fail the n-th call from now on: once, always from then on, or by dying, after half of the write if that is asked. */
void fault_arm(const char *below, int how, int number, long n) {
    strncpy(folder, below, sizeof folder - 1);
    mode = how, error = number, due = n, seen = 0;
}

long fault_seen(void) { return seen; }

static int is_below(const char *path) { return path && folder[0] && !strncmp(path, folder, strlen(folder)); }

static int is_open_below(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

/* Return whether this call is to fail; a torn write dies in its caller. */
static int is_due(int concerned) {
    if (!concerned || mode == NOTHING) return 0;
    seen++;
    if (seen < due || (seen > due && mode != ALWAYS)) return 0;
    if (mode == DIE) kill(getpid(), SIGKILL);
    errno = error;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define TORN(call) do { int saved = errno; if (mode == TEAR) { call; kill(getpid(), SIGKILL); } errno = saved; } while (0)

ssize_t write(int fd, const void *data, size_t size) {
    if (is_due(is_open_below(fd))) { TORN(REAL(write)(fd, data, size / 2)); return -1; }
    return REAL(write)(fd, data, size);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    if (is_due(is_open_below(fd))) { TORN(REAL(pwrite)(fd, data, size / 2, at)); return -1; }
    return REAL(pwrite)(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    if (is_due(is_open_below(fd))) { TORN(REAL(pwrite64)(fd, data, size / 2, at)); return -1; }
    return REAL(pwrite64)(fd, data, size, at);
}
int fsync(int fd) { return is_due(is_open_below(fd)) ? -1 : REAL(fsync)(fd); }
int fdatasync(int fd) { return is_due(is_open_below(fd)) ? -1 : REAL(fdatasync)(fd); }
int ftruncate(int fd, off_t size) { return is_due(is_open_below(fd)) ? -1 : REAL(ftruncate)(fd, size); }
int ftruncate64(int fd, off64_t size) { return is_due(is_open_below(fd)) ? -1 : REAL(ftruncate64)(fd, size); }
int posix_fallocate(int fd, off_t at, off_t size) {
    return is_due(is_open_below(fd)) ? error : REAL(posix_fallocate)(fd, at, size);
}
int posix_fallocate64(int fd, off64_t at, off64_t size) {
    return is_due(is_open_below(fd)) ? error : REAL(posix_fallocate64)(fd, at, size);
}
int rename(const char *from, const char *to) { return is_due(is_below(to)) ? -1 : REAL(rename)(from, to); }
/* On a full disk files can be removed. */
int unlink(const char *path) { return is_due(is_below(path) && error != ENOSPC) ? -1 : REAL(unlink)(path); }
