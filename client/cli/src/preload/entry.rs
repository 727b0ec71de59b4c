//! Chooses how `LD_PRELOAD` names the library, so that programs that cannot load the library do not
//! try to.
//!
//! Every dynamically linked program reads the variable, whatever its C library. musl's loader would try to load the library and
//! fail, and the program would not start. The loader of 32-bit programs would print an error. So the path contains `$PLATFORM`:
//!
//! - glibc's loader replaces `$PLATFORM` with the name of the processor, and the folder of that name contains a link to the
//!   library;
//! - the loader of 32-bit programs replaces `$PLATFORM` with another name, and the folder of that name contains an empty 32-bit
//!   library;
//! - musl's loader replaces nothing, finds no file, and reports no error.
//!
//! If these folders cannot be created, the path contains `$LIB` instead, which musl's loader does not know either.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// The folder, next to the library, that contains one folder for each value of `$PLATFORM`.
const FOLDER: &str = "dayfly-preload";

/// The values that glibc's loader gives `$PLATFORM` in 64-bit programs. Some versions of glibc have special names for newer
/// processors.
#[cfg(target_arch = "x86_64")]
const PLATFORMS: [&str; 3] = ["x86_64", "haswell", "xeon_phi"];
#[cfg(target_arch = "aarch64")]
const PLATFORMS: [&str; 1] = ["aarch64"];
/// The values of `$PLATFORM` in 32-bit programs.
#[cfg(target_arch = "x86_64")]
const SMALL_PLATFORMS: [&str; 4] = ["i386", "i486", "i586", "i686"];
#[cfg(target_arch = "aarch64")]
const SMALL_PLATFORMS: [&str; 0] = [];

/// Returns the ways to name a library in `LD_PRELOAD`, the best first. The last one is the library's plain path.
pub(super) fn entries(library: &Path) -> Vec<OsString> {
    // The root is its own parent, so four steps up from `/$LIB` lead to the root, whatever `$LIB`
    // stands for.
    let mut by_lib = OsString::from("/$LIB/../../../..");
    by_lib.push(library);
    let by_platform = folder(library).ok().map(|folder| folder.join("$PLATFORM").join(super::NAME).into_os_string());
    by_platform.into_iter().chain([by_lib, library.into()]).collect()
}

/// Creates the folder and everything in it that does not exist yet.
fn folder(library: &Path) -> io::Result<PathBuf> {
    let folder = library.with_file_name(FOLDER);
    for platform in PLATFORMS {
        let link = folder.join(platform).join(super::NAME);
        if !link.is_file() {
            fs::create_dir_all(folder.join(platform))?;
            is_there(symlink(Path::new("../..").join(super::NAME), link))?;
        }
    }
    for platform in SMALL_PLATFORMS {
        let file = folder.join(platform).join(super::NAME);
        if !file.is_file() {
            fs::create_dir_all(folder.join(platform))?;
            // Another process may create or load the file at this moment, so the file gets its name
            // only once it is complete.
            let whole = folder.join(platform).join(format!("{}.{}", super::NAME, std::process::id()));
            fs::write(&whole, empty_library())?;
            fs::rename(whole, file)?;
        }
    }
    Ok(folder)
}

/// Treats a link that already exists as a success, because another process may have created the
/// same link.
fn is_there(result: io::Result<()>) -> io::Result<()> {
    result.or_else(|error| if error.kind() == io::ErrorKind::AlreadyExists { Ok(()) } else { Err(error) })
}

/// Returns whether an entry of `LD_PRELOAD` names this library in one of the ways above.
pub(super) fn names(entry: &OsStr, library: &Path) -> bool {
    let folder = library.with_file_name(FOLDER).join("$PLATFORM").join(super::NAME);
    let mut by_lib = OsString::from("/$LIB/../../../..");
    by_lib.push(library);
    entry == library || entry == folder || entry == by_lib
}

/// Returns a shared library for 32-bit x86 programs that contains nothing.
fn empty_library() -> Vec<u8> {
    const HEADER_LEN: u32 = 52;
    const SEGMENT_LEN: u32 = 32;
    const DYNAMIC: u32 = HEADER_LEN + 3 * SEGMENT_LEN;
    const HASH: u32 = DYNAMIC + 6 * 8;
    const SYMBOLS: u32 = HASH + 16;
    const STRINGS: u32 = SYMBOLS + 16;
    const LEN: u32 = STRINGS + 1;
    const READ_WRITE: u32 = 6;
    let halves = |halves: &[u16]| halves.iter().flat_map(|half| half.to_le_bytes()).collect::<Vec<u8>>();
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let segment = |kind: u32, at: u32, len: u32, align: u32| words(&[kind, at, at, at, len, len, READ_WRITE, align]);
    [
        // 32 bits, little-endian, version 1.
        b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0".to_vec(),
        // A shared object for the 80386, version 1, without an entry point; segments follow the header, and there are no sections.
        halves(&[3, 3]),
        words(&[1, 0, HEADER_LEN, 0, 0]),
        halves(&[HEADER_LEN as u16, SEGMENT_LEN as u16, 3, 0, 0, 0]),
        // Loaded as a whole, and writable, because the loader changes the dynamic section; the stack is not executable.
        segment(1, 0, LEN, 0x1000),
        segment(2, DYNAMIC, HASH - DYNAMIC, 4),
        segment(0x6474_e551, 0, 0, 16),
        // DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, and the end.
        words(&[4, HASH, 5, STRINGS, 6, SYMBOLS, 10, 1, 11, 16, 0, 0]),
        // One bucket and one symbol, the empty one.
        words(&[1, 1, 0, 0]),
        vec![0; 16],
        // No strings.
        vec![0],
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_has_a_library_for_every_platform() {
        let ground = std::env::temp_dir().join(format!("dayfly-entry-{}", std::process::id()));
        fs::create_dir_all(&ground).unwrap();
        let library = ground.join(super::super::NAME);
        fs::write(&library, "the library").unwrap();
        for _ in 0..2 {
            let entries = entries(&library);
            assert_eq!(entries.len(), 3);
            assert!(entries.iter().all(|entry| names(entry, &library)) && !names(OsStr::new("libother.so"), &library));
            for platform in PLATFORMS {
                let path = entries[0].to_str().unwrap().replace("$PLATFORM", platform);
                assert_eq!(fs::read(path).unwrap(), b"the library");
            }
            for platform in SMALL_PLATFORMS {
                let path = entries[0].to_str().unwrap().replace("$PLATFORM", platform);
                assert_eq!(fs::read(path).unwrap(), empty_library());
            }
        }
        fs::remove_dir_all(&ground).unwrap();
    }
}
