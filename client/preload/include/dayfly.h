/* Dayfly's C interface: read a session's namespace without going through paths of the kernel.
 *
 * Link with libdayfly_preload.so. The session is that of the environment (`dayfly exec`, `dayfly run` or
 * `eval "$(dayfly env)"`). Functions return -1 or NULL and set errno, as C's own do. All of them may be called from several
 * threads at once. After a fork the child may go on with what its parent had. */

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

/* Reads many whole files: those that this node does not hold cost one message together. Returns how many failed; -1 only where
 * the session is gone. */
ssize_t dayfly_read_batch(dayfly *session, struct dayfly_request *requests, size_t count);

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
