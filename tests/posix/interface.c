/* Uses the functions of dayfly.h and prints their results. Usage: interface FOLDER (the tree that tests/posix.rs creates) */

#include <dayfly.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int count(const char *name, unsigned char type, void *context) {
    (void)type;
    ++*(int *)context;
    return strcmp(name, "link") == 0 ? 7 : 0;
}

/* The result of a shuffle: the number of samples, their total size, and the length of the first path. */
struct order {
    int count;
    unsigned long long size, first;
};

static int see(const char *path, uint64_t size, void *context) {
    struct order *order = context;
    if (order->count++ == 0) order->first = strlen(path);
    order->size += size;
    return strstr(path, "//") ? 9 : 0;
}

int main(int argument_count, char **arguments) {
    (void)argument_count;
    char path[4096], *buffers[4];
    dayfly *session = dayfly_attach();
    if (!session) return perror("attach"), 1;
    snprintf(path, sizeof path, "%s/big", arguments[1]);
    struct stat s;
    int result = dayfly_stat(session, path, &s);
    printf("stat %d %ld\n", result, (long)s.st_size);
    dayfly_file *file = dayfly_open(session, path);
    printf("size %lu\n", (unsigned long)dayfly_size(file));
    char *bytes = malloc(400000);
    printf("read %zd\n", dayfly_read(session, file, bytes, 400000, 1));
    printf("end %zd\n", dayfly_read(session, file, bytes, 10, 1 << 30));
    dayfly_close(file);
    errno = 0;
    printf("missing %d", dayfly_open(session, "/nowhere") == NULL);
    printf(" %s; %s\n", strerror(errno), dayfly_error());
    const char *names[] = {"sub/f1", "sub/f2", "missing", "big"};
    struct dayfly_request requests[4];
    for (int i = 0; i < 4; i++) {
        requests[i].path = malloc(4096);
        snprintf((char *)requests[i].path, 4096, "%s/%s", arguments[1], names[i]);
        requests[i].buffer = buffers[i] = calloc(1, 400000);
        requests[i].len = i == 1 ? 100 : 400000;
    }
    printf("failed %zd\n", dayfly_read_many(session, requests, 4, DAYFLY_REPORT_MISSING));
    for (int i = 0; i < 4; i++) printf("%s %ld\n", names[i], (long)requests[i].result);
    printf("cut %d %d\n", buffers[1][99] != 0 || buffers[1][98] != 0, buffers[1][100]);
    printf("same %d\n", memcmp(buffers[3] + 1, bytes, 300000) == 0);
    const char *paths[4];
    for (int i = 0; i < 4; i++) paths[i] = requests[i].path;
    dayfly_batch *batch = dayfly_batch_open(session, paths, 4, DAYFLY_REPORT_MISSING);
    struct dayfly_view view = {9, bytes, 9, 9};
    result = dayfly_batch_get(batch, 0, &view);
    printf("early %d %d %d\n", result, errno == EAGAIN, view.bytes == NULL);
    dayfly_batch_wait(batch);
    for (size_t i = 0; i < 5; i++) {
        result = dayfly_batch_get(batch, i, &view);
        printf("get %zu %d %lu %d %s\n", view.index, result, (unsigned long)view.len, view.error, view.bytes ? "" : dayfly_error());
    }
    dayfly_batch_close(batch);
    printf("whole %zd", dayfly_read_many(session, requests, 4, 0));
    for (int i = 0; i < 4; i++) printf(" %d", requests[i].result == -ENOENT);
    batch = dayfly_batch_open(session, paths, 2, 0);
    for (int i = 0; i < 2; i++) dayfly_batch_next(batch, &view);
    result = dayfly_batch_next(batch, &view);
    printf(" end %d %zu %d %d", result, view.index, view.bytes == NULL, view.error);
    dayfly_batch_close(batch);
    batch = dayfly_batch_open(session, paths, 4, 0);
    if (!batch) printf(" refused");
    while (batch && (result = dayfly_batch_next(batch, &view)) == 1) continue;
    if (batch) printf(" failed %d %zu %d %d", result, view.index, view.bytes == NULL, view.error == ENOENT);
    dayfly_batch_close(batch);
    printf("\n");
    dayfly_dataset *dataset = dayfly_dataset_open(session, arguments[1]);
    uint32_t total = dayfly_dataset_count(dataset), *ids = malloc(total * sizeof *ids), *own = malloc(total * sizeof *own);
    printf("ids %d", dayfly_epoch_ids(dataset, 1, 2, ids));
    struct dayfly_sample *samples = malloc(total * sizeof *samples);
    printf(" look %d", dayfly_dataset_look(dataset, ids, total, samples));
    ssize_t mine = dayfly_local_ids(dataset, own);
    printf(" own %d", mine > 0 && mine < (ssize_t)total);
    uint64_t sizes = 0, *offsets = malloc((total + 1) * sizeof *offsets);
    int here = 0, *errors = malloc(total * sizeof *errors), right = 1;
    for (uint32_t i = 0; i < total; i++) sizes += samples[i].size, here += samples[i].is_here;
    printf(" here %d", here >= mine);
    result = dayfly_read_many_ids(dataset, ids, total, bytes, 10, offsets, errors, 0);
    printf(" small %d %d %d %d", result, errno == ERANGE, offsets[total] == sizes, errors[0] == ERANGE);
    char *all_bytes = malloc(sizes), one[4096];
    dayfly_order *order = dayfly_order_ids(dataset, ids, total);
    result = dayfly_read_many_ids(dataset, ids, total, all_bytes, sizes, offsets, errors, 0);
    for (uint32_t i = 0; i < total; i++) {
        ssize_t length = dayfly_dataset_path(dataset, ids[i], one, sizeof one);
        dayfly_file *single = dayfly_open(session, one);
        char *expected = malloc(samples[i].size + 1);
        right &= length == (ssize_t)strlen(one) && dayfly_id(single) == ids[i] && errors[i] == 0;
        right &= dayfly_read(session, single, expected, samples[i].size + 1, 0) == (ssize_t)samples[i].size;
        right &= memcmp(expected, all_bytes + offsets[i], samples[i].size) == 0;
        dayfly_close(single);
        free(expected);
    }
    printf(" all %d right %d order %d\n", result, right, order != NULL);
    dayfly_order_end(order);
    uint32_t some[2] = {ids[0], total};
    result = dayfly_read_many_ids(dataset, some, 2, all_bytes, sizes, offsets, errors, DAYFLY_REPORT_MISSING);
    printf("unknown %d %d %d", result, errors[0], errors[1] == ENOENT);
    printf(" %zd", dayfly_read_many_ids(dataset, some, 2, all_bytes, sizes, offsets, NULL, 0));
    printf(" %zd", dayfly_dataset_path(dataset, total, one, sizeof one));
    printf(" %zd", dayfly_dataset_path(dataset, 0, one, 3));
    printf(" %d", dayfly_dataset_look(dataset, some, 2, samples));
    printf(" %d\n", dayfly_order_ids(dataset, some, 2) == NULL);
    dayfly_dataset_close(dataset);
    int seen = 0;
    printf("list %d", dayfly_list(session, arguments[1], count, &seen));
    printf(" after %d\n", seen);
    struct order all = {0, 0, 0}, again = {0, 0, 0}, local = {0, 0, 0};
    printf("epoch %d %d", dayfly_epoch(session, arguments[1], 1, 2, see, &all), dayfly_epoch(session, arguments[1], 1, 2, see, &again));
    printf(" local %d", dayfly_local(session, arguments[1], see, &local));
    printf(" same %d some %d\n", all.count == again.count && all.size == again.size && all.first == again.first,
           local.count > 0 && local.count < all.count);
    dayfly_detach(session);
    return 0;
}
