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
    printf(" %s\n", strerror(errno));
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
