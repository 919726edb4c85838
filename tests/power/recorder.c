/* Records what the process that loads it does to the files below a directory, in order.

   LD_PRELOAD          this library; processes that this one starts are not recorded
   POWER_DIRECTORY     absolute path of the directory
   POWER_RECORD        file outside of it, to which the record is appended
   POWER_SYNC_US       how long a sync takes; nothing is really synced

   An entry of the record is a `struct head`, the path, and the bytes that were written. Each operation happens together
   with its entry, one after another; only a sync takes time, and has an entry at its begin and one at its end. With
   `power_note`, which the program finds by its name, it adds an entry of its own. recording.py reads the record, and
   notices changes of files by functions that are missing here.
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define FILES 65536
#define REAL(name) ((typeof(&name)) real(#name))

enum { OPEN = 1, OPEN_DIRECTORY, WRITE, RESIZE, RENAME, REMOVE, MAKE_DIRECTORY, SYNC_BEGINS, SYNC_ENDS, NOTE };

struct head {
    uint32_t kind;
    uint32_t file; /* the number of an open; 0 if the operation has a path */
    uint64_t at;   /* the offset of a write, the new size of a file, the flags of an open */
    uint32_t path; /* length; a rename has its target after a 0 */
    uint32_t size; /* bytes that were written */
};

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
static uint32_t opened[FILES]; /* by descriptor: the number of its open; 0 if the file is not below the directory */
static uint32_t opens;
static const char *directory;
static int record = -1;
static pid_t owner;
static useconds_t sync_us;

static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found)
        abort();
    return found;
}

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("POWER_RECORD"), *us = getenv("POWER_SYNC_US");
    directory = getenv("POWER_DIRECTORY");
    if (!path || !directory)
        return;
    record = REAL(open)(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (record < 0)
        abort();
    sync_us = us ? atol(us) : 0;
    owner = getpid();
    unsetenv("LD_PRELOAD");
}

static int is_recorded(void) { return record >= 0 && getpid() == owner; }

/* A path relative to the directory, which is "/"; NULL if it is neither below nor the directory. */
static const char *below(const char *path, char *buffer) {
    size_t length;
    if (!is_recorded() || !path)
        return NULL;
    if (path[0] != '/') {
        if (!getcwd(buffer, PATH_MAX) || strlen(path) >= PATH_MAX)
            return NULL;
        strcat(strcat(buffer, "/"), path);
        path = buffer;
    }
    length = strlen(directory);
    if (strncmp(path, directory, length) || (path[length] && path[length] != '/'))
        return NULL;
    return path[length] ? path + length : "/";
}

static uint32_t number_of(int descriptor) {
    return descriptor >= 0 && descriptor < FILES && is_recorded() ? opened[descriptor] : 0;
}

static void add(struct head head, const char *path, const char *target, const struct iovec *data) {
    size_t targeted = target ? strlen(target) + 1 : 0, left = head.size;
    head.path = (path ? strlen(path) : 0) + targeted;
    size_t total = sizeof head + head.path + head.size;
    char *entry = malloc(total), *end = entry;
    if (!entry)
        abort();
    end = mempcpy(end, &head, sizeof head);
    end = mempcpy(end, path, head.path - targeted);
    if (target) {
        *end++ = 0;
        end = mempcpy(end, target, targeted - 1);
    }
    for (; left; data++) {
        size_t taken = data->iov_len < left ? data->iov_len : left;
        end = mempcpy(end, data->iov_base, taken);
        left -= taken;
    }
    if (REAL(write)(record, entry, total) != (ssize_t) total)
        abort();
    free(entry);
}

#define LOCKED(operation) \
    do { \
        pthread_mutex_lock(&one_at_a_time); \
        operation; \
        int error = errno; \
        pthread_mutex_unlock(&one_at_a_time); \
        errno = error; \
    } while (0)

void power_note(const char *text, size_t size) {
    struct iovec data = {(void *) text, size};
    if (is_recorded())
        LOCKED(add((struct head){.kind = NOTE, .size = size}, NULL, NULL, &data));
}

/* --- opening and closing --- */

static int note_open(int descriptor, const char *path, int flags) {
    struct stat status;
    int error = errno;
    if (descriptor >= FILES)
        abort();
    if (descriptor >= 0) {
        uint32_t kind = !fstat(descriptor, &status) && S_ISDIR(status.st_mode) ? OPEN_DIRECTORY : OPEN;
        opened[descriptor] = ++opens;
        add((struct head){.kind = kind, .file = opens, .at = flags}, path, NULL, NULL);
        if (flags & O_TRUNC)
            add((struct head){.kind = RESIZE, .file = opens}, NULL, NULL, NULL);
    }
    errno = error;
    return descriptor;
}

#define DEFINE_OPEN(name, parameters, usual, ...) \
    int name parameters { \
        char buffer[2 * PATH_MAX]; \
        const char *place = (usual) || path[0] == '/' ? below(path, buffer) : NULL; \
        int descriptor; \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        if (!place) \
            return REAL(name)(__VA_ARGS__, mode); \
        LOCKED(descriptor = note_open(REAL(name)(__VA_ARGS__, mode), place, flags)); \
        return descriptor; \
    }
DEFINE_OPEN(open, (const char *path, int flags, ...), 1, path, flags)
DEFINE_OPEN(open64, (const char *path, int flags, ...), 1, path, flags)
DEFINE_OPEN(openat, (int from, const char *path, int flags, ...), from == AT_FDCWD, from, path, flags)
DEFINE_OPEN(openat64, (int from, const char *path, int flags, ...), from == AT_FDCWD, from, path, flags)

int close(int descriptor) {
    int done;
    if (!number_of(descriptor))
        return REAL(close)(descriptor);
    LOCKED(opened[descriptor] = 0; done = REAL(close)(descriptor));
    return done;
}

/* --- changing the content of files --- */

/* Note a write at an offset, or just before the position of the descriptor if that is -1. */
static ssize_t note_write(ssize_t written, int descriptor, off_t offset, const struct iovec *data) {
    int error = errno;
    if (written > 0) {
        off_t at = offset < 0 ? lseek(descriptor, 0, SEEK_CUR) - written : offset;
        add((struct head){.kind = WRITE, .file = opened[descriptor], .at = at, .size = written}, NULL, NULL, data);
    }
    errno = error;
    return written;
}

#define DEFINE_WRITE(name, parameters, offset, data, ...) \
    ssize_t name parameters { \
        ssize_t written; \
        if (!number_of(descriptor)) \
            return REAL(name)(__VA_ARGS__); \
        LOCKED(written = note_write(REAL(name)(__VA_ARGS__), descriptor, offset, data)); \
        return written; \
    }
#define BYTES (&(struct iovec){(void *) bytes, size})
DEFINE_WRITE(write, (int descriptor, const void *bytes, size_t size), -1, BYTES, descriptor, bytes, size)
DEFINE_WRITE(pwrite, (int descriptor, const void *bytes, size_t size, off_t at), at, BYTES, descriptor, bytes, size, at)
DEFINE_WRITE(pwrite64, (int descriptor, const void *bytes, size_t size, off64_t at), at, BYTES, descriptor, bytes, size, at)
DEFINE_WRITE(writev, (int descriptor, const struct iovec *data, int parts), -1, data, descriptor, data, parts)
DEFINE_WRITE(pwritev, (int descriptor, const struct iovec *data, int parts, off_t at), at, data, descriptor, data, parts, at)
DEFINE_WRITE(pwritev64, (int descriptor, const struct iovec *data, int parts, off64_t at), at, data, descriptor, data, parts, at)
DEFINE_WRITE(pwritev2, (int descriptor, const struct iovec *data, int parts, off_t at, int flags), at, data, descriptor, data, parts, at, flags)
DEFINE_WRITE(pwritev64v2, (int descriptor, const struct iovec *data, int parts, off64_t at, int flags), at, data, descriptor, data, parts, at, flags)

/* Note the new size of a file, whatever has changed it. */
static int note_size(int failed, int descriptor) {
    struct stat status;
    int error = errno;
    if (!failed && !fstat(descriptor, &status))
        add((struct head){.kind = RESIZE, .file = opened[descriptor], .at = status.st_size}, NULL, NULL, NULL);
    errno = error;
    return failed;
}

#define DEFINE_RESIZE(name, parameters, ...) \
    int name parameters { \
        int failed; \
        if (!number_of(descriptor)) \
            return REAL(name)(__VA_ARGS__); \
        LOCKED(failed = note_size(REAL(name)(__VA_ARGS__), descriptor)); \
        return failed; \
    }
DEFINE_RESIZE(ftruncate, (int descriptor, off_t size), descriptor, size)
DEFINE_RESIZE(ftruncate64, (int descriptor, off64_t size), descriptor, size)
DEFINE_RESIZE(fallocate, (int descriptor, int mode, off_t at, off_t size), descriptor, mode, at, size)
DEFINE_RESIZE(fallocate64, (int descriptor, int mode, off64_t at, off64_t size), descriptor, mode, at, size)
DEFINE_RESIZE(posix_fallocate, (int descriptor, off_t at, off_t size), descriptor, at, size)
DEFINE_RESIZE(posix_fallocate64, (int descriptor, off64_t at, off64_t size), descriptor, at, size)

/* --- names --- */

static int note_name(int failed, uint32_t kind, const char *path, const char *target) {
    int error = errno;
    if (!failed)
        add((struct head){.kind = kind}, path, target, NULL);
    errno = error;
    return failed;
}

int rename(const char *source, const char *target) {
    char buffers[2][2 * PATH_MAX];
    const char *from = below(source, buffers[0]), *to = below(target, buffers[1]);
    int failed;
    if (!from || !to)
        return REAL(rename)(source, target);
    LOCKED(failed = note_name(REAL(rename)(source, target), RENAME, from, to));
    return failed;
}

#define DEFINE_NAME(name, kind, parameters, ...) \
    int name parameters { \
        char buffer[2 * PATH_MAX]; \
        const char *place = below(path, buffer); \
        int failed; \
        if (!place) \
            return REAL(name)(__VA_ARGS__); \
        LOCKED(failed = note_name(REAL(name)(__VA_ARGS__), kind, place, NULL)); \
        return failed; \
    }
DEFINE_NAME(unlink, REMOVE, (const char *path), path)
DEFINE_NAME(mkdir, MAKE_DIRECTORY, (const char *path, mode_t mode), path, mode)

/* --- syncs: what was written before the begin is durable after the end --- */

static int note_sync(int descriptor) {
    uint32_t file = number_of(descriptor);
    LOCKED(add((struct head){.kind = SYNC_BEGINS, .file = file}, NULL, NULL, NULL));
    usleep(sync_us);
    LOCKED(add((struct head){.kind = SYNC_ENDS, .file = file}, NULL, NULL, NULL));
    return 0;
}

int fsync(int descriptor) { return number_of(descriptor) ? note_sync(descriptor) : REAL(fsync)(descriptor); }
int fdatasync(int descriptor) { return number_of(descriptor) ? note_sync(descriptor) : REAL(fdatasync)(descriptor); }
