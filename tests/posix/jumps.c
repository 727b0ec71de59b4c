/* Jumps out of a signal handler, by `siglongjmp`, in the middle of calls on the namespace, and checks that afterward everything
 * works as before: files have the right bytes, the signal mask and the cancellation state are the program's, no more numbers are
 * lost than over a plain directory, and memory does not grow without bound. POSIX allows such a jump where the handler has
 * interrupted functions that are async-signal-safe.
 *
 * Usage: jumps JUMPS FOLDER PLAIN, where FOLDER has files named 0, 1, ... and PLAIN is a plain copy. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/select.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char *folder, *plain;
static int files, ends[2];
static sigjmp_buf back;
static volatile sig_atomic_t is_armed;
static volatile int number = -1;
/* The file that is being read, and the offset before the read under way; -1 if none is. */
static volatile unsigned reading;
static volatile long offset_before = -1;
static timer_t timer;
static char bytes[1 << 20], expected[1 << 20];

static char *at(char *room, const char *root, unsigned which) {
    snprintf(room, 500, "%s/%u", root, which % files);
    return room;
}

static void on_timer(int signal) {
    (void)signal;
    if (is_armed) {
        is_armed = 0;
        siglongjmp(back, 1);
    }
}

/* The arrays are static: after a jump they must be as the program left them. */
static struct pollfd entries[2];
static fd_set set;

/* Makes calls until the handler jumps. */
static void work(unsigned seed) {
    char path[512];
    struct stat stat_;
    for (;;) {
        reading = rand_r(&seed);
        at(path, folder, reading);
        stat(path, &stat_);
        access(path, R_OK);
        number = open(path, O_RDONLY | O_CLOEXEC);
        fstat(number, &stat_);
        do offset_before = lseek(number, 0, SEEK_CUR);
        while (read(number, bytes, 100000) > 0);
        offset_before = -1;
        pread(number, bytes, 5000, 0);
        lseek(number, 0, SEEK_SET);
        if (seed % 16 == 0) {
            entries[0] = (struct pollfd){.fd = number, .events = 0};
            entries[1] = (struct pollfd){.fd = ends[0], .events = POLLIN};
            poll(entries, 2, 20);
            FD_ZERO(&set);
            FD_SET(number, &set);
            struct timespec soon = {0, 20000000};
            fd_set except = set;
            FD_CLR(number, &set);
            FD_SET(ends[0], &set);
            pselect(number + 1, &set, NULL, &except, &soon, NULL);
        }
        int closing = number;
        number = -1;
        close(closing);
    }
}

static void wrong(const char *what, long found) {
    printf("%s: %ld, %s\n", what, found, strerrorname_np(errno));
    exit(1);
}

static void compare(unsigned which) {
    char path[512];
    int ours = open(at(path, folder, which), O_RDONLY), other = open(at(path, plain, which), O_RDONLY);
    if (ours < 0 || other < 0) wrong("open", errno);
    long len = 0, part;
    while ((part = read(ours, bytes + len, sizeof bytes - len)) > 0) len += part;
    if (part < 0 || len != read(other, expected, sizeof expected) || memcmp(bytes, expected, len) != 0) wrong("bytes", len);
    if (close(ours) != 0 || close(other) != 0) wrong("close", errno);
}

/* Compares what the interrupted read has taken, which is what the offset says, with what it has stored. */
static void compare_taken(void) {
    char path[512];
    long taken = lseek(number, 0, SEEK_CUR) - offset_before;
    int other = open(at(path, plain, reading), O_RDONLY);
    if (taken < 0 || taken > 100000) wrong("bytes taken", taken);
    if (pread(other, expected, taken, offset_before) != taken || memcmp(bytes, expected, taken) != 0) wrong("not stored, but taken", taken);
    close(other);
}

static long memory(void) {
    long pages = 0, resident = 0;
    FILE *statm = fopen("/proc/self/statm", "r");
    if (fscanf(statm, "%ld %ld", &pages, &resident) != 2) exit(2);
    fclose(statm);
    return resident * 4;
}

static int open_numbers(void) {
    int count = 0;
    for (int number = 0; number < 4096; number++) count += fcntl(number, F_GETFD) >= 0;
    return count;
}

/* Jumps `count` times. After each jump, checks what must hold right away. */
static void jump(int count) {
    for (volatile int i = 0; i < count; i++) {
        if (sigsetjmp(back, 1) == 0) {
            struct itimerspec when = {.it_value.tv_nsec = 20000 + 1000 * (i * 37 % 500)};
            is_armed = 1;
            timer_settime(timer, 0, &when, NULL);
            work(i);
        }
        if (number >= 0 && offset_before >= 0) compare_taken();
        offset_before = -1;
        if (number >= 0) close(number);
        number = -1;
        sigset_t mask;
        int state;
        pthread_sigmask(SIG_SETMASK, NULL, &mask);
        for (int signal = 1; signal < 32; signal++)
            if (sigismember(&mask, signal)) wrong("a signal is blocked", signal);
        pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state);
        if (state != PTHREAD_CANCEL_ENABLE) wrong("cancellation is off after jump", i);
        if (entries[1].fd != ends[0] && entries[1].fd != 0) wrong("a descriptor that is polled", entries[1].fd);
        if (entries[0].fd == -1) wrong("a file that is polled", i);
    }
}

/* The library's descriptors give way at once. */
static void take_high_numbers(void) {
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int high = 800; high < 1024; high++)
        if (dup2(ends[0], high) != high) wrong("dup2", high);
    clock_gettime(CLOCK_MONOTONIC, &end);
    if (end.tv_sec - start.tv_sec > 5) wrong("dup2 took seconds", end.tv_sec - start.tv_sec);
    for (int high = 800; high < 1024; high++) close(high);
}

static void *run_thread(void *unused) {
    for (unsigned which = 0;; which++) compare(which);
    return unused;
}

int main(int count, char **arguments) {
    if (count != 4) return 2;
    int jumps = atoi(arguments[1]);
    char path[512];
    struct stat stat_;
    folder = arguments[2], plain = arguments[3];
    do snprintf(path, sizeof path, "%s/%d", plain, files++);
    while (stat(path, &stat_) == 0);
    files--;
    if (pipe(ends) != 0) return 3;
    /* Whoever started the tests may have blocked some. */
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    struct sigaction action = {.sa_handler = on_timer};
    sigaction(SIGUSR1, &action, NULL);
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
    timer_create(CLOCK_MONOTONIC, &event, &timer);
    compare(0);
    jump(jumps / 10);
    int numbers = open_numbers();
    long before = memory();
    jump(jumps);
    long grown = memory() - before;
    numbers = open_numbers() - numbers;
    for (int which = 0; which < files; which++) compare(which);
    take_high_numbers();
    for (int which = 0; which < files; which++) compare(which);
    /* Another thread still works, and can be canceled. */
    pthread_t thread;
    void *result;
    pthread_create(&thread, NULL, run_thread, NULL);
    usleep(10000);
    pthread_cancel(thread);
    pthread_join(thread, &result);
    if (result != PTHREAD_CANCELED) wrong("canceled", 0);
    fprintf(stderr, "%d numbers, %ld KiB\n", numbers, grown);
    if (grown > 32 << 10) wrong("KiB of memory", grown);
    /* If a handler jumps when `open` has just returned, the number is lost, as over a plain directory. */
    if (numbers > jumps / 4) wrong("numbers", numbers);
    printf("%d jumps\n", jumps);
    return 0;
}
