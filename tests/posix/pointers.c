/* Calls functions with pointers that lead nowhere, and prints their results. tests/posix/border.rs runs this program over a plain
 * directory and over the namespace; every line must be the same. Usage: pointers FOLDER OUTSIDE, where OUTSIDE is a folder that is
 * never in the namespace.
 *
 * Functions in which glibc itself follows the pointer are left out: they crash without our library, too. */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#define PAGE 4096
#define FICLONERANGE_ 0x4020940dUL
#define FIGETBSZ_ 2UL

extern char **environ;
static const char *root, *outside;
static const char *kind;
static sigjmp_buf crashed;

static void on_crash(int number) { siglongjmp(crashed, number); }

static void report(const char *what, long result) {
    int before = errno;
    if (result == -1) printf("%s, %s: %s\n", kind, what, strerrorname_np(before));
    else printf("%s, %s: %ld\n", kind, what, result);
}

#define TRY(call)                                                              \
    do {                                                                       \
        int number = sigsetjmp(crashed, 1);                                    \
        if (number) printf("%s, %s: crashed by signal %d\n", kind, #call, number); \
        else errno = 0, report(#call, (long)(call));                           \
    } while (0)

static char *path_of(const char *folder, const char *name) {
    char *path = NULL;
    if (asprintf(&path, "%s/%s", folder, name) < 0) abort();
    return path;
}

/* Returns whether a descriptor was opened, and closes it. */
static int opened(int descriptor) {
    if (descriptor < 0) return -1;
    close(descriptor);
    return 0;
}

/* Maps pages that can be read and written, with one after them that cannot be accessed. */
static char *pages(int count) {
    char *start = mmap(NULL, (count + 1) * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED || mprotect(start + count * PAGE, PAGE, PROT_NONE)) abort();
    return start;
}

/* Calls that take a path. `p` cannot be read, or is cut off by a page that cannot be read. */
static void paths(const char *p, int directory) {
    const char *file = path_of(root, "list"), *new = path_of(root, "new"), *far = path_of(outside, "new");
    struct stat s;
    struct statx x;
    struct statfs f;
    char out[100];
    TRY(opened(open(p, O_RDONLY)));
    TRY(opened(open(p, O_RDWR | O_CREAT, 0600)));
    TRY(opened(open64(p, O_RDONLY)));
    TRY(opened(creat(p, 0600)));
    TRY(opened(openat(AT_FDCWD, p, O_RDONLY)));
    TRY(opened(openat(directory, p, O_RDONLY)));
    TRY(stat(p, &s));
    TRY(lstat(p, &s));
    TRY(fstatat(AT_FDCWD, p, &s, 0));
    TRY(fstatat(directory, p, &s, AT_SYMLINK_NOFOLLOW));
    TRY(statx(AT_FDCWD, p, 0, STATX_ALL, &x));
    TRY(statx(directory, p, 0, STATX_ALL, &x));
    if (p) {
        TRY(fstatat(directory, p, &s, AT_EMPTY_PATH));
        TRY(statx(directory, p, AT_EMPTY_PATH, STATX_ALL, &x));
    }
    TRY(statfs(p, &f));
    TRY(access(p, R_OK));
    TRY(euidaccess(p, R_OK));
    TRY(faccessat(AT_FDCWD, p, R_OK, 0));
    TRY(faccessat(directory, p, R_OK, AT_EACCESS));
    TRY(readlink(p, out, sizeof out));
    TRY(readlinkat(directory, p, out, sizeof out));
    TRY(chdir(p));
    TRY(chroot(p));
    TRY(mkdir(p, 0700));
    TRY(mkdirat(directory, p, 0700));
    TRY(mkfifo(p, 0700));
    TRY(mknod(p, S_IFIFO | 0700, 0));
    TRY(rmdir(p));
    TRY(unlink(p));
    TRY(unlinkat(directory, p, 0));
    TRY(remove(p));
    TRY(rename(p, p));
    TRY(rename(p, new));
    TRY(rename(file, p));
    TRY(rename(p, far));
    TRY(rename(far, p));
    TRY(renameat(AT_FDCWD, p, directory, "new"));
    TRY(renameat(directory, "list", AT_FDCWD, p));
    TRY(renameat2(directory, "list", AT_FDCWD, p, RENAME_NOREPLACE));
    TRY(link(p, new));
    TRY(link(file, p));
    TRY(linkat(directory, "list", AT_FDCWD, p, 0));
    TRY(symlink(p, new));
    TRY(symlink(p, far));
    TRY(symlink("target", p));
    TRY(symlinkat(p, directory, "new"));
    TRY(symlinkat("target", directory, p));
    TRY(truncate(p, 0));
    TRY(chmod(p, 0600));
    TRY(fchmodat(directory, p, 0600, 0));
    TRY(chown(p, 0, 0));
    TRY(lchown(p, 0, 0));
    TRY(fchownat(directory, p, 0, 0, 0));
    struct timespec times[2] = {{0, UTIME_OMIT}, {0, UTIME_OMIT}};
    if (p) TRY(utimensat(directory, p, times, 0));
    TRY(getxattr(p, "user.x", out, sizeof out));
    TRY(lgetxattr(p, "user.x", out, sizeof out));
    TRY(getxattr(file, p, out, sizeof out));
    TRY(fgetxattr(directory, p, out, sizeof out));
    TRY(listxattr(p, out, sizeof out));
    TRY(setxattr(p, "user.x", "1", 1, 0));
    TRY(setxattr(file, p, "1", 1, 0));
    TRY(removexattr(p, "user.x"));
    TRY(removexattr(file, p));
    char *arguments[] = {"script", NULL};
    TRY(execve(p, arguments, environ));
    TRY(execveat(directory, p, arguments, environ, 0));
    pid_t child;
    TRY(posix_spawn(&child, p, NULL, NULL, arguments, environ));
    TRY(execv(p, arguments));
    FILE *stream;
    TRY((stream = fopen(p, "r")) ? fclose(stream) : -1);
    if (p) TRY((stream = freopen(p, "r", fopen("/dev/null", "r"))) ? fclose(stream) : -1);
}

/* Calls that read arguments other than paths. */
static void inputs(void *p, int directory, int file) {
    const char *script = path_of(root, "script"), *list = path_of(root, "list");
    char *good[] = {"script", NULL}, *bad[] = {"script", p, NULL};
    if (p) {
        TRY(execve(script, p, environ));
        TRY(execve(script, bad, environ));
        TRY(execve(script, good, p));
        TRY(execve(script, good, bad));
        int program = open(script, O_RDONLY | O_CLOEXEC);
        TRY(fexecve(program, p, environ));
        TRY(fexecve(program, bad, environ));
        TRY(fexecve(program, good, bad));
        close(program);
        TRY(execve("/bin/true", p, environ));
        TRY(execve("/bin/true", bad, environ));
        TRY(execve("/bin/true", good, bad));
        pid_t child;
        TRY(posix_spawn(&child, "/bin/true", NULL, NULL, bad, environ));
        TRY(posix_spawn(&child, script, NULL, NULL, bad, environ));
        FILE *stream;
        TRY((stream = popen(p, "r")) ? pclose(stream) : -1);
        TRY(utimensat(directory, "list", p, 0));
        TRY(utimensat(AT_FDCWD, list, p, AT_SYMLINK_NOFOLLOW));
        TRY(futimens(file, p));
    }
    TRY(poll(p, 1, 0));
    TRY(poll(p, 1000, 0));
    TRY(poll(p, 1 << 30, 0));
    struct timespec now = {0, 0};
    TRY(ppoll(p, 1, &now, NULL));
    struct pollfd entry = {.fd = file, .events = POLLIN};
    if (p) TRY(ppoll(&entry, 1, &now, p));
    struct timeval none = {0, 0};
    if (p) {
        TRY(select(file + 1, p, NULL, NULL, &none));
        TRY(select(file + 1, NULL, p, NULL, &none));
        TRY(select(file + 1, NULL, NULL, p, &none));
        TRY(select(1, p, NULL, NULL, &none));
        TRY(pselect(file + 1, p, NULL, NULL, &now, NULL));
    }
    int epoll = epoll_create1(0), pair[2], pipes[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) || pipe(pipes)) abort();
    TRY(epoll_ctl(epoll, EPOLL_CTL_ADD, file, p));
    TRY(epoll_ctl(epoll, EPOLL_CTL_ADD, pair[0], p));
    TRY(fcntl(file, F_SETLK, p));
    TRY(fcntl(file, F_GETLK, p));
    TRY(fcntl(file, F_OFD_SETLK, p));
    TRY(fcntl(pair[0], F_SETLK, p));
    TRY(sendmsg(pair[0], p, 0));
    struct iovec part = {.iov_base = "x", .iov_len = 1};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = p, .msg_controllen = CMSG_SPACE(sizeof(int))};
    if (p) TRY(sendmsg(pair[0], &header, 0));
    header = (struct msghdr){.msg_iov = p, .msg_iovlen = 1};
    TRY(sendmsg(pair[0], &header, 0));
    TRY(readv(file, p, 2));
    TRY(preadv(file, p, 2, 0));
    TRY(preadv2(file, p, 2, -1, 0));
    if (p) {
        TRY(sendfile(pair[0], file, p, 10));
        TRY(copy_file_range(file, p, pair[0], NULL, 10, 0));
        TRY(splice(file, p, pipes[1], NULL, 10, 0));
    }
    TRY(write(file, p, 10));
    close(epoll), close(pair[0]), close(pair[1]), close(pipes[0]), close(pipes[1]);
}

/* Calls that write through a pointer. */
static void outputs(void *p, int directory, int file) {
    const char *list = path_of(root, "list"), *missing = path_of(root, "missing"), *symlink = path_of(root, "link");
    TRY(stat(list, p));
    TRY(lstat(list, p));
    TRY(stat(missing, p));
    TRY(fstat(file, p));
    TRY(fstat(directory, p));
    TRY(fstatat(directory, "list", p, 0));
    TRY(fstatat(file, "", p, AT_EMPTY_PATH));
    TRY(statx(AT_FDCWD, list, 0, STATX_ALL, p));
    TRY(statx(file, "", AT_EMPTY_PATH, STATX_ALL, p));
    TRY(statfs(list, p));
    TRY(fstatfs(file, p));
    TRY(stat("/etc/passwd", p));
    TRY(readlink(symlink, p, 100));
    TRY(readlink(symlink, p, 0));
    TRY(readlinkat(directory, "link", p, 100));
    if (p) {
        TRY(chdir(root));
        TRY((long)getcwd(p, PATH_MAX) ? 0 : -1);
        TRY((long)getcwd(p, 1) ? 0 : -1);
        TRY(chdir("/"));
    }
    TRY(lseek(file, 0, SEEK_SET));
    TRY(read(file, p, 10));
    TRY(read(file, p, 0));
    volatile size_t all = SIZE_MAX;
    TRY(read(file, p, all));
    TRY(read(file, p, all >> 2));
    TRY(read(file, p, all >> 24));
    TRY(read(directory, p, 10));
    TRY(lseek(file, 0, SEEK_CUR));
    TRY(pread(file, p, 10, 5));
    TRY(pread(file, p, 10, 1 << 30));
    TRY(pread(file, p, 10, -1));
    TRY(pread(file, p, PAGE, 5000));
    char good[5];
    struct iovec parts[] = {{good, 5}, {p, 10}}, only[] = {{p, 10}}, none[] = {{p, 0}}, negative[] = {{good, 5}, {p, SIZE_MAX}};
    TRY(readv(file, parts, 2));
    TRY(readv(file, only, 1));
    TRY(readv(file, none, 1));
    TRY(readv(file, negative, 2));
    TRY(lseek(file, 0, SEEK_CUR));
    TRY(preadv(file, parts, 2, 7));
    TRY(preadv(file, only, 1, 7));
    TRY(preadv2(file, parts, 2, -1, 0));
    TRY(lseek(file, 0, SEEK_END));
    TRY(read(file, p, 10));
    TRY(syscall(SYS_lseek, -1, 0, 0));
    TRY(lseek(directory, 0, SEEK_SET));
    TRY(getdents64(directory, p, 1000));
    TRY(ioctl(file, FIONREAD, p));
    TRY(ioctl(file, FIGETBSZ_, p));
    TRY(sigprocmask(SIG_BLOCK, NULL, p));
    TRY(pthread_sigmask(SIG_BLOCK, NULL, p));
}

/* A buffer that ends in a page that cannot be written: the bytes before it are read, and counted. */
static void cut_buffers(int file, int room, int protection) {
    char *start = pages(4);
    if (mprotect(start + 4 * PAGE, PAGE, protection)) abort();
    char *buffer = start + 4 * PAGE - room, expected[4 * PAGE];
    if (pread(file, expected, room, 17) != room) abort();
    printf("room for %d\n", room);
    TRY(lseek(file, 17, SEEK_SET));
    TRY(read(file, buffer, room + 100));
    TRY(lseek(file, 0, SEEK_CUR));
    TRY(memcmp(buffer, expected, room));
    TRY(pread(file, buffer, room + PAGE, 17));
    TRY(pread(file, buffer, room, 17));
    struct iovec parts[] = {{expected, 10}, {buffer, room + 10}, {expected, 10}};
    TRY(readv(file, parts, 3));
    TRY(lseek(file, 0, SEEK_CUR));
    munmap(start, 5 * PAGE);
}

/* Memory below the stack, which grows when the kernel writes there. */
static void below_stack(int file) {
    char here;
    char *below = (char *)(((uintptr_t)&here - (1 << 20)) & ~(uintptr_t)(PAGE - 1));
    TRY(pread(file, below, 100, 0));
    below -= 1 << 20;
    TRY(pread(file, below, 10 * PAGE, 0));
    below -= 1 << 20;
    TRY(fstat(file, (void *)below));
    below -= 1 << 20;
    TRY(stat(below, (void *)(below + PAGE)));
}

/* Structures in memory that can only be read. */
static void constant(int file) {
    char *page = pages(1);
    struct pollfd *entries = (void *)page;
    entries[0] = (struct pollfd){.fd = file, .events = POLLIN};
    fd_set *set = (void *)(page + 512);
    FD_ZERO(set);
    FD_SET(file, set);
    if (mprotect(page, PAGE, PROT_READ)) abort();
    struct timeval none = {0, 0};
    TRY(poll(entries, 1, 0));
    TRY(poll(entries, 1, -1));
    TRY(select(file + 1, set, NULL, NULL, &none));
    TRY(entries[0].fd == file);
}

/* Paths at the end of a page, where the next page cannot be read, and paths that are too long. */
static void edges(const char *folder, int directory) {
    char *start = pages(3), *end = start + 3 * PAGE;
    char *good = path_of(folder, "list");
    struct stat s;
    size_t len = strlen(good);
    for (int shift = 0; shift < 3; shift++) {
        char *p = end - len - 1 - shift * PAGE;
        strcpy(p, good);
        TRY(opened(open(p, O_RDONLY)));
        TRY(stat(p, &s));
        strcpy(end - 5, "list");
        TRY(fstatat(directory, end - 5, &s, 0));
    }
    strcpy(end - 1, "");
    TRY(fstatat(directory, end - 1, &s, AT_EMPTY_PATH));
    TRY(opened(open(end - 1, O_RDONLY)));
    for (int len = 4094; len <= 4098; len++) {
        char *p = end - len - 1;
        memset(p, '/', len);
        memcpy(p, folder, strlen(folder));
        memcpy(p + len - 4, "list", 5);
        TRY(stat(p, &s));
        TRY(opened(open(p, O_RDONLY)));
        TRY(mkdir(p, 0700));
    }
    /* A page that can be read at first, and later not. */
    char *page = pages(1);
    strcpy(page + 100, good);
    TRY(stat(page + 100, &s));
    mprotect(page, PAGE, PROT_NONE);
    TRY(stat(page + 100, &s));
    mprotect(page, PAGE, PROT_READ);
    TRY(stat(page + 100, &s));
    int file = open(page + 100, O_RDONLY);
    TRY(fstat(file, (void *)page));
    mprotect(page, PAGE, PROT_READ | PROT_WRITE);
    TRY(fstat(file, (void *)page));
    TRY(pread(file, page, 100, 0));
    munmap(page, PAGE);
    TRY(fstat(file, (void *)page));
    TRY(pread(file, page, 100, 0));
    TRY(stat(page + 100, &s));
    char *again = mmap(page, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    TRY(stat(again + 100, &s));
    TRY(fstat(file, (void *)again));
    close(file);
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    root = arguments[1], outside = arguments[2];
    setvbuf(stdout, NULL, _IOLBF, 0);
    struct sigaction action = {.sa_handler = on_crash, .sa_flags = SA_NODEFER};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    /* Close-on-exec, because the calls of `exec` would put kernel files in place of these descriptors. */
    int directory = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC), file = open(path_of(root, "list"), O_RDONLY | O_CLOEXEC);
    if (directory < 0 || file < 0) return 3;

    char *none = pages(1) + PAGE, *constant_page = pages(1);
    /* An address far from where the kernel puts mappings, so that nothing takes its place. */
    char *gone = mmap((void *)0x10000000000, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    munmap(gone, PAGE);
    mprotect(constant_page, PAGE, PROT_READ);
    /* The file is cut off after it was mapped: the page gives SIGBUS, or EFAULT from the kernel. */
    int short_file = memfd_create("short", 0);
    if (ftruncate(short_file, 2 * PAGE)) abort();
    char *cut_off = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, short_file, 0);
    cut_off[PAGE] = 'x';
    if (ftruncate(short_file, PAGE)) abort();
    cut_off += PAGE;
    char *strings = pages(2), *end = strings + 2 * PAGE;
    memset(strings, 'a', 2 * PAGE);
    /* Strings that begin like a path in the folder, or in another folder, and are cut off. */
    char *inside_cut = strings + 2 * PAGE - 200, *outside_cut = pages(1) + PAGE - 200;
    memset(inside_cut, '/', 200), memset(outside_cut, '/', 200);
    memcpy(inside_cut, root, strlen(root)), memcpy(outside_cut, outside, strlen(outside));
    struct { const char *name; void *pointer; int is_path, is_in, is_out; } kinds[] = {
        {"null", NULL, 1, 1, 1},
        {"no access", none, 1, 1, 1},
        {"unmapped", gone, 1, 1, 1},
        {"beyond a file's end", cut_off, 1, 1, 1},
        {"one", (void *)1, 1, 1, 1},
        {"minus one", (void *)-1, 1, 1, 1},
        {"the kernel's", (void *)0xffff888000000000, 1, 1, 1},
        {"not canonical", (void *)0x0000900000000000, 1, 1, 1},
        {"a string cut off", end - 40, 1, 0, 0},
        {"a path in the folder cut off", inside_cut, 1, 0, 0},
        {"a path outside cut off", outside_cut, 1, 0, 0},
        {"a structure cut off", end - 2, 0, 1, 1},
        {"constant", constant_page, 0, 0, 1},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        kind = kinds[i].name;
        if (kinds[i].is_path) paths(kinds[i].pointer, directory);
        if (kinds[i].is_in) inputs(kinds[i].pointer, directory, file);
        if (kinds[i].is_out && strcmp(kind, "a structure cut off")) outputs(kinds[i].pointer, directory, file);
    }
    kind = "cut";
    int big = open(path_of(root, "big"), O_RDONLY | O_CLOEXEC);
    int rooms[] = {1, 99, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 5};
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++) {
        cut_buffers(big, rooms[i], PROT_NONE);
        cut_buffers(big, rooms[i], PROT_READ);
    }
    constant(file);
    below_stack(big);
    edges(root, directory);
    edges(outside, open(outside, O_RDONLY | O_DIRECTORY));
    return 0;
}
