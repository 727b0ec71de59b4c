/* Makes the library load with every glibc since 2.28, including those in containers.
 *
 * The linker binds a library to the newest version of each symbol, and glibc 2.34 gave new versions to the functions that it took
 * over from libpthread and libdl. Rust's standard library uses some of them. The linker redirects those references to the
 * wrappers below (`--wrap`, see build.rs), which call the oldest version, because every glibc has that one. */

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
OLD(int, pthread_key_create, (unsigned *key, void (*destructor)(void *)), (key, destructor))
OLD(int, pthread_key_delete, (unsigned key), (key))
OLD(int, pthread_setspecific, (unsigned key, const void *value), (key, value))
OLD(void, pthread_testcancel, (void), ())

/* glibc has exported `gettid` only since 2.30. */
int __wrap_gettid(void) {
    return syscall(SYS_gettid);
}
