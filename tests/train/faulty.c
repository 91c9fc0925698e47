/* Preloaded into a process: opening a file for reading fails, or waits, as a bad disk or a slow one would let it.
 *
 * FAULT_PATH   what a path must contain
 * FAULT_SKIP   opens of such a path that go well before (0)
 * FAULT_TIMES  opens after them that fail (all)
 * FAULT_ERRNO  with which error; 0: none
 * FAULT_FLAG   a file that is made at the first of them, which then waits until the file is gone
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static int refused(const char *path, int flags) {
    static int seen = 0;
    const char *wanted = getenv("FAULT_PATH"), *flag = getenv("FAULT_FLAG");
    if (!wanted || !path || (flags & O_ACCMODE) != O_RDONLY || !strstr(path, wanted)) return 0;
    int place = seen++ - number("FAULT_SKIP", 0);
    if (place < 0 || place >= number("FAULT_TIMES", 1 << 30)) return 0;
    if (flag && place == 0) {
        int (*original)(const char *, int, ...) = dlsym(RTLD_NEXT, "open64");
        close(original(flag, O_WRONLY | O_CREAT, 0644));
        while (access(flag, F_OK) == 0) usleep(20000);
    }
    errno = number("FAULT_ERRNO", 0);
    return errno != 0;
}

#define OPEN(name)                                                              \
    int name(const char *path, int flags, ...) {                                \
        va_list rest;                                                           \
        va_start(rest, flags);                                                  \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                           \
        if (refused(path, flags)) return -1;                                    \
        int (*original)(const char *, int, ...) = dlsym(RTLD_NEXT, #name);      \
        return original(path, flags, mode);                                     \
    }
OPEN(open)
OPEN(open64)

DIR *opendir(const char *path) {
    if (refused(path, O_RDONLY)) return NULL;
    DIR *(*original)(const char *) = dlsym(RTLD_NEXT, "opendir");
    return original(path);
}
