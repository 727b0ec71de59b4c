/* Calls whose answers once differed between the namespace and a plain directory. tests/posix/answers.rs runs each of the commands
 * below over both; every line must be the same. Usage: answers COMMAND FOLDER (the tree that tests/posix/answers.rs creates). */

#define _GNU_SOURCE
#include <aio.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

extern char **environ;
static const char *program, *root;

/* Returns the path of a name below the folder, in one of eight buffers that are used in turn. */
static const char *at(const char *name) {
    static char paths[8][PATH_MAX];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, PATH_MAX, "%s/%s", root, name);
    return path;
}

static void print_result(const char *what, long result) {
    if (result < 0)
        printf("%s: failed, %s\n", what, strerrorname_np(errno));
    else
        printf("%s: %ld\n", what, result);
}

/* Prints a result, or errno if the call failed. */
#define PRINT(call) (errno = 0, print_result(#call, (long)(call)))

static unsigned sum(const char *bytes, long len) {
    unsigned sum = 0;
    for (long i = 0; i < len; i++)
        sum = sum * 31 + (unsigned char)bytes[i];
    return sum;
}

static void show(const char *what, int descriptor) {
    struct stat s;
    if (fstat(descriptor, &s) != 0)
        print_result(what, -1);
    else
        printf("%s: mode %o size %ld mtime %ld.%09ld\n", what, s.st_mode, S_ISDIR(s.st_mode) ? 0L : (long)s.st_size,
               (long)s.st_mtim.tv_sec, s.st_mtim.tv_nsec);
}

/* Prints what a program sees of a descriptor that another process has passed to it. */
static void show_passed(const char *what, int descriptor) {
    char bytes[5] = {0};
    printf("-- %s\n", what);
    show("fstat", descriptor);
    PRINT(fcntl(descriptor, F_GETFL));
    PRINT(lseek(descriptor, 0, SEEK_CUR));
    PRINT(read(descriptor, bytes, sizeof bytes));
    printf("sum %u\n", sum(bytes, sizeof bytes));
    PRINT(write(descriptor, "x", 1));
    PRINT(ftruncate(descriptor, 0));
    char *map = mmap(NULL, 4096, PROT_READ, MAP_SHARED, descriptor, 0);
    PRINT(map == MAP_FAILED ? -1 : 0);
    if (map != MAP_FAILED) PRINT(mprotect(map, 4096, PROT_READ | PROT_WRITE));
    PRINT(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0) == MAP_FAILED ? -1 : 0);
}

/* -- descriptors in messages -- */

static void messages(void) {
    int pair[2], files[2];
    socketpair(AF_UNIX, SOCK_DGRAM, 0, pair);
    files[0] = open(at("data"), O_RDONLY);
    files[1] = open(at("small"), O_RDONLY);
    lseek(files[0], 100, SEEK_SET);
    lseek(files[1], 200, SEEK_SET);
    struct mmsghdr messages[3] = {0};
    struct iovec part = {"hello", 5};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(2 * sizeof(int))];
    } control[3] = {0};
    /* The first message passes one descriptor, the second none, the third both. */
    for (int i = 0; i < 3; i++) {
        messages[i].msg_hdr.msg_iov = &part;
        messages[i].msg_hdr.msg_iovlen = 1;
        int count = i == 1 ? 0 : 1 + i / 2;
        if (count == 0) continue;
        messages[i].msg_hdr.msg_control = control[i].bytes;
        messages[i].msg_hdr.msg_controllen = CMSG_SPACE(count * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&messages[i].msg_hdr);
        *header = (struct cmsghdr){.cmsg_len = CMSG_LEN(count * sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(header), files, count * sizeof(int));
    }
    PRINT(sendmmsg(pair[0], messages, 3, 0));
    for (int i = 0; i < 3; i++) {
        int in_place[2] = {0};
        if (i != 1) memcpy(in_place, CMSG_DATA(&control[i].header), (1 + i / 2) * sizeof(int));
        printf("sent %u, the program's numbers are there: %d\n", messages[i].msg_len,
               i == 1 || (in_place[0] == files[0] && (i == 0 || in_place[1] == files[1])));
        char text[8];
        struct iovec room = {text, sizeof text};
        union {
            struct cmsghdr header;
            char bytes[CMSG_SPACE(2 * sizeof(int))];
        } received = {0};
        struct msghdr message = {.msg_iov = &room, .msg_iovlen = 1, .msg_control = received.bytes,
                                 .msg_controllen = sizeof received.bytes};
        PRINT(recvmsg(pair[1], &message, 0));
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        int count = header ? (header->cmsg_len - CMSG_LEN(0)) / sizeof(int) : 0;
        printf("received %d\n", count);
        for (int j = 0; j < count; j++) {
            int number;
            memcpy(&number, CMSG_DATA(header) + j * sizeof(int), sizeof number);
            show_passed("received", number);
            close(number);
        }
    }
    PRINT(sendmmsg(-1, messages, 1, 0));
    PRINT(sendmmsg(pair[0], messages, 0, 0));
}

/* -- asynchronous reads by threads of the C library -- */

static void wait_for(const char *what, struct aiocb *request) {
    const struct aiocb *list[] = {request};
    while (aio_error(request) == EINPROGRESS)
        aio_suspend(list, 1, NULL);
    printf("%s: error %s\n", what, strerrorname_np(aio_error(request)) ?: "none");
    long count = aio_return(request);
    printf("%s: %ld\n", what, count);
    if (count > 0 && request->aio_lio_opcode != LIO_WRITE) printf("sum %u\n", sum((char *)request->aio_buf, count));
}

static void posix_aio(void) {
    static char bytes[2][300000];
    char text[3];
    int file = open(at("data"), O_RDONLY);
    PRINT(read(file, text, 3));
    struct aiocb request = {.aio_fildes = file, .aio_buf = bytes[0], .aio_nbytes = 1000, .aio_offset = 5000};
    PRINT(aio_read(&request));
    wait_for("aio_read", &request);
    request.aio_offset = 400000;
    PRINT(aio_read(&request));
    wait_for("aio_read at the end", &request);
    PRINT(lseek(file, 0, SEEK_CUR));
    PRINT(read(file, text, 3));
    printf("sum %u\n", sum(text, 3));
    request.aio_offset = 0;
    request.aio_lio_opcode = LIO_WRITE;
    PRINT(aio_write(&request));
    wait_for("aio_write", &request);
    PRINT(aio_fsync(O_SYNC, &request));
    int small = open(at("small"), O_RDONLY | O_CLOEXEC);
    struct aiocb one = {.aio_fildes = file, .aio_buf = bytes[0], .aio_nbytes = 300000, .aio_lio_opcode = LIO_READ};
    struct aiocb two = {.aio_fildes = small, .aio_buf = bytes[1], .aio_nbytes = 3000, .aio_lio_opcode = LIO_READ};
    struct aiocb none = {.aio_fildes = 12345, .aio_lio_opcode = LIO_NOP};
    struct aiocb *list[] = {&one, NULL, &none, &two};
    PRINT(lio_listio(LIO_WAIT, list, 4, NULL));
    wait_for("one", &one);
    wait_for("two", &two);
    PRINT(fcntl(small, F_GETFD));
    show("small", small);
}

/* -- asynchronous reads by the kernel; `libasync.c` stands for libaio and liburing -- */

#include "libasync.h"

static void kernel_aio(void) {
    static char bytes[2][300000];
    int file = open(at("data"), O_RDONLY), small = open(at("small"), O_RDONLY | O_CLOEXEC);
    aio_context_t context = 0;
    int result = io_setup(8, &context);
    printf("io_setup %d\n", result);
    if (result != 0) return;
    struct iocb one = {.aio_fildes = file, .aio_lio_opcode = IOCB_CMD_PREAD, .aio_buf = (uintptr_t)bytes[0], .aio_nbytes = 300000};
    struct iocb two = {.aio_fildes = small, .aio_lio_opcode = IOCB_CMD_PREAD, .aio_buf = (uintptr_t)bytes[1], .aio_nbytes = 999,
                       .aio_offset = 7};
    struct iocb bad = {.aio_fildes = 12345, .aio_lio_opcode = IOCB_CMD_PREAD};
    struct iocb *list[] = {&one, &two, &bad};
    printf("io_submit %d\n", io_submit(context, 3, list));
    struct io_event events[2];
    printf("io_getevents %d\n", io_getevents(context, 2, 2, events, NULL));
    for (int i = 0; i < 2; i++) {
        struct iocb *done = (struct iocb *)(uintptr_t)events[i].obj;
        if (done == &one) printf("one %ld sum %u\n", (long)events[i].res, sum(bytes[0], 300000));
    }
    printf("two sum %u\n", sum(bytes[1], 999));
    printf("io_submit %d\n", io_submit(context, 1, NULL));
    printf("io_submit %d\n", io_submit(context, -1, list));
    PRINT(lseek(file, 0, SEEK_CUR));
    PRINT(fcntl(small, F_GETFD));
    PRINT(fcntl(file, F_GETFL));
}

static void kernel_ring(void) {
    static char bytes[300000];
    int before = open(at("data"), O_RDONLY);
    lseek(before, 11, SEEK_SET);
    struct io_uring ring;
    int result = io_uring_queue_init(8, &ring, 0);
    printf("io_uring_queue_init %d\n", result);
    if (result != 0) return;
    int after = open(at("small"), O_RDONLY | O_CLOEXEC);
    printf("before %d\n", ring_read(&ring, before, 0, bytes, 300000, 0));
    printf("sum %u\n", sum(bytes, 300000));
    printf("after %d\n", ring_read(&ring, after, 0, bytes, 1000, 3));
    printf("sum %u\n", sum(bytes, 1000));
    int files[] = {after, before};
    printf("register %d\n", ring_register(&ring, files, 2));
    printf("registered %d\n", ring_read(&ring, 1, 1, bytes, 1000, 5));
    printf("sum %u\n", sum(bytes, 1000));
    PRINT(lseek(before, 0, SEEK_CUR));
    PRINT(read(before, bytes, 9));
    printf("sum %u\n", sum(bytes, 9));
    PRINT(fcntl(after, F_GETFD));
    PRINT(fcntl(before, F_GETFL));
    show("before", before);
    int copy = dup(before);
    printf("copy %d\n", ring_read(&ring, copy, 0, bytes, 1000, 3));
    PRINT(close(before));
    PRINT(read(before, bytes, 1));
}

/* A file that is too large to be copied for a ring. */
static void large_ring(void) {
    static char bytes[1000];
    struct io_uring ring;
    if (io_uring_queue_init(8, &ring, 0) != 0) {
        fprintf(stderr, "io_uring is not allowed here: large\n");
        printf("ring -9\nread 1000\n");
        return;
    }
    int file = open(at("large"), O_RDONLY);
    printf("ring %d\n", ring_read(&ring, file, 0, bytes, 1000, 0));
    printf("read %ld\n", (long)read(file, bytes, 1000));
}

/* -- flags -- */

static void flags(void) {
    int file = open(at("data"), O_RDONLY), folder = open(root, O_RDONLY), on = 1, off = 0, left;
    PRINT(ioctl(file, FIONBIO, &on));
    PRINT(fcntl(file, F_GETFL));
    PRINT(ioctl(file, FIONBIO, &on));
    PRINT(fcntl(file, F_GETFL));
    PRINT(ioctl(file, FIONBIO, &off));
    PRINT(fcntl(file, F_GETFL));
    PRINT(ioctl(file, FIONBIO, NULL));
    PRINT(ioctl(folder, FIONBIO, &on));
    PRINT(fcntl(folder, F_GETFL));
    PRINT(ioctl(file, FIOASYNC, &off));
    PRINT(ioctl(file, FIOASYNC, &on));
    PRINT(fcntl(file, F_GETFL));
    PRINT(fcntl(file, F_SETFL, O_ASYNC));
    PRINT(fcntl(file, F_GETFL));
    PRINT(fcntl(file, F_SETFL, O_APPEND | O_NONBLOCK | O_NOATIME));
    PRINT(fcntl(file, F_GETFL));
    PRINT(fcntl(file, F_SETFL, 0));
    PRINT(ioctl(file, FIONREAD, &left));
    printf("left %d\n", left);
    lseek(file, 300000, SEEK_SET);
    PRINT(ioctl(file, FIONREAD, &left));
    printf("left %d\n", left);
    lseek(file, 400000, SEEK_SET);
    PRINT(ioctl(file, FIONREAD, &left));
    printf("left %d\n", left);
    PRINT(ioctl(folder, FIONREAD, &left));
    PRINT(ioctl(file, TIOCGWINSZ, &left));
    PRINT(ioctl(file, FIOCLEX));
    PRINT(fcntl(file, F_GETFD));
    int opened = open(at("data"), O_RDONLY | O_NONBLOCK);
    PRINT(fcntl(opened, F_GETFL));
    PRINT(ioctl(opened, FIONBIO, &off));
    PRINT(fcntl(opened, F_GETFL));
}

/* -- descriptors that only name a file -- */

static void of_path(const char *name, int extra) {
    char bytes[64];
    struct iovec part = {bytes, sizeof bytes};
    printf("-- %s %o\n", name, extra);
    int number = open(at(name), O_PATH | extra), number_is_there = number >= 0;
    print_result("open", number_is_there ? 0 : -1);
    if (!number_is_there) return;
    struct statfs fs;
    struct statvfs vfs;
    show("fstat", number);
    PRINT(fstatfs(number, &fs));
    PRINT(fstatvfs(number, &vfs));
    PRINT(fcntl(number, F_GETFL));
    PRINT(fcntl(number, F_GETFD));
    PRINT(fcntl(number, F_SETFD, 0));
    PRINT(fcntl(number, F_SETFL, O_NONBLOCK));
    struct flock lock = {.l_type = F_RDLCK};
    PRINT(fcntl(number, F_SETLK, &lock));
    PRINT(fcntl(number, F_GETLK, &lock));
    PRINT(fcntl(number, F_GETOWN));
    PRINT(fcntl(number, F_GETPIPE_SZ));
    PRINT(flock(number, LOCK_SH));
    PRINT(lockf(number, F_TEST, 0));
    PRINT(read(number, bytes, 5));
    PRINT(read(number, NULL, 0));
    PRINT(pread(number, bytes, 5, 0));
    PRINT(readv(number, &part, 1));
    PRINT(preadv(number, &part, 1, 0));
    PRINT(preadv2(number, &part, 1, -1, 0));
    PRINT(write(number, bytes, 5));
    PRINT(pwrite(number, bytes, 5, 0));
    PRINT(lseek(number, 0, SEEK_CUR));
    PRINT(mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, number, 0) == MAP_FAILED ? -1 : 0);
    PRINT(posix_fadvise(number, 0, 0, 0) == EBADF);
    PRINT(readahead(number, 0, 10));
    PRINT(fsync(number));
    PRINT(fdatasync(number));
    PRINT(syncfs(number));
    PRINT(ftruncate(number, 0));
    PRINT(fchmod(number, 0600));
    PRINT(fchown(number, 0, 0));
    PRINT(futimens(number, NULL));
    int left;
    PRINT(ioctl(number, FIONREAD, &left));
    PRINT(ioctl(number, FIOCLEX));
    PRINT(isatty(number));
    printf("%s\n", strerrorname_np(errno));
    PRINT(fgetxattr(number, "user.x", bytes, 5));
    PRINT(flistxattr(number, bytes, 5));
    PRINT(fsetxattr(number, "user.x", bytes, 5, 0));
    PRINT(fremovexattr(number, "user.x"));
    PRINT(syscall(SYS_getdents64, 12345, bytes, 64));
    PRINT(getdents64(number, bytes, 64));
    DIR *stream = fdopendir(dup(number));
    print_result("fdopendir", stream == NULL ? -1 : 0);
    if (stream != NULL) {
        PRINT(readdir(stream) == NULL ? -1 : 0);
        closedir(stream);
    }
    PRINT(sendfile(1, number, NULL, 5));
    int pipes[2];
    PRINT(pipe(pipes));
    PRINT(splice(number, NULL, pipes[1], NULL, 5, 0));
    PRINT(copy_file_range(number, NULL, pipes[1], NULL, 5, 0));
    close(pipes[0]), close(pipes[1]);
    struct pollfd poll_one = {number, POLLIN, 0};
    PRINT(poll(&poll_one, 1, 0));
    printf("revents %x\n", poll_one.revents);
    fd_set set;
    FD_ZERO(&set);
    FD_SET(number, &set);
    struct timeval now = {0};
    PRINT(select(number + 1, &set, NULL, NULL, &now));
    int epoll = epoll_create1(0);
    struct epoll_event event = {EPOLLIN, {0}};
    PRINT(epoll_ctl(epoll, EPOLL_CTL_ADD, number, &event));
    close(epoll);
    int copy = dup(number);
    PRINT(read(copy, bytes, 5));
    PRINT(fcntl(copy, F_GETFL));
    close(copy);
    struct stat s;
    struct stat inner;
    PRINT(fstatat(number, "", &s, AT_EMPTY_PATH));
    printf("mode %o\n", s.st_mode);
    PRINT(fstatat(number, "inner", &inner, 0));
    PRINT(openat(number, "inner", O_RDONLY) >= 0 ? 0 : -1);
    memset(bytes, 0, sizeof bytes);
    PRINT(readlinkat(number, "", bytes, sizeof bytes));
    printf("target %s\n", bytes);
    PRINT(faccessat(number, "", R_OK, AT_EMPTY_PATH));
    if (!S_ISLNK(s.st_mode)) {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", number);
        int again = open(link, O_RDONLY);
        PRINT(again >= 0 ? 0 : -1);
        PRINT(read(again, bytes, 5));
        close(again);
    }
    PRINT(fchdir(number));
    PRINT(chdir("/"));
    PRINT(close(number));
    PRINT(close(number));
}

static void paths_only(void) {
    of_path("data", 0);
    of_path("data", O_WRONLY);
    of_path("data", O_RDWR | O_TRUNC | O_CREAT | O_EXCL | O_CLOEXEC);
    of_path("data", O_NOFOLLOW | O_NONBLOCK);
    of_path("data", O_DIRECTORY);
    of_path("missing", O_CREAT);
    of_path("folder", 0);
    of_path("folder", O_DIRECTORY | O_NOFOLLOW);
    of_path("link", 0);
    of_path("link", O_NOFOLLOW);
    of_path("link", O_NOFOLLOW | O_DIRECTORY);
    of_path("dangling", O_NOFOLLOW);
    of_path("dangling", 0);
}

/* -- descriptors that another program inherits -- */

static void start(const char *how, int number) {
    char text[16];
    snprintf(text, sizeof text, "%d", number);
    char *arguments[] = {(char *)program, "inherited", (char *)root, text, NULL};
    printf("== %s\n", how);
    fflush(stdout);
    pid_t child = -1;
    if (!strcmp(how, "posix_spawn"))
        posix_spawn(&child, program, NULL, NULL, arguments, environ);
    else if (!strcmp(how, "vfork")) {
        child = vfork();
        if (child == 0) execv(program, arguments), _exit(1);
    } else {
        child = fork();
        if (child == 0) execv(program, arguments), _exit(1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    printf("status %d\n", status);
    PRINT(lseek(number, 0, SEEK_CUR));
    PRINT(fcntl(number, F_GETFL));
    show("here", number);
}

static void inherited(void) {
    const char *names[] = {"data", "small", "script", "bare"}, *ways[] = {"fork", "vfork", "posix_spawn"};
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 3; j++) {
            int number = open(at(names[i]), O_RDONLY);
            lseek(number, 50, SEEK_SET);
            start(ways[j], number);
            close(number);
        }
    int number = open(at("large"), O_RDONLY);
    start("posix_spawn", number);
    number = open(at("data"), O_RDONLY | O_NONBLOCK);
    start("fork", number);
    number = open(at("data"), O_PATH);
    start("posix_spawn", number);
    start("fork", number);
    start("vfork", open(at("script"), O_PATH));
    close(0);
    PRINT(open(at("small"), O_RDONLY));
    show_passed("standard input", 0);
    start("posix_spawn", 0);
}

/* -- SIGBUS -- */

static volatile int handled;
static sigset_t mask_inside;
static struct sigaction action_inside;

static void on_bus(int number) {
    handled++;
    pthread_sigmask(SIG_BLOCK, NULL, &mask_inside);
    sigaction(number, NULL, &action_inside);
}

static void on_bus_with_details(int number, siginfo_t *info, void *context) {
    (void)info, (void)context;
    on_bus(number);
}

static void show_mask(const char *what, const sigset_t *mask) {
    printf("%s:", what);
    for (int number = 1; number < 32; number++)
        if (sigismember(mask, number)) printf(" %d", number);
    printf("\n");
}

static void show_blocked(const char *what) {
    sigset_t mask;
    pthread_sigmask(SIG_BLOCK, NULL, &mask);
    show_mask(what, &mask);
    sigpending(&mask);
    show_mask("pending", &mask);
}

static void show_action(const char *what, const struct sigaction *action) {
    void *handler = (void *)action->sa_handler;
    printf("%s: %s flags %x ", what,
           handler == (void *)SIG_DFL ? "default" : handler == (void *)SIG_IGN ? "ignored" : handler == (void *)on_bus ? "simple" : "other",
           action->sa_flags);
    show_mask("mask", &action->sa_mask);
}

static void *in_thread(void *unused) {
    (void)unused;
    char bytes[100];
    show_blocked("thread");
    int file = open(at("data"), O_RDONLY);
    for (int i = 0; i < 3; i++) {
        PRINT(pread(file, bytes, 100, 70000));
        printf("sum %u\n", sum(bytes, 100));
    }
    close(file);
    return NULL;
}

static sigjmp_buf back;

static void jump(int number) {
    siglongjmp(back, number);
}

static void bus_errors(void) {
    struct sigaction action, old;
    sigset_t set, before;
    memset(&old, 0, sizeof old);
    PRINT(open(at("data"), O_RDONLY) >= 0);
    PRINT(sigaction(SIGBUS, NULL, &old));
    show_action("first", &old);
    int all_flags[] = {0, SA_NODEFER, SA_RESTART, SA_SIGINFO, SA_RESETHAND, SA_ONSTACK | SA_NODEFER};
    for (int i = 0; i < 6; i++) {
        memset(&action, 0, sizeof action);
        action.sa_flags = all_flags[i];
        if (all_flags[i] & SA_SIGINFO)
            action.sa_sigaction = on_bus_with_details;
        else
            action.sa_handler = on_bus;
        sigemptyset(&action.sa_mask);
        sigaddset(&action.sa_mask, SIGUSR1);
        sigaddset(&action.sa_mask, SIGHUP + i);
        PRINT(sigaction(SIGBUS, &action, &old));
        show_action("old", &old);
        PRINT(sigaction(SIGBUS, NULL, &old));
        show_action("new", &old);
        PRINT(raise(SIGBUS));
        printf("handled %d\n", handled);
        show_mask("inside", &mask_inside);
        show_action("inside", &action_inside);
        show_blocked("outside");
        PRINT(sigaction(SIGBUS, NULL, &old));
        show_action("after", &old);
    }
    action.sa_handler = on_bus;
    action.sa_flags = 0;
    sigaction(SIGBUS, &action, NULL);

    /* Blocked, pending, delivered. */
    sigemptyset(&set);
    sigaddset(&set, SIGBUS);
    sigaddset(&set, SIGUSR2);
    PRINT(pthread_sigmask(SIG_BLOCK, &set, &before));
    show_mask("before", &before);
    show_blocked("blocked");
    PRINT(raise(SIGBUS));
    show_blocked("raised");
    printf("handled %d\n", handled);
    pthread_t thread;
    pthread_create(&thread, NULL, in_thread, NULL);
    pthread_join(thread, NULL);
    in_thread(NULL);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) execl(program, program, "blocked", root, NULL), _exit(1);
    waitpid(child, NULL, 0);
    PRINT(sigprocmask(SIG_UNBLOCK, &set, &before));
    show_mask("before", &before);
    printf("handled %d\n", handled);
    sigfillset(&set);
    PRINT(sigprocmask(SIG_SETMASK, &set, &before));
    show_blocked("all");
    PRINT(raise(SIGBUS));
    sigemptyset(&set);
    sigaddset(&set, SIGBUS);
    int number = 0;
    PRINT(sigwait(&set, &number));
    printf("waited for %d\n", number);
    PRINT(sigprocmask(SIG_SETMASK, &before, NULL));
    PRINT(sigprocmask(77, &before, NULL));
    PRINT(pthread_sigmask(77, &before, NULL));
    printf("handled %d\n", handled);

    /* The older functions. */
    PRINT(signal(SIGBUS, SIG_IGN) == on_bus);
    PRINT(raise(SIGBUS));
    sigaction(SIGBUS, NULL, &old);
    show_action("ignored", &old);
    PRINT(signal(SIGBUS, on_bus) == SIG_IGN);
    sigaction(SIGBUS, NULL, &old);
    show_action("signal", &old);
    PRINT(raise(SIGBUS));
    show_mask("inside", &mask_inside);
    PRINT(ssignal(SIGBUS, SIG_DFL) == on_bus);
    PRINT(sysv_signal(SIGBUS, on_bus) == SIG_DFL);
    sigaction(SIGBUS, NULL, &old);
    show_action("sysv_signal", &old);
    PRINT(raise(SIGBUS));
    show_mask("inside", &mask_inside);
    PRINT(signal(SIGBUS, SIG_DFL) == SIG_DFL);

    /* A fault that the program causes itself. */
    memset(&action, 0, sizeof action);
    action.sa_handler = jump;
    sigaddset(&action.sa_mask, SIGUSR1);
    sigaction(SIGBUS, &action, NULL);
    int file = memfd_create("short", 0);
    volatile char *map = mmap(NULL, 4096, PROT_READ, MAP_SHARED, file, 0);
    for (int i = 0; i < 2; i++) {
        int caught = sigsetjmp(back, 1);
        if (caught == 0) printf("%d\n", map[0]);
        printf("caught %d\n", caught);
        show_blocked("after the fault");
    }

    /* The default action ends the process. */
    fflush(stdout);
    for (int i = 0; i < 2; i++) {
        child = fork();
        if (child == 0) {
            signal(SIGBUS, SIG_DFL);
            if (i == 0) raise(SIGBUS); else printf("%d\n", map[0]);
            _exit(1);
        }
        int status = -1;
        waitpid(child, &status, 0);
        printf("ended by %d\n", WIFSIGNALED(status) ? WTERMSIG(status) : -1);
    }
}

/* Reads while SIGBUS is blocked, before and after the session ends. */
static void gone(void) {
    char bytes[100];
    sigset_t set;
    int file = open(at("data"), O_RDONLY);
    for (int i = 0; i < 3; i++)
        PRINT(pread(file, bytes, 100, 70000));
    sigfillset(&set);
    sigprocmask(SIG_BLOCK, &set, NULL);
    PRINT(pread(file, bytes, 100, 70000));
    fflush(stdout);
    getchar();
    PRINT(pread(file, bytes, 100, 70000));
}

/* -- mappings -- */

static void maps(void) {
    const char *names[] = {"data", "small", "large"};
    for (int i = 0; i < 3; i++) {
        int file = open(at(names[i]), O_RDONLY);
        int kinds[] = {MAP_SHARED, MAP_PRIVATE, MAP_SHARED_VALIDATE};
        for (int j = 0; j < 3; j++) {
            printf("-- %s %d\n", names[i], j);
            for (int protection = 0; protection < 8; protection++) {
                char *map = mmap(NULL, 3000, PROT_READ, kinds[j], file, 0);
                PRINT(map == MAP_FAILED ? -1 : 0);
                printf("protection %d ", protection);
                PRINT(mprotect(map, 3000, protection));
                munmap(map, 3000);
            }
            char *map = mmap(NULL, 3000, PROT_NONE, kinds[j], file, 0);
            PRINT(mprotect(map, 3000, PROT_READ));
            printf("sum %u\n", sum(map, 3000));
            PRINT(mprotect(map, 3000, PROT_READ | PROT_WRITE));
            if (kinds[j] == MAP_PRIVATE) {
                map[5]++;
                printf("sum %u\n", sum(map, 3000));
            }
            munmap(map, 3000);
            map = mmap(NULL, 3000, PROT_READ, kinds[j], file, 0);
            printf("sum %u\n", sum(map, 3000));
            munmap(map, 3000);
        }
        PRINT(mmap(NULL, 3000, PROT_WRITE, MAP_SHARED, file, 0) == MAP_FAILED ? -1 : 0);
        close(file);
    }
}

/* -- links to descriptors -- */

static void look_through(const char *form, ...) {
    char path[PATH_MAX], target[PATH_MAX] = "";
    va_list arguments;
    va_start(arguments, form);
    vsnprintf(path, sizeof path, form, arguments);
    va_end(arguments);
    printf("-- %s\n", form);
    struct stat s;
    int result = stat(path, &s);
    print_result("stat", result);
    if (result == 0) printf("mode %o size %ld\n", s.st_mode, S_ISREG(s.st_mode) ? (long)s.st_size : 0);
    result = lstat(path, &s);
    print_result("lstat", result);
    if (result == 0) printf("mode %o\n", s.st_mode);
    struct statx x;
    result = statx(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS, &x);
    if (result == 0) printf("statx mode %o\n", x.stx_mode);
    PRINT(access(path, R_OK));
    result = readlink(path, target, sizeof target - 1);
    print_result("readlink", result);
    printf("target %s\n", target);
    char *real = realpath(path, NULL);
    printf("real %s\n", real ? real : strerrorname_np(errno));
    free(real);
    char bytes[10] = {0};
    int number = open(path, O_RDONLY);
    print_result("open", number < 0 ? -1 : 0);
    PRINT(read(number, bytes, sizeof bytes));
    printf("sum %u\n", sum(bytes, sizeof bytes));
    close(number);
    FILE *stream = fopen(path, "r");
    print_result("fopen", stream ? 0 : -1);
    if (stream) fclose(stream);
}

static void *links_in_thread(void *argument) {
    int file = *(int *)argument;
    look_through("/proc/thread-self/fd/%1$d", file);
    printf("-- task\n");
    char path[PATH_MAX];
    struct stat s;
    snprintf(path, sizeof path, "/proc/self/task/%d/fd/%d", gettid(), file);
    PRINT(stat(path, &s));
    printf("size %ld\n", (long)s.st_size);
    snprintf(path, sizeof path, "/proc/%d/task/%d/fd/%d", getpid(), gettid(), file);
    PRINT(stat(path, &s));
    printf("size %ld\n", (long)s.st_size);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", gettid(), file);
    PRINT(stat(path, &s));
    printf("size %ld\n", (long)s.st_size);
    return NULL;
}

static void links(void) {
    int file = dup2(open(at("data"), O_RDONLY), 50), folder = dup2(open(at("folder"), O_RDONLY), 51);
    int own = dup2(open("/etc/hostname", O_RDONLY), 52);
    int process = getpid();
    look_through("/proc/self/fd/%1$d", file);
    look_through("/proc/self/fd/%1$d", folder);
    look_through("/proc/self/fd/%1$d/inner", folder);
    look_through("/proc/self/fd/%1$d/../small", folder);
    look_through("/proc/self/fd/%1$d/", file);
    look_through("/proc/self/fd/%1$d/inner", file);
    look_through("/proc/self/fd/%1$d", own);
    look_through("/proc/self/fd/+%1$d", file);
    look_through("/proc/self/fd/0%1$d", file);
    look_through("/proc/self/fd/99");
    look_through("/proc/self/fd/999999999999");
    look_through("/dev/fd/%1$d", file);
    look_through("/proc/%2$d/fd/%1$d", file, process);
    look_through("/proc/%2$d/fd/%1$d/inner", folder, process);
    look_through("/proc/0%2$d/fd/%1$d", file, process);
    look_through("/proc/thread-self/fd/%1$d", file);
    pthread_t thread;
    pthread_create(&thread, NULL, links_in_thread, &file);
    pthread_join(thread, NULL);
    /* Another process's descriptors are not this one's. */
    int ready[2];
    char byte = 0;
    PRINT(pipe(ready));
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        dup2(open("/etc/hostname", O_RDONLY), file);
        if (write(ready[1], &byte, 1) == 1) pause();
        _exit(1);
    }
    PRINT(read(ready[0], &byte, 1));
    look_through("/proc/%2$d/fd/%1$d", file, child);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

int main(int count, char **arguments) {
    if (count < 3) return 2;
    program = arguments[0];
    root = arguments[2];
    const char *command = arguments[1];
    struct {
        const char *name;
        void (*run)(void);
    } commands[] = {
        {"messages", messages},   {"posix_aio", posix_aio}, {"kernel_aio", kernel_aio}, {"kernel_ring", kernel_ring},
        {"flags", flags},
        {"large_ring", large_ring},         {"paths", paths_only},    {"inherit", inherited},     {"bus", bus_errors},
        {"gone", gone},           {"maps", maps},           {"links", links},
    };
    if (!strcmp(command, "inherited")) {
        show_passed("inherited", atoi(arguments[3]));
        return 0;
    }
    if (!strcmp(command, "blocked")) {
        show_blocked("after exec");
        return 0;
    }
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (!strcmp(command, commands[i].name)) {
            commands[i].run();
            return 0;
        }
    return 2;
}
