/* Lists a dataset and reads all of its samples in the shuffled order of one epoch.
 *
 * Run it within a session, on any node:
 *
 *     dayfly exec -- ./read_samples /dayfly/train 7 0
 */

#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dayfly.h"

/* The number of samples that one message to the server requests. */
#define BATCH 64

struct samples {
    const char *dataset;
    char **paths;
    uint64_t *sizes;
    size_t count, room;
};

static int print_name(const char *name, unsigned char type, void *context) {
    (void)context;
    printf("%s %s\n", type == DT_DIR ? "directory" : type == DT_LNK ? "symlink" : "file", name);
    return 0;
}

/* dayfly_epoch calls this for every sample, in the order of the epoch. */
static int collect(const char *path, uint64_t size, void *context) {
    struct samples *samples = context;
    size_t len = strlen(samples->dataset);
    while (len > 0 && samples->dataset[len - 1] == '/')
        len--;
    if (strncmp(path, samples->dataset, len) || path[len] != '/') {
        fprintf(stderr, "%s is only a part of a dataset; an epoch covers the whole dataset\n", samples->dataset);
        exit(1);
    }
    if (samples->count == samples->room) {
        size_t room = samples->room ? 2 * samples->room : 1024;
        char **paths = realloc(samples->paths, room * sizeof *paths);
        if (paths)
            samples->paths = paths;
        uint64_t *sizes = realloc(samples->sizes, room * sizeof *sizes);
        if (sizes)
            samples->sizes = sizes;
        if (!paths || !sizes)
            return -1;
        samples->room = room;
    }
    samples->sizes[samples->count] = size;
    samples->paths[samples->count] = strdup(path);
    return samples->paths[samples->count++] ? 0 : -1;
}

static int fail(const char *what) {
    perror(what);
    return 1;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: read_samples DATASET [SEED [EPOCH]]\n");
        return 2;
    }
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
    uint64_t epoch = argc > 3 ? strtoull(argv[3], NULL, 10) : 0;

    /* Attach to the session that the environment names. */
    dayfly *session = dayfly_attach();
    if (!session)
        return fail("dayfly_attach");

    if (dayfly_list(session, argv[1], print_name, NULL) != 0)
        return fail(argv[1]);

    /* The order is the same in every process that passes the same seed and epoch. */
    struct samples samples = {.dataset = argv[1]};
    if (dayfly_epoch(session, argv[1], seed, epoch, collect, &samples) != 0)
        return fail("dayfly_epoch");

    /* From now on the server prefetches along this order. This process reads all of it: reader 0 of 1. */
    dayfly_order *order = dayfly_order_epoch(session, argv[1], seed, epoch, 0, 1);
    if (!order)
        return fail("dayfly_order_epoch");

    for (size_t start = 0; start < samples.count; start += BATCH) {
        size_t count = samples.count - start < BATCH ? samples.count - start : BATCH;
        dayfly_batch *batch = dayfly_batch_open(session, (const char *const *)samples.paths + start, count, 0);
        if (!batch)
            return fail("dayfly_batch_open");
        struct dayfly_view view;
        int more;
        while ((more = dayfly_batch_next(batch, &view)) == 1) {
            /* The bytes lie where the batch found them, in mapped memory: no copy is made. */
            const unsigned char *bytes = view.bytes;
            uint64_t sum = 0;
            for (uint64_t at = 0; at < view.len; at++)
                sum += bytes[at];
            printf("sample %s %" PRIu64 " %" PRIu64 "\n", samples.paths[start + view.index], view.len, sum);
        }
        if (more < 0)
            return fail("dayfly_batch_next");
        /* Check only now, after the last look at the bytes, whether all of them were valid. */
        if (dayfly_batch_is_good(batch) != 1) {
            fprintf(stderr, "some bytes were lost while they were read; read the batch again\n");
            return 1;
        }
        dayfly_batch_close(batch);
    }

    dayfly_order_end(order);
    for (size_t at = 0; at < samples.count; at++)
        free(samples.paths[at]);
    free(samples.paths);
    free(samples.sizes);
    dayfly_detach(session);
    return 0;
}
