/* The library's own descriptors look closed: every call about them has the result that it has for a closed number.
 *
 *   reserved closed ROOT PLAIN   finds these descriptors without the library, and makes every call about each
 *   reserved low ROOT PLAIN      uses the namespace while the limit on descriptors is low
 *
 * PLAIN is a directory with the same files as ROOT. */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <linux/fs.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

static const char *root, *plain;

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

enum { NUMBERS = 65536, CLOSED = 700 };

/* Marks the numbers that are open, whoever opened them. */
static void list(char *is_open) {
    memset(is_open, 0, NUMBERS);
    for (int number = 0; number < NUMBERS; number++)
        is_open[number] = unseen(SYS_fcntl, number, F_GETFD, 0, 0) >= 0;
}

static long files, wrong;

/* Reads a file and compares it with its plain copy. */
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
    wrong += read(descriptor, found, sizeof found) != len || memcmp(expected, found, len);
    wrong += pread(descriptor, found, sizeof found, 0) != len || memcmp(expected, found, len);
    char *mapped = len ? mmap(NULL, len, PROT_READ, MAP_PRIVATE, descriptor, 0) : NULL;
    wrong += len && (mapped == MAP_FAILED || memcmp(expected, mapped, len));
    if (mapped && mapped != MAP_FAILED)
        munmap(mapped, len);
    close(descriptor);
    return 0;
}

/* Files of the program's own, for calls with two descriptors. */
static int own, ends[2], pair[2], epoll;

enum { ROWS = 400 };
struct outcome {
    const char *call;
    long result;
    int error;
};

#define ROW(call_)                                                     \
    do {                                                               \
        errno = 0;                                                     \
        long result_ = (long)(call_);                                  \
        rows[count++] = (struct outcome){#call_, result_, errno};      \
    } while (0)

static struct pollfd polled;
static int poll_one(int fd) {
    polled = (struct pollfd){fd, POLLIN, 0};
    return poll(&polled, 1, 0);
}

static fd_set *set_of(int fd) {
    static fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    return &set;
}

static struct msghdr *passing(int fd) {
    static char byte = 'x', control[CMSG_SPACE(sizeof(int))];
    static struct iovec part = {&byte, 1};
    static struct msghdr message;
    message = (struct msghdr){.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &fd, sizeof(int));
    return &message;
}

static struct mmsghdr *passing_many(int fd) {
    static struct mmsghdr message;
    message = (struct mmsghdr){.msg_hdr = *passing(fd)};
    return &message;
}

static struct msghdr *nothing(void) {
    static char byte[8];
    static struct iovec part = {byte, 8};
    static struct msghdr message;
    message = (struct msghdr){.msg_iov = &part, .msg_iovlen = 1};
    return &message;
}

static struct mmsghdr *nothing_many(void) {
    static struct mmsghdr message;
    message = (struct mmsghdr){.msg_hdr = *nothing()};
    return &message;
}

static int every_call(int fd, struct outcome *rows) {
    static char bytes[4096];
    struct iovec parts[] = {{bytes, 8}, {bytes + 100, 8}};
    int count = 0, value = 0;
    struct stat status;
    struct statx extended;
    struct statfs system;
    struct statvfs portable;
    struct timespec times[2] = {{0, UTIME_NOW}, {0, UTIME_NOW}};
    struct timespec now = {0, 0};
    struct timeval zero = {0, 0}, moments[2] = {{0, 0}, {0, 0}};
    struct epoll_event event = {.events = EPOLLIN};
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct sockaddr *any = (struct sockaddr *)&address;
    struct itimerspec timer = {{0, 0}, {0, 0}};
    struct termios terminal;
    struct flock lock = {.l_type = F_RDLCK};
    struct file_clone_range range = {.src_fd = fd};
    socklen_t len = sizeof address;
    loff_t offset = 0;
    eventfd_t number = 1;

    ROW(read(fd, bytes, 8));
    ROW(pread(fd, bytes, 8, 0));
    ROW(readv(fd, parts, 2));
    ROW(preadv(fd, parts, 2, 0));
    ROW(preadv2(fd, parts, 2, 0, 0));
    ROW(write(fd, "x", 1));
    ROW(pwrite(fd, "x", 1, 0));
    ROW(writev(fd, parts, 2));
    ROW(pwritev(fd, parts, 2, 0));
    ROW(pwritev2(fd, parts, 2, 0, 0));
    ROW(dprintf(fd, "x"));
    ROW(lseek(fd, 0, SEEK_CUR));
    ROW(fsync(fd));
    ROW(fdatasync(fd));
    ROW(syncfs(fd));
    ROW(sync_file_range(fd, 0, 1, 0));
    ROW(ftruncate(fd, 0));
    ROW(fallocate(fd, 0, 0, 1));
    ROW(posix_fallocate(fd, 0, 1));
    ROW(posix_fadvise(fd, 0, 1, POSIX_FADV_NORMAL));
    ROW(readahead(fd, 0, 1));
    ROW(mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0));
    ROW(mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0));
    ROW(fchmod(fd, 0600));
    ROW(fchown(fd, -1, -1));
    ROW(futimens(fd, times));
    ROW(futimes(fd, moments));
    ROW(fstat(fd, &status));
    ROW(fstatat(fd, "", &status, AT_EMPTY_PATH));
    ROW(fstatat(fd, "x", &status, 0));
    ROW(statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &extended));
    ROW(statx(fd, "x", 0, STATX_BASIC_STATS, &extended));
    ROW(fstatfs(fd, &system));
    ROW(fstatvfs(fd, &portable));
    ROW(fgetxattr(fd, "user.x", bytes, 8));
    ROW(fsetxattr(fd, "user.x", bytes, 8, 0));
    ROW(flistxattr(fd, bytes, 8));
    ROW(fremovexattr(fd, "user.x"));
    ROW(fpathconf(fd, _PC_NAME_MAX));
    ROW(ioctl(fd, FIONREAD, &value));
    ROW(ioctl(fd, FIONBIO, &value));
    ROW(ioctl(own, FICLONE, fd));
    ROW(ioctl(own, FICLONERANGE, &range));
    ROW(isatty(fd));
    ROW(tcgetattr(fd, &terminal));
    ROW(tcsetattr(fd, TCSANOW, &terminal));
    ROW(flock(fd, LOCK_SH | LOCK_NB));
    ROW(lockf(fd, F_TEST, 1));
    ROW(fcntl(fd, F_GETFD));
    ROW(fcntl(fd, F_GETFL));
    ROW(fcntl(fd, F_SETFL, O_NONBLOCK));
    ROW(fcntl(fd, F_DUPFD, 3));
    ROW(fcntl(fd, F_GETLK, &lock));
    ROW(dup(fd));
    ROW(dup2(fd, fd));
    ROW(dup2(fd, CLOSED + 1));
    ROW(dup3(fd, CLOSED + 1, 0));
    ROW(close(fd));
    ROW(fdopen(fd, "r"));
    ROW(fdopendir(fd));
    ROW(getdents64(fd, bytes, sizeof bytes));
    ROW(fchdir(fd));
    ROW(openat(fd, "x", O_RDONLY));
    ROW(faccessat(fd, "x", R_OK, 0));
    ROW(readlinkat(fd, "x", bytes, 8));
    ROW(readlinkat(fd, "", bytes, 8));
    ROW(mkdirat(fd, "x", 0700));
    ROW(mkfifoat(fd, "x", 0700));
    ROW(mknodat(fd, "x", 0700, 0));
    ROW(unlinkat(fd, "x", 0));
    ROW(symlinkat("x", fd, "x"));
    ROW(linkat(fd, "x", AT_FDCWD, "y", 0));
    ROW(linkat(AT_FDCWD, "/etc/passwd", fd, "y", 0));
    ROW(renameat(fd, "x", AT_FDCWD, "y"));
    ROW(renameat(AT_FDCWD, "/etc", fd, "y"));
    ROW(renameat2(fd, "x", AT_FDCWD, "y", 0));
    ROW(fchmodat(fd, "x", 0600, 0));
    ROW(fchownat(fd, "x", -1, -1, 0));
    ROW(fchownat(fd, "", -1, -1, AT_EMPTY_PATH));
    ROW(utimensat(fd, "x", times, 0));
    ROW(futimesat(fd, "x", moments));
    ROW(execveat(fd, "", (char *[]){"x", NULL}, environ, AT_EMPTY_PATH));
    ROW(poll_one(fd) == 1 ? polled.revents : -1);
    ROW((polled = (struct pollfd){fd, POLLIN, 0}, ppoll(&polled, 1, &now, NULL)) == 1 ? polled.revents : -1);
    ROW(select(fd + 1, set_of(fd), NULL, NULL, &zero));
    ROW(select(fd + 1, NULL, set_of(fd), NULL, &zero));
    ROW(pselect(fd + 1, NULL, NULL, set_of(fd), &now, NULL));
    ROW(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
    ROW(epoll_ctl(fd, EPOLL_CTL_ADD, own, &event));
    ROW(epoll_wait(fd, &event, 1, 0));
    ROW(timerfd_settime(fd, 0, &timer, NULL));
    ROW(timerfd_gettime(fd, &timer));
    ROW(inotify_add_watch(fd, "/etc", IN_CREATE));
    ROW(inotify_rm_watch(fd, 1));
    ROW(eventfd_read(fd, &number));
    ROW(eventfd_write(fd, number));
    ROW(sendfile(own, fd, &offset, 8));
    ROW(sendfile(fd, own, &offset, 8));
    ROW(splice(fd, NULL, ends[1], NULL, 8, SPLICE_F_NONBLOCK));
    ROW(splice(ends[0], NULL, fd, NULL, 8, SPLICE_F_NONBLOCK));
    ROW(tee(fd, ends[1], 8, SPLICE_F_NONBLOCK));
    ROW(tee(ends[0], fd, 8, SPLICE_F_NONBLOCK));
    ROW(vmsplice(fd, parts, 1, SPLICE_F_NONBLOCK));
    ROW(copy_file_range(fd, NULL, own, NULL, 8, 0));
    ROW(copy_file_range(own, NULL, fd, NULL, 8, 0));
    ROW(send(fd, "x", 1, MSG_NOSIGNAL));
    ROW(sendto(fd, "x", 1, MSG_NOSIGNAL, NULL, 0));
    ROW(sendmsg(fd, nothing(), MSG_NOSIGNAL));
    ROW(sendmmsg(fd, nothing_many(), 1, MSG_NOSIGNAL));
    ROW(sendmsg(pair[0], passing(fd), 0));
    ROW(sendmmsg(pair[0], passing_many(fd), 1, 0));
    ROW(recv(fd, bytes, 8, MSG_DONTWAIT));
    ROW(recvfrom(fd, bytes, 8, MSG_DONTWAIT, NULL, NULL));
    ROW(recvmsg(fd, nothing(), MSG_DONTWAIT));
    ROW(recvmmsg(fd, nothing_many(), 1, MSG_DONTWAIT, NULL));
    ROW(getsockopt(fd, SOL_SOCKET, SO_TYPE, &value, &len));
    ROW(setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &value, sizeof value));
    ROW(getsockname(fd, any, &len));
    ROW(getpeername(fd, any, &len));
    ROW(bind(fd, any, sizeof address));
    ROW(connect(fd, any, sizeof address));
    ROW(listen(fd, 1));
    ROW(accept(fd, NULL, NULL));
    ROW(accept4(fd, NULL, NULL, SOCK_CLOEXEC));
    ROW(sockatmark(fd));
    ROW(shutdown(fd, SHUT_RDWR));

    ROW(syscall(SYS_read, fd, bytes, 8));
    ROW(syscall(SYS_pread64, fd, bytes, 8, 0L));
    ROW(syscall(SYS_readv, fd, parts, 2));
    ROW(syscall(SYS_preadv, fd, parts, 2, 0L, 0L));
    ROW(syscall(SYS_preadv2, fd, parts, 2, 0L, 0L, 0));
    ROW(syscall(SYS_write, fd, "x", 1L));
    ROW(syscall(SYS_pwrite64, fd, "x", 1L, 0L));
    ROW(syscall(SYS_writev, fd, parts, 2));
    ROW(syscall(SYS_pwritev, fd, parts, 2, 0L, 0L));
    ROW(syscall(SYS_pwritev2, fd, parts, 2, 0L, 0L, 0));
    ROW(syscall(SYS_lseek, fd, 0L, SEEK_CUR));
    ROW(syscall(SYS_fsync, fd));
    ROW(syscall(SYS_fdatasync, fd));
    ROW(syscall(SYS_syncfs, fd));
    ROW(syscall(SYS_sync_file_range, fd, 0L, 1L, 0));
    ROW(syscall(SYS_ftruncate, fd, 0L));
    ROW(syscall(SYS_fallocate, fd, 0, 0L, 1L));
    ROW(syscall(SYS_fadvise64, fd, 0L, 1L, POSIX_FADV_NORMAL));
    ROW(syscall(SYS_readahead, fd, 0L, 1L));
    ROW(syscall(SYS_mmap, NULL, 4096L, PROT_READ, MAP_PRIVATE, fd, 0L));
    ROW(syscall(SYS_fchmod, fd, 0600));
    ROW(syscall(SYS_fchown, fd, -1, -1));
    ROW(syscall(SYS_utimensat, fd, NULL, times, 0));
    ROW(syscall(SYS_fstat, fd, &status));
    ROW(syscall(SYS_newfstatat, fd, "", &status, AT_EMPTY_PATH));
    ROW(syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &extended));
    ROW(syscall(SYS_fstatfs, fd, &system));
    ROW(syscall(SYS_fgetxattr, fd, "user.x", bytes, 8L));
    ROW(syscall(SYS_fsetxattr, fd, "user.x", bytes, 8L, 0));
    ROW(syscall(SYS_flistxattr, fd, bytes, 8L));
    ROW(syscall(SYS_fremovexattr, fd, "user.x"));
    ROW(syscall(SYS_ioctl, fd, FIONREAD, &value));
    ROW(syscall(SYS_flock, fd, LOCK_SH | LOCK_NB));
    ROW(syscall(SYS_fcntl, fd, F_GETFD));
    ROW(syscall(SYS_fcntl, fd, F_DUPFD, 3));
    ROW(syscall(SYS_dup, fd));
    ROW(syscall(SYS_dup3, fd, CLOSED + 1, 0));
    ROW(syscall(SYS_close, fd));
    ROW(syscall(SYS_getdents64, fd, bytes, sizeof bytes));
    ROW(syscall(SYS_fchdir, fd));
    ROW(syscall(SYS_openat, fd, "x", O_RDONLY));
    ROW(syscall(SYS_faccessat, fd, "x", R_OK));
    ROW(syscall(SYS_readlinkat, fd, "", bytes, 8L));
    ROW(syscall(SYS_mkdirat, fd, "x", 0700));
    ROW(syscall(SYS_unlinkat, fd, "x", 0));
    ROW(syscall(SYS_symlinkat, "x", fd, "x"));
    ROW(syscall(SYS_linkat, AT_FDCWD, "/etc/passwd", fd, "y", 0));
    ROW(syscall(SYS_renameat2, AT_FDCWD, "/etc", fd, "y", 0));
    ROW(syscall(SYS_execveat, fd, "", (char *[]){"x", NULL}, environ, AT_EMPTY_PATH));
    ROW((polled = (struct pollfd){fd, POLLIN, 0}, syscall(SYS_ppoll, &polled, 1L, &now, NULL, 8L)) == 1 ? polled.revents : -1);
    ROW(syscall(SYS_pselect6, fd + 1, set_of(fd), NULL, NULL, &now, NULL));
#if defined(__x86_64__)
    ROW((polled = (struct pollfd){fd, POLLIN, 0}, syscall(SYS_poll, &polled, 1L, 0)) == 1 ? polled.revents : -1);
    ROW(syscall(SYS_select, fd + 1, set_of(fd), NULL, NULL, &zero));
    ROW(syscall(SYS_dup2, fd, CLOSED + 1));
    ROW(syscall(SYS_getdents, fd, bytes, sizeof bytes));
    ROW(syscall(SYS_epoll_wait, fd, &event, 1, 0));
    ROW(syscall(SYS_futimesat, fd, "x", moments));
    ROW(syscall(SYS_signalfd, fd, bytes, 8L));
#endif
    ROW(syscall(SYS_signalfd4, fd, bytes, 8L, 0));
    ROW(syscall(SYS_epoll_ctl, epoll, EPOLL_CTL_ADD, fd, &event));
    ROW(syscall(SYS_epoll_pwait, fd, &event, 1, 0, NULL, 8L));
    ROW(syscall(SYS_timerfd_gettime, fd, &timer));
    ROW(syscall(SYS_inotify_add_watch, fd, "/etc", IN_CREATE));
    ROW(syscall(SYS_sendfile, own, fd, &offset, 8L));
    ROW(syscall(SYS_sendfile, fd, own, &offset, 8L));
    ROW(syscall(SYS_splice, fd, NULL, ends[1], NULL, 8L, SPLICE_F_NONBLOCK));
    ROW(syscall(SYS_splice, ends[0], NULL, fd, NULL, 8L, SPLICE_F_NONBLOCK));
    ROW(syscall(SYS_tee, fd, ends[1], 8L, SPLICE_F_NONBLOCK));
    ROW(syscall(SYS_vmsplice, fd, parts, 1L, SPLICE_F_NONBLOCK));
    ROW(syscall(SYS_copy_file_range, fd, NULL, own, NULL, 8L, 0));
    ROW(syscall(SYS_copy_file_range, own, NULL, fd, NULL, 8L, 0));
    ROW(syscall(SYS_sendto, fd, "x", 1L, MSG_NOSIGNAL, NULL, 0));
    ROW(syscall(SYS_sendmsg, fd, nothing(), MSG_NOSIGNAL));
    ROW(syscall(SYS_sendmmsg, fd, nothing_many(), 1, MSG_NOSIGNAL));
    ROW(syscall(SYS_sendmsg, pair[0], passing(fd), 0));
    ROW(syscall(SYS_sendmmsg, pair[0], passing_many(fd), 1, 0));
    ROW(syscall(SYS_recvfrom, fd, bytes, 8L, MSG_DONTWAIT, NULL, NULL));
    ROW(syscall(SYS_recvmsg, fd, nothing(), MSG_DONTWAIT));
    ROW(syscall(SYS_recvmmsg, fd, nothing_many(), 1, MSG_DONTWAIT, NULL));
    ROW(syscall(SYS_getsockopt, fd, SOL_SOCKET, SO_TYPE, &value, &len));
    ROW(syscall(SYS_setsockopt, fd, SOL_SOCKET, SO_KEEPALIVE, &value, sizeof value));
    ROW(syscall(SYS_getsockname, fd, any, &len));
    ROW(syscall(SYS_getpeername, fd, any, &len));
    ROW(syscall(SYS_bind, fd, any, sizeof address));
    ROW(syscall(SYS_connect, fd, any, sizeof address));
    ROW(syscall(SYS_listen, fd, 1));
    ROW(syscall(SYS_accept, fd, NULL, NULL));
    ROW(syscall(SYS_accept4, fd, NULL, NULL, SOCK_CLOEXEC));
    ROW(syscall(SYS_shutdown, fd, SHUT_RDWR));
    return count;
}

/* Makes every call about each of the library's descriptors, and returns their number. */
static int check(const char *mine) {
    static char is_open[NUMBERS];
    struct outcome expected[ROWS], found[ROWS];
    int count = every_call(CLOSED, expected), reserved = 0, differences = 0;
    for (int row = 0; row < count; row++)
        if (expected[row].error != EBADF && expected[row].result != EBADF && expected[row].result != POLLNVAL)
            printf("not about the descriptor: %s: %ld %s\n", expected[row].call, expected[row].result,
                   strerrorname_np(expected[row].error));
    list(is_open);
    for (int number = 3; number < NUMBERS; number++) {
        if (!is_open[number] || mine[number])
            continue;
        reserved++;
        every_call(number, found);
        for (int row = 0; row < count; row++)
            if (found[row].result != expected[row].result || found[row].error != expected[row].error) {
                differences++;
                printf("%d: %s: %ld %s\n", number, found[row].call, found[row].result,
                       found[row].error ? strerrorname_np(found[row].error) : "");
            }
    }
    printf("%d calls, %d differences\n", count > 200, differences);
    return reserved;
}

static void closed(void) {
    static char mine[NUMBERS];
    char byte, name[] = "/tmp/reserved-XXXXXX";
    own = mkstemp(name);
    unlink(name);
    if (write(own, "some bytes of our own", 21) != 21 || pipe(ends) || socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
        exit(2);
    epoll = epoll_create1(0);
    list(mine);
    char path[4096];
    snprintf(path, sizeof path, "%s/list", root);
    int first = open(path, O_RDONLY);
    mine[first] = 1;
    int early = check(mine);
    printf("first use: %d reserved\n", early > 0);
    nftw(plain, compare, 10, FTW_PHYS);
    printf("%ld files, %ld wrong\n", files, wrong);
    printf("all in use: %d reserved\n", check(mine) >= early);
    files = wrong = 0;
    nftw(plain, compare, 10, FTW_PHYS);
    printf("%ld files, %ld wrong\n", files, wrong);
    printf("first: %ld\n", (long)read(first, &byte, 1));
}

static void low(void) {
    struct rlimit limit, small, after;
    getrlimit(RLIMIT_NOFILE, &limit);
    small = limit;
    small.rlim_cur = 20;
    setrlimit(RLIMIT_NOFILE, &small);
    char path[4096], is_open[100] = {0};
    snprintf(path, sizeof path, "%s/list", root);
    int first = open(path, O_RDONLY);
    printf("first number %d\n", first);
    getrlimit(RLIMIT_NOFILE, &after);
    printf("limit kept %d\n", after.rlim_cur == 20 && after.rlim_max == limit.rlim_max);
    setrlimit(RLIMIT_NOFILE, &limit);
    for (int number = 3; number < 100; number++)
        is_open[number] = unseen(SYS_fcntl, number, F_GETFD, 0, 0) >= 0;
    for (int number = 3; number < 100; number++)
        if (is_open[number])
            printf("open: %d\n", number);
    for (int time = 0; time < 30; time++)
        printf("%d ", open(time % 2 ? "/dev/null" : path, O_RDONLY));
    printf("\n");
    for (int number = 3; number < 100; number++)
        close(number);
    nftw(plain, compare, 10, FTW_PHYS);
    printf("%ld files, %ld wrong\n", files, wrong);
    /* If the hard limit is low as well, the namespace works with the numbers that there are. */
    fflush(stdout);
    if (!fork()) {
        struct rlimit hard = {40, 40};
        setrlimit(RLIMIT_NOFILE, &hard);
        execl("/proc/self/exe", "reserved", "hard", root, plain, NULL);
        _exit(3);
    }
    int status;
    wait(&status);
    printf("status %d\n", status);
}

static void hard(void) {
    nftw(plain, compare, 10, FTW_PHYS);
    printf("%ld files, %ld wrong\n", files, wrong);
}

int main(int count, char **arguments) {
    if (count < 4)
        return 2;
    root = arguments[2], plain = arguments[3];
    setvbuf(stdout, NULL, _IOFBF, 1 << 16);
    for (int number = 3; number < 5000; number++)
        close(number);
    if (!strcmp(arguments[1], "closed"))
        closed();
    if (!strcmp(arguments[1], "low"))
        low();
    if (!strcmp(arguments[1], "hard"))
        hard();
    return 0;
}
