/* A C library binds a program to the newest version of each symbol, and glibc 2.34 gave new ones to what it took over from
 * libpthread and libdl. The linker sends the references of Rust's standard library here (`--wrap`, see build.rs), and from here
 * they go to the oldest versions, which every glibc has: so the library also loads in containers with an old one. */

#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define OLDEST "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define OLDEST "GLIBC_2.17"
#endif

#define OLD(result, name, parameters, arguments)                  \
    __asm__(".symver oldest_" #name "," #name "@" OLDEST);        \
    extern result oldest_##name parameters;                       \
    result __wrap_##name parameters { return oldest_##name arguments; }

OLD(void *, dlsym, (void *handle, const char *name), (handle, name))
OLD(void *, dlvsym, (void *handle, const char *name, const char *version), (handle, name, version))
OLD(int, pthread_key_create, (unsigned *key, void (*end)(void *)), (key, end))
OLD(int, pthread_key_delete, (unsigned key), (key))
OLD(int, pthread_setspecific, (unsigned key, const void *value), (key, value))

int __wrap_gettid(void) {
    return syscall(SYS_gettid);
}
