/* Stands for libaio and liburing: it makes system calls without the C library, as those do, and returns negative error numbers. */

#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "libasync.h"

static long call(long number, long a, long b, long c, long d, long e, long f) {
    register long fourth __asm__("r10") = d, fifth __asm__("r8") = e, sixth __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "0"(number), "D"(a), "S"(b), "d"(c), "r"(fourth), "r"(fifth), "r"(sixth)
                     : "rcx", "r11", "memory");
    return result;
}

int io_setup(int count, aio_context_t *context) {
    return call(SYS_io_setup, count, (long)context, 0, 0, 0, 0);
}

int io_submit(aio_context_t context, long count, struct iocb **list) {
    return call(SYS_io_submit, context, count, (long)list, 0, 0, 0);
}

int io_getevents(aio_context_t context, long least, long most, struct io_event *events, struct timespec *timeout) {
    return call(SYS_io_getevents, context, least, most, (long)events, (long)timeout, 0);
}

static char *map(int ring, long len, long offset) {
    return (char *)call(SYS_mmap, 0, len, PROT_READ | PROT_WRITE, MAP_SHARED, ring, offset);
}

int io_uring_queue_init(unsigned count, struct io_uring *ring, unsigned flags) {
    struct io_uring_params params;
    memset(&params, 0, sizeof params);
    params.flags = flags;
    int number = call(SYS_io_uring_setup, count, (long)&params, 0, 0, 0, 0);
    if (number < 0) return number;
    char *submissions = map(number, params.sq_off.array + params.sq_entries * 4, IORING_OFF_SQ_RING);
    char *completions = map(number, params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe), IORING_OFF_CQ_RING);
    ring->number = number;
    ring->entries = (struct io_uring_sqe *)map(number, params.sq_entries * sizeof(struct io_uring_sqe), IORING_OFF_SQES);
    ring->tail = (unsigned *)(submissions + params.sq_off.tail);
    ring->mask = (unsigned *)(submissions + params.sq_off.ring_mask);
    ring->array = (unsigned *)(submissions + params.sq_off.array);
    ring->completion_head = (unsigned *)(completions + params.cq_off.head);
    ring->completion_mask = (unsigned *)(completions + params.cq_off.ring_mask);
    ring->completions = (struct io_uring_cqe *)(completions + params.cq_off.cqes);
    return 0;
}

int ring_read(struct io_uring *ring, int number, int is_registered, char *bytes, unsigned len, long offset) {
    unsigned at = *ring->tail & *ring->mask;
    struct io_uring_sqe *entry = &ring->entries[at];
    memset(entry, 0, sizeof *entry);
    entry->opcode = IORING_OP_READ;
    entry->flags = is_registered ? IOSQE_FIXED_FILE : 0;
    entry->fd = number;
    entry->addr = (unsigned long)bytes;
    entry->len = len;
    entry->off = offset;
    ring->array[at] = at;
    __atomic_store_n(ring->tail, *ring->tail + 1, __ATOMIC_RELEASE);
    int result = call(SYS_io_uring_enter, ring->number, 1, 1, IORING_ENTER_GETEVENTS, 0, 0);
    if (result < 0) return result;
    unsigned head = *ring->completion_head;
    result = ring->completions[head & *ring->completion_mask].res;
    __atomic_store_n(ring->completion_head, head + 1, __ATOMIC_RELEASE);
    return result;
}

int ring_register(struct io_uring *ring, const int *numbers, unsigned count) {
    return call(SYS_io_uring_register, ring->number, IORING_REGISTER_FILES, (long)numbers, count, 0, 0);
}
