/* The parts of libaio and liburing that answers.c uses, with the names and arguments that those libraries have. */

#include <linux/aio_abi.h>
#include <linux/io_uring.h>
#include <time.h>

int io_setup(int count, aio_context_t *context);
int io_submit(aio_context_t context, long count, struct iocb **list);
int io_getevents(aio_context_t context, long least, long most, struct io_event *events, struct timespec *timeout);

struct io_uring {
    int number;
    unsigned *tail, *mask, *array, *completion_head, *completion_mask;
    struct io_uring_sqe *entries;
    struct io_uring_cqe *completions;
};

int io_uring_queue_init(unsigned count, struct io_uring *ring, unsigned flags);
/* Reads, and returns what the kernel returned. */
int ring_read(struct io_uring *ring, int number, int is_registered, char *bytes, unsigned len, long offset);
int ring_register(struct io_uring *ring, const int *numbers, unsigned count);
