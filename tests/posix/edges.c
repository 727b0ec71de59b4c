/* Calls at the edges of what is allowed: no free number, bad pointers, huge offsets, directories where a file is expected.
 *
 *   edges numbers|pointers|offsets|moves ROOT
 *
 * Prints the same for a plain directory as for the namespace. */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/uio.h>
#include <unistd.h>

static const char *root;

static char *at(const char *name) {
    static char paths[8][4096];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, 4096, "%s/%s", root, name);
    return path;
}

#define SHOW(call)                                                                              \
    do {                                                                                        \
        errno = 77;                                                                             \
        long result_ = (call);                                                                  \
        printf("%s: %ld %s\n", #call, result_, errno == 77 ? "" : strerrorname_np(errno));      \
    } while (0)

static void numbers(void) {
    struct rlimit limit;
    char long_name[300];
    memset(long_name, 'x', sizeof long_name);
    long_name[299] = 0;
    SHOW(open(at("list"), O_RDONLY));
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = 20;
    setrlimit(RLIMIT_NOFILE, &limit);
    while (open("/dev/null", O_RDONLY) < 19)
        ;
    /* Nothing has failed so far. */
    SHOW(open(at("list"), O_RDONLY | O_DIRECTORY));
    SHOW(open(at("sub"), O_WRONLY));
    for (int full = 1; full >= 0; full--) {
        if (!full)
            close(15);
#define OPEN(path, flags)                                           \
    do {                                                            \
        SHOW(open(path, flags, 0600) >= 0 ? 0 : -1);                \
        if (!full)                                                  \
            close(15);                                              \
    } while (0)
        OPEN(at("list"), O_RDONLY);
        OPEN(at("list"), O_RDONLY | O_DIRECTORY);
        OPEN(at("list"), O_PATH | O_DIRECTORY);
        OPEN(at("list/x"), O_RDONLY);
        OPEN(at("sub"), O_RDONLY | O_DIRECTORY);
        OPEN(at("sub"), O_WRONLY);
        OPEN(at("missing"), O_RDONLY);
        OPEN(at("missing/x"), O_RDONLY);
        OPEN(at("loop"), O_RDONLY);
        OPEN(at("link"), O_RDONLY | O_NOFOLLOW);
        OPEN(at("dangling"), O_RDONLY);
        OPEN(at("out"), O_RDONLY);
        OPEN(at(long_name), O_RDONLY);
        OPEN(at("list"), O_RDONLY | O_CREAT | O_EXCL);
        SHOW(fopen(at("missing"), "r") != NULL);
        SHOW(fopen(at("list"), "?") != NULL);
        SHOW(access(at("missing"), R_OK));
    }
}

static void pointers(void) {
    static char bytes[100];
    char *bad = (char *)8, *kernel = (char *)-4096L;
    int descriptors[] = {open(at("list"), O_PATH), open(at("sub"), O_PATH), open(at("link"), O_PATH | O_NOFOLLOW),
                         open(at("sub"), O_RDONLY), open(at("list"), O_RDONLY)};
    for (int each = 0; each < 5; each++) {
        int fd = descriptors[each];
        printf("--- %d\n", each);
        char *places[] = {bytes, bad, kernel};
        for (int place = 0; place < 3; place++) {
            char *p = places[place];
            struct iovec part = {p, 8}, long_part = {bytes, -1};
            printf("- %d\n", place);
            SHOW(read(fd, p, 8));
            SHOW(read(fd, p, -1));
            SHOW(read(fd, p, 0));
            SHOW(pread(fd, p, 8, 0));
            SHOW(pread(fd, p, 8, -1));
            SHOW(readv(fd, &part, 1));
            SHOW(readv(fd, &long_part, 1));
            SHOW(readv(fd, (struct iovec *)p, place ? 1 : 0));
            SHOW(readv(fd, &part, -1));
            SHOW(preadv(fd, &part, 1, 0));
            SHOW(preadv(fd, &part, 1, -1));
            SHOW(preadv(fd, &part, -1, 0));
            SHOW(preadv2(fd, &part, 1, 0, 0));
            SHOW(preadv2(fd, &part, 1, -1, 0));
            SHOW(preadv2(fd, &part, 1, 0, 0x40000000));
            SHOW(getdents64(fd, p, place ? 100 : 0) < 0 ? -1 : 0);
            if (place)
                SHOW(fstat(fd, (struct stat *)p));
            if (place)
                SHOW(fstatfs(fd, (struct statfs *)p));
            SHOW(lseek(fd, 0, SEEK_SET));
        }
    }
}

static void offsets(void) {
    static char bytes[100];
    long targets[] = {0, 1, 5, 1L << 20, 1L << 43, 17592186040319, 17592186040320, 17592186040321, 17592186044415,
                      17592186044416, 1L << 48, 1L << 62, INT64_MAX - 1, INT64_MAX, -1, INT64_MIN};
    int whences[] = {SEEK_SET, SEEK_CUR, SEEK_END, SEEK_DATA, SEEK_HOLE, 5, 17, -1};
    int descriptors[] = {open(at("list"), O_RDONLY), open(at("sub"), O_RDONLY), open(at("list"), O_PATH)};
    for (int each = 0; each < 3; each++) {
        int fd = descriptors[each];
        for (int whence = 0; whence < 8; whence++)
            for (int target = 0; target < 16; target++) {
                printf("--- %d, %d, %ld\n", each, whences[whence], targets[target]);
                SHOW(lseek(fd, 3, SEEK_SET));
                SHOW(lseek(fd, targets[target], whences[whence]));
                SHOW(lseek(fd, 0, SEEK_CUR));
                SHOW(each == 1 ? 0 : read(fd, bytes, 10));
                SHOW(each != 1 ? 0 : read(fd, bytes, 10));
                SHOW(lseek(fd, 0, SEEK_SET));
                SHOW(each == 1 ? getdents64(fd, bytes, sizeof bytes) > 0 : read(fd, bytes, 10));
            }
        for (int target = 0; target < 16; target++) {
            struct iovec part = {bytes, 100};
            printf("--- %d, %ld\n", each, targets[target]);
            SHOW(lseek(fd, 0, SEEK_SET));
            SHOW(pread(fd, bytes, 100, targets[target]));
            SHOW(preadv(fd, &part, 1, targets[target]));
            SHOW(posix_fadvise(fd, targets[target], 10, POSIX_FADV_WILLNEED));
            SHOW(posix_fadvise(fd, 0, targets[target], POSIX_FADV_SEQUENTIAL));
            SHOW(posix_fadvise(fd, 0, 1, target));
            SHOW(readahead(fd, targets[target], 10));
        }
    }
    /* To the end of a directory, and back. */
    SHOW(lseek(descriptors[1], 0, SEEK_END) == INT64_MAX);
    SHOW(getdents64(descriptors[1], bytes, sizeof bytes));
    SHOW(lseek(descriptors[1], 0, SEEK_SET));
    SHOW(getdents64(descriptors[1], bytes, sizeof bytes) > 0);
}

static void moves(void) {
    static char bytes[100000];
    char name[] = "/tmp/edges-XXXXXX";
    int own = mkstemp(name), append = open(name, O_WRONLY | O_APPEND), reading = open(name, O_RDONLY), ends[2];
    int folder = open("/tmp", O_RDONLY), null = open("/dev/null", O_WRONLY), fifo[2], full[2];
    unlink(name);
    if (pipe(ends) || pipe(fifo) || pipe2(full, O_NONBLOCK))
        exit(2);
    while (write(full[1], bytes, 4096) > 0)
        ;
    int sources[] = {open(at("list"), O_RDONLY), open(at("sub"), O_RDONLY), open(at("list"), O_PATH), open(at("sub"), O_PATH)};
    int sinks[] = {own, append, reading, ends[1], ends[0], full[1], folder, null, 999, -1, sources[0], sources[1], sources[2]};
    for (int source = 0; source < 4; source++)
        for (int sink = 0; sink < 13; sink++) {
            int from = sources[source], to = sinks[sink];
            printf("--- %d to %d\n", source, sink);
            long here = 3, there = 2, far = 1L << 40, none = -1;
#define BACK lseek(from, 0, SEEK_SET), lseek(own, 0, SEEK_SET), sink == 3 ? read(ends[0], bytes, sizeof bytes) : 0
#define MOVE(call)                                                              \
    do {                                                                        \
        if (sink == 3 && write(ends[1], "x", 1) != 1)                           \
            exit(2);                                                            \
        here = 3, there = 2, far = 1L << 40, none = -1;                         \
        SHOW(call);                                                             \
        printf("%ld %ld %ld\n", here, there, (long)lseek(from, 0, SEEK_CUR));   \
        (void)(BACK);                                                           \
    } while (0)
            MOVE(sendfile(to, from, NULL, 10));
            MOVE(sendfile(to, from, &here, 10));
            MOVE(sendfile(to, from, &far, 10));
            MOVE(sendfile(to, from, &none, 10));
            MOVE(sendfile(to, from, (off_t *)8, 10));
            MOVE(sendfile(to, from, NULL, 0));
            MOVE(copy_file_range(from, NULL, to, NULL, 10, 0));
            MOVE(copy_file_range(from, &here, to, &there, 10, 0));
            MOVE(copy_file_range(from, &far, to, NULL, 10, 0));
            MOVE(copy_file_range(from, &none, to, NULL, 10, 0));
            MOVE(copy_file_range(from, NULL, to, NULL, 0, 0));
            MOVE(copy_file_range(from, NULL, to, NULL, 10, 7));
            MOVE(splice(from, NULL, to, NULL, 10, SPLICE_F_NONBLOCK));
            MOVE(splice(from, &here, to, NULL, 10, SPLICE_F_NONBLOCK));
            MOVE(splice(from, &here, to, &there, 10, SPLICE_F_NONBLOCK));
            MOVE(splice(from, &far, to, NULL, 10, SPLICE_F_NONBLOCK));
            MOVE(splice(from, &none, to, NULL, 10, SPLICE_F_NONBLOCK));
            MOVE(splice(from, NULL, to, NULL, 0, SPLICE_F_NONBLOCK));
            MOVE(splice(from, NULL, to, NULL, 10, 0x100));
            if (write(fifo[1], "some bytes", 10) == 10) {
                MOVE(splice(fifo[0], NULL, from, NULL, 10, SPLICE_F_NONBLOCK));
                MOVE(sendfile(from, own, NULL, 10));
                MOVE(tee(fifo[0], from, 10, SPLICE_F_NONBLOCK));
            }
            if (read(fifo[0], bytes, sizeof bytes) < 0)
                exit(2);
        }
}

int main(int count, char **arguments) {
    if (count < 3)
        return 2;
    root = arguments[2];
    setvbuf(stdout, NULL, _IOFBF, 1 << 16);
    for (int number = 3; number < 5000; number++)
        close(number);
    if (!strcmp(arguments[1], "numbers"))
        numbers();
    if (!strcmp(arguments[1], "pointers"))
        pointers();
    if (!strcmp(arguments[1], "offsets"))
        offsets();
    if (!strcmp(arguments[1], "moves"))
        moves();
    return 0;
}
