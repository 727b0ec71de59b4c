/* Dayfly's C interface: read a session's namespace without going through paths of the kernel.
 *
 * Link with libdayfly_preload.so. The session is that of the environment (`dayfly exec`, `dayfly run` or
 * `eval "$(dayfly env)"`). Functions return -1 or NULL and set errno, as C's own do. All of them may be called from several
 * threads at once. After a fork the child may go on with what its parent had, but for batches
 * and orders, which are the parent's alone. */

#ifndef DAYFLY_H
#define DAYFLY_H

#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An attachment to the session's server on this node. */
typedef struct dayfly dayfly;

/* An open file. */
typedef struct dayfly_file dayfly_file;

/* Attaches to the session of the environment. */
dayfly *dayfly_attach(void);

/* Detaches. Files must have been closed before. */
void dayfly_detach(dayfly *session);

/* Opens a file by its path as programs see it, prefix included. */
dayfly_file *dayfly_open(dayfly *session, const char *path);

/* Closes a file. */
void dayfly_close(dayfly_file *file);

/* Size of a file in bytes. */
uint64_t dayfly_size(const dayfly_file *file);

/* Reads up to `len` bytes from `offset`; returns how many, fewer only at the end of the file. */
ssize_t dayfly_read(dayfly *session, dayfly_file *file, void *buffer, size_t len, uint64_t offset);

/* One file of a batch. */
struct dayfly_request {
    const char *path; /* in: the file */
    void *buffer;     /* in: where its bytes go */
    size_t len;       /* in: room there, in bytes */
    int64_t result;   /* out: size of the file in bytes, of which at most `len` were written; or minus an errno */
};

/* Flags of the following. */
#define DAYFLY_TELL_MISSING 1 /* a file that cannot be read is told by its own errno; else the first such ends the whole batch */
#define DAYFLY_AS_THEY_COME 2 /* deliver what is there first, what is on this node before the rest; else in the order asked for */

/* Reads many whole files into buffers: those that this node does not hold cost one message together. Returns how many failed; -1 where
 * the session is gone, or, without DAYFLY_TELL_MISSING, where one failed. */
ssize_t dayfly_read_many(dayfly *session, struct dayfly_request *requests, size_t count, int flags);

/* Whole files, to be looked at where they lie, without a copy, until the batch is closed. One thread uses a batch at a time. */
typedef struct dayfly_batch dayfly_batch;

/* One file of such a batch. */
struct dayfly_view {
    size_t index;      /* its place in what was asked for */
    const void *bytes; /* all of it; NULL where it cannot be had */
    uint64_t len;      /* its size in bytes */
    int error;         /* 0, or the errno */
};

/* Begins to read files, by their paths, or by their numbers (dayfly_id) in the dataset that `path` is in. */
dayfly_batch *dayfly_batch_open(dayfly *session, const char *const *paths, size_t count, int flags);
dayfly_batch *dayfly_batch_open_ids(dayfly *session, const char *path, const uint32_t *ids, size_t count, int flags);

/* Waits for the next file: 1, or 0 at the end. What it tells is good until the next call of this. */
int dayfly_batch_next(dayfly_batch *batch, struct dayfly_view *out);

/* Waits for all files; from then on each can be got, and is good until the batch is closed. */
int dayfly_batch_wait(dayfly_batch *batch);
int dayfly_batch_get(const dayfly_batch *batch, size_t index, struct dayfly_view *out);

/* Whether what was looked at was real: not so, where the session has ended, a dataset was replaced or a drive has failed in the meantime
 * (then it may have been zeros), or where others waited so long for the memory that it lay in that the server took it back (then it may
 * have been anything: read it again). */
int dayfly_batch_is_good(const dayfly_batch *batch);

/* Ends a batch and all views of it. */
void dayfly_batch_close(dayfly_batch *batch);

/* Number of a file in its dataset, from 0. */
uint32_t dayfly_id(const dayfly_file *file);

/* An order in which files will be read, by whatever means: the server fetches ahead of the reader. It ends when it is ended, or with
 * the process. */
typedef struct dayfly_order dayfly_order;

/* The order of dayfly_epoch, as reader `reader` of `readers` takes it. */
dayfly_order *dayfly_order_epoch(dayfly *session, const char *path, uint64_t seed, uint64_t epoch, uint32_t reader,
                                 uint32_t readers);

/* Any order of files of one dataset. */
dayfly_order *dayfly_order_files(dayfly *session, const char *const *paths, size_t count);

/* Ends an order. */
void dayfly_order_end(dayfly_order *order);

/* As stat(2). */
int dayfly_stat(dayfly *session, const char *path, struct stat *out);

/* Calls `see` for each name in a directory, sorted by bytes, without `.` and `..`, with its type as in dirent.h (DT_REG, DT_DIR,
 * DT_LNK). If `see` returns something other than 0, that ends the listing and is returned. */
int dayfly_list(dayfly *session, const char *path, int (*see)(const char *name, unsigned char type, void *context),
                void *context);

/* Called for a sample: its path as programs see it, and its size in bytes. What is not 0 ends the calls and is returned. */
typedef int (*dayfly_see_sample)(const char *path, uint64_t size, void *context);

/* Calls `see` for every sample of the dataset at or above `path`, in a random order that `seed` and `epoch` decide, the same on every
 * node: a global shuffle. With several readers, reader r of n takes each n-th, from the r-th on. Files of one --group follow
 * each other; who wants them at one reader counts groups, not files. */
int dayfly_epoch(dayfly *session, const char *path, uint64_t seed, uint64_t epoch, dayfly_see_sample see, void *context);

/* Calls `see` for the samples of that dataset which this node owns, in the order in which they lie on its drives: a random order,
 * the same each time, that is read at the speed of sequential reading. Over all nodes, each sample once: a local shuffle. */
int dayfly_local(dayfly *session, const char *path, dayfly_see_sample see, void *context);

#ifdef __cplusplus
}
#endif

#endif
