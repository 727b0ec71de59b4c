/* Makes a process attach to its session before its main function. LD_PRELOAD names this library before the preload
 * library, so the preload library is initialized first. */

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

__attribute__((constructor)) static void attach(void) {
    int before = errno;
    const char *prefix = getenv("DAYFLY_PREFIX");
    if (prefix)
        access(prefix, F_OK);
    errno = before;
}
