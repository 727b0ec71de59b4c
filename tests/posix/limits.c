/* Uses files of ROOT where memory or descriptors are scarce. Each case runs in a process of its own.
 *
 *   limits memory ROOT       limits the address space, from a little more than the process has to enough
 *   limits descriptors ROOT  leaves a few free numbers, for the first use of ROOT
 *   limits threads ROOT      leaves no free numbers, for the first use of ROOT by many threads at once
 *   limits stack ROOT        reads a file for the first time in a handler on a small stack
 *   limits environment ROOT  reads a file in a program that has a getenv of its own (if built with -DOWN_GETENV)
 *
 * `memory` and `threads` print only what must never happen. The other modes print the same for a plain directory as for the namespace. */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char file[4096], folder[4096];
static struct rlimit before;

#ifdef OWN_GETENV
char *getenv(const char *name) {
    return NULL;
}
char *secure_getenv(const char *name) {
    return NULL;
}
#endif

/* The length of ROOT/big, and its byte at an offset: see tree_for_calls. */
#define LEN 300001
static unsigned char expected(unsigned at) {
    return (unsigned char)(at * 2654435761u >> 11);
}

static void check(const unsigned char *bytes, long len, const char *what) {
    for (long at = 0; at < len; at++)
        if (bytes[at] != expected(at)) {
            printf("%s: wrong byte at %ld\n", what, at);
            return;
        }
}

/* A result of -1 must come with an errno that says what is scarce. */
static long scarce(long result, const char *what) {
    if (result == -1 && errno != ENOMEM && errno != ENOBUFS && errno != EAGAIN)
        printf("%s: %s\n", what, strerrorname_np(errno));
    return result;
}

static void use(int which, int opened) {
    static unsigned char bytes[LEN];
    int number = opened, ends[2];
    if (number < 0 && scarce(number = open(file, O_RDONLY), "open") < 0)
        return;
    /* The offset is shared with the processes of earlier cases. */
    lseek(number, 0, SEEK_SET);
    switch (which) {
    case 0:
        check(bytes, scarce(pread(number, bytes, LEN, 0), "pread"), "pread");
        break;
    case 1: {
        void *map = mmap(NULL, LEN, PROT_READ, MAP_PRIVATE, number, 0);
        if (map != MAP_FAILED)
            check(map, LEN, "mmap");
        else
            scarce(-1, "mmap");
        break;
    }
    case 2:
        socketpair(AF_UNIX, SOCK_STREAM, 0, ends);
        if (scarce(sendfile(ends[0], number, NULL, 50000), "sendfile") > 0)
            check(bytes, read(ends[1], bytes, LEN), "sendfile");
        break;
    case 3:
        if (pipe(ends) == 0 && scarce(splice(number, NULL, ends[1], NULL, 50000, 0), "splice") > 0)
            check(bytes, read(ends[0], bytes, LEN), "splice");
        break;
    case 4: {
        DIR *stream = opendir(folder);
        if (stream && !readdir(stream))
            printf("readdir: empty\n");
        break;
    }
    case 5: {
        FILE *stream = fopen(file, "r");
        if (stream)
            check(bytes, fread(bytes, 1, LEN, stream), "fread");
        break;
    }
    case 6:
        scarce(dup2(number, 0), "dup2");
        break;
    case 7: {
        struct stat s;
        scarce(stat(file, &s), "stat");
        scarce(chdir(folder), "chdir");
        break;
    }
    }
}

static long mapped(void) {
    long pages = 0;
    FILE *stream = fopen("/proc/self/statm", "r");
    if (fscanf(stream, "%ld", &pages) != 1)
        exit(2);
    fclose(stream);
    return pages * 4096;
}

static void memory(void) {
    for (int attached = 0; attached < 2; attached++) {
        int opened = attached ? open(file, O_RDONLY) : -1;
        for (int which = 0; which < 8; which++)
            /* With less, the stack cannot grow, which ends a process. */
            for (long extra = 64 << 10; extra <= 256 << 20; extra *= 4) {
                fflush(stdout);
                pid_t child = fork();
                if (child == 0) {
                    long most = mapped() + extra;
                    struct rlimit limit = {most, most};
                    setrlimit(RLIMIT_AS, &limit);
                    use(which, opened);
                    fflush(stdout);
                    _exit(0);
                }
                int status;
                waitpid(child, &status, 0);
                if (status)
                    printf("case %d with %ld bytes: status %x\n", which, extra, status);
            }
    }
}

static int count(int from, int to) {
    int count = 0;
    for (int number = from; number < to; number++)
        count += fcntl(number, F_GETFD) != -1;
    return count;
}

static void descriptors(int is_hard) {
    for (int keep = 0; keep < 12; keep++) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            struct rlimit limit = {100, is_hard ? 100 : before.rlim_max};
            setrlimit(RLIMIT_NOFILE, &limit);
            while (dup(1) != -1)
                ;
            for (int number = 0; number < keep; number++)
                close(50 + number);
            int number = open(file, O_RDONLY), error = number < 0 ? errno : 0;
            char bytes[10];
            if (!is_hard || keep == 0)
                printf("%d free: %d %s %ld\n", keep, number, error ? strerrorname_np(error) : "", (long)pread(number, bytes, 10, 0));
            else if (error && error != EMFILE)
                printf("%d free: %s\n", keep, strerrorname_np(error));
            close(number);
            /* Whatever the library needs for itself stays out of sight, and what it could not use it has closed. */
            if ((!is_hard || error) && count(0, 100) != 100 - keep)
                printf("%d free: then %d in use\n", keep, count(0, 100));
            for (number = 40; number < 70; number++)
                close(number);
            number = open(file, O_RDONLY);
            printf("then %ld\n", number < 0 ? -1 : (long)pread(number, bytes, 10, 0));
            fflush(stdout);
            _exit(0);
        }
        int status;
        waitpid(child, &status, 0);
        printf("status %x\n", status);
    }
}

static pthread_barrier_t start;

static void *ask(void *unused) {
    struct stat s;
    pthread_barrier_wait(&start);
    if (stat(file, &s))
        printf("stat: %s\n", strerrorname_np(errno));
    return NULL;
}

static void threads(void) {
    enum { THREADS = 16, ROUNDS = 20, MOST = 64 };
    for (int round = 0; round < ROUNDS; round++) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            struct rlimit limit = {MOST, before.rlim_max};
            pthread_t all[THREADS];
            setrlimit(RLIMIT_NOFILE, &limit);
            while (dup(1) != -1)
                ;
            pthread_barrier_init(&start, NULL, THREADS);
            for (int each = 0; each < THREADS; each++)
                pthread_create(&all[each], NULL, ask, NULL);
            for (int each = 0; each < THREADS; each++)
                pthread_join(all[each], NULL);
            getrlimit(RLIMIT_NOFILE, &limit);
            if (limit.rlim_cur != MOST || count(0, MOST) != MOST)
                printf("the limit is %ld, %d in use\n", (long)limit.rlim_cur, count(0, MOST));
            fflush(stdout);
            _exit(0);
        }
        int status;
        waitpid(child, &status, 0);
        if (status)
            printf("status %x\n", status);
    }
}

static void read_file(int signal) {
    char bytes[10];
    long len = read(open(file, O_RDONLY), bytes, sizeof bytes);
    printf("%ld\n", len);
}

static void stack(void) {
    enum { STACK_LEN = 64 << 10 };
    char *pages = mmap(NULL, 2 * STACK_LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(pages, STACK_LEN, PROT_NONE);
    stack_t stack = {.ss_sp = pages + STACK_LEN, .ss_size = STACK_LEN};
    struct sigaction action = {.sa_handler = read_file, .sa_flags = SA_ONSTACK};
    sigaltstack(&stack, NULL);
    sigaction(SIGUSR1, &action, NULL);
    raise(SIGUSR1);
}

int main(int argument_count, char **arguments) {
    if (argument_count < 3)
        return 2;
    setvbuf(stdout, NULL, _IOFBF, 1 << 16);
    snprintf(file, sizeof file, "%s/big", arguments[2]);
    snprintf(folder, sizeof folder, "%s/sub", arguments[2]);
    getrlimit(RLIMIT_NOFILE, &before);
    for (int number = 3; number < 5000; number++)
        close(number);
    if (!strcmp(arguments[1], "memory"))
        memory();
    if (!strcmp(arguments[1], "descriptors")) {
        descriptors(0);
        descriptors(1);
    }
    if (!strcmp(arguments[1], "threads"))
        threads();
    if (!strcmp(arguments[1], "stack"))
        stack();
    if (!strcmp(arguments[1], "environment")) {
        unsigned char bytes[LEN];
        long len = read(open(file, O_RDONLY), bytes, LEN);
        check(bytes, len, "read");
        printf("%ld\n", len);
    }
    printf("done\n");
    return 0;
}
