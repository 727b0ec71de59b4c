//! Compiles the C files, and binds the library to symbols that old C libraries have (see `src/compat.c`).

use std::env;

/// glibc has added a new version of each of these functions since 2.28. `compat.c` has a wrapper for each.
const WRAPPED: [&str; 7] =
    ["dlsym", "dlvsym", "gettid", "pthread_key_create", "pthread_key_delete", "pthread_setspecific", "pthread_testcancel"];

/// Set if the linker is Zig's, which is told the oldest glibc and binds to the symbols of that one by itself.
const OLD_GLIBC_LINKER: &str = "DAYFLY_OLD_GLIBC_LINKER";

fn main() {
    println!("cargo:rerun-if-changed=src/variadic.c");
    println!("cargo:rerun-if-changed=src/compat.c");
    println!("cargo:rerun-if-env-changed={OLD_GLIBC_LINKER}");
    cc::Build::new().file("src/variadic.c").file("src/compat.c").compile("dayfly_preload_c");
    let is_zig = env::var_os(OLD_GLIBC_LINKER).is_some();
    // When a hook calls another hook, it reaches ours, even if a library before this one has a function of the same name. The
    // library exports functions only, so both options do the same; Zig knows one of them.
    let symbolic = if is_zig { "-Bsymbolic" } else { "-Bsymbolic-functions" };
    println!("cargo:rustc-cdylib-link-arg=-Wl,{symbolic}");
    if is_zig {
        return;
    }
    for name in WRAPPED {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap={name}");
    }
    // Before glibc 2.34 the wrapped functions are in these two libraries.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--no-as-needed,-l:libpthread.so.0,-l:libdl.so.2");
}
