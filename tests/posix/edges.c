/* Calls at the edges of what is allowed: no free number, bad pointers, huge offsets, directories where a file is expected.
 *
 *   edges numbers|pointers|offsets|moves|arguments|directory_link|links|programs|statx ROOT
 *
 * Prints the same for a plain directory as for the namespace, except for `statx`. */

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
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
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

static void maps(int file, int folder) {
    int kinds[] = {0, MAP_SHARED, MAP_PRIVATE, MAP_SHARED_VALIDATE, 4, 15};
    int more[] = {0, MAP_HUGETLB, MAP_GROWSDOWN, MAP_SYNC, MAP_POPULATE, 1 << 27};
    for (int kind = 0; kind < 6; kind++)
        for (int each = 0; each < 6; each++) {
            int flags = kinds[kind] | more[each];
            printf("--- mmap, %x\n", flags);
            SHOW(mmap(NULL, 4096, PROT_READ, flags, file, 0) == MAP_FAILED ? -1 : 0);
            SHOW(mmap(NULL, 0, PROT_READ, flags, file, 0) == MAP_FAILED ? -1 : 0);
            SHOW(mmap(NULL, 4096, PROT_READ, flags, folder, 0) == MAP_FAILED ? -1 : 0);
        }
    SHOW(mmap(NULL, 4096, PROT_READ | PROT_WRITE, 0, file, 0) == MAP_FAILED ? -1 : 0);
}

/* Runs a program without any arguments, and with none and no environment. */
static void runs(void) {
    char *nothing[] = {NULL}, **volatile none = NULL;
    for (int each = 0; each < 4; each++) {
        fflush(stdout);
        int status = 0;
        if (!fork()) {
            if (each < 2)
                execve(at(each ? "program" : "script"), none, environ);
            else
                execve(at("program"), each == 2 ? none : nothing, none);
            printf("%s\n", strerrorname_np(errno));
            fflush(stdout);
            _exit(1);
        }
        wait(&status);
        printf("--- run %d: %d\n", each, status);
    }
    SHOW(fexecve(open(at("program"), O_RDONLY | O_CLOEXEC), none, environ));
    SHOW(execve(at("missing"), none, environ));
    SHOW(execve(at("list"), none, environ));
}

static void checks(void) {
    const char *names[] = {"list", "sub", "link", "dangling", "missing", "list/x", "list/"};
    unsigned masks[] = {0, STATX_BASIC_STATS, 0x80000000u, 0xc0000000u};
    int flags[] = {0, 1, 2, AT_SYMLINK_NOFOLLOW, AT_EACCESS, AT_SYMLINK_FOLLOW, AT_NO_AUTOMOUNT, AT_EMPTY_PATH, 0x2000, 0x4000, 0x6000,
                   0x8000, 0x10000, 0x40000, -1};
    int modes[] = {0, 4, 1, 8, 12, -1, 1 << 20};
    struct stat s;
    struct statx x;
    for (int name = 0; name < 7; name++) {
        const char *path = at(names[name]);
        int folder = open(at("sub"), O_RDONLY);
        printf("--- checks of %s\n", names[name]);
        for (int flag = 0; flag < 15; flag++) {
            printf("- flags %x\n", flags[flag]);
            SHOW(fstatat(AT_FDCWD, path, &s, flags[flag]));
            SHOW(syscall(SYS_newfstatat, AT_FDCWD, path, &s, flags[flag]));
            SHOW(faccessat(AT_FDCWD, path, R_OK, flags[flag]));
            SHOW(syscall(SYS_faccessat2, AT_FDCWD, path, 0, flags[flag]));
            SHOW(fstatat(folder, "", &s, flags[flag] | AT_EMPTY_PATH));
            for (int mask = 0; mask < 4; mask++)
                SHOW(statx(AT_FDCWD, path, flags[flag], masks[mask], &x));
        }
        for (int mode = 0; mode < 7; mode++) {
            printf("- mode %d\n", modes[mode]);
            SHOW(access(path, modes[mode]));
            SHOW(modes[mode] < 0 ? 0 : euidaccess(path, modes[mode]));
            SHOW(faccessat(AT_FDCWD, path, modes[mode], 0));
            SHOW(faccessat(AT_FDCWD, path, modes[mode], AT_SYMLINK_NOFOLLOW));
            SHOW(faccessat(AT_FDCWD, path, modes[mode], 1));
            SHOW(syscall(SYS_faccessat, AT_FDCWD, path, modes[mode]));
            SHOW(syscall(SYS_faccessat2, AT_FDCWD, path, modes[mode], 0));
        }
        close(folder);
    }
}

static void others(int file, int folder) {
    static char bytes[100];
    char own_link[64];
    int descriptors[] = {file, folder};
    struct iovec none = {bytes, 0}, some = {bytes, 8}, parts[] = {none, some, none};
    for (int each = 0; each < 2; each++) {
        int fd = descriptors[each];
        printf("--- others, %d\n", each);
        SHOW(fcntl(fd, F_GETPIPE_SZ));
        SHOW(fcntl(fd, F_SETPIPE_SZ, 4096));
        SHOW(fcntl(fd, 5000));
        SHOW(readv(fd, &none, 1));
        SHOW(preadv(fd, &none, 1, 0));
        SHOW(preadv(fd, &none, 1, -1));
        SHOW(preadv2(fd, &none, 1, 0, 0));
        SHOW(preadv2(fd, &none, 1, -1, 0));
        SHOW(preadv2(fd, &none, 1, 0, 0x40000000));
        SHOW(preadv2(fd, &some, 1, 0, 0x40000000));
        SHOW(preadv2(fd, &some, 1, -1, 0x40000000));
        SHOW(preadv2(fd, &some, 1, 0, RWF_HIPRI) < 0 && each);
        SHOW(each ? preadv2(fd, &some, 1, 0, RWF_NOWAIT) : 0);
        SHOW(preadv(fd, parts, 3, 0));
        SHOW(preadv2(fd, parts, 3, 0, 0));
        SHOW(readv(fd, parts, 0));
        snprintf(own_link, sizeof own_link, "/proc/self/fd/%d", fd);
        SHOW(faccessat(AT_FDCWD, own_link, W_OK, AT_SYMLINK_NOFOLLOW));
        SHOW(faccessat(AT_FDCWD, own_link, R_OK, AT_SYMLINK_NOFOLLOW));
        SHOW(readlink(own_link, bytes, 0));
        SHOW(fgetxattr(fd, "", bytes, 10));
        SHOW(fsetxattr(fd, "", bytes, 1, 0));
        SHOW(fremovexattr(fd, ""));
    }
    SHOW(readlink(at("list/"), bytes, 0));
    SHOW(readlink(at("link"), bytes, 0));
    SHOW(readlink(at("link"), bytes, -1));
    SHOW(readlink(at("missing"), bytes, 0));
    SHOW(readlinkat(folder, "../link", bytes, 0));
    SHOW(getxattr(at("list"), "", bytes, 10));
    SHOW(lgetxattr(at("link"), "", bytes, 10));
    SHOW(setxattr(at("list"), "", bytes, 1, 0));
    SHOW(removexattr(at("list"), ""));
    SHOW(symlink("", at("new")));
    SHOW(symlinkat("", folder, "new"));
    SHOW(rename(at("list"), ""));
    SHOW(rename("", at("new")));
    SHOW(rename(at("missing/x"), ""));
    SHOW(renameat(folder, "f1", folder, ""));
    SHOW(link(at("list"), ""));
    SHOW(link("", at("new")));
    SHOW(syscall(SYS_futimesat, folder, NULL, (struct timeval *)8));
    SHOW(chdir(at("sub")));
    SHOW(syscall(SYS_getcwd, bytes, 0));
    SHOW(syscall(SYS_getcwd, bytes, 3));
    SHOW(syscall(SYS_getcwd, NULL, 0));
    SHOW(syscall(SYS_getcwd, NULL, 4096));
    SHOW(getcwd(bytes, 0) != NULL);
}

static void arguments_of_calls(void) {
    int file = open(at("list"), O_RDONLY), folder = open(at("sub"), O_RDONLY);
    maps(file, folder);
    runs();
    checks();
    others(file, folder);
}

/* Goes through the link in /proc to the working directory. */
static void directory_link(void) {
    char own[64], task[64], path[4200], bytes[4096];
    snprintf(own, sizeof own, "/proc/%d/cwd", getpid());
    snprintf(task, sizeof task, "/proc/self/task/%d/cwd", getpid());
    const char *links[] = {"/proc/self/cwd", "/proc/thread-self/cwd", own, task, "/proc/1/cwd/missing", "/proc/self/cwdx", "/proc/self/cw"};
    const char *ends[] = {"", "/", "/f1", "/../list", "/empty", "/missing", "/f1/x", "/."};
    for (int place = 0; place < 3; place++) {
        if (chdir(place == 2 ? "/" : at(place ? "." : "sub")))
            exit(2);
        for (int link = 0; link < 7; link++)
            for (int end = 0; end < 8; end++) {
                struct stat s = {0};
                snprintf(path, sizeof path, "%s%s", links[link], ends[end]);
                printf("--- %d, link %d, end %s\n", place, link, ends[end]);
                SHOW(open(path, O_RDONLY) >= 0 ? 0 : -1);
                SHOW(open(path, O_RDONLY | O_DIRECTORY) >= 0 ? 0 : -1);
                SHOW(open(path, O_RDONLY | O_NOFOLLOW) >= 0 ? 0 : -1);
                SHOW(open(path, O_PATH | O_NOFOLLOW) >= 0 ? 0 : -1);
                SHOW(access(path, R_OK));
                /* The link itself, which can be written to. */
                SHOW(faccessat(AT_FDCWD, path, end ? R_OK : W_OK, AT_SYMLINK_NOFOLLOW));
                SHOW(stat(path, &s));
                printf("%o %ld\n", s.st_mode, place < 2 && S_ISREG(s.st_mode) ? (long)s.st_size : 0L);
                SHOW(lstat(path, &s));
                printf("%o\n", s.st_mode);
                struct statx x = {0};
                SHOW(statx(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS, &x));
                printf("%o\n", x.stx_mode);
                long len = readlink(path, bytes, sizeof bytes);
                printf("%.*s\n", (int)len, len < 0 ? strerrorname_np(errno) : bytes);
                printf("%s\n", realpath(path, bytes) ? bytes : strerrorname_np(errno));
                DIR *stream = opendir(path);
                printf("%s\n", stream ? "" : strerrorname_np(errno));
                if (stream)
                    closedir(stream);
                for (int number = 3; number < 20; number++)
                    close(number);
            }
    }
    if (chdir(at("sub")) || chdir("/proc/self/cwd/../sub/empty"))
        exit(2);
    puts(getcwd(bytes, sizeof bytes));
}

/* Links in /proc to descriptors of a symlink, a file and a directory, and questions about terminals. */
static void links(void) {
    char path[64], name[100];
    int numbers[] = {open(at("link"), O_PATH | O_NOFOLLOW), open(at("folder"), O_PATH | O_NOFOLLOW),
                     open(at("list"), O_RDONLY), open(at("sub"), O_RDONLY | O_DIRECTORY)};
    int flags[] = {O_RDONLY, O_PATH, O_RDONLY | O_NOFOLLOW, O_PATH | O_NOFOLLOW, O_RDONLY | O_DIRECTORY, O_PATH | O_DIRECTORY};
    for (int each = 0; each < 4; each++) {
        printf("-- descriptor %d\n", each);
        snprintf(path, sizeof path, "/proc/self/fd/%d", numbers[each]);
        for (int flag = 0; flag < 6; flag++) {
            struct stat s = {0};
            int number;
            SHOW(number = open(path, flags[flag]));
            if (number >= 0) {
                SHOW(fstat(number, &s));
                printf("%o\n", s.st_mode & S_IFMT);
                close(number);
            }
        }
        strcat(path, "/f1");
        SHOW(open(path, O_RDONLY) >= 0 ? 0 : -1);
        SHOW(access(path, R_OK));
        SHOW(isatty(numbers[each]));
        SHOW(ttyname(numbers[each]) != NULL);
        SHOW(ttyname_r(numbers[each], name, sizeof name));
    }
}

/* The error of a program that cannot run, and where the search goes on. */
static void programs(void) {
    char *words[] = {"true", NULL}, search[9000];
    SHOW(execv(at("sub"), words));
    SHOW(execv(at("sub/f1"), words));
    SHOW(execv(at("missing"), words));
    SHOW(execv(at("list/x"), words));
    char *names[] = {"sub", "deep", "f1", "missing", "true", "script"};
    char *folders[][2] = {{"", "/bin"}, {"sub", ""}, {"missing", "sub"}};
    for (int each = 0; each < 3; each++) {
        snprintf(search, sizeof search, "%s:%s", at(folders[each][0]), each ? at(folders[each][1]) : folders[each][1]);
        setenv("PATH", search, 1);
        for (int name = 0; name < 6; name++) {
            printf("-- %d %s\n", each, names[name]);
            fflush(stdout);
            pid_t child = fork();
            if (child == 0) {
                words[0] = names[name];
                SHOW(execvp(names[name], words));
                fflush(stdout);
                _exit(9);
            }
            int status;
            waitpid(child, &status, 0);
            SHOW(status);
        }
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
    if (!strcmp(arguments[1], "arguments"))
        arguments_of_calls();
    if (!strcmp(arguments[1], "directory_link"))
        directory_link();
    if (!strcmp(arguments[1], "links"))
        links();
    if (!strcmp(arguments[1], "programs"))
        programs();
    if (!strcmp(arguments[1], "statx")) {
        struct statx x;
        unsigned masks[] = {0, STATX_SIZE, STATX_BASIC_STATS, STATX_ALL, 0x7fffffff};
        for (int each = 0; each < 5; each++) {
            int result = statx(AT_FDCWD, at("list"), 0, masks[each], &x);
            printf("%d %x\n", result, x.stx_mask);
        }
        struct file_handle handle = {.handle_bytes = 0};
        int mount;
        SHOW(name_to_handle_at(AT_FDCWD, at("list"), &handle, &mount, 0));
    }
    return 0;
}
