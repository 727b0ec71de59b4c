/* A library to be preloaded beside ours. Like fakeroot's library, it defines the functions of `stat` under their names for new
 * programs. These call the ones with the names for old programs, which it defines as well. It adds 1000 to the owner of every
 * file. */

#define _GNU_SOURCE
/* Without these lines, the header declares the functions for large files with a type of their own. */
#undef _LARGEFILE64_SOURCE
#define stat64 header_stat64
#define fstat64 header_fstat64
#define fstatat64 header_fstatat64
#include <dlfcn.h>
#include <fcntl.h>
#include <stddef.h>
#include <sys/stat.h>
#undef stat64
#undef fstat64
#undef fstatat64

int __fxstat(int version, int descriptor, struct stat *out) {
    int (*next)(int, int, struct stat *) = dlsym(RTLD_NEXT, "__fxstat");
    int result = next(version, descriptor, out);
    out->st_uid += 1000;
    return result;
}

int __xstat(int version, const char *path, struct stat *out) {
    int (*next)(int, const char *, struct stat *) = dlsym(RTLD_NEXT, "__xstat");
    int result = next(version, path, out);
    out->st_uid += 1000;
    return result;
}

int __fxstatat(int version, int directory, const char *path, struct stat *out, int flags) {
    int (*next)(int, int, const char *, struct stat *, int) = dlsym(RTLD_NEXT, "__fxstatat");
    int result = next(version, directory, path, out, flags);
    out->st_uid += 1000;
    return result;
}

int fstat(int descriptor, struct stat *out) {
    return __fxstat(1, descriptor, out);
}

int stat(const char *path, struct stat *out) {
    return __xstat(1, path, out);
}

int fstatat(int directory, const char *path, struct stat *out, int flags) {
    return __fxstatat(1, directory, path, out, flags);
}

/* The names that are used by programs compiled for large files. */

int fstat64(int descriptor, struct stat *out) {
    return fstat(descriptor, out);
}

int stat64(const char *path, struct stat *out) {
    return stat(path, out);
}

int fstatat64(int directory, const char *path, struct stat *out, int flags) {
    return fstatat(directory, path, out, flags);
}
