/* Functions with a variable number of arguments, which stable Rust cannot define. execl, execlp and execle collect their arguments
 * into an array and call Rust (calls/exec.rs), and dprintf calls the hook of vdprintf (calls/hidden.rs). */

#include <stdarg.h>
#include <stddef.h>

extern int dayfly_execve(const char *path, char *const arguments[], char *const environment[]);
extern int dayfly_execvp(const char *file, char *const arguments[]);

extern int vdprintf(int descriptor, const char *format, va_list list);
extern int __vdprintf_chk(int descriptor, int flag, const char *format, va_list list);

/* Declares `array` and fills it with the arguments from `first` on, including the null pointer at their end. `last` reads what
 * follows that null pointer. */
#define COLLECT(first, last)                                  \
    size_t count = 1;                                         \
    va_list list;                                             \
    va_start(list, first);                                    \
    for (const char *one = first; one; count++)               \
        one = va_arg(list, const char *);                     \
    va_end(list);                                             \
    char *array[count + 1];                                   \
    va_start(list, first);                                    \
    array[0] = (char *)first;                                 \
    for (size_t at = 0; array[at]; at++)                      \
        array[at + 1] = va_arg(list, char *);                 \
    last                                                      \
    va_end(list);

__attribute__((visibility("hidden"))) int dayfly_execl(const char *path, const char *first, ...) {
    COLLECT(first, )
    return dayfly_execve(path, array, NULL);
}

__attribute__((visibility("hidden"))) int dayfly_execlp(const char *file, const char *first, ...) {
    COLLECT(first, )
    return dayfly_execvp(file, array);
}

__attribute__((visibility("hidden"))) int dayfly_execle(const char *path, const char *first, ...) {
    COLLECT(first, char *const *environment = va_arg(list, char *const *);)
    return dayfly_execve(path, array, environment);
}

__attribute__((visibility("hidden"))) int dayfly_dprintf(int descriptor, const char *format, ...) {
    va_list list;
    va_start(list, format);
    int result = vdprintf(descriptor, format, list);
    va_end(list);
    return result;
}

__attribute__((visibility("hidden"))) int dayfly_dprintf_chk(int descriptor, int flag, const char *format, ...) {
    va_list list;
    va_start(list, format);
    int result = __vdprintf_chk(descriptor, flag, format, list);
    va_end(list);
    return result;
}
