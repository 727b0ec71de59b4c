/* Keeps a file open and mapped while its session goes down, then prints the results of reading it. Before the session goes down,
 * prints "ready" and waits for a line on standard input. Usage: gone FILE */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static sigjmp_buf back;

static void on_fault(int number) {
    siglongjmp(back, number);
}

static void print_result(const char *what, long result) {
    printf("%s: %s\n", what, result < 0 ? strerrorname_np(errno) : "read");
}

int main(int count, char **arguments) {
    char buffer[4096];
    int file = open(arguments[count - 1], O_RDONLY);
    /* The first read is a system call; the second one copies from the library's own mapping. */
    for (int i = 0; i < 2; i++)
        if (pread(file, buffer, sizeof buffer, 0) != sizeof buffer) return 1;
    volatile char *map = mmap(NULL, 1 << 20, PROT_READ, MAP_SHARED, file, 0);
    signal(SIGBUS, on_fault);
    if (map == MAP_FAILED || map[4096] == map[4097]) return 2;
    char byte, other;
    pread(file, &byte, 1, 500000);
    pread(file, &other, 1, 600000);
    puts("ready");
    fflush(stdout);
    read(0, buffer, 1);
    print_result("read", read(file, buffer, sizeof buffer));
    print_result("pread", pread(file, buffer, sizeof buffer, 0));
    print_result("open", open(arguments[count - 1], O_RDONLY));
    int number = sigsetjmp(back, 1);
    if (number == 0) {
        /* The mapping is a copy if the block is not on this node. */
        puts(map[500000] == byte && map[600000] == other ? "mapped: its bytes" : "mapped: wrong bytes");
    } else {
        printf("mapped: %s\n", number == SIGBUS ? "SIGBUS" : "something else");
    }
    puts(signal(SIGBUS, SIG_DFL) == on_fault ? "handler: kept" : "handler: lost");
    return 0;
}
