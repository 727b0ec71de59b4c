/* Makes the calls that change files, and opens with every kind of flags, on many paths of a read-only folder, and prints how each
 * ends. tests/posix.rs runs this program over a read-only bind mount of a plain directory and over the namespace; every line must
 * be the same. Usage: read_only FOLDER OUTSIDE, where OUTSIDE is a writable folder with a file `file` in it. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

static const char *root, *outside;

/* Returns a folder's path with a name appended, in one of four buffers that are used in turn. */
static const char *in(const char *folder, const char *name) {
    static char paths[4][PATH_MAX];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, PATH_MAX, *name ? "%s/%s" : "%s", folder, name);
    return path;
}

static void print_result(const char *what, const char *path, long result) {
    printf("%s of '%s': %s\n", what, path, result < 0 ? strerrorname_np(errno) : "succeeds");
}

/* A read-only mount says EROFS about the removal of a missing path, the namespace ENOENT: both are printed as ENOENT. */
static int removed(int result, int folder, const char *path) {
    int before = errno;
    struct stat st;
    if (result < 0 && before == EROFS && fstatat(folder, path, &st, AT_SYMLINK_NOFOLLOW) < 0 && errno == ENOENT) before = ENOENT;
    errno = before;
    return result;
}
#define unlink(path) removed(unlink(path), AT_FDCWD, path)
#define rmdir(path) removed(rmdir(path), AT_FDCWD, path)
#define remove(path) removed(remove(path), AT_FDCWD, path)
#define unlinkat(folder, path, flags) removed(unlinkat(folder, path, flags), folder, path)

static const struct {
    const char *name;
    int flags;
} opens[] = {
#define FLAGS(flags) {"open " #flags, flags}
    FLAGS(O_RDONLY), FLAGS(O_WRONLY), FLAGS(O_RDWR), FLAGS(O_RDONLY | O_TRUNC), FLAGS(O_WRONLY | O_TRUNC), FLAGS(O_EXCL),
    FLAGS(O_CREAT), FLAGS(O_CREAT | O_RDWR), FLAGS(O_CREAT | O_TRUNC), FLAGS(O_CREAT | O_EXCL),
    FLAGS(O_CREAT | O_EXCL | O_WRONLY), FLAGS(O_NOFOLLOW), FLAGS(O_NOFOLLOW | O_WRONLY), FLAGS(O_NOFOLLOW | O_TRUNC),
    FLAGS(O_NOFOLLOW | O_CREAT), FLAGS(O_NOFOLLOW | O_CREAT | O_EXCL), FLAGS(O_DIRECTORY), FLAGS(O_DIRECTORY | O_WRONLY),
    FLAGS(O_DIRECTORY | O_TRUNC), FLAGS(O_DIRECTORY | O_NOFOLLOW), FLAGS(O_DIRECTORY | O_CREAT), FLAGS(O_TMPFILE | O_RDWR),
    FLAGS(O_TMPFILE | O_RDONLY), FLAGS(O_PATH), FLAGS(O_PATH | O_NOFOLLOW), FLAGS(O_PATH | O_CREAT | O_EXCL),
    FLAGS(O_PATH | O_DIRECTORY | O_NOFOLLOW), FLAGS(O_PATH | O_TRUNC),
};

#define CALL(name, call) \
    static long name(const char *path) { return call; }
CALL(make_directory, mkdir(path, 0700))
CALL(make_fifo, mkfifo(path, 0600))
CALL(make_node, mknod(path, S_IFREG | 0600, 0))
CALL(make_link, symlink("x", path))
CALL(unlink_directory, unlinkat(AT_FDCWD, path, AT_REMOVEDIR))
CALL(unlink_badly, unlinkat(AT_FDCWD, path, 1))
CALL(unlink_file, unlink(path))
CALL(remove_directory, rmdir(path))
CALL(remove_either, remove(path))
CALL(cut, truncate(path, 0))
CALL(cut_badly, truncate(path, -1))
CALL(change_mode, chmod(path, 0700))
CALL(change_owner, chown(path, 0, 0))
CALL(change_owner_of_link, lchown(path, 0, 0))
CALL(change_time, utime(path, NULL))
CALL(change_time_of_link, utimensat(AT_FDCWD, path, NULL, AT_SYMLINK_NOFOLLOW))
CALL(may_write, access(path, W_OK))
CALL(may_write_or_run, access(path, W_OK | X_OK))
CALL(set_attribute, setxattr(path, "user.x", "y", 1, 0))
CALL(set_attribute_of_link, lsetxattr(path, "user.x", "y", 1, 0))
CALL(remove_attribute, removexattr(path, "user.x"))
CALL(rename_to_new, rename(path, in(root, "new")))
CALL(rename_from_file, rename(in(root, "list"), path))
CALL(rename_from_missing, rename(in(root, "missing"), path))
CALL(rename_below_missing, rename(path, in(root, "missing/new")))
CALL(rename_over_nothing, renameat2(AT_FDCWD, in(root, "list"), AT_FDCWD, path, RENAME_NOREPLACE))
CALL(exchange, renameat2(AT_FDCWD, in(root, "list"), AT_FDCWD, path, RENAME_EXCHANGE))
CALL(rename_badly, renameat2(AT_FDCWD, in(root, "list"), AT_FDCWD, path, 1 << 20))
CALL(rename_out, rename(path, in(outside, "new")))
CALL(rename_in, rename(in(outside, "file"), path))
CALL(rename_in_from_missing, rename(in(outside, "missing/file"), path))
CALL(link_to_new, link(path, in(root, "new")))
CALL(link_to_existing, link(path, in(root, "list")))
CALL(link_from_file, link(in(root, "list"), path))
CALL(link_followed, linkat(AT_FDCWD, path, AT_FDCWD, in(root, "new"), AT_SYMLINK_FOLLOW))
CALL(link_badly, linkat(AT_FDCWD, path, AT_FDCWD, in(root, "new"), 1))
CALL(link_out, link(path, in(outside, "new")))
CALL(link_out_to_existing, link(path, in(outside, "file")))
CALL(link_in, link(in(outside, "file"), path))
CALL(link_in_from_missing, link(in(outside, "missing"), path))
CALL(make_temporary, mkstemp(strcat((char *)in(path, ""), "/XXXXXX")))
CALL(make_temporary_directory, mkdtemp(strcat((char *)in(path, ""), "/XXXXXX")) ? 0 : -1)

static const struct {
    const char *name;
    long (*call)(const char *path);
    /* Whether the call would change a directory outside. */
    int only_inside;
} calls[] = {
#define ROW(name) {#name, name, 0}
#define INSIDE(name) {#name, name, 1}
    ROW(make_directory), ROW(make_fifo), ROW(make_node), ROW(make_link), ROW(unlink_directory), ROW(unlink_badly),
    ROW(unlink_file), ROW(remove_directory), ROW(remove_either), ROW(cut), ROW(cut_badly), INSIDE(change_mode),
    INSIDE(change_owner), INSIDE(change_owner_of_link), INSIDE(change_time), INSIDE(change_time_of_link), INSIDE(may_write),
    INSIDE(may_write_or_run), INSIDE(set_attribute), INSIDE(set_attribute_of_link), INSIDE(remove_attribute),
    ROW(rename_to_new), ROW(rename_from_file), ROW(rename_from_missing), ROW(rename_below_missing), ROW(rename_over_nothing),
    ROW(exchange), ROW(rename_badly), ROW(rename_out), ROW(rename_in), ROW(rename_in_from_missing), ROW(link_to_new),
    ROW(link_to_existing), ROW(link_from_file), ROW(link_followed), ROW(link_badly), ROW(link_out), ROW(link_out_to_existing),
    ROW(link_in), ROW(link_in_from_missing), INSIDE(make_temporary), INSIDE(make_temporary_directory),
};

static void one(const char *path, int leaves) {
    for (size_t i = 0; i < sizeof opens / sizeof *opens; i++) {
        if (leaves && (opens[i].flags & O_TMPFILE) == O_TMPFILE) continue;
        int descriptor = open(path, opens[i].flags, 0600);
        print_result(opens[i].name, path, descriptor);
        if (descriptor >= 0) close(descriptor);
    }
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        if (leaves && calls[i].only_inside) continue;
        print_result(calls[i].name, path, calls[i].call(path));
    }
}

int main(int count, char **arguments) {
    if (count != 3) return 1;
    root = arguments[1], outside = arguments[2];
    const char *names[] = {"",        "list",      "script",     "sub",   "sub/empty", "link",    "folder_link", "dangling",
                           "loop",    "missing",   "missing/x",  "list/x", "link/x",   "dangling/x", "loop/x",  "folder_link/f1",
                           "leaving", "sub/../list", "folder_link/missing", "sub//f1"};
    const char *ends[] = {"", "/", "//", "/.", "/..", "/./", "/../"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        for (size_t j = 0; j < sizeof ends / sizeof *ends; j++) {
            char name[64], path[PATH_MAX];
            snprintf(name, sizeof name, "%s%s", names[i], ends[j]);
            snprintf(path, sizeof path, "%s%s%s", root, *names[i] ? "/" : "", name);
            /* This path leads out through a link, so only calls are made that leave no new file behind. */
            if (!strncmp(name, "leaving", 7)) {
                print_result("exclusive", path, open(path, O_CREAT | O_EXCL | O_WRONLY, 0600));
                print_result("make_directory", path, mkdir(path, 0700));
                print_result("unlink_file", path, unlink(path));
                print_result("remove_directory", path, rmdir(path));
            } else {
                one(path, !*names[i] && strstr(ends[j], ".."));
            }
        }
    }
    const char *folders[] = {"", "sub", "sub/empty"}, *relative[] = {".", "./", "list", "missing", "empty/.", "../list", "..", "../.."};
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        for (size_t j = 0; j < sizeof relative / sizeof *relative; j++) {
            /* Nothing may change outside. */
            if (!i && !strncmp(relative[j], "../", 3)) continue;
            if (chdir(in(root, folders[i]))) return 1;
            printf("== in '%s'\n", folders[i]);
            int folder = open(in(root, folders[i]), O_RDONLY | O_DIRECTORY);
            print_result("unlinkat", relative[j], unlinkat(folder, relative[j], 0));
            print_result("unlinkat, a directory", relative[j], unlinkat(folder, relative[j], AT_REMOVEDIR));
            print_result("mkdirat", relative[j], mkdirat(folder, relative[j], 0700));
            print_result("renameat", relative[j], renameat(folder, relative[j], folder, "new"));
            close(folder);
            if (i < 2 && !strncmp(relative[j], "..", 2) && strcmp(relative[j], "../list")) continue;
            one(relative[j], 0);
        }
    }
    puts("== through a link to a folder outside");
    char file[PATH_MAX], other[PATH_MAX];
    snprintf(file, sizeof file, "%s/leaving_folder/file", root);
    snprintf(other, sizeof other, "%s/leaving_folder/other", root);
    print_result("rename", file, rename(file, other));
    print_result("rename back", other, renameat2(AT_FDCWD, other, AT_FDCWD, in(outside, "file"), RENAME_NOREPLACE));
    print_result("link", file, link(file, other));
    print_result("link again", file, link(in(outside, "file"), other));
    print_result("unlink", other, unlink(other));
    print_result("unlink again", other, unlink(other));
    print_result("mkdir", other, mkdir(other, 0700));
    print_result("rename in", file, rename(file, in(root, "leaving_folder/other/file")));
    print_result("rename out", file, rename(in(outside, "other/file"), file));
    print_result("rmdir", other, rmdir(other));
    print_result("rename into the namespace", file, rename(file, in(root, "new")));
    print_result("link into the namespace", file, link(file, in(root, "new")));
    return 0;
}
