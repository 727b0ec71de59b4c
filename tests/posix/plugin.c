/* Reads through libasync.so, which the program that loads this library does not know. */

#include <stdint.h>
#include <string.h>

#include "libasync.h"

/* Reads 1000 bytes twice, with libaio's calls and with those of liburing. Returns how many bytes were read. */
int read_both(int number, char *bytes) {
    aio_context_t context = 0;
    int result = io_setup(1, &context);
    if (result != 0) return result;
    struct iocb request;
    memset(&request, 0, sizeof request);
    request.aio_fildes = number;
    request.aio_lio_opcode = IOCB_CMD_PREAD;
    request.aio_buf = (uintptr_t)bytes;
    request.aio_nbytes = 1000;
    request.aio_offset = 70000;
    struct iocb *list[] = {&request};
    result = io_submit(context, 1, list);
    if (result != 1) return result;
    struct io_event event;
    io_getevents(context, 1, 1, &event, NULL);
    struct io_uring ring;
    result = io_uring_queue_init(4, &ring, 0);
    if (result != 0) return result;
    return event.res + ring_read(&ring, number, 0, bytes + 1000, 1000, 75000);
}
