//! `ftw` and `nftw` below the prefix: a walk over our own directory calls.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::transmute;

use libc::stat as KernelStat;

use super::directory::{closedir, opendir, readdir};
use super::names::{chdir, fchdir};
use super::open::open;
use super::{descriptor, hook, stat};
use crate::memory::{self, get, string, zeroed};
use crate::next;
use crate::path::is_ours;

const FTW_F: c_int = 0;
const FTW_D: c_int = 1;
const FTW_DNR: c_int = 2;
const FTW_NS: c_int = 3;
const FTW_SL: c_int = 4;
const FTW_DP: c_int = 5;
const FTW_SLN: c_int = 6;
const FTW_PHYS: c_int = 1;
const FTW_CHDIR: c_int = 4;
const FTW_DEPTH: c_int = 8;
const FTW_ACTIONRETVAL: c_int = 16;
const FTW_STOP: c_int = 1;
const FTW_SKIP_SUBTREE: c_int = 2;
const FTW_SKIP_SIBLINGS: c_int = 3;

#[repr(C)]
struct Place {
    base: c_int,
    level: c_int,
}

type Old = extern "C" fn(*const c_char, *const KernelStat, c_int) -> c_int;
type New = extern "C" fn(*const c_char, *const KernelStat, c_int, *mut Place) -> c_int;

hook! {
    fn ftw | ftw64 (path: *const c_char, visit: *const c_void, descriptors: c_int) -> c_int {
        if !is_ours(libc::AT_FDCWD, path) {
            return next::ftw(path, visit, descriptors);
        }
        // SAFETY: the program gives a function of this kind.
        let visit = unsafe { transmute::<*const c_void, Old>(visit) };
        let visit = |path: &CStr, stat: &KernelStat, kind: c_int, _: &mut Place| {
            visit(path.as_ptr(), stat, if kind == FTW_SLN { FTW_NS } else { kind })
        };
        walk(path, 0, &visit)
    }

    fn nftw | nftw64 (path: *const c_char, visit: *const c_void, descriptors: c_int, flags: c_int) -> c_int {
        if !is_ours(libc::AT_FDCWD, path) {
            return next::nftw(path, visit, descriptors, flags);
        }
        // SAFETY: the program gives a function of this kind.
        let visit = unsafe { transmute::<*const c_void, New>(visit) };
        walk(path, flags, &|path: &CStr, stat: &KernelStat, kind, place: &mut Place| visit(path.as_ptr(), stat, kind, place))
    }
}

struct Walk<'a> {
    flags: c_int,
    visit: &'a dyn Fn(&CStr, &KernelStat, c_int, &mut Place) -> c_int,
    /// Directories on the way down, by inode: where symlinks are followed, none is entered twice.
    above: Vec<u64>,
    /// Where the walk began, from which its paths are seen, if the visits are made elsewhere.
    back: Option<c_int>,
}

fn walk(path: *const c_char, flags: c_int, visit: &dyn Fn(&CStr, &KernelStat, c_int, &mut Place) -> c_int) -> c_int {
    let Some(root) = string(path) else { return memory::fail(libc::EFAULT) };
    let trimmed = root.to_bytes();
    let end = trimmed.iter().rposition(|&byte| byte != b'/').map_or(trimmed.len().min(1), |last| last + 1);
    let root = CString::new(&trimmed[..end]).unwrap_or_default();
    let mut found: KernelStat = zeroed();
    if stat::lstat(root.as_ptr(), &raw mut found) != 0 {
        return -1;
    }
    let back = (flags & FTW_CHDIR != 0).then(|| open(c".".as_ptr(), libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC, 0));
    let back = back.filter(|&back| back >= 0);
    let walk = &mut Walk { flags, visit, above: Vec::new(), back };
    let result = walk.entry(&root, 0);
    walk.go_back();
    if let Some(back) = back {
        descriptor::close(back);
    }
    // An instruction that is not about the whole walk ends here.
    if flags & FTW_ACTIONRETVAL != 0 && result != FTW_STOP && result > 0 { 0 } else { result }
}

impl Walk<'_> {
    fn go_back(&self) {
        if let Some(back) = self.back {
            fchdir(back);
        }
    }

    fn entry(&mut self, path: &CStr, level: c_int) -> c_int {
        self.go_back();
        let mut found: KernelStat = zeroed();
        let physical = self.flags & FTW_PHYS != 0;
        let mut kind =
            if physical { stat::lstat(path.as_ptr(), &raw mut found) } else { stat::stat(path.as_ptr(), &raw mut found) };
        if kind != 0 {
            if !matches!(memory::errno(), libc::EACCES | libc::ENOENT) {
                return -1;
            }
            kind = if stat::lstat(path.as_ptr(), &raw mut found) == 0 { FTW_SLN } else { FTW_NS };
        } else {
            kind = match found.st_mode & libc::S_IFMT {
                libc::S_IFDIR => FTW_D,
                libc::S_IFLNK => FTW_SL,
                _ => FTW_F,
            };
        }
        if kind == FTW_D { self.directory(path, &found, level) } else { self.tell(path, &found, kind, level) }
    }

    fn tell(&self, path: &CStr, found: &KernelStat, kind: c_int, level: c_int) -> c_int {
        let bytes = path.to_bytes();
        let base = bytes.iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1);
        if self.flags & FTW_CHDIR != 0 && base > 0 {
            self.go_back();
            let parent = CString::new(&bytes[..base]).unwrap_or_default();
            if chdir(parent.as_ptr()) != 0 {
                return -1;
            }
        }
        (self.visit)(path, found, kind, &mut Place { base: base as c_int, level })
    }

    fn directory(&mut self, path: &CStr, found: &KernelStat, level: c_int) -> c_int {
        if self.above.contains(&found.st_ino) {
            return 0;
        }
        let stream = opendir(path.as_ptr());
        if stream.is_null() {
            return self.tell(path, found, FTW_DNR, level);
        }
        let depth = self.flags & FTW_DEPTH != 0;
        let mut result = if depth { 0 } else { self.tell(path, found, FTW_D, level) };
        let skips = self.flags & FTW_ACTIONRETVAL != 0;
        if skips && result == FTW_SKIP_SUBTREE {
            closedir(stream);
            return 0;
        }
        self.above.push(found.st_ino);
        while result == 0 {
            let Some(entry) = get(readdir(stream).cast_const()) else { break };
            let name: Vec<u8> = entry.d_name.iter().map(|&byte| byte as u8).take_while(|&byte| byte != 0).collect();
            if name == b"." || name == b".." {
                continue;
            }
            let child = [path.to_bytes(), if path.to_bytes().ends_with(b"/") { b"" } else { b"/" }, &name].concat();
            result = self.entry(&CString::new(child).unwrap_or_default(), level + 1);
            if skips && result == FTW_SKIP_SIBLINGS {
                result = 0;
                break;
            }
        }
        self.above.pop();
        closedir(stream);
        if result == 0 && depth { self.tell(path, found, FTW_DP, level) } else { result }
    }
}
