// Reads a file with C functions, on threads of the Go runtime. The argument is the file.
package main

/*
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static long bytes_of(const char *path) {
    static __thread char buffer[4096];
    FILE *file = fopen(path, "r");
    long total = 0, count;
    if (!file) return -1;
    while ((count = fread(buffer, 1, sizeof buffer, file)) > 0) total += count;
    fclose(file);
    return total;
}
*/
import "C"

import (
	"fmt"
	"os"
	"os/exec"
	"sync"
	"unsafe"
)

func main() {
	path := C.CString(os.Args[1])
	defer C.free(unsafe.Pointer(path))
	var all sync.WaitGroup
	totals := make([]C.long, 64)
	for number := range totals {
		all.Add(1)
		go func(number int) {
			defer all.Done()
			for round := 0; round < 50; round++ {
				totals[number] += C.bytes_of(path)
			}
		}(number)
	}
	all.Wait()
	out, err := exec.Command("wc", "-c", os.Args[1]).Output()
	fmt.Println(totals[0], totals[63], len(out) > 0, err)
	own, err := os.ReadFile("/proc/self/cmdline")
	fmt.Println(len(own) > 0, err)
}
