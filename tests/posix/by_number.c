/* A library to be preloaded beside ours that, like tcmalloc, makes system calls by number in functions that it replaces. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

void *mmap(void *address, size_t len, int protection, int flags, int descriptor, off_t offset) {
    return (void *)syscall(SYS_mmap, address, len, protection, flags, descriptor, offset);
}

void *mmap64(void *address, size_t len, int protection, int flags, int descriptor, off_t offset) {
    return mmap(address, len, protection, flags, descriptor, offset);
}

int munmap(void *address, size_t len) {
    return syscall(SYS_munmap, address, len);
}

void *mremap(void *address, size_t old_len, size_t new_len, int flags, ...) {
    return (void *)syscall(SYS_mremap, address, old_len, new_len, flags, NULL);
}

int mprotect(void *address, size_t len, int protection) {
    return syscall(SYS_mprotect, address, len, protection);
}

int fstat(int descriptor, struct stat *out) {
    return syscall(SYS_fstat, descriptor, out);
}

int dup(int from) {
    return syscall(SYS_dup, from);
}

int dup3(int from, int to, int flags) {
    return syscall(SYS_dup3, from, to, flags);
}

int dup2(int from, int to) {
    return from == to ? (fcntl(from, F_GETFD) < 0 ? -1 : to) : dup3(from, to, 0);
}

int close(int descriptor) {
    return syscall(SYS_close, descriptor);
}

ssize_t read(int descriptor, void *out, size_t len) {
    return syscall(SYS_read, descriptor, out, len);
}

int fchdir(int descriptor) {
    return syscall(SYS_fchdir, descriptor);
}

off_t lseek(int descriptor, off_t offset, int whence) {
    return syscall(SYS_lseek, descriptor, offset, whence);
}
