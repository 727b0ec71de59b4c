/* Dayfly's C interface: reads a session's namespace without system calls on paths.
 *
 * Link with libdayfly_preload.so. The environment names the session: start the program with `dayfly exec` or `dayfly run`,
 * or in a shell after `eval "$(dayfly env)"`.
 *
 * Example: read one sample.
 *
 *     #include <dayfly.h>
 *     #include <stdio.h>
 *     #include <stdlib.h>
 *
 *     int main(int argc, char **argv) {
 *         if (argc < 2) return 2;
 *         dayfly *session = dayfly_attach();
 *         if (!session) return perror("dayfly_attach"), 1;
 *         dayfly_file *file = dayfly_open(session, argv[1]);
 *         if (!file) return perror(argv[1]), 1;
 *         uint64_t size = dayfly_size(file);
 *         char *bytes = malloc(size ? size : 1);
 *         ssize_t count = bytes ? dayfly_read(session, file, bytes, size, 0) : -1;
 *         if (count < 0) return perror(argv[1]), 1;
 *         fwrite(bytes, 1, count, stdout);
 *         free(bytes);
 *         dayfly_close(file);
 *         dayfly_detach(session);
 *         return 0;
 *     }
 *
 * Rules for all functions:
 *
 * - Failure: a function that returns a pointer returns NULL, a function that returns an int or ssize_t returns -1, and errno
 *   says why. EIO means that the session or its server has ended, or that a sample cannot be read; the first such failure also
 *   prints a line to standard error. EINVAL means a NULL handle, a NULL function or unknown flags; EFAULT means a NULL path or
 *   NULL for a result. dayfly_error says more than errno.
 * - Paths are absolute, as programs see them, with the session's prefix. They are bytes and end with NUL.
 * - Sizes, lengths and offsets count bytes.
 * - Threads: several threads may use one session or one file at the same time. One thread at a time uses a batch.
 * - fork: the child may use its parent's session and files. Batches and orders belong to the parent alone; the child may only
 *   close its copies of them, which does not affect the parent. */

#ifndef DAYFLY_H
#define DAYFLY_H

#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Returns, as text, why the last call of this thread that failed did so, or why the file has no bytes that the last call
 * delivered: the reason, the path and the node, as far as they are known. An empty string if nothing has failed. The text stays
 * valid until this thread calls another function of this header. */
const char *dayfly_error(void);

/* ---- Session ---- */

/* An attachment to the session's server on this node. */
typedef struct dayfly dayfly;

/* Attaches to the session that the environment names. */
dayfly *dayfly_attach(void);

/* Detaches. First close all files, batches and orders of the session. */
void dayfly_detach(dayfly *session);

/* ---- Single files ---- */

/* An open file. */
typedef struct dayfly_file dayfly_file;

/* Opens a regular file. Follows symlinks. */
dayfly_file *dayfly_open(dayfly *session, const char *path);

/* Closes a file. */
void dayfly_close(dayfly_file *file);

/* Returns the size of a file. */
uint64_t dayfly_size(const dayfly_file *file);

/* Returns the number of a file in its dataset, from 0, or UINT32_MAX for NULL. The number stays the same as long as the dataset
 * exists, on every node. */
uint32_t dayfly_id(const dayfly_file *file);

/* Reads up to `len` bytes from `offset` on. Returns the number of bytes read, which is smaller than `len` only at the end of the
 * file, and 0 beyond it. */
ssize_t dayfly_read(dayfly *session, dayfly_file *file, void *buffer, size_t len, uint64_t offset);

/* As stat(2): follows symlinks. */
int dayfly_stat(dayfly *session, const char *path, struct stat *out);

/* Calls `see` for each name in a directory, sorted by bytes, without `.` and `..`. `type` is DT_REG, DT_DIR or DT_LNK of
 * <dirent.h>. A result of `see` other than 0 ends the listing and becomes the result of this function. */
int dayfly_list(dayfly *session, const char *path, int (*see)(const char *name, unsigned char type, void *context),
                void *context);

/* ---- Many files ----
 *
 * Both ways below send one message for all files that are not on this node, which is much faster than a call per file. */

/* Flag: a file that cannot be read gets an error of its own, and the others are read. Without the flag, the first such file fails
 * the whole call or batch. */
#define DAYFLY_REPORT_MISSING 1
/* Flag: a batch delivers files as they become available, those on this node first. Without the flag, the batch delivers
 * them in the requested order. */
#define DAYFLY_AS_AVAILABLE 2

/* A file for dayfly_read_many. */
struct dayfly_request {
    const char *path; /* in: the file */
    void *buffer;     /* in: where its bytes go */
    size_t len;       /* in: room in the buffer */
    int64_t result;   /* out: the file's size, even if the buffer was too small for it; or minus an errno */
};

/* Reads files into buffers. A file that is longer than its buffer is cut off. Returns the number of files that failed, which is 0
 * without DAYFLY_REPORT_MISSING. If the call itself fails, each result is minus its errno. */
ssize_t dayfly_read_many(dayfly *session, struct dayfly_request *requests, size_t count, int flags);

/* Whole files that a program looks at without a copy: in the node's storage, or in the server's memory. Closing the batch ends
 * all its views. Until then, dayfly_batch_is_good says whether their bytes are right. */
typedef struct dayfly_batch dayfly_batch;

/* A view of one file of a batch. */
struct dayfly_view {
    size_t index;      /* the file's index in the request, from 0 */
    const void *bytes; /* all bytes of the file; NULL if it cannot be read */
    uint64_t len;      /* the file's size */
    int error;         /* 0, or the errno of a file that cannot be read */
};

/* Begins to read the files at these paths. */
dayfly_batch *dayfly_batch_open(dayfly *session, const char *const *paths, size_t count, int flags);

/* Begins to read the files with these numbers (see dayfly_id) in the dataset that contains `path`. */
dayfly_batch *dayfly_batch_open_ids(dayfly *session, const char *path, const uint32_t *ids, size_t count, int flags);

/* Waits for the next file. Returns 1 and fills in `out`, or returns 0 after the last file. The view is valid until the next call
 * of this function. If it returns 0 or fails, the view has no bytes, and its index is the number of files. */
int dayfly_batch_next(dayfly_batch *batch, struct dayfly_view *out);

/* Waits for all files. Returns 0. From then on dayfly_batch_get returns views that are valid until the batch is closed. */
int dayfly_batch_wait(dayfly_batch *batch);

/* Fills in the view of the file at `index`, or its error. Returns 0. Fails with ENOENT if there is no such file, and with EAGAIN
 * if the file was not delivered; then the view has no bytes. */
int dayfly_batch_get(const dayfly_batch *batch, size_t index, struct dayfly_view *out);

/* Returns 1 if all bytes that the program has looked at so far were right. Returns 0 if they may have been wrong:
 *
 * - They may have been zeros if the session has ended, a dataset was replaced or a drive has failed in the meantime.
 * - They may have been any bytes if the server took back the memory that held them. The server does so if other clients have
 *   waited for memory for a long time. Read these files again.
 *
 * Call it after the last look at a view, and before relying on the result. */
int dayfly_batch_is_good(const dayfly_batch *batch);

/* Closes a batch and all its views. */
void dayfly_batch_close(dayfly_batch *batch);

/* ---- Files by number ----
 *
 * A dataset's files have the numbers 0 to count - 1 (see dayfly_id). A program that keeps numbers instead of paths needs 4 bytes for
 * each file, and no name is looked up when it reads. */

/* A dataset. */
typedef struct dayfly_dataset dayfly_dataset;

/* What is known about a file. */
struct dayfly_sample {
    uint64_t size;
    int is_here; /* 1 if all its bytes are on this node's drives, else 0 */
};

/* Opens the dataset that contains `path`. Close it before its session. */
dayfly_dataset *dayfly_dataset_open(dayfly *session, const char *path);

/* Closes a dataset. */
void dayfly_dataset_close(dayfly_dataset *dataset);

/* Returns the number of files, or 0 for NULL. */
uint32_t dayfly_dataset_count(const dayfly_dataset *dataset);

/* Stores the path of a file, with a NUL at its end. Returns its length without the NUL. Fails with ERANGE if `len` is too small,
 * and with ENOENT if there is no such file. The first call for a dataset reads its whole catalog. */
ssize_t dayfly_dataset_path(const dayfly_dataset *dataset, uint32_t id, char *out, size_t len);

/* Stores what is known about `count` files. Fails with ENOENT if one of them does not exist. */
int dayfly_dataset_look(const dayfly_dataset *dataset, const uint32_t *ids, size_t count, struct dayfly_sample *out);

/* Stores the numbers of all files in the order of dayfly_epoch. `out` has room for all of them. */
int dayfly_epoch_ids(const dayfly_dataset *dataset, uint64_t seed, uint64_t epoch, uint32_t *out);

/* Stores the numbers of the files of dayfly_local, in that order, and returns how many there are. `out` has room for all files of
 * the dataset. */
ssize_t dayfly_local_ids(const dayfly_dataset *dataset, uint32_t *out);

/* Reads whole files into one buffer, one after another: file i lies at offsets[i] to offsets[i + 1]. `offsets` has room for
 * `count` + 1 values. `errors` has room for `count` values, 0 or the errno of a file that cannot be read, or is NULL. Returns the
 * number of files that failed, which is 0 without DAYFLY_REPORT_MISSING. If the buffer is too small, fails with ERANGE, and
 * offsets[count] is the length that it needs. If the call itself fails, each error is its errno. */
ssize_t dayfly_read_many_ids(const dayfly_dataset *dataset, const uint32_t *ids, size_t count, void *buffer, size_t len,
                             uint64_t *offsets, int *errors, int flags);

/* ---- Order ---- */

/* An announced order: the files that this process will read next, by any functions. The server fetches them ahead of the
 * reader. An order lasts until dayfly_order_end or the end of the process. Reading in another order is correct, but slower. */
typedef struct dayfly_order dayfly_order;

/* Announces that this process will read every `readers`-th sample of the order of dayfly_epoch: those at the positions
 * reader, reader + readers, reader + 2 * readers and so on, from 0. */
dayfly_order *dayfly_order_epoch(dayfly *session, const char *path, uint64_t seed, uint64_t epoch, uint32_t reader,
                                 uint32_t readers);

/* Announces files of one dataset, in any order. Fails with EXDEV if the files belong to several datasets. */
dayfly_order *dayfly_order_files(dayfly *session, const char *const *paths, size_t count);

/* Announces files of a dataset by their numbers, in any order. To go on with an order from a position, announce what is left. */
dayfly_order *dayfly_order_ids(const dayfly_dataset *dataset, const uint32_t *ids, size_t count);

/* Withdraws an order. */
void dayfly_order_end(dayfly_order *order);

/* A function that is called for a sample, with its path and its size. A result other than 0 ends the calls. */
typedef int (*dayfly_see_sample)(const char *path, uint64_t size, void *context);

/* Global shuffle: calls `see` for every sample of the dataset that contains `path`, in a random order that depends on `seed` and
 * `epoch` only, so that it is the same on every node. With n readers, reader r takes every n-th sample from the r-th on (from 0).
 * Files of one group (`dayfly stage-in --group`) follow each other. To give all files of a group to one reader, count groups
 * instead of files. Returns 0, or the result of `see` that ended the calls. */
int dayfly_epoch(dayfly *session, const char *path, uint64_t seed, uint64_t epoch, dayfly_see_sample see, void *context);

/* Local shuffle: calls `see` for each sample that this node owns in the dataset that contains `path`. The samples come in the
 * order in which they lie on the node's drives. The order is random and the same each time, and files read in this order are
 * read at sequential speed. Over all nodes, each sample occurs once. Returns what dayfly_epoch returns. */
int dayfly_local(dayfly *session, const char *path, dayfly_see_sample see, void *context);

#ifdef __cplusplus
}
#endif

#endif
