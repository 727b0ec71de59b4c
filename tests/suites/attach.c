/* Makes a process attach to its session before its main function. LD_PRELOAD names it before the preload library, which is
 * therefore initialized first. */

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
