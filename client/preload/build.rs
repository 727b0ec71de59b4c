//! Compiles the C files, and binds the library to symbols that old C libraries have (see `src/compat.c`).

/// glibc has added a new version of each of these functions since 2.28. `compat.c` has a wrapper for each.
const WRAPPED: [&str; 7] =
    ["dlsym", "dlvsym", "gettid", "pthread_key_create", "pthread_key_delete", "pthread_setspecific", "pthread_testcancel"];

fn main() {
    println!("cargo:rerun-if-changed=src/variadic.c");
    println!("cargo:rerun-if-changed=src/compat.c");
    cc::Build::new().file("src/variadic.c").file("src/compat.c").compile("dayfly_preload_c");
    for name in WRAPPED {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap={name}");
    }
    // When a hook calls another hook, it reaches ours, even if a library before this one has a function of the same name.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
    // Before glibc 2.34 the wrapped functions are in these two libraries.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--no-as-needed,-l:libpthread.so.0,-l:libdl.so.2");
}
