//! Builds the variadic functions, and binds to symbols that old C libraries have.

/// What glibc has given new versions since 2.28; `compat.c` has them all.
const WRAPPED: [&str; 6] = ["dlsym", "dlvsym", "gettid", "pthread_key_create", "pthread_key_delete", "pthread_setspecific"];

fn main() {
    println!("cargo:rerun-if-changed=src/variadic.c");
    println!("cargo:rerun-if-changed=src/compat.c");
    cc::Build::new().file("src/variadic.c").file("src/compat.c").compile("dayfly_preload_c");
    for name in WRAPPED {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap={name}");
    }
    // Where old C libraries have them.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--no-as-needed,-l:libpthread.so.0,-l:libdl.so.2");
}
