/* Makes calls below a folder and prints their results. tests/posix.rs runs this program over a plain directory and over the
 * namespace; every line must be the same. Usage: calls FOLDER (the tree that tests/posix.rs creates). With a second argument it
 * makes the calls that change files instead. */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fts.h>
#include <ftw.h>
#include <glob.h>
#include <limits.h>
#include <linux/openat2.h>
#include <poll.h>
#include <pthread.h>
#include <spawn.h>
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
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

extern char **environ;
static const char *root;

/* Returns the path of a name below the folder, in one of eight buffers that are used in turn. */
static const char *at(const char *name) {
    static char paths[8][PATH_MAX];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, PATH_MAX, "%s/%s", root, name);
    return path;
}

/* Prints a result, or errno if the call failed. */
static void print_result(const char *what, long result) {
    if (result < 0)
        printf("%s: failed, %s\n", what, strerrorname_np(errno));
    else
        printf("%s: %ld\n", what, result);
}

#define PRINT(call) (errno = 0, print_result(#call, (long)(call)))
/* Also checks that a successful call leaves errno unchanged. */
#define KEEPS(call)                                                       \
    do {                                                                  \
        errno = 77;                                                       \
        long result = (long)(call);                                       \
        print_result(#call, result);                                              \
        if (result >= 0 && errno != 77) printf("errno changed by " #call "\n"); \
    } while (0)

static unsigned sum(const char *bytes, long len) {
    unsigned sum = 0;
    for (long i = 0; i < len; i++)
        sum = sum * 31 + (unsigned char)bytes[i];
    return sum;
}

static void show(const char *what, const struct stat *s) {
    printf("%s: mode %o links %ld size %ld mtime %ld.%09ld uid %u gid %u\n", what, s->st_mode, (long)s->st_nlink,
           S_ISDIR(s->st_mode) ? 0L : (long)s->st_size, (long)s->st_mtim.tv_sec, s->st_mtim.tv_nsec, s->st_uid, s->st_gid);
}

static void stats(void) {
    const char *names[] = {"list", "sub", "link", "dangling", "out", "missing", "list/x", "sub/../list", "sub//f1", ".", "loop", "sub/"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct stat s;
        printf("-- %s\n", names[i]);
        errno = 77;
        int result = stat(at(names[i]), &s);
        if (result == 0) show("stat", &s), printf("errno %d\n", errno); else print_result("stat", result);
        result = lstat(at(names[i]), &s);
        if (result == 0) show("lstat", &s); else print_result("lstat", result);
        struct statx x;
        result = statx(AT_FDCWD, at(names[i]), AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS, &x);
        if (result == 0) printf("statx: mode %o size %ld\n", x.stx_mode, S_ISDIR(x.stx_mode) ? 0L : (long)x.stx_size);
        else print_result("statx", result);
        PRINT(access(at(names[i]), R_OK));
        PRINT(access(at(names[i]), X_OK));
        PRINT(faccessat(AT_FDCWD, at(names[i]), F_OK, AT_SYMLINK_NOFOLLOW));
        char target[PATH_MAX] = "";
        PRINT(readlink(at(names[i]), target, 5));
        printf("%s\n", target);
        char *real = realpath(at(names[i]), NULL);
        printf("realpath %s\n", real ? real : strerrorname_np(errno));
        free(real);
        real = canonicalize_file_name(at(names[i]));
        printf("canonical %s\n", real ? real : strerrorname_np(errno));
        free(real);
        int descriptor = open(at(names[i]), O_RDONLY | O_CLOEXEC);
        print_result("open", descriptor);
        if (descriptor >= 0) {
            PRINT(fstat(descriptor, &s));
            show("fstat", &s);
            PRINT(fstatat(descriptor, "", &s, AT_EMPTY_PATH));
            PRINT(fcntl(descriptor, F_GETFD));
            PRINT(fcntl(descriptor, F_GETFL));
            PRINT(close(descriptor));
        }
        print_result("nofollow", (descriptor = open(at(names[i]), O_RDONLY | O_NOFOLLOW)));
        close(descriptor);
        print_result("directory", (descriptor = open(at(names[i]), O_RDONLY | O_DIRECTORY)));
        close(descriptor);
    }
    PRINT(syscall(SYS_getpid) > 0);
}

static void reads(void) {
    char buffer[1 << 16];
    int descriptor = open(at("list"), O_RDONLY);
    KEEPS(read(descriptor, buffer, 10));
    KEEPS(lseek(descriptor, 0, SEEK_CUR));
    KEEPS(lseek(descriptor, -3, SEEK_END));
    KEEPS(read(descriptor, buffer, 10));
    KEEPS(read(descriptor, buffer, 10));
    PRINT(lseek(descriptor, -1, SEEK_SET));
    KEEPS(lseek(descriptor, 1L << 40, SEEK_SET));
    KEEPS(read(descriptor, buffer, 10));
    KEEPS(lseek(descriptor, 0, SEEK_DATA));
    PRINT(lseek(descriptor, 1L << 40, SEEK_DATA));
    KEEPS(lseek(descriptor, 5, SEEK_HOLE));
    PRINT(lseek(descriptor, 5, 99));
    KEEPS(pread(descriptor, buffer, 100, 7));
    printf("%u\n", sum(buffer, 100));
    PRINT(pread(descriptor, buffer, 100, -7));
    struct iovec parts[3] = {{buffer, 3}, {buffer + 10, 0}, {buffer + 20, 30}};
    KEEPS(lseek(descriptor, 1, SEEK_SET));
    KEEPS(readv(descriptor, parts, 3));
    KEEPS(preadv(descriptor, parts, 3, 5));
    KEEPS(preadv2(descriptor, parts, 3, -1, 0));
    KEEPS(lseek(descriptor, 0, SEEK_CUR));
    volatile int too_few = -1;
    PRINT(readv(descriptor, parts, too_few));
    int left = 0;
    KEEPS(ioctl(descriptor, FIONREAD, &left));
    printf("%d\n", left);
    PRINT(write(descriptor, "x", 1));
    PRINT(pwrite(descriptor, "x", 1, 0));
    PRINT(ftruncate(descriptor, 0));
    PRINT(isatty(descriptor) - 1);
    KEEPS(fsync(descriptor));
    KEEPS(flock(descriptor, LOCK_SH));
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET};
    KEEPS(fcntl(descriptor, F_SETLK, &lock));
    lock.l_type = F_WRLCK;
    PRINT(fcntl(descriptor, F_SETLK, &lock));
    KEEPS(fcntl(descriptor, F_GETLK, &lock));
    printf("%d\n", lock.l_type == F_UNLCK);
    KEEPS(posix_fadvise(descriptor, 0, 0, POSIX_FADV_WILLNEED));
    KEEPS(readahead(descriptor, 0, 100));
    KEEPS(fgetxattr(descriptor, "user.none", buffer, 10) + 1);
    KEEPS(flistxattr(descriptor, buffer, 10));
    KEEPS(close(descriptor));
    PRINT(read(descriptor, buffer, 1));
    PRINT(close(descriptor));
    descriptor = open(at("sub"), O_RDONLY);
    PRINT(read(descriptor, buffer, 1));
    close(descriptor);
}

static void numbers(void) {
    char byte;
    int a = open(at("list"), O_RDONLY);
    int b = dup(a);
    printf("numbers %d %d\n", a, b);
    PRINT(read(a, &byte, 1));
    PRINT(lseek(b, 0, SEEK_CUR));
    PRINT(close(a));
    PRINT(lseek(b, 0, SEEK_CUR));
    PRINT(open(at("sub/f1"), O_RDONLY));
    PRINT(fcntl(b, F_DUPFD, 20));
    PRINT(fcntl(b, F_DUPFD_CLOEXEC, 20));
    PRINT(fcntl(21, F_GETFD));
    PRINT(fcntl(20, F_SETFD, FD_CLOEXEC));
    PRINT(fcntl(20, F_GETFD));
    PRINT(dup2(b, 30));
    PRINT(dup2(30, 30));
    PRINT(dup3(b, 31, O_CLOEXEC));
    PRINT(dup3(b, b, 0));
    int null = open("/dev/null", O_RDONLY);
    PRINT(dup2(null, 30));
    PRINT(read(30, &byte, 1));
    PRINT(dup2(b, null));
    PRINT(read(null, &byte, 1));
    PRINT(close_range(20, 31, 0));
    PRINT(lseek(31, 0, SEEK_CUR));
    PRINT(fcntl(b, F_SETFL, O_NONBLOCK));
    PRINT(fcntl(b, F_GETFL) & O_NONBLOCK);
    int in = dup(0);
    PRINT(close(0));
    PRINT(open(at("list"), O_RDONLY));
    PRINT(read(0, &byte, 1));
    PRINT(dup2(in, 0));
    closefrom(3);
    PRINT(open(at("list"), O_RDONLY));
    closefrom(3);
}

static void directories(void) {
    char buffer[4096];
    DIR *stream = opendir(at("sub"));
    long third = 0;
    int count = 0;
    for (struct dirent *entry; (errno = 0, entry = readdir(stream));) {
        if (++count == 3) third = telldir(stream);
    }
    printf("entries %d, errno %d\n", count, errno);
    seekdir(stream, third);
    count = 0;
    while (readdir(stream)) count++;
    printf("after the third %d\n", count);
    rewinddir(stream);
    struct stat s;
    PRINT(fstatat(dirfd(stream), "f1", &s, 0));
    PRINT(openat(dirfd(stream), "f1", O_RDONLY) > 0);
    PRINT(openat(dirfd(stream), "../list", O_RDONLY) > 0);
    PRINT(openat(dirfd(stream), "../../missing", O_RDONLY));
    PRINT(fchdir(dirfd(stream)));
    PRINT(strcmp(getcwd(buffer, sizeof buffer), at("sub")));
    PRINT(access("f1", R_OK));
    PRINT(chdir(".."));
    PRINT(access("list", R_OK));
    PRINT(chdir("list"));
    PRINT(chdir("../.."));
    PRINT(access("list", R_OK));
    PRINT(getcwd(buffer, 1) != NULL);
    PRINT(chdir("/"));
    puts(getcwd(buffer, sizeof buffer));
    PRINT(closedir(stream));
    /* The streams over duplicates of one descriptor share its offset, and each begins where it is. */
    int folder = open(at("sub"), O_RDONLY);
    DIR *first = fdopendir(dup(folder)), *second = fdopendir(dup(folder));
    for (count = 0; readdir(first);) count++;
    PRINT(count);
    PRINT(lseek(folder, 0, SEEK_CUR) > 0);
    for (count = 0; readdir(second);) count++;
    PRINT(count);
    rewinddir(second);
    PRINT(lseek(folder, 0, SEEK_CUR));
    for (count = 0; readdir(second);) count++;
    PRINT(count);
    closedir(first);
    closedir(second);
    close(folder);
    PRINT(opendir(at("list")) != NULL);
    PRINT(opendir(at("missing")) != NULL);
    struct dirent **list;
    int n = scandir(at("sub"), &list, NULL, alphasort);
    for (int i = 0; i < n; i++) printf("%s %d\n", list[i]->d_name, list[i]->d_type), free(list[i]);
    free(list);
    PRINT(scandir(at("missing"), &list, NULL, NULL));
    int directory = open(at("sub"), O_RDONLY | O_DIRECTORY);
    long got = 0, one;
    while ((one = getdents64(directory, buffer, 200)) > 0) got += one;
    printf("getdents %ld\n", got);
    PRINT(getdents64(directory, buffer, 200));
    close(directory);
    closefrom(3);
}

static int seen;
static int visit(const char *path, const struct stat *s, int kind, struct FTW *place) {
    printf("nftw %d %d %s %ld %s\n", kind, place->level, path + place->base, kind == FTW_F ? (long)s->st_size : 0L,
           path + strlen(root));
    return 0;
}
static int visit_old(const char *path, const struct stat *s, int kind) {
    (void)path, (void)s;
    seen += kind == FTW_F;
    return 0;
}
static int by_name(const FTSENT **left, const FTSENT **right) {
    return strcmp((*left)->fts_name, (*right)->fts_name);
}

static void walks(void) {
    /* A plain directory has its own order, so the test sorts these lines. */
    PRINT(nftw(at("sub"), visit, 10, FTW_PHYS));
    PRINT(nftw(at("sub"), visit, 10, FTW_PHYS | FTW_DEPTH));
    PRINT(nftw(at("sub"), visit, 10, FTW_DEPTH | FTW_CHDIR));
    PRINT(nftw(at("loop"), visit, 10, 0));
    PRINT(nftw(at("missing"), visit, 10, 0));
    seen = 0;
    PRINT(ftw(at("sub"), visit_old, 10));
    printf("ftw %d\n", seen);
    PRINT(chdir(at("sub")));
    PRINT(chdir("/"));
    fflush(stdout);
    PRINT(system("pwd"));
    char *inside = getcwd(NULL, PATH_MAX);
    PRINT(strlen(inside));
    free(inside);
    char *roots[] = {strdup(at("sub")), strdup(at("list")), strdup(at("missing")), NULL};
    for (int options = FTS_PHYSICAL; options; options = options == FTS_PHYSICAL ? FTS_LOGICAL | FTS_NOCHDIR : 0) {
        FTS *walk = fts_open(roots, options, by_name);
        for (FTSENT *entry; (entry = fts_read(walk));) {
            printf("fts %d %d %s %s\n", entry->fts_info, entry->fts_level, entry->fts_name, entry->fts_path + strlen(root));
            if (entry->fts_info == FTS_D && !strcmp(entry->fts_name, "empty")) fts_set(walk, entry, FTS_SKIP);
            if (entry->fts_info == FTS_D && entry->fts_level == 0) {
                int count = 0;
                for (FTSENT *child = fts_children(walk, 0); child; child = child->fts_link) count++;
                printf("children %d\n", count);
            }
        }
        PRINT(fts_close(walk));
    }
    FTS *walk = fts_open(roots, FTS_PHYSICAL, NULL);
    fts_read(walk), fts_read(walk);
    PRINT(fts_close(walk));
    const char *patterns[] = {"sub/f*", "*/f[12]", "none*", "sub", "{list,sub}/*", "s?b/*1"};
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        glob_t found;
        int result = glob(at(patterns[i]), GLOB_BRACE | GLOB_MARK, NULL, &found);
        printf("glob %s: %d\n", patterns[i], result);
        for (size_t j = 0; result == 0 && j < found.gl_pathc; j++) printf("  %s\n", found.gl_pathv[j] + strlen(root));
        if (result == 0) globfree(&found);
    }
    PRINT(chdir(at("sub")));
    glob_t found;
    PRINT(glob("f*", 0, NULL, &found));
    for (size_t j = 0; j < found.gl_pathc; j++) printf("  %s\n", found.gl_pathv[j]);
    globfree(&found);
    PRINT(chdir("/"));
}

static void streams(void) {
    char line[256], *grown = NULL;
    size_t room = 0;
    FILE *stream = fopen(at("list"), "r");
    puts(fgets(line, sizeof line, stream));
    PRINT(getline(&grown, &room, stream));
    PRINT(fseeko(stream, 100, SEEK_SET));
    PRINT(ftello(stream));
    PRINT(fgetc(stream));
    PRINT(ungetc('x', stream));
    PRINT(fgetc(stream));
    PRINT(fread(line, 1, sizeof line, stream));
    PRINT(fileno(stream) > 2);
    struct stat s;
    PRINT(fstat(fileno(stream), &s));
    PRINT(fseek(stream, 0, SEEK_END));
    PRINT(ftell(stream));
    PRINT(feof(stream));
    PRINT(fgetc(stream));
    PRINT(feof(stream));
    rewind(stream);
    PRINT(fgetc(stream));
    int number = fileno(stream);
    PRINT(fclose(stream));
    PRINT(fcntl(number, F_GETFD));
    PRINT(fopen(at("missing"), "r") != NULL);
    PRINT(fopen(at("sub/missing/x"), "r") != NULL);
    stream = fdopen(open(at("sub/f1"), O_RDONLY), "r");
    PRINT(fread(line, 1, 100, stream));
    PRINT(fclose(stream));
    int in = dup(0);
    char head[16] = "";
    /* The C library's own stream, over a number that now names a file of the namespace. */
    number = open(at("sub/f1"), O_RDONLY);
    dup2(number, 0);
    PRINT(fread(head, 1, 8, stdin));
    printf("%u\n", sum(head, 8));
    close(number);
    const char *targets[] = {at("sub/f1"), "/proc/self/comm", at("list"), "/dev/null", at("sub"), at("big"), at("missing")};
    FILE *again = fopen(at("list"), "r");
    fgets(line, sizeof line, again);
    for (size_t i = 0; i < sizeof targets / sizeof *targets; i++) {
        FILE *same = freopen(targets[i], "r", again);
        printf("freopen %zu: %d %d\n", i, same == again, same ? 0 : errno);
        if (!same) break;
        long first = fgetc(again), got = fread(head, 1, 8, again);
        printf("%ld %ld %u %d %d\n", first, got, sum(head, got), !!feof(again), !!ferror(again));
        PRINT(i == 1 || fseek(again, 3, SEEK_SET) < 0 ? 0 : ftell(again));
    }
    again = fdopen(open(at("list"), O_RDONLY), "r");
    PRINT(freopen("/dev/null", "r", again) == again && fgetc(again) == EOF);
    PRINT(fclose(again));
    PRINT(freopen(at("list"), "r", stdin) == stdin);
    PRINT(fileno(stdin));
    puts(fgets(line, sizeof line, stdin));
    int value = 0;
    PRINT(fscanf(stdin, "%d", &value));
    printf("%d\n", value);
    dup2(in, 0);
    close(in);
    free(grown);
}

static void maps(void) {
    const char *names[] = {"big", "list"};
    for (int i = 0; i < 2; i++) {
        int descriptor = open(at(names[i]), O_RDONLY);
        struct stat s;
        fstat(descriptor, &s);
        char *map = mmap(NULL, s.st_size, PROT_READ, MAP_SHARED, descriptor, 0);
        printf("%s %u\n", names[i], sum(map, s.st_size));
        long rest = (4096 - s.st_size % 4096) % 4096;
        printf("zeros after the end: %u\n", sum(map + s.st_size, rest));
        munmap(map, s.st_size);
        map = mmap(NULL, s.st_size, PROT_READ, MAP_PRIVATE, descriptor, 0);
        PRINT(madvise(map, s.st_size, MADV_DONTNEED));
        printf("again %u\n", sum(map, s.st_size));
        munmap(map, s.st_size);
        map = mmap(NULL, s.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, descriptor, 0);
        map[0] ^= 1;
        printf("private %u\n", sum(map, s.st_size));
        munmap(map, s.st_size);
        PRINT(mmap(NULL, 100, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0) == MAP_FAILED);
        PRINT(mmap(NULL, 0, PROT_READ, MAP_SHARED, descriptor, 0) == MAP_FAILED);
        PRINT(mmap(NULL, 100, PROT_READ, MAP_SHARED, descriptor, 1) == MAP_FAILED);
        if (s.st_size > 8192) {
            map = mmap(NULL, s.st_size - 4096, PROT_READ, MAP_PRIVATE, descriptor, 4096);
            close(descriptor);
            printf("from 4096 %u\n", sum(map, s.st_size - 4096));
        } else {
            close(descriptor);
        }
    }
    int directory = open(at("sub"), O_RDONLY);
    PRINT(mmap(NULL, 100, PROT_READ, MAP_PRIVATE, directory, 0) == MAP_FAILED);
    close(directory);
}

static void transfers(void) {
    char buffer[1 << 20];
    int pipes[2], from = open(at("big"), O_RDONLY);
    FILE *target = tmpfile();
    int to = fileno(target);
    off_t offset = 100, other = 50;
    PRINT(sendfile(to, from, NULL, 1000));
    PRINT(sendfile(to, from, &offset, 500));
    PRINT(offset);
    PRINT(lseek(from, 0, SEEK_CUR));
    PRINT(copy_file_range(from, NULL, to, NULL, 777, 0));
    PRINT(copy_file_range(from, &offset, to, &other, 20, 0));
    PRINT(other);
    PRINT(sendfile(to, from, NULL, 1 << 30));
    PRINT(sendfile(to, from, NULL, 10));
    long len = pread(to, buffer, sizeof buffer, 0);
    printf("%ld %u\n", len, sum(buffer, len));
    PRINT(pipe(pipes));
    lseek(from, 0, SEEK_SET);
    PRINT(splice(from, NULL, pipes[1], NULL, 4096, 0));
    PRINT(read(pipes[0], buffer, 5000));
    PRINT(ioctl(to, _IOW(0x94, 9, int), from) < 0);
    int pair[2];
    PRINT(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    char control[CMSG_SPACE(sizeof(int))] = {0}, byte = 'x';
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &from, sizeof from);
    lseek(from, 10, SEEK_SET);
    PRINT(sendmsg(pair[0], &message, 0));
    PRINT(recvmsg(pair[1], &message, 0));
    int received;
    memcpy(&received, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof received);
    PRINT(read(received, buffer, 100));
    printf("%u\n", sum(buffer, 100));
    fclose(target);
    closefrom(3);
}

static void waits(void) {
    int file = open(at("list"), O_RDONLY), pipes[2];
    PRINT(pipe(pipes));
    struct pollfd polls[3] = {{file, POLLIN, 0}, {pipes[0], POLLIN, 0}, {-1, POLLIN, 0}};
    PRINT(poll(polls, 3, -1));
    printf("%d %d %d\n", polls[0].revents, polls[1].revents, polls[0].fd == file);
    polls[0].events = 0;
    PRINT(poll(polls, 2, 10));
    fd_set reading, writing;
    FD_ZERO(&reading);
    FD_ZERO(&writing);
    FD_SET(file, &reading);
    FD_SET(pipes[0], &reading);
    FD_SET(pipes[1], &writing);
    uint64_t small[1] = {1UL << file};
    PRINT(select(file + 1, (fd_set *)small, NULL, NULL, NULL));
    PRINT(small[0] == 1UL << file);
    PRINT(select(pipes[1] + 1, &reading, &writing, NULL, NULL));
    printf("%d %d %d\n", !!FD_ISSET(file, &reading), !!FD_ISSET(pipes[0], &reading), !!FD_ISSET(pipes[1], &writing));
    int epoll = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN};
    PRINT(epoll_ctl(epoll, EPOLL_CTL_ADD, file, &event));
    closefrom(3);
}

static void children(void) {
    char buffer[64];
    int file = open(at("list"), O_RDONLY);
    PRINT(read(file, buffer, 10));
    fflush(stdout);
    if (fork() == 0) {
        PRINT(read(file, buffer, 10));
        fflush(stdout);
        _exit(0);
    }
    wait(NULL);
    PRINT(lseek(file, 0, SEEK_CUR));
    fflush(stdout);
    /* Another program shares the offset. */
    if (fork() == 0) {
        dup2(file, 0);
        execl("/bin/sh", "sh", "-c", "read line; echo \"$line\"", NULL);
    }
    wait(NULL);
    PRINT(lseek(file, 0, SEEK_CUR));
    fflush(stdout);
    pid_t pid = vfork();
    if (pid == 0) {
        dup2(file, 5);
        dup2(5, 0);
        close(file);
        close_range(3, 100, 0);
        execlp("head", "head", "-c", "12", NULL);
        _exit(1);
    }
    waitpid(pid, NULL, 0);
    PRINT(read(file, buffer, 5));
    PRINT(fcntl(5, F_GETFD));
    fflush(stdout);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    int hidden = open(at("sub/f1"), O_RDONLY | O_CLOEXEC);
    PRINT(posix_spawn_file_actions_adddup2(&actions, hidden, 0));
    PRINT(posix_spawn_file_actions_addopen(&actions, 7, at("list"), O_RDONLY, 0));
    fflush(stdout);
    char *arguments[] = {"sh", "-c", "cksum; cksum <&7", NULL};
    print_result("posix_spawnp", posix_spawnp(&pid, "sh", &actions, NULL, arguments, environ));
    waitpid(pid, NULL, 0);
    PRINT(posix_spawn_file_actions_destroy(&actions));
    PRINT(lseek(hidden, 0, SEEK_CUR) >= 0);
    fflush(stdout);
    /* Runs a program by its name, from a folder of the namespace that is in PATH. */
    char path[2 * PATH_MAX];
    snprintf(path, sizeof path, "%s:/usr/bin:/bin", root);
    setenv("PATH", path, 1);
    if (fork() == 0) {
        execlp("script", "script", "by name", NULL);
        _exit(1);
    }
    wait(NULL);
    setenv("PATH", "/usr/bin:/bin", 1);
    lseek(file, 0, SEEK_SET);
    dup2(file, 9);
    PRINT(system("head -n 1 <&9"));
    FILE *stream = popen("wc -c <&9; pwd", "r");
    while (fgets(buffer, sizeof buffer, stream)) fputs(buffer, stdout);
    PRINT(pclose(stream));
    PRINT(chdir(at("sub")));
    fflush(stdout);
    PRINT(system("pwd; cat f1 | cksum"));
    char *environment[32] = {"PATH=/usr/bin:/bin"};
    int n = 1;
    for (char **one = environ; *one; one++)
        if (!strncmp(*one, "DAYFLY_", 7) || !strncmp(*one, "LD_PRELOAD", 10)) if (n < 31) environment[n++] = *one;
    fflush(stdout);
    if (fork() == 0) execle("/bin/ls", "ls", NULL, environment);
    wait(NULL);
    PRINT(chdir("/"));
    fflush(stdout);
    char *spawned[] = {"script", "spawned", NULL};
    print_result("posix_spawn", posix_spawn(&pid, at("script"), NULL, NULL, spawned, environ));
    waitpid(pid, NULL, 0);
    print_result("posix_spawn", posix_spawn(&pid, at("list"), NULL, NULL, spawned, environ));
    PRINT(execv(at("list"), arguments));
    PRINT(execv(at("missing"), arguments));
    if (fork() == 0) {
        char *script[] = {"script", "argument", NULL};
        execv(at("script"), script);
        _exit(1);
    }
    wait(NULL);
    closefrom(3);
}

/* Calls that fail in the namespace and would succeed in a plain directory. */
static void refusals(void) {
    PRINT(open(at("new"), O_CREAT | O_WRONLY, 0600));
    PRINT(open(at("missing/new"), O_CREAT | O_WRONLY, 0600));
    PRINT(open(at("list"), O_RDWR));
    PRINT(open(at("list"), O_RDONLY | O_TRUNC));
    PRINT(open(at("list"), O_CREAT | O_EXCL, 0600));
    PRINT(open(at("sub"), O_WRONLY));
    PRINT(open(at("sub"), O_TMPFILE | O_RDWR, 0600));
    PRINT(open(at("list"), O_CREAT | O_RDONLY, 0600) >= 0 ? 0 : -1);
    PRINT(creat(at("new"), 0600));
    PRINT(fopen(at("list"), "r+") ? 0 : -1);
    PRINT(fopen(at("new"), "w") ? 0 : -1);
    PRINT(mkdir(at("new"), 0700));
    PRINT(mkdir(at("sub"), 0700));
    PRINT(rmdir(at("sub")));
    PRINT(unlink(at("list")));
    PRINT(unlink(at("missing")));
    PRINT(rename(at("list"), at("new")));
    PRINT(rename(at("list"), "/tmp/new"));
    PRINT(link(at("list"), "/tmp/new"));
    PRINT(symlink("x", at("new")));
    PRINT(mkfifo(at("new"), 0600));
    PRINT(truncate(at("list"), 0));
    PRINT(chmod(at("list"), 0600));
    PRINT(chown(at("list"), 0, 0));
    PRINT(utime(at("list"), NULL));
    PRINT(setxattr(at("list"), "user.x", "y", 1, 0));
    PRINT(access(at("list"), W_OK));
    struct open_how beneath = {.resolve = RESOLVE_BENEATH}, plain = {.resolve = RESOLVE_NO_MAGICLINKS};
    PRINT(syscall(SYS_openat2, AT_FDCWD, at("list"), &beneath, sizeof beneath));
    PRINT(syscall(SYS_openat2, AT_FDCWD, at("list"), &plain, sizeof plain) < 0);
    struct statvfs s;
    PRINT(statvfs(at("list"), &s));
    PRINT(s.f_flag & ST_RDONLY);
    int descriptor = open(at("list"), O_RDONLY);
    PRINT(fchmod(descriptor, 0600));
    PRINT(futimens(descriptor, NULL));
}

int main(int count, char **arguments) {
    root = arguments[1];
    setvbuf(stdout, NULL, _IOFBF, 1 << 16);
    if (count > 2) {
        refusals();
        return 0;
    }
    puts("== stats"), stats();
    puts("== reads"), reads();
    puts("== numbers"), numbers();
    puts("== directories"), directories();
    puts("== walks"), walks();
    puts("== streams"), streams();
    puts("== maps"), maps();
    puts("== transfers"), transfers();
    puts("== waits"), waits();
    puts("== children"), children();
    return 0;
}
