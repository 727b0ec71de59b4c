/* What happens to descriptors behind the C library's back: system calls by number, and system calls that no library sees.
 *
 *   raw calls ROOT           reads the tree by `syscall` alone
 *   raw reuse ROOT           closes descriptors of files and lets the kernel give their numbers to other things
 *   raw kept ROOT PLAIN OWN  closes every descriptor but the standard ones, opens 900 others, and reads the tree
 *   raw high ROOT PLAIN OWN  looks for descriptors that it did not open, and puts its own on high numbers
 *
 * Prints the same for a plain directory as for the namespace. */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <unistd.h>

static const char *root;

/* A system call that no library sees, with the kernel's result. */
static long unseen(long number, long a, long b, long c, long d) {
    long result;
#if defined(__x86_64__)
    register long r10 __asm__("r10") = d;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c,
                  x3 __asm__("x3") = d;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
    result = x0;
#endif
    return result;
}

static char *at(const char *name) {
    static char paths[8][4096];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, 4096, "%s/%s", root, name);
    return path;
}

static unsigned long sum(const char *bytes, long len) {
    unsigned long sum = 5381;
    for (long at = 0; at < len; at++)
        sum = sum * 33 + (unsigned char)bytes[at];
    return sum;
}

/* Prints a call's result, and `errno` if the call failed, or if it succeeded but changed `errno`. */
#define SHOW(call)                                                                              \
    do {                                                                                        \
        errno = 77;                                                                             \
        long result_ = (call);                                                                  \
        printf("%s: %ld %s\n", #call, result_, errno == 77 ? "" : strerrorname_np(errno));      \
    } while (0)

static void calls(void) {
    static char bytes[400000];
    struct stat stat;
    struct statx extended;
    int descriptor;
    SHOW(descriptor = syscall(SYS_openat, AT_FDCWD, at("big"), O_RDONLY));
    SHOW(syscall(SYS_read, descriptor, bytes, 1000));
    printf("%lu\n", sum(bytes, 1000));
    SHOW(syscall(SYS_lseek, descriptor, 10, SEEK_CUR));
    SHOW(syscall(SYS_pread64, descriptor, bytes, 5000, 290000));
    printf("%lu\n", sum(bytes, 5000));
    struct iovec parts[] = {{bytes, 100}, {bytes + 200, 300}};
    SHOW(syscall(SYS_readv, descriptor, parts, 2));
    printf("%lu\n", sum(bytes, 500));
    SHOW(syscall(SYS_preadv, descriptor, parts, 2, 77L, 0L));
    SHOW(syscall(SYS_preadv2, descriptor, parts, 2, 78L, 0L, 0));
    SHOW(syscall(SYS_preadv2, descriptor, parts, 2, -1L, -1L, 0));
    SHOW(syscall(SYS_lseek, descriptor, 0, SEEK_CUR));
    SHOW(syscall(SYS_fstat, descriptor, &stat));
    printf("%ld %o\n", (long)stat.st_size, stat.st_mode);
    SHOW(syscall(SYS_newfstatat, AT_FDCWD, at("link"), &stat, AT_SYMLINK_NOFOLLOW));
    printf("%ld %o\n", (long)stat.st_size, stat.st_mode);
    SHOW(syscall(SYS_newfstatat, descriptor, "", &stat, AT_EMPTY_PATH));
    printf("%ld %o\n", (long)stat.st_size, stat.st_mode);
    SHOW(syscall(SYS_statx, AT_FDCWD, at("sub/f2"), 0, STATX_BASIC_STATS, &extended));
    printf("%ld %o\n", (long)extended.stx_size, extended.stx_mode);
    SHOW(syscall(SYS_faccessat, AT_FDCWD, at("list"), R_OK));
    SHOW(syscall(SYS_faccessat, AT_FDCWD, at("missing"), R_OK));
    SHOW(syscall(SYS_faccessat2, AT_FDCWD, at("list"), X_OK, AT_EACCESS) == 0 ? 0 : -1);
    memset(bytes, 0, 100);
    SHOW(syscall(SYS_readlinkat, AT_FDCWD, at("link"), bytes, 100L));
    printf("%s\n", bytes);
    SHOW(syscall(SYS_openat, AT_FDCWD, at("missing"), O_RDONLY));
    struct open_how how = {.flags = O_RDONLY | O_CLOEXEC};
    int again;
    SHOW(again = syscall(SYS_openat2, AT_FDCWD, at("sub/f3"), &how, sizeof how));
    SHOW(syscall(SYS_read, again, bytes, 20000));
    printf("%lu\n", sum(bytes, 9000));
    SHOW(syscall(SYS_fcntl, again, F_GETFD));
    SHOW(syscall(SYS_close, again));
    SHOW(syscall(SYS_close, again));
    SHOW(syscall(SYS_read, again, bytes, 1));
#if defined(__x86_64__)
    SHOW(again = syscall(SYS_open, at("sub/f1"), O_RDONLY));
    SHOW(syscall(SYS_stat, at("sub/f1"), &stat));
    SHOW(syscall(SYS_lstat, at("dangling"), &stat));
    SHOW(syscall(SYS_access, at("sub"), X_OK));
    SHOW(syscall(SYS_readlink, at("out"), bytes, 100));
    SHOW(syscall(SYS_dup2, descriptor, 30));
    SHOW(syscall(SYS_read, 30, bytes, 10));
    SHOW(syscall(SYS_close, 30));
    SHOW(syscall(SYS_close, again));
#endif
    int copy;
    SHOW(copy = syscall(SYS_dup, descriptor));
    SHOW(syscall(SYS_read, copy, bytes, 50));
    SHOW(syscall(SYS_lseek, descriptor, 0, SEEK_CUR));
    SHOW(syscall(SYS_dup3, descriptor, 40, O_CLOEXEC));
    SHOW(syscall(SYS_fcntl, 40, F_GETFD));
    SHOW(syscall(SYS_fcntl, 40, F_DUPFD, 50));
    SHOW(syscall(SYS_read, 50, bytes, 70));
    SHOW(syscall(SYS_close_range, 40, 60, 0));
    SHOW(syscall(SYS_read, 50, bytes, 70));
    char *mapped = (char *)syscall(SYS_mmap, NULL, 300001L, PROT_READ, MAP_PRIVATE, descriptor, 0L);
    printf("%lu\n", mapped == MAP_FAILED ? 0 : sum(mapped, 300001));
    int ends[2];
    SHOW(syscall(SYS_pipe2, ends, O_CLOEXEC));
    off_t offset = 12;
    SHOW(syscall(SYS_sendfile, ends[1], descriptor, &offset, 100L));
    SHOW(syscall(SYS_read, ends[0], bytes, 200));
    printf("%lu %ld\n", sum(bytes, 100), (long)offset);
    SHOW(syscall(SYS_splice, descriptor, &offset, ends[1], NULL, 60L, 0));
    SHOW(syscall(SYS_fadvise64, descriptor, 0L, 0L, POSIX_FADV_SEQUENTIAL));
    SHOW(syscall(SYS_flock, descriptor, LOCK_SH));
    SHOW(syscall(SYS_ftruncate, descriptor, 0L) == -1);
    int folder;
    SHOW(folder = syscall(SYS_openat, AT_FDCWD, at("sub"), O_RDONLY | O_DIRECTORY));
    long entries = 0;
    for (long len; (len = syscall(SYS_getdents64, folder, bytes, sizeof bytes)) > 0;)
        for (long place = 0; place < len; place += ((struct dirent *)(bytes + place))->d_reclen)
            entries++;
    printf("%ld entries\n", entries);
    SHOW(again = syscall(SYS_openat, folder, "f1", O_RDONLY));
    SHOW(syscall(SYS_read, again, bytes, 5000));
    SHOW(syscall(SYS_fchdir, folder));
    SHOW(syscall(SYS_getcwd, bytes, sizeof bytes) > 0);
    printf("%s\n", bytes);
    SHOW(syscall(SYS_getcwd, bytes, 3L));
    SHOW(syscall(SYS_faccessat, AT_FDCWD, "f2", R_OK));
    SHOW(syscall(SYS_chdir, "/tmp"));
    SHOW(syscall(SYS_getcwd, bytes, sizeof bytes));
    SHOW(syscall(SYS_faccessat, AT_FDCWD, "f2", R_OK));
    SHOW(syscall(SYS_getppid) == getppid());
    /* A call with six arguments, which is passed on. */
    char from[8] = "passed", to[8] = "";
    struct iovec source = {from, 7}, target = {to, 7};
    SHOW(syscall(SYS_process_vm_readv, (long)getpid(), &target, 1L, &source, 1L, 0L));
    SHOW(syscall(SYS_process_vm_readv, (long)getpid(), &target, 1L, &source, 1L, 1L));
    printf("%s\n", to);
    SHOW(fstat(AT_FDCWD, &stat));
    SHOW(syscall(SYS_fstat, AT_FDCWD, &stat));
    SHOW(syscall(100000L));
    SHOW(syscall(-1L));
}

/* Ways to close a descriptor. */
static void close_seen(int number) { syscall(SYS_close, number); }
static void close_unseen(int number) { unseen(SYS_close, number, 0, 0, 0); }

/* Ways to get a new descriptor. If it is a socket, "socket" can be read from it, and `peer` is the other end. */
static int peer;
static int with_message(int pair[2]) {
    peer = pair[1];
    return write(pair[1], "socket", 6) == 6 ? pair[0] : -1;
}
static int by_socketpair(void) {
    int pair[2];
    return socketpair(AF_UNIX, SOCK_STREAM, 0, pair) ? -1 : with_message(pair);
}
static int by_syscall(void) {
    int pair[2];
    return syscall(SYS_socketpair, AF_UNIX, SOCK_STREAM, 0, pair) ? -1 : with_message(pair);
}
static int by_unseen(void) {
    int pair[2];
    return unseen(SYS_socketpair, AF_UNIX, SOCK_STREAM, 0, (long)pair) ? -1 : with_message(pair);
}
static int by_pipe(void) {
    int pair[2];
    return pipe(pair) ? -1 : with_message(pair);
}
static int by_accept(void) {
    struct sockaddr address = {.sa_family = AF_UNIX};
    int listener = fcntl(socket(AF_UNIX, SOCK_STREAM, 0), F_DUPFD, 100);
    unseen(SYS_close, peer = open("/dev/null", O_RDONLY), 0, 0, 0);
    bind(listener, &address, sizeof(sa_family_t));
    listen(listener, 1);
    socklen_t len = sizeof(struct sockaddr_storage);
    struct sockaddr_storage name;
    getsockname(listener, (struct sockaddr *)&name, &len);
    peer = fcntl(socket(AF_UNIX, SOCK_STREAM, 0), F_DUPFD, 100);
    connect(peer, (struct sockaddr *)&name, len);
    int pair[2] = {accept(listener, NULL, NULL), peer};
    close(listener);
    return with_message(pair);
}
static int by_eventfd(void) {
    peer = -1;
    return eventfd(5, 0);
}
static int by_timerfd(void) {
    peer = -1;
    return timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
}
static int by_memfd(void) {
    peer = -1;
    int number = memfd_create("x", 0);
    return pwrite(number, "memory", 6, 0) == 6 ? number : -1;
}
static int by_fopen(void) {
    peer = -1;
    return fileno(fopen("/etc/passwd", "r"));
}
static int by_mkstemp(void) {
    char name[] = "/tmp/raw-XXXXXX";
    peer = -1;
    int number = mkstemp(name);
    unlink(name);
    return number;
}
static int by_recvmsg(void) {
    int pair[2], number = -1;
    unseen(SYS_socketpair, AF_UNIX, SOCK_DGRAM, 0, (long)pair);
    /* The received descriptor must get the lowest number, so the socket moves away. */
    int receiver = fcntl(pair[0], F_DUPFD, 100);
    int sent = fcntl(by_unseen(), F_DUPFD, 100), other = peer;
    for (int low = 3; low < 100; low++)
        if (low != other)
            unseen(SYS_close, low, 0, 0, 0);
    close(receiver);
    int again[2];
    socketpair(AF_UNIX, SOCK_DGRAM, 0, again);
    char byte = 'x', control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &sent, sizeof(int));
    sendmsg(again[1], &message, 0);
    recvmsg(again[0], &message, 0);
    memcpy(&number, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
    peer = other;
    return number;
}

/* Shows what a descriptor is, by calls that would give other results for a file of the namespace. `reads` says whether to
 * begin with `read`, which does not notice a system call that no library saw. */
static void show(int number, int reads) {
    char bytes[64] = {0};
    struct stat stat;
    off_t offset = 0;
    struct epoll_event event = {.events = EPOLLIN};
    if (peer >= 0 && reads) {
        long count = read(number, bytes, sizeof bytes);
        printf("read %ld %.*s; ", count, (int)(count < 0 ? 0 : count), bytes);
    }
    fstat(number, &stat);
    printf("type %o; ", stat.st_mode & S_IFMT);
    fstat(number, &stat);
    printf("type %o; ", stat.st_mode & S_IFMT);
    memset(bytes, 0, sizeof bytes);
    errno = 0;
    long count = pread(number, bytes, 4, 0);
    printf("pread %ld %s %d; ", count, bytes, errno);
    int epoll = epoll_create1(0);
    errno = 0;
    int added = epoll_ctl(epoll, EPOLL_CTL_ADD, number, &event);
    printf("epoll_ctl %d %d; ", added, errno);
    close(epoll);
    printf("mmap %d; ", mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, number, 0) != MAP_FAILED);
    printf("flags %x; ", fcntl(number, F_GETFL));
    int copy = dup(number);
    fstat(copy, &stat);
    printf("copy %o; ", stat.st_mode & S_IFMT);
    close(copy);
    int sink = memfd_create("sink", 0);
    errno = 0;
    if (peer < 0) {
        int sent = sendfile(sink, number, &offset, 100) > 0;
        printf("sendfile %d %d; ", sent, errno);
    }
    close(sink);
    printf("close %d\n", close(number));
    if (peer >= 0)
        close(peer);
}

static void reuse(void) {
    struct { const char *name; void (*close)(int); } closers[] = {{"seen", close_seen}, {"unseen", close_unseen}};
    struct { const char *name; int (*make)(void); int is_seen; } makers[] = {
        {"socketpair", by_socketpair, 1}, {"syscall", by_syscall, 1}, {"unseen", by_unseen, 0}, {"pipe", by_pipe, 1},
        {"accept", by_accept, 1}, {"eventfd", by_eventfd, 1}, {"timerfd", by_timerfd, 1}, {"memfd", by_memfd, 1},
        {"fopen", by_fopen, 1}, {"mkstemp", by_mkstemp, 1}, {"recvmsg", by_recvmsg, 1},
    };
    for (int closer = 0; closer < 2; closer++)
        for (int maker = 0; maker < (int)(sizeof makers / sizeof *makers); maker++) {
            /* Every number that the maker may get was the number of a file before. `fstat` asks about each file
             * a few times, so that the library does not believe its table because the file is new. */
            struct stat stat;
            for (int number = 3; number < 40; number++)
                if (open(at("sub/f1"), O_RDONLY) != number)
                    printf("not the lowest number\n");
            for (int number = 3; number < 40; number++)
                for (int time = 0; time < 4; time++)
                    fstat(number, &stat);
            for (int number = 3; number < 40; number++)
                closers[closer].close(number);
            int number = makers[maker].make();
            printf("%s %s %d: ", closers[closer].name, makers[maker].name, number);
            show(number, closer == 0 || makers[maker].is_seen);
            for (number = 3; number < 400; number++)
                close_seen(number);
        }
}

enum { OWN = 900 };
static const char *plain;
static long files, wrong, failed;

/* Reads a file in several ways and compares it with its plain copy. */
static int compare(const char *path, const struct stat *stat, int kind, struct FTW *walk) {
    (void)stat, (void)walk;
    if (kind != FTW_F)
        return 0;
    static char expected[400000], found[400000];
    char other[4096];
    snprintf(other, sizeof other, "%s%s", root, path + strlen(plain));
    int descriptor = open(path, O_RDONLY);
    long len = read(descriptor, expected, sizeof expected);
    close(descriptor);
    files++;
    descriptor = open(other, O_RDONLY);
    if (descriptor < 0)
        return failed++, 0;
    long count = read(descriptor, found, sizeof found);
    failed += count < 0;
    wrong += count >= 0 && (count != len || memcmp(expected, found, len));
    memset(found, 0, sizeof found);
    count = pread(descriptor, found, sizeof found, 0);
    failed += count < 0;
    wrong += count >= 0 && (count != len || memcmp(expected, found, len));
    char *mapped = len ? mmap(NULL, len, PROT_READ, MAP_PRIVATE, descriptor, 0) : NULL;
    failed += mapped == MAP_FAILED;
    wrong += len && mapped != MAP_FAILED && memcmp(expected, mapped, len);
    if (mapped && mapped != MAP_FAILED)
        munmap(mapped, len);
    close(descriptor);
    return 0;
}

static int own_files[OWN];

/* Opens a file of our own that contains its number. `how` selects a way to open it. */
static int open_own(const char *folder, int number, int how) {
    char path[4096], bytes[16];
    snprintf(path, sizeof path, "%s/own-%d", folder, number);
    int len = snprintf(bytes, sizeof bytes, "%d", number);
    int file;
    if (how == 0)
        file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    else if (how == 1)
        file = fileno(fopen(path, "w+"));
    else
        file = unseen(SYS_openat, AT_FDCWD, (long)path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    return unseen(SYS_write, file, (long)bytes, len, 0) == len ? file : -1;
}

/* Returns how many of our own files are not as we left them. */
static int spoiled(const char *folder, int count) {
    int spoiled = 0;
    for (int number = 0; number < count; number++) {
        char path[4096], bytes[32] = {0}, expected[16];
        int len = snprintf(expected, sizeof expected, "%d", number);
        long got = unseen(SYS_pread64, own_files[number], (long)bytes, sizeof bytes, 0);
        spoiled += got != len || strcmp(bytes, expected) || unseen(SYS_lseek, own_files[number], 0, SEEK_CUR, 0) != len;
        snprintf(path, sizeof path, "%s/own-%d", folder, number);
        unlink(path);
    }
    return spoiled;
}

/* Waits until the test that started this program has done its part. */
static void wait_for_word(void) {
    char word[16];
    printf("ready\n");
    fflush(stdout);
    if (read(0, word, sizeof word) < 0)
        exit(2);
}

static void kept(const char *own, int how) {
    int early = open(at("big"), O_RDONLY);
    char bytes[100];
    if (early < 0 || read(early, bytes, 10) != 10)
        printf("cannot read\n");
    nftw(plain, compare, 10, FTW_PHYS);
    printf("before: %ld wrong, %ld failed\n", wrong, failed);
    wait_for_word();
    for (int number = 3; number < 65536; number++)
        (how == 3 ? close_seen : close_unseen)(number);
    for (int number = 0; number < OWN; number++)
        own_files[number] = open_own(own, number, how == 3 ? 0 : how);
    files = wrong = failed = 0;
    for (int round = 0; round < 3; round++)
        nftw(plain, compare, 10, FTW_PHYS);
    fprintf(stderr, "%ld failed\n", failed);
    printf("after: %ld read, %ld wrong, %d spoiled\n", files, wrong, spoiled(own, OWN));
    int refused = 0;
    for (int number = 0; number < OWN; number++)
        refused += close(own_files[number]) != 0;
    printf("%d could not be closed\n", refused);
}

static void high(const char *own) {
    nftw(plain, compare, 10, FTW_PHYS);
    int seen = 0;
    for (int number = 3; number < 5000; number++) {
        struct stat stat;
        int copy = dup(number);
        if (copy >= 0)
            close(copy);
        seen += fcntl(number, F_GETFD) >= 0 || fcntl(number, F_GETFL) >= 0 || fstat(number, &stat) == 0 || copy >= 0;
        seen += fcntl(number, F_DUPFD, 3) >= 0 || close(number) == 0;
    }
    printf("%d foreign descriptors\n", seen);
    int count = 0, refused = 0;
    for (int number = 500; number < 1020; number++) {
        int file = open_own(own, count, 0);
        own_files[count] = number % 2 ? dup2(file, number) : dup3(file, number, O_CLOEXEC);
        refused += own_files[count++] != number;
        close(file);
    }
    printf("%d refused\n", refused);
    files = wrong = failed = 0;
    nftw(plain, compare, 10, FTW_PHYS);
    printf("%ld read, %ld wrong, %ld failed, %d spoiled\n", files, wrong, failed, spoiled(own, count));
    for (int number = 500; number < 1020; number++)
        refused += close(number) != 0;
    printf("%d refused\n", refused);
}

int main(int count, char **arguments) {
    struct rlimit limit = {65536, 65536};
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max < 65536 ? limit.rlim_max : 65536;
    setrlimit(RLIMIT_NOFILE, &limit);
    setvbuf(stdout, NULL, _IOFBF, 1 << 16);
    root = arguments[2];
    plain = count > 3 ? arguments[3] : NULL;
    /* The harness may leave descriptors open. */
    for (int number = 3; number < 5000; number++)
        close(number);
    if (!strcmp(arguments[1], "calls"))
        calls();
    if (!strcmp(arguments[1], "reuse"))
        reuse();
    if (!strcmp(arguments[1], "kept"))
        kept(arguments[4], atoi(arguments[5]));
    if (!strcmp(arguments[1], "high"))
        high(arguments[4]);
    return 0;
}
