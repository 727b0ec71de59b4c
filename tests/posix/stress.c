/* Threads read while other threads fork, and the children read as well; all of them check every byte.
 * Usage: stress SECONDS LIST. Each line of LIST has a path in the namespace and the path of a plain file with the same bytes. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 16, CHILDREN = 8, FILES = 512, SIZE = 1 << 20 };

static char *paths[FILES], *plain[FILES];
static int count;
static double end;
static atomic_long checked, forked, wrong;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void complain(const char *what, const char *path) {
    wrong++;
    fprintf(stderr, "%s: %s: %m\n", what, path);
}

/* Reads a file in one of four ways and compares it with the plain one. */
static void check(int at, unsigned *seed, char *buffer) {
    struct stat s;
    int file = open(paths[at], O_RDONLY | (rand_r(seed) & 1 ? O_CLOEXEC : 0));
    int other = open(plain[at], O_RDONLY | O_CLOEXEC);
    if (file < 0 || other < 0 || fstat(file, &s) != 0) {
        complain("open", paths[at]);
        return;
    }
    if (s.st_size > SIZE) s.st_size = SIZE;
    char *expected = mmap(NULL, s.st_size ? s.st_size : 1, PROT_READ, MAP_PRIVATE, other, 0);
    long got = 0;
    switch (rand_r(seed) % 4) {
    case 0:
        while (got < s.st_size) {
            long n = read(file, buffer + got, rand_r(seed) % 70000 + 1);
            if (n <= 0) break;
            got += n;
        }
        break;
    case 1:
        got = pread(file, buffer, s.st_size, 0);
        break;
    case 2: {
        int copy = dup(file);
        close(file);
        file = copy;
        lseek(file, 0, SEEK_SET);
        while (got < s.st_size) {
            long n = read(file, buffer + got, s.st_size - got);
            if (n <= 0) break;
            got += n;
        }
        break;
    }
    case 3:
        if (s.st_size) {
            char *map = mmap(NULL, s.st_size, PROT_READ, MAP_SHARED, file, 0);
            if (map == MAP_FAILED) break;
            memcpy(buffer, map, s.st_size);
            munmap(map, s.st_size);
        }
        got = s.st_size;
        break;
    }
    if (got < s.st_size || memcmp(buffer, expected, s.st_size < got ? s.st_size : got) != 0) complain("bytes differ", paths[at]);
    munmap(expected, s.st_size ? s.st_size : 1);
    close(file);
    close(other);
    checked++;
}

static void *run(void *number) {
    unsigned seed = (unsigned)(long)number * 7919 + 1;
    char *buffer = malloc(SIZE + 70000);
    while (now() < end) {
        for (int i = 0; i < 50; i++) check(rand_r(&seed) % count, &seed, buffer);
        pid_t children[CHILDREN];
        for (int i = 0; i < CHILDREN; i++) {
            children[i] = fork();
            if (children[i] == 0) {
                seed += i * 31;
                alarm(300);
                wrong = 0;
                for (int j = 0; j < 10; j++) check(rand_r(&seed) % count, &seed, buffer);
                _exit(wrong ? 1 : 0);
            }
        }
        for (int i = 0; i < CHILDREN; i++) {
            int status = -1;
            if (children[i] < 0 || waitpid(children[i], &status, 0) < 0 || status != 0) {
                wrong++;
                fprintf(stderr, "a child exited with status %d\n", status);
            }
            forked++;
        }
    }
    free(buffer);
    return NULL;
}

int main(int argument_count, char **arguments) {
    (void)argument_count;
    FILE *list = fopen(arguments[2], "r");
    char left[4096], right[4096];
    while (count < FILES && fscanf(list, "%4095s %4095s", left, right) == 2) {
        paths[count] = strdup(left);
        plain[count++] = strdup(right);
    }
    end = now() + atof(arguments[1]);
    pthread_t threads[THREADS];
    for (long i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, run, (void *)i);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    printf("%ld checked, %ld children, %ld wrong\n", checked, forked, wrong);
    return wrong != 0;
}
