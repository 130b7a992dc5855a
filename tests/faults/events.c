/* Loaded with LD_PRELOAD: counts what a process does to files below some folders, and at the n-th event kills the
 * process or makes the call fail, as a full disk (ENOSPC), a folder without write permission (EACCES) or a broken disk
 * (EIO) would. It sees Python, C++ (torch, Arrow) and Rust (safetensors) alike. Used by lab.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define KILL 9
static char folders[8][PATH_MAX];
static int n_folders, action, hit;
static long at, *counted;

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, name)

/* The folders are separated by newlines. The count is shared with children. */
void faults_arm(const char *list, long event, int what) {
    if (!counted) counted = mmap(NULL, sizeof(long), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    *counted = 0, n_folders = 0, hit = 0, at = event, action = what;
    while (*list && n_folders < 8) {
        size_t length = strcspn(list, "\n");
        snprintf(folders[n_folders++], PATH_MAX, "%.*s", (int)length, list);
        list += length + (list[length] == '\n');
    }
}
long faults_count(void) { return counted ? *counted : 0; }

static int inside(const char *path) {
    for (int i = 0; i < n_folders; i++) {
        size_t length = strlen(folders[i]);
        if (!strncmp(path, folders[i], length) && (path[length] == '/' || !path[length])) return 1;
    }
    return 0;
}
static int fd_inside(int fd) {
    char link[64], path[PATH_MAX];
    if (!n_folders) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return inside(path);
}
static int path_inside(int folder, const char *name) {
    char path[2 * PATH_MAX], base[PATH_MAX], link[64];
    if (!n_folders || !name) return 0;
    if (name[0] == '/') return inside(name);
    if (folder == AT_FDCWD) { if (!getcwd(base, sizeof base)) return 0; }
    else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, base, PATH_MAX - 1);
        if (length <= 0) return 0;
        base[length] = 0;
    }
    snprintf(path, sizeof path, "%s/%s", base, name);
    return inside(path);
}

enum { WRITE, CREATE, CHANGE, SYNC };
/* 0: go on. Otherwise errno. `grows`: a write that needs room. */
static int event(int kind, int grows) {
    long now = __sync_add_and_fetch(counted, 1);
    if (!at || now < at) return 0;
    if (action == KILL) { if (now == at) kill(getpid(), SIGKILL); return 0; }
    if (action == EIO) return now == at ? EIO : 0;
    if (action == ENOSPC) return (kind == WRITE && grows) || kind == CREATE ? ENOSPC : 0;
    if (action == EACCES) return kind == CREATE || kind == CHANGE ? EACCES : 0;
    return 0;
}
#define FAIL(kind, grows, back) do { int e = event(kind, grows); if (e) { errno = e; return back; } } while (0)

static int grows(int fd, off_t offset, size_t length) {
    struct stat s;
    if (fstat(fd, &s)) return 1;
    if (offset < 0) offset = lseek(fd, 0, SEEK_CUR);
    if (fcntl(fd, F_GETFL) & O_APPEND) offset = s.st_size;
    return offset + (off_t)length > s.st_blocks * 512; /* a hole needs room, too */
}
/* A write that is cut: half of it reaches the file, as a full disk or a kill leaves it. */
static size_t torn(size_t length) {
    if (action == EIO || action == EACCES || hit || !at || *counted + 1 < at || length < 2) return 0;
    return action == KILL && at % 2 ? 0 : length / 2;
}

ssize_t write(int fd, const void *bytes, size_t length) {
    REAL(ssize_t, "write", int, const void *, size_t);
    if (!n_folders || !fd_inside(fd)) return real(fd, bytes, length);
    int more = grows(fd, -1, length);
    size_t half = torn(length);
    if (half && (more || action == KILL)) {
        hit = 1;
        ssize_t done = real(fd, bytes, half);
        if (action == KILL) event(WRITE, more);
        return done;
    }
    FAIL(WRITE, more, -1);
    return real(fd, bytes, length);
}
ssize_t pwrite(int fd, const void *bytes, size_t length, off_t offset) {
    REAL(ssize_t, "pwrite", int, const void *, size_t, off_t);
    if (n_folders && fd_inside(fd)) FAIL(WRITE, grows(fd, offset, length), -1);
    return real(fd, bytes, length, offset);
}
ssize_t pwrite64(int fd, const void *bytes, size_t length, off64_t offset) { return pwrite(fd, bytes, length, offset); }
ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    if (n_folders && fd_inside(fd)) FAIL(WRITE, 1, -1);
    return real(fd, parts, count);
}
int fsync(int fd) { REAL(int, "fsync", int); if (n_folders && fd_inside(fd)) FAIL(SYNC, 0, -1); return real(fd); }
int ftruncate(int fd, off_t length) {
    REAL(int, "ftruncate", int, off_t);
    if (n_folders && fd_inside(fd)) FAIL(CHANGE, 0, -1);
    return real(fd, length);
}
int ftruncate64(int fd, off64_t length) { return ftruncate(fd, length); }

static int writes(int flags) { return (flags & (O_CREAT | O_TRUNC)) || (flags & O_ACCMODE) != O_RDONLY; }
static int before_open(int folder, const char *name, int flags) {
    if (!n_folders || !writes(flags) || !path_inside(folder, name)) return 0;
    struct stat s;
    int there = !fstatat(folder, name, &s, 0);
    return event(there ? WRITE : CREATE, 0);
}
#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list v; va_start(v, flags); mode = va_arg(v, mode_t); va_end(v); }
#define OPEN(name) int name(const char *path, int flags, ...) { MODE REAL(int, #name, const char *, int, ...); \
    int e = before_open(AT_FDCWD, path, flags); if (e) { errno = e; return -1; } return real(path, flags, mode); }
#define OPENAT(name) int name(int folder, const char *path, int flags, ...) { MODE REAL(int, #name, int, const char *, int, ...); \
    int e = before_open(folder, path, flags); if (e) { errno = e; return -1; } return real(folder, path, flags, mode); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)
#define FOPEN(name) FILE *name(const char *path, const char *mode) { REAL(FILE *, #name, const char *, const char *); \
    int e = before_open(AT_FDCWD, path, strpbrk(mode, "wa+") ? O_WRONLY | O_CREAT : O_RDONLY); \
    if (e) { errno = e; return NULL; } return real(path, mode); }
FOPEN(fopen) FOPEN(fopen64)

int rename(const char *one, const char *two) {
    REAL(int, "rename", const char *, const char *);
    if (path_inside(AT_FDCWD, two)) FAIL(CHANGE, 0, -1);
    return real(one, two);
}
int renameat(int a, const char *one, int b, const char *two) {
    REAL(int, "renameat", int, const char *, int, const char *);
    if (path_inside(b, two)) FAIL(CHANGE, 0, -1);
    return real(a, one, b, two);
}
int unlink(const char *path) {
    REAL(int, "unlink", const char *);
    if (path_inside(AT_FDCWD, path)) FAIL(CHANGE, 0, -1);
    return real(path);
}
int unlinkat(int folder, const char *path, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    if (path_inside(folder, path)) FAIL(CHANGE, 0, -1);
    return real(folder, path, flags);
}
int rmdir(const char *path) {
    REAL(int, "rmdir", const char *);
    if (path_inside(AT_FDCWD, path)) FAIL(CHANGE, 0, -1);
    return real(path);
}
int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    struct stat s;
    if (path_inside(AT_FDCWD, path) && stat(path, &s)) FAIL(CREATE, 0, -1);
    return real(path, mode);
}
int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(int, "mkdirat", int, const char *, mode_t);
    if (path_inside(folder, path)) FAIL(CREATE, 0, -1);
    return real(folder, path, mode);
}
