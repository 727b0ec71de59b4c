/* Signal handlers that use the namespace at random instructions of the threads that they interrupt.
 *
 * signals run SECONDS LIST   Threads allocate, read, list a directory and fork, while a timer of each thread interrupts it every
 *                            50 to 500 us. The handler opens, stats, reads and closes files. Children do the same.
 * signals first RUNS LIST    RUNS processes, one after another, use the namespace for the first time in a handler, which
 *                            interrupts malloc and fork.
 *
 * LIST contains a directory of the namespace and the names of all files in it. A name is a number and a size, such as `7-3000`.
 * `expected` computes a file's bytes from both, so a handler can check them without a second file. Every process ends after a
 * deadline (SIGALRM), so a hang is a failure. */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

enum { THREADS = 4, FILES = 512, PART = 16384, PATIENCE = 300, NESTED = 2 };

struct file {
    char path[512];
    unsigned number;
    long size;
};

static struct file files[FILES];
static int count;
static const char *root;
static double end;
static atomic_long handled, checked, forked, wrong;

static __thread timer_t timer __attribute__((tls_model("initial-exec")));
static __thread unsigned seed __attribute__((tls_model("initial-exec")));
static __thread int depth __attribute__((tls_model("initial-exec")));

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static unsigned next_random(void) {
    seed = seed * 1664525 + 1013904223;
    return seed >> 8;
}

static unsigned char expected(unsigned number, unsigned long at) {
    return ((unsigned)at * 2654435761u + number * 40503u) >> 13;
}

/* Reports without stdio, which a handler must not use. */
static void complain(const char *what, const char *path) {
    char line[700], digits[] = "000";
    int error = errno;
    digits[0] += error / 100 % 10, digits[1] += error / 10 % 10, digits[2] += error % 10;
    line[0] = 0;
    for (const char *part[] = {what, ": ", path, " errno ", digits, "\n", NULL}, **p = part; *p; p++)
        strncat(line, *p, sizeof line - strlen(line) - 1);
    if (write(2, line, strlen(line)) < 0) _exit(3);
    wrong++;
}

static void check_bytes(const struct file *file, const unsigned char *bytes, long from, long len, const char *how) {
    for (long i = 0; i < len; i++)
        if (bytes[i] != expected(file->number, from + i)) {
            errno = 0;
            complain(how, file->path);
            return;
        }
}

/* Uses a file by its name and the name of its directory, and a file outside the namespace. */
static void use_names(const struct file *file) {
    struct stat info;
    char target[8];
    if (lstat(file->path, &info) != 0 || access(file->path, R_OK) != 0) complain("lstat", file->path);
    if (readlink(file->path, target, sizeof target) != -1 || errno != EINVAL) complain("readlink", file->path);
    if (open(file->path, O_WRONLY) != -1 || errno != EROFS) complain("open for writing", file->path);
    if (stat("/dayfly/none/of/these", &info) != -1 || errno != ENOENT) complain("stat", "/dayfly/none/of/these");
    int folder = open(root, O_RDONLY | O_DIRECTORY);
    int number = openat(folder, strrchr(file->path, '/') + 1, O_RDONLY);
    int copy = fcntl(number, F_DUPFD_CLOEXEC, 3);
    if (fstatat(folder, strrchr(file->path, '/') + 1, &info, 0) != 0 || info.st_size != file->size) complain("fstatat", file->path);
    if (lseek(copy, 0, SEEK_END) != file->size || dup2(folder, copy) != copy) complain("dup2", file->path);
    if (fstat(copy, &info) != 0 || !S_ISDIR(info.st_mode)) complain("fstat of a copy", root);
    if (close(folder) != 0 || close(number) != 0 || close(copy) != 0) complain("close", file->path);
    int outside = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    if (read(outside, target, sizeof target) != sizeof target || target[7] != 0 || close(outside) != 0) complain("read", "/dev/zero");
}

/* Uses one file in one of several ways. Async-signal-safe, if the functions that it calls are. */
static void use_file(const char *where) {
    unsigned char bytes[PART];
    struct stat by_path, by_number;
    const struct file *file = &files[next_random() % count];
    if (stat(file->path, &by_path) != 0 || by_path.st_size != file->size) complain("stat", file->path);
    int number = open(file->path, O_RDONLY | (next_random() & 1 ? O_CLOEXEC : 0));
    if (number < 0) {
        complain("open", file->path);
        return;
    }
    if (fstat(number, &by_number) != 0 || by_number.st_ino != by_path.st_ino) complain("fstat", file->path);
    long from = 0, want = file->size < PART ? file->size : PART, got = 0;
    if (file->size > PART) from = (long)(next_random() % (file->size - PART));
    switch (next_random() % 4) {
    case 0:
        got = pread(number, bytes, want, from);
        check_bytes(file, bytes, from, got, where);
        break;
    case 1: {
        int copy = dup(number);
        if (close(number) != 0) complain("close", file->path);
        number = copy;
    } /* fall through */
    case 2:
        if (lseek(number, from, SEEK_SET) != from) complain("lseek", file->path);
        while (got < want) {
            long some = next_random() % want + 1, n = read(number, bytes + got, some < want - got ? some : want - got);
            if (n <= 0) break;
            check_bytes(file, bytes + got, from + got, n, where);
            got += n;
        }
        break;
    case 3:
        use_names(file);
        got = want;
        break;
    }
    if (got < want) complain("short read", file->path);
    if (close(number) != 0) complain("close", file->path);
    checked++;
}

static void wake_later(void) {
    struct itimerspec when = {.it_value.tv_nsec = 1000 * (50 + next_random() % 451)};
    timer_settime(timer, 0, &when, NULL);
}

static void on_timer(int number) {
    (void)number;
    int before = errno;
    /* The next signal may interrupt this handler, but not without end. */
    if (++depth < NESTED) wake_later();
    use_file("wrong bytes in a handler");
    handled++;
    if (depth-- == 1) wake_later();
    errno = before;
}

/* Interrupts this thread from now on. The C library's own timers would allocate. */
static void start_timer(unsigned with_seed) {
    seed = with_seed;
    struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGUSR1};
    event.sigev_notify_thread_id = syscall(SYS_gettid);
    if (timer_create(CLOCK_MONOTONIC, &event, &timer) != 0) complain("timer_create", "");
    wake_later();
}

static void stop_timer(void) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    timer_delete(timer);
}

static void install(void) {
    struct sigaction action = {.sa_handler = on_timer, .sa_flags = SA_RESTART | SA_NODEFER};
    sigaction(SIGUSR1, &action, NULL);
}

static void allocate(void) {
    void *blocks[32];
    for (int i = 0; i < 32; i++) {
        size_t len = 1ul << (next_random() % 18);
        blocks[i] = malloc(len);
        memset(blocks[i], 0xa5, len < 64 ? len : 64);
    }
    for (int i = 0; i < 32; i++) free(blocks[i]);
}

static void list(void) {
    DIR *directory = opendir(root);
    int entries = 0;
    if (!directory) {
        complain("opendir", root);
        return;
    }
    while (readdir(directory)) entries++;
    closedir(directory);
    if (entries != count + 2) complain("readdir", root);
}

static void breed(void) {
    unsigned child_seed = next_random();
    pid_t child = fork();
    if (child == 0) {
        /* Timers are not inherited. */
        alarm(PATIENCE);
        wrong = 0;
        depth = 0;
        start_timer(child_seed);
        for (int i = 0; i < 5; i++) {
            allocate();
            use_file("wrong bytes in a child");
        }
        stop_timer();
        _exit(wrong ? 1 : 0);
    }
    int status = -1;
    if (child < 0) {
        complain("fork", "");
        return;
    }
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    if (status != 0) {
        errno = WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
        complain("a child failed, see its signal or status", "");
    }
    forked++;
}

static void *work(void *number) {
    start_timer((unsigned)(long)number * 7919 + 1);
    while (now() < end) {
        for (int i = 0; i < 20; i++) {
            allocate();
            use_file("wrong bytes");
        }
        list();
        breed();
    }
    stop_timer();
    return NULL;
}

static int run(double seconds) {
    alarm((unsigned)seconds + PATIENCE);
    install();
    end = now() + seconds;
    pthread_t threads[THREADS];
    for (long i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, work, (void *)i);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    printf("%ld in handlers, %ld checked, %ld children, %ld wrong\n", handled, checked, forked, wrong);
    return wrong != 0 || handled == 0;
}

/* One process, whose first use of the namespace is in a handler. */
static int first_once(unsigned with_seed) {
    alarm(PATIENCE);
    install();
    start_timer(with_seed);
    while (handled < 10) {
        allocate();
        if (with_seed % 4 == 0) {
            pid_t child = fork();
            if (child == 0) _exit(0);
            while (waitpid(child, NULL, 0) < 0 && errno == EINTR) {}
        }
    }
    stop_timer();
    return wrong != 0;
}

static int first(int runs, char **arguments) {
    for (int i = 1; i <= runs; i++) {
        char text[16];
        snprintf(text, sizeof text, "%d", i);
        pid_t child = fork();
        if (child == 0) {
            execl("/proc/self/exe", arguments[0], "once", text, arguments[3], NULL);
            _exit(4);
        }
        int status = -1;
        waitpid(child, &status, 0);
        if (status != 0) {
            printf("run %d ended with signal %d or status %d\n", i, WTERMSIG(status), WEXITSTATUS(status));
            return 1;
        }
    }
    printf("%d first uses, %ld wrong\n", runs, wrong);
    return wrong != 0;
}

/* Reads LIST, so that nothing touches the namespace before the first handler. */
static void read_list(const char *names) {
    FILE *list = fopen(names, "r");
    static char folder[400];
    if (!list || fscanf(list, "%399s", folder) != 1) exit(5);
    root = folder;
    struct file *file = files;
    while (count < FILES && fscanf(list, "%u-%ld", &file->number, &file->size) == 2) {
        snprintf(file->path, sizeof file->path, "%s/%u-%ld", folder, file->number, file->size);
        file = &files[++count];
    }
    fclose(list);
}

int main(int argument_count, char **arguments) {
    if (argument_count < 4) return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    read_list(arguments[3]);
    if (strcmp(arguments[1], "run") == 0) return run(atof(arguments[2]));
    if (strcmp(arguments[1], "once") == 0) return first_once(atoi(arguments[2]));
    return first(atoi(arguments[2]), arguments);
}
