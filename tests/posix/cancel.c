/* Cancels threads that wait in calls, or read files of a folder, and checks that the process is sound afterward: cleanup handlers
 * ran, reads are right, and no descriptor was lost. Usage: cancel COUNT FOLDER PLAIN, where PLAIN is a plain copy of the folder.
 * FOLDER holds files named 0, 1, ... up to the first that does not exist. */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                                       \
    do {                                                                                                       \
        if (!(condition)) printf("line %d: %s, errno %d\n", __LINE__, #condition, errno), fflush(stdout), abort(); \
    } while (0)

static const char *folder, *plain;
static int files;
static int empty_pipe[2], pair[2], full_pipe[2], one_file;
static char fifo[PATH_MAX];

/* What one thread does. */
struct Task {
    void (*run)(struct Task *);
    unsigned seed;
    sem_t started;
    /* Open when the thread is canceled, or -1. */
    int descriptor;
    FILE *stream;
    DIR *listing;
    char *memory;
    int cleaned;
    long reads;
};

static char *path_of(char *room, const char *root, unsigned number) {
    snprintf(room, PATH_MAX, "%s/%u", root, number % files);
    return room;
}

/* Runs when the thread is canceled, and uses the library once more. */
static void clean(void *argument) {
    struct Task *task = argument;
    struct stat s;
    CHECK(stat(folder, &s) == 0 && S_ISDIR(s.st_mode));
    if (task->descriptor >= 0) CHECK(close(task->descriptor) == 0);
    if (task->stream) fclose(task->stream);
    if (task->listing) closedir(task->listing);
    free(task->memory);
    task->cleaned++;
}

static void wait_in_read(struct Task *task) { CHECK(read(empty_pipe[0], task->memory, 10) < 0); }
static void wait_in_readv(struct Task *task) {
    struct iovec part = {task->memory, 10};
    CHECK(readv(empty_pipe[0], &part, 1) < 0);
}
static void wait_in_write(struct Task *task) {
    for (;;) CHECK(write(full_pipe[1], task->memory, 4096) > 0);
}
/* Splices a file of the folder, whose bytes the library writes to the pipe. */
static void wait_in_splice(struct Task *task) {
    for (;;) {
        off_t from = 0;
        CHECK(splice(one_file, &from, full_pipe[1], NULL, 4096, 0) > 0);
    }
}
static void wait_in_open(struct Task *task) { task->descriptor = open(fifo, O_RDONLY); }
static void wait_in_openat(struct Task *task) { task->descriptor = openat(AT_FDCWD, fifo, O_RDONLY); }
static void wait_in_fopen(struct Task *task) { task->stream = fopen(fifo, "r"); }
static void wait_in_poll(struct Task *task) {
    struct pollfd entry = {.fd = empty_pipe[0], .events = POLLIN};
    poll(&entry, 1, -1);
}
static void wait_in_ppoll(struct Task *task) {
    struct pollfd entry = {.fd = pair[0], .events = POLLIN};
    ppoll(&entry, 1, NULL, NULL);
}
/* Polls a pipe, along with a file of the folder for which no events are requested. */
static void wait_in_poll_with_file(struct Task *task) {
    struct pollfd *entries = (void *)task->memory;
    entries[0] = (struct pollfd){.fd = one_file, .events = 0};
    entries[1] = (struct pollfd){.fd = empty_pipe[0], .events = POLLIN};
    poll(entries, 2, -1);
}
static void wait_in_select(struct Task *task) {
    fd_set set;
    FD_ZERO(&set);
    FD_SET(empty_pipe[0], &set);
    select(empty_pipe[0] + 1, &set, NULL, NULL, NULL);
}
static void wait_in_pselect(struct Task *task) {
    fd_set set;
    FD_ZERO(&set);
    FD_SET(pair[0], &set);
    pselect(pair[0] + 1, &set, NULL, NULL, NULL, NULL);
}
static void wait_in_recv(struct Task *task) { recv(pair[0], task->memory, 10, 0); }
static void wait_in_recvmsg(struct Task *task) {
    struct iovec part = {task->memory, 10};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    recvmsg(pair[0], &header, 0);
}
static void wait_in_nanosleep(struct Task *task) {
    struct timespec hour = {3600, 0};
    nanosleep(&hour, NULL);
}
static void wait_in_sleep(struct Task *task) { sleep(3600); }
static void wait_in_pause(struct Task *task) { pause(); }
static void wait_in_sigsuspend(struct Task *task) {
    sigset_t none;
    sigemptyset(&none);
    sigsuspend(&none);
}
static void wait_in_accept(struct Task *task) {
    task->descriptor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(task->descriptor >= 0 && listen(task->descriptor, 1) == 0);
    accept(task->descriptor, NULL, NULL);
}

/* glibc itself loses the descriptor of an open or a close that is canceled at the wrong moment (its bug 12683). So the
 * threads below cannot be canceled in calls of the kernel that open or close.
 *
 * Opens, reads and closes files of the folder, some of which another node holds, until the thread is canceled. Between the calls
 * nothing else is a cancellation point, so cancellation must take effect in one of them. */
static void read_files(struct Task *task) {
    char path[PATH_MAX];
    for (;; task->reads++) {
        task->descriptor = open(path_of(path, folder, rand_r(&task->seed)), O_RDONLY | O_CLOEXEC);
        CHECK(task->descriptor >= 0);
        CHECK(read(task->descriptor, task->memory, 1 << 20) >= 0);
        int descriptor = task->descriptor;
        task->descriptor = -1;
        int before;
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
        CHECK(close(descriptor) == 0);
        pthread_setcancelstate(before, &before);
    }
}
static void pread_one_file(struct Task *task) {
    char path[PATH_MAX];
    task->descriptor = open(path_of(path, folder, task->seed), O_RDONLY | O_CLOEXEC);
    for (;; task->reads++) CHECK(pread(task->descriptor, task->memory, 4096, 0) >= 0);
}
static void preadv_one_file(struct Task *task) {
    char path[PATH_MAX];
    task->descriptor = open(path_of(path, folder, task->seed), O_RDONLY | O_CLOEXEC);
    struct iovec parts[2] = {{task->memory, 100}, {task->memory + 100, 5000}};
    for (;; task->reads++) CHECK(preadv(task->descriptor, parts, 2, 10) >= 0);
}
static void only_open(struct Task *task) {
    char path[PATH_MAX];
    for (;; task->reads++) {
        task->descriptor = open(path_of(path, folder, rand_r(&task->seed)), O_RDONLY | O_CLOEXEC);
        int descriptor = task->descriptor, before;
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
        task->descriptor = -1;
        CHECK(close(descriptor) == 0);
        pthread_setcancelstate(before, &before);
    }
}
static void read_streams(struct Task *task) {
    char path[PATH_MAX];
    for (;; task->reads++) {
        int before;
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
        CHECK(task->stream = fopen(path_of(path, folder, rand_r(&task->seed)), "re"));
        pthread_setcancelstate(before, &before);
        while (fread(task->memory, 1, 1 << 16, task->stream) > 0) {}
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
        FILE *stream = task->stream;
        task->stream = NULL;
        CHECK(fclose(stream) == 0);
        pthread_setcancelstate(before, &before);
    }
}
static void list_folder(struct Task *task) {
    for (;; task->reads++) {
        int before;
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
        CHECK(task->listing = opendir(folder));
        pthread_setcancelstate(before, &before);
        for (struct dirent *entry; (entry = readdir(task->listing));) {
            struct stat s;
            CHECK(fstatat(dirfd(task->listing), entry->d_name, &s, 0) == 0);
            pthread_testcancel();
        }
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
        DIR *listing = task->listing;
        task->listing = NULL;
        CHECK(closedir(listing) == 0);
        pthread_setcancelstate(before, &before);
    }
}
/* Sends files. The thread must not be canceled in `sendfile`, but it must be canceled after it. */
static void send_files(struct Task *task) {
    char path[PATH_MAX];
    int before;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    task->descriptor = null;
    pthread_setcancelstate(before, &before);
    for (;; task->reads++) {
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
        int file = open(path_of(path, folder, rand_r(&task->seed)), O_RDONLY | O_CLOEXEC);
        pthread_setcancelstate(before, &before);
        CHECK(sendfile(null, file, NULL, 1 << 20) >= 0);
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
        close(file);
        pthread_setcancelstate(before, &before);
        pthread_testcancel();
    }
}

/* Copies a file to another file, with a call that is a cancellation point in glibc. */
static void move_files(struct Task *task) {
    char path[PATH_MAX];
    int before;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    FILE *target = task->stream = tmpfile();
    int file = task->descriptor = open(path_of(path, folder, task->seed), O_RDONLY | O_CLOEXEC);
    CHECK(target && file >= 0);
    pthread_setcancelstate(before, &before);
    for (;; task->reads++) {
        off_t from = 0, to = 0;
        CHECK(copy_file_range(file, &from, fileno(target), &to, 1 << 16, 0) >= 0);
    }
}
/* Asks for locks that are granted at once. */
static void lock_one_file(struct Task *task) {
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_len = 1};
    for (;; task->reads++) CHECK(fcntl(one_file, F_SETLKW, &lock) == 0);
}

static void (*const WAITING[])(struct Task *) = {
    wait_in_read, wait_in_readv, wait_in_write, wait_in_open, wait_in_openat, wait_in_fopen, wait_in_poll, wait_in_ppoll,
    wait_in_poll_with_file, wait_in_select, wait_in_pselect, wait_in_recv, wait_in_recvmsg, wait_in_nanosleep, wait_in_sleep,
    wait_in_pause, wait_in_sigsuspend, wait_in_accept, wait_in_splice,
};
static void (*const READING[])(struct Task *) = {
    read_files, read_files, read_files, pread_one_file, preadv_one_file, only_open, read_streams, list_folder, send_files,
    move_files, lock_one_file,
};
#define LEN(array) (sizeof array / sizeof *array)

static void *run(void *argument) {
    struct Task *task = argument;
    pthread_cleanup_push(clean, task);
    task->memory = malloc(1 << 20);
    CHECK(sem_post(&task->started) == 0);
    task->run(task);
    /* The call has returned before the thread was canceled, so wait here. */
    for (;;) pause();
    pthread_cleanup_pop(0);
    return NULL;
}

/* Compares a file of the folder with its plain copy. */
static void compare(unsigned number) {
    static char left[1 << 20], right[1 << 20];
    char path[PATH_MAX];
    int a = open(path_of(path, folder, number), O_RDONLY), b = open(path_of(path, plain, number), O_RDONLY);
    CHECK(a >= 0 && b >= 0);
    long len = read(a, left, sizeof left);
    CHECK(len == read(b, right, sizeof right) && len > 0 && memcmp(left, right, len) == 0);
    CHECK(close(a) == 0 && close(b) == 0);
}

static int lowest_free(void) {
    int descriptor = dup(0);
    close(descriptor);
    return descriptor;
}

static int count_open(void) {
    int count = 0;
    for (int number = 0; number < 256; number++) count += fcntl(number, F_GETFD) >= 0;
    return count;
}

/* Starts a thread, cancels it after some time, and joins it. */
static void cancel(void (*task_run)(struct Task *), unsigned seed, long *reads) {
    struct Task task = {.run = task_run, .seed = seed, .descriptor = -1};
    pthread_t thread;
    void *result;
    CHECK(sem_init(&task.started, 0, 0) == 0 && pthread_create(&thread, NULL, run, &task) == 0);
    while (sem_wait(&task.started)) {}
    /* The moment is random: before the call, within it, or after many calls. */
    for (volatile unsigned turns = rand_r(&seed) % 64 ? rand_r(&seed) % 20000 : 0; turns; turns--) {}
    if (rand_r(&seed) % 4 == 0) usleep(rand_r(&seed) % 300);
    CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, &result) == 0);
    CHECK(result == PTHREAD_CANCELED && task.cleaned == 1);
    *reads += task.reads;
}

int main(int count, char **arguments) {
    CHECK(count == 4);
    int cancels = atoi(arguments[1]);
    folder = arguments[2], plain = arguments[3];
    char path[PATH_MAX];
    struct stat s;
    do snprintf(path, sizeof path, "%s/%d", plain, files++);
    while (stat(path, &s) == 0);
    CHECK(--files > 1);
    snprintf(fifo, sizeof fifo, "%s.fifo", plain);
    CHECK(mkfifo(fifo, 0600) == 0);
    CHECK(pipe(empty_pipe) == 0 && pipe(full_pipe) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    fcntl(full_pipe[1], F_SETPIPE_SZ, 4096);
    long reads = 0;
    /* First in a process that has not used the folder yet: the thread is canceled while the library attaches. */
    for (int at = 0; at < 50; at++) {
        pid_t child = fork();
        if (child == 0) {
            cancel(read_files, at, &reads);
            compare(at);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    one_file = open(path_of(path, folder, 0), O_RDONLY | O_CLOEXEC);
    CHECK(one_file >= 0);
    compare(0);
    int open_before = count_open(), free_before = lowest_free();
    for (int at = 0; at < cancels; at++) {
        cancel(at % 2 ? READING[at / 2 % LEN(READING)] : WAITING[at / 2 % LEN(WAITING)], at, &reads);
        if (at % 50 == 0) compare(at / 50);
    }
    for (int number = 0; number < files; number++) compare(number);
    printf("%d canceled, %d descriptors and %d lost, %s\n", cancels, count_open() - open_before, lowest_free() - free_before,
           reads > 0 ? "some reads" : "no reads");
    return 0;
}
