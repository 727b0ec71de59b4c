/* What the kernel or another process gets in place of a descriptor of the namespace. Prints the same over a plain directory as
 * over the namespace. Usage: handoffs COMMAND FOLDER, where FOLDER has a file `list` and a folder `sub`.
 *
 *   numbers      calls by number that wait, list, or send
 *   constant     sends descriptors in control data that cannot be written
 *   directories  sends a directory's descriptor, and reads it asynchronously
 *   locked       locks its memory, and prints whether that is small
 *   pipes        splices into pipes that are full, not empty, or no pipes */

#define _GNU_SOURCE
#include <aio.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PRINT(call)                                                                     \
    do {                                                                                \
        errno = 77;                                                                     \
        long result_ = (call);                                                          \
        printf("%s: %ld %s\n", #call, result_, errno == 77 ? "" : strerrorname_np(errno)); \
    } while (0)

static char *path(const char *folder, const char *name) {
    char *path = NULL;
    if (asprintf(&path, "%s/%s", folder, name) < 0) abort();
    return path;
}

static int file, folder, pair[2], ends[2];

static void pause_never(int number) { (void)number; }

static fd_set in, out, except;

static void set(int with_file) {
    FD_ZERO(&in);
    FD_ZERO(&out);
    FD_ZERO(&except);
    FD_SET(ends[0], &in);
    FD_SET(file, &except);
    if (with_file) FD_SET(file, &in);
}

static void numbers(void) {
    char bytes[4096];
    struct timespec hour = {3600, 0};
    struct { const void *mask; size_t len; } mask = {NULL, 8};
    struct pollfd entries[100];
    for (int count = 2; count <= 100; count += 98) {
        for (int i = 0; i < count; i++) entries[i] = (struct pollfd){.fd = -1, .revents = 7};
        entries[0] = (struct pollfd){.fd = ends[0], .events = POLLIN, .revents = 7};
        entries[1] = (struct pollfd){.fd = file, .events = POLLIN | POLLPRI, .revents = 7};
        PRINT(syscall(SYS_ppoll, entries, count, &hour, NULL, 8));
        printf("%d: %d %x, %d %x, %x\n", count, entries[0].fd == ends[0], entries[0].revents, entries[1].fd == file,
               entries[1].revents, entries[count - 1].revents);
        entries[1].events = 0;
        hour = (struct timespec){0, 1000};
        PRINT(syscall(SYS_ppoll, entries, count, &hour, NULL, 8));
        hour.tv_sec = 3600;
    }
    PRINT(syscall(SYS_ppoll, entries, 1L << 30, &hour, NULL, 8));
    struct sigaction quiet = {.sa_handler = pause_never};
    sigaction(SIGALRM, &quiet, NULL);
#define SHOW printf("%d %d %d\n", FD_ISSET(file, &in), FD_ISSET(ends[0], &in), FD_ISSET(file, &except))
    set(1);
    PRINT(syscall(SYS_pselect6, 1024, &in, NULL, &except, &hour, &mask));
    SHOW;
    set(1);
    PRINT(select(64, &in, NULL, &except, NULL));
    SHOW;
    /* A call that fails leaves the sets as they were. */
    set(0);
    /* More than once, in case the first one comes before the call. */
    ualarm(20000, 20000);
    PRINT(syscall(SYS_pselect6, 1024, &in, NULL, &except, &hour, &mask));
    ualarm(0, 0);
    SHOW;
    struct timeval soon = {0, 1000};
#if defined(__x86_64__)
    set(1);
    PRINT(syscall(SYS_select, 1024, &in, &out, &except, NULL));
    SHOW;
    set(0);
    PRINT(syscall(SYS_select, 1024, &in, NULL, &except, &soon));
    entries[1].events = POLLIN;
    PRINT(syscall(SYS_poll, entries, 2L, -1L));
    printf("%x %x\n", entries[0].revents, entries[1].revents);
    PRINT(syscall(SYS_poll, NULL, 2L, -1L));
    long found = 0, len;
    while ((len = syscall(SYS_getdents, folder, bytes, 100L)) > 0)
        for (long at = 0; at < len; at += *(unsigned short *)(bytes + at + 16)) {
            char type = bytes[at + *(unsigned short *)(bytes + at + 16) - 1];
            found += strlen(bytes + at + 18) * (strcmp(bytes + at + 18, "empty") == 0 ? type * 1000 : 1);
        }
    printf("getdents %ld %ld\n", len, found);
    PRINT(syscall(SYS_getdents, folder, bytes, 100L));
    PRINT(syscall(SYS_getdents, file, bytes, 100L));
#endif
    (void)soon, (void)bytes;
    PRINT(syscall(SYS_epoll_ctl, epoll_create1(0), 1, file, entries));
    int sink = memfd_create("sink", 0);
    PRINT(syscall(SYS_readahead, file, 0L, 100L));
    PRINT(syscall(SYS_sync_file_range, file, 0L, 100L, 0));
    PRINT(syscall(SYS_sync_file_range, file, -1L, 100L, 0));
    PRINT(sync_file_range(file, 0, 0, 77));
    PRINT(syscall(SYS_tee, file, ends[1], 10L, 0));
    PRINT(tee(file, sink, 10, 0));
    PRINT(tee(file, ends[0], 10, 0));
    PRINT(tee(ends[0], file, 10, 0));
    PRINT(syscall(SYS_flock, file, 2));
}

/* Sends a descriptor. The control data is in memory with the given protection. */
static int send_one(int number, int protection, int by) {
    char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct iovec part = {"x", 1};
    struct cmsghdr *header = (void *)page;
    *header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(header), &number, sizeof number);
    mprotect(page, 4096, protection);
    struct mmsghdr message = {.msg_hdr = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = page,
                                          .msg_controllen = CMSG_SPACE(sizeof(int))}, .msg_len = 9};
    struct mmsghdr *place = &message;
    long sent = by == 0   ? sendmsg(pair[0], &place->msg_hdr, 0)
                : by == 1 ? sendmmsg(pair[0], place, 1, 0)
                : by == 2 ? syscall(SYS_sendmsg, pair[0], place, 0)
                          : syscall(SYS_sendmmsg, pair[0], place, 1, 0);
    printf("sent %ld %u %s, in place %d\n", sent, message.msg_len, sent < 0 ? strerrorname_np(errno) : "",
           (protection & PROT_READ) && memcmp(CMSG_DATA(header), &number, sizeof number) == 0);
    if (sent < 0) return -1;
    char byte;
    struct iovec room = {&byte, 1};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } received = {0};
    struct msghdr answer = {.msg_iov = &room, .msg_iovlen = 1, .msg_control = received.bytes,
                            .msg_controllen = sizeof received.bytes};
    int found = -1;
    recvmsg(pair[1], &answer, 0);
    if (CMSG_FIRSTHDR(&answer)) memcpy(&found, CMSG_DATA(CMSG_FIRSTHDR(&answer)), sizeof found);
    return found;
}

static void constant(void) {
    for (int by = 0; by < 4; by++)
        for (int protection = 0; protection < 3; protection++) {
            int protections[] = {PROT_READ, PROT_READ | PROT_WRITE, PROT_NONE};
            int found = send_one(file, protections[protection], by);
            char bytes[20] = "";
            struct stat stat;
            if (found < 0) continue;
            PRINT(fstat(found, &stat));
            PRINT(pread(found, bytes, 10, 3));
            printf("%lo %ld %s\n", (long)stat.st_mode, (long)stat.st_size, bytes);
            close(found);
        }
}

static void directories(void) {
    struct stat stat;
    char byte;
    int found = send_one(folder, PROT_READ | PROT_WRITE, 0);
    fstat(found, &stat);
    printf("%o\n", stat.st_mode & S_IFMT);
    PRINT(read(found, &byte, 1));
    PRINT(openat(found, "no such name", O_RDONLY));
    int place = open("/proc/self/fd", O_PATH);
    close(place);
    struct aiocb request = {.aio_fildes = folder, .aio_buf = &byte, .aio_nbytes = 1, .aio_lio_opcode = LIO_READ};
    struct aiocb *list[] = {&request};
    PRINT(aio_read(&request));
    while (aio_error(&request) == EINPROGRESS) aio_suspend((const struct aiocb **)list, 1, NULL);
    printf("%s %zd\n", strerrorname_np(aio_error(&request)), aio_return(&request));
    PRINT(lio_listio(LIO_WAIT, list, 1, NULL));
    printf("%s %zd\n", strerrorname_np(aio_error(&request)), aio_return(&request));
    /* The program can still list the directory, and so can a child. */
    char bytes[4096];
    PRINT(syscall(SYS_getdents64, folder, bytes, sizeof bytes) > 100);
    PRINT(fstat(folder, &stat));
    int copy = dup(folder), inner = openat(copy, "f1", O_RDONLY);
    PRINT(read(inner, bytes, sizeof bytes));
    PRINT(lseek(copy, 0, SEEK_SET));
    fflush(stdout);
    if (fork() == 0) {
        PRINT(syscall(SYS_getdents64, folder, bytes, sizeof bytes) > 100);
        PRINT(fchdir(folder));
        PRINT(access("f1", R_OK));
        exit(0);
    }
    wait(NULL);
    PRINT(close(copy));
    PRINT(close(folder));
}

static void pipes(void) {
    char page[4096], bytes[70000];
    fcntl(ends[1], F_SETPIPE_SZ, 8192);
    PRINT(splice(file, NULL, ends[1], NULL, 100, 0));
    PRINT(read(ends[0], bytes, sizeof bytes));
    printf("%.20s\n", bytes);
    PRINT(write(ends[1], page, sizeof page));
    /* There is room for a part of the bytes. */
    off_t from = 0;
    PRINT(splice(file, &from, ends[1], NULL, 8000, 0));
    printf("%ld\n", (long)from);
    PRINT(splice(file, &from, ends[1], NULL, 8000, SPLICE_F_NONBLOCK));
    PRINT(splice(file, &from, ends[1], &from, 10, 0));
    PRINT(splice(file, &from, ends[1], NULL, 10, 999));
    PRINT(splice(file, &from, ends[0], NULL, 10, 0));
    PRINT(splice(file, &from, memfd_create("sink", 0), NULL, 10, 0));
    PRINT(splice(file, &from, ends[1], NULL, 0, 0));
    PRINT(read(ends[0], bytes, 4096));
    PRINT(read(ends[0], bytes, 8192));
    from = 1 << 20;
    PRINT(splice(file, &from, ends[1], NULL, 10, 0));
    from = -1;
    PRINT(splice(file, &from, ends[1], NULL, 10, 0));
    PRINT(splice(file, NULL, ends[1], NULL, 10, SPLICE_F_NONBLOCK));
    PRINT(lseek(file, 0, SEEK_CUR));
}

/* Locks all of the memory, which makes it resident, before the folder is used. Prints whether the memory is small, and reads a
 * file. */
static void locked(const char *folder) {
    long pages = 0, resident = 0;
    if (mlockall(MCL_CURRENT) != 0) {
        printf("cannot lock: %s\n", strerrorname_np(errno));
        return;
    }
    FILE *statm = fopen("/proc/self/statm", "r");
    if (fscanf(statm, "%ld %ld", &pages, &resident) != 2) exit(3);
    fclose(statm);
    printf("%s\n", resident * 4 < 20 << 10 ? "a few MiB" : "many MiB");
    char byte;
    int number = open(path(folder, "list"), O_RDONLY);
    printf("%zd %c\n", read(number, &byte, 1), byte);
    PRINT(munlockall());
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    if (strcmp(arguments[1], "locked") == 0) {
        locked(arguments[2]);
        return 0;
    }
    file = open(path(arguments[2], "list"), O_RDONLY), folder = open(path(arguments[2], "sub"), O_RDONLY | O_DIRECTORY);
    if (file < 0 || folder < 0 || socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) != 0 || pipe(ends) != 0) return 3;
    struct { const char *name; void (*run)(void); } commands[] = {
        {"numbers", numbers}, {"constant", constant}, {"directories", directories}, {"pipes", pipes},
    };
    for (unsigned i = 0; i < sizeof commands / sizeof *commands; i++)
        if (strcmp(arguments[1], commands[i].name) == 0) commands[i].run();
    return 0;
}
