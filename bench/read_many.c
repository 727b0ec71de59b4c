/* Measures what one file of a batch costs, by three ways to the same bytes: open, read and close through the preload library;
 * dayfly_read_many; and dayfly_read_many_ids. Only files that are on this node are read, whole, in one random order.
 *
 * Each way has a process of its own, because a process reads a range of a segment otherwise the first time than later. The
 * processes run in turn. Prints the medians over all runs, in nanoseconds per file, of the first pass of a process and of the
 * last one, and the ratios to open, read and close.
 *
 * Usage: read_many DATASET [RUNS [BATCH [PASSES]]]    Run it under `dayfly exec`, which loads the functions of dayfly.h. */

#include <dayfly.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { FILES, FILES_APART, MANY, IDS, WAYS };
static const char *const names[WAYS] = {"open, read, close; one buffer", "open, read, close; a buffer per file", "dayfly_read_many",
                                        "dayfly_read_many_ids"};

static dayfly *session;
static dayfly_dataset *dataset;
static uint32_t *ids, files;
static struct dayfly_sample *facts;
static char **paths;

static void fail(const char *what) {
    fprintf(stderr, "read_many: %s: %s\n", what, dayfly_error());
    exit(1);
}

static void *get(size_t len) {
    void *memory = malloc(len);
    if (!memory) fail("malloc");
    memset(memory, 1, len);
    return memory;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e9 + time.tv_nsec;
}

/* Chooses the files that are here, in an order that is the same in each process. */
static void choose(const char *path) {
    session = dayfly_attach();
    dataset = session ? dayfly_dataset_open(session, path) : NULL;
    if (!dataset) fail(path);
    uint32_t count = dayfly_dataset_count(dataset);
    uint32_t *all = get((size_t)count * sizeof *all);
    struct dayfly_sample *known = get((size_t)count * sizeof *known);
    if (dayfly_epoch_ids(dataset, 7, 0, all) != 0 || dayfly_dataset_look(dataset, all, count, known) != 0) fail(path);
    ids = get((size_t)count * sizeof *ids);
    facts = get((size_t)count * sizeof *facts);
    paths = get((size_t)count * sizeof *paths);
    for (uint32_t at = 0; at < count; at++) {
        if (!known[at].is_here || !known[at].size) continue;
        char name[4096];
        if (dayfly_dataset_path(dataset, all[at], name, sizeof name) < 0) fail("dayfly_dataset_path");
        ids[files] = all[at], facts[files] = known[at], paths[files++] = strdup(name);
    }
    if (!files) fail("no file of the dataset is on this node");
}

static void read_whole(const char *path, char *into, size_t len) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0 || read(file, into, len) != (ssize_t)len || close(file) != 0) fail(path);
}

/* Reads all files once, in batches. `room` is long enough for each batch. */
static void pass(int way, uint32_t batch, char *room, struct dayfly_request *requests, uint64_t *offsets, size_t len) {
    for (uint32_t first = 0; first < files; first += batch) {
        uint32_t count = files - first < batch ? files - first : batch;
        char *end = room;
        for (uint32_t at = 0; at < count && way != IDS; at++) {
            size_t size = facts[first + at].size;
            if (way == MANY) {
                requests[at] = (struct dayfly_request){paths[first + at], end, size, 0};
            } else {
                read_whole(paths[first + at], way == FILES ? room : end, size);
            }
            end += size;
        }
        if (way == MANY && dayfly_read_many(session, requests, count, 0) != 0) fail("dayfly_read_many");
        if (way == IDS && dayfly_read_many_ids(dataset, ids + first, count, room, len, offsets, NULL, 0) != 0)
            fail("dayfly_read_many_ids");
    }
}

static void measure(int way, const char *path, uint32_t batch, int passes, double out[2]) {
    choose(path);
    size_t len = 0;
    for (uint32_t first = 0; first < files; first += batch) {
        size_t sum = 0;
        for (uint32_t at = first; at < files && at < first + batch; at++) sum += facts[at].size;
        len = sum > len ? sum : len;
    }
    char *room = get(len);
    struct dayfly_request *requests = get(batch * sizeof *requests);
    uint64_t *offsets = get((batch + 1) * sizeof *offsets);
    for (int at = 0; at < passes; at++) {
        double start = now();
        pass(way, batch, room, requests, offsets, len);
        out[at ? 1 : 0] = (now() - start) / files;
    }
}

static int compare(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

int main(int count, char **arguments) {
    if (count < 2) fail("usage: read_many DATASET [RUNS [BATCH [PASSES]]]");
    int runs = count > 2 ? atoi(arguments[2]) : 5, passes = count > 4 ? atoi(arguments[4]) : 3;
    uint32_t batch = count > 3 ? (uint32_t)atoi(arguments[3]) : 256;
    double(*results)[2][runs] = get(WAYS * sizeof *results);
    for (int run = 0; run < runs; run++) {
        for (int way = 0; way < WAYS; way++) {
            int ends[2];
            double out[2] = {0, 0};
            if (pipe(ends) != 0) fail("pipe");
            fflush(stdout);
            if (fork() == 0) {
                measure(way, arguments[1], batch, passes, out);
                _exit(write(ends[1], out, sizeof out) == sizeof out ? 0 : 1);
            }
            close(ends[1]);
            int status = 1;
            if (read(ends[0], out, sizeof out) != sizeof out || wait(&status) < 0 || status != 0) fail("a child failed");
            close(ends[0]);
            results[way][0][run] = out[0], results[way][1][run] = out[1];
        }
    }
    printf("ns per file, medians of %d runs, batches of %u\n", runs, batch);
    for (int way = 0; way < WAYS; way++) {
        for (int when = 0; when < 2; when++) qsort(results[way][when], runs, sizeof(double), compare);
        double first = results[way][0][runs / 2], last = results[way][1][runs / 2];
        printf("%-38s first pass %7.0f (%.2f)   last pass %7.0f (%.2f)\n", names[way], first, first / results[FILES][0][runs / 2],
               last, last / results[FILES][1][runs / 2]);
    }
    return 0;
}
