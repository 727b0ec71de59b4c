/* Reads a file through plugin.so. Only plugin.so is linked to libaio and liburing, and this program loads it in such a way that no
 * other library finds the functions of these two. Usage: local PLUGIN FILE */

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>

int main(int count, char **arguments) {
    static char bytes[2000];
    if (count < 3) return 2;
    int file = open(arguments[2], O_RDONLY);
    void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        printf("%s\n", dlerror());
        return 1;
    }
    int (*read_both)(int, char *) = (int (*)(int, char *))dlsym(library, "read_both");
    for (int i = 0; i < 3; i++) {
        printf("plugin %d\n", read_both(file, bytes));
        unsigned sum = 0;
        for (int at = 0; at < 2000; at++)
            sum = sum * 31 + (unsigned char)bytes[at];
        printf("sum %u\n", sum);
    }
    return 0;
}
