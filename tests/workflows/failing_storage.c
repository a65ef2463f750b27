/* Storage that fails: calls on files whose path has a given text in it fail with a given errno.

   Preloaded (LD_PRELOAD) into a process, which says by fail_storage what is to fail from now on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE = 1, SYNC = 2, READ = 4, CREATE = 8, RENAME = 16, FOLDER = 32, OPEN = 64 };

static char text[PATH_MAX];
static atomic_int calls, error, spare, failed;

/* From now on all but the first `skip` calls of the kinds in `kinds` fail with `number`, for paths with `part` in them.
   Returns how many failed since it was last called. */
int fail_storage(int kinds, const char *part, int number, int skip)
{
    atomic_store(&calls, 0);
    strncpy(text, part, sizeof text - 1);
    atomic_store(&error, number);
    atomic_store(&spare, skip);
    atomic_store(&calls, kinds);
    return atomic_exchange(&failed, 0);
}

/* Whether a path has the text in it; at its end, where the text ends in a dollar sign. */
static int is_meant(const char *path)
{
    size_t length = strlen(text), whole = strlen(path);
    if (!length || text[length - 1] != '$')
        return strstr(path, text) != NULL;
    return whole + 1 >= length && !strncmp(path + whole + 1 - length, text, length - 1);
}

static int fails_at(int kind, const char *path)
{
    if (!(atomic_load(&calls) & kind) || !path || !is_meant(path) || atomic_fetch_sub(&spare, 1) > 0)
        return 0;
    atomic_fetch_add(&failed, 1);
    errno = atomic_load(&error);
    return 1;
}

static int fails(int kind, int descriptor)
{
    char link[64], path[PATH_MAX];
    if (!(atomic_load(&calls) & kind))
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return fails_at(kind, path);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define ON_DESCRIPTOR(kind, type, name, parameters, arguments) \
    type name parameters { return fails(kind, descriptor) ? -1 : NEXT(name) arguments; }

ON_DESCRIPTOR(WRITE, ssize_t, write, (int descriptor, const void *data, size_t count), (descriptor, data, count))
ON_DESCRIPTOR(WRITE, ssize_t, pwrite, (int descriptor, const void *data, size_t count, off_t at), (descriptor, data, count, at))
ON_DESCRIPTOR(WRITE, ssize_t, pwrite64, (int descriptor, const void *data, size_t count, off_t at), (descriptor, data, count, at))
ON_DESCRIPTOR(READ, ssize_t, read, (int descriptor, void *data, size_t count), (descriptor, data, count))
ON_DESCRIPTOR(READ, ssize_t, pread, (int descriptor, void *data, size_t count, off_t at), (descriptor, data, count, at))
ON_DESCRIPTOR(READ, ssize_t, pread64, (int descriptor, void *data, size_t count, off_t at), (descriptor, data, count, at))
ON_DESCRIPTOR(READ, ssize_t, preadv, (int descriptor, const struct iovec *parts, int count, off_t at), (descriptor, parts, count, at))
ON_DESCRIPTOR(READ, ssize_t, preadv64, (int descriptor, const struct iovec *parts, int count, off_t at), (descriptor, parts, count, at))
ON_DESCRIPTOR(READ, ssize_t, preadv2, (int descriptor, const struct iovec *parts, int count, off_t at, int flags), (descriptor, parts, count, at, flags))
ON_DESCRIPTOR(READ, ssize_t, preadv64v2, (int descriptor, const struct iovec *parts, int count, off_t at, int flags), (descriptor, parts, count, at, flags))
ON_DESCRIPTOR(SYNC, int, fsync, (int descriptor), (descriptor))
ON_DESCRIPTOR(SYNC, int, fdatasync, (int descriptor), (descriptor))

#define OPENS(name) \
    int name(const char *path, int flags, ...) \
    { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        return fails_at(flags & O_CREAT ? CREATE : OPEN, path) ? -1 : NEXT(name)(path, flags, mode); \
    }
OPENS(open)
OPENS(open64)

int rename(const char *from, const char *to)
{
    return fails_at(RENAME, to) ? -1 : NEXT(rename)(from, to);
}

int mkdir(const char *path, mode_t mode)
{
    return fails_at(FOLDER, path) ? -1 : ((int (*)(const char *, mode_t))dlsym(RTLD_NEXT, "mkdir"))(path, mode);
}
