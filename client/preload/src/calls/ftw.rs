//! `ftw` and `nftw` below the prefix. libc's own walk calls its internal functions directly instead of the exported ones, so it
//! would bypass our hooks; this one uses our directory calls.

use std::ffi::{CStr, CString, c_char, c_int};

use libc::stat as KernelStat;

use super::descriptor::close;
use super::directory::{Listing, name_of};
use super::names::{chdir, fchdir};
use super::open::open;
use super::{hook, stat};
use crate::memory::{self, FromC, zeroed};
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

/// `struct FTW`.
#[repr(C)]
pub(crate) struct Position {
    /// The offset of the last name in the path, in bytes.
    base: c_int,
    /// The depth below the walk's root.
    level: c_int,
}

/// The program's function for `ftw`.
type Visit = Option<extern "C-unwind" fn(*const c_char, *const KernelStat, c_int) -> c_int>;
/// The program's function for `nftw`.
type VisitAt = Option<extern "C-unwind" fn(*const c_char, *const KernelStat, c_int, *mut Position) -> c_int>;

hook! {
    fn ftw | ftw64 (path: FromC<*const c_char>, visit: Visit, descriptors: c_int) -> c_int {
        if !is_ours(libc::AT_FDCWD, path) {
            return ftw::next(path, visit, descriptors);
        }
        let Some(visit) = visit else { return memory::fail(libc::EINVAL) };
        let visit = |path: &CStr, stat: &KernelStat, kind: c_int, _: &mut Position| {
            visit(path.as_ptr(), stat, if kind == FTW_SLN { FTW_NS } else { kind })
        };
        walk(path, 0, &visit)
    }

    fn nftw | nftw64 (path: FromC<*const c_char>, visit: VisitAt, descriptors: c_int, flags: c_int) -> c_int {
        if !is_ours(libc::AT_FDCWD, path) {
            return nftw::next(path, visit, descriptors, flags);
        }
        let Some(visit) = visit else { return memory::fail(libc::EINVAL) };
        let visit = |path: &CStr, stat: &KernelStat, kind: c_int, position: &mut Position| {
            visit(path.as_ptr(), stat, kind, position)
        };
        walk(path, flags, &visit)
    }
}

struct Walk<'a> {
    flags: c_int,
    visit: &'a dyn Fn(&CStr, &KernelStat, c_int, &mut Position) -> c_int,
    /// Inodes of the directories above the current entry. Where symlinks are followed, no directory is entered twice.
    above: Vec<u64>,
    /// With FTW_CHDIR: the working directory at the start of the walk, to which the walk's paths are relative.
    back: Option<c_int>,
}

fn walk(path: FromC<*const c_char>, flags: c_int, visit: &dyn Fn(&CStr, &KernelStat, c_int, &mut Position) -> c_int) -> c_int {
    let Some(root) = path.string() else { return memory::fail(libc::EFAULT) };
    let bytes = root.to_bytes();
    // Without slashes at the end, except for "/" itself.
    let end = bytes.iter().rposition(|&byte| byte != b'/').map_or(bytes.len().min(1), |last| last + 1);
    let root = CString::new(&bytes[..end]).unwrap_or_default();
    let mut found: KernelStat = zeroed();
    if stat::lstat(root.as_c_str().into(), (&mut found).into()) != 0 {
        return -1;
    }
    let back = (flags & FTW_CHDIR != 0).then(|| open(c".".into(), libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC, 0));
    let back = back.filter(|&back| back >= 0);
    let walk = &mut Walk { flags, visit, above: Vec::new(), back };
    let result = walk.entry(&root, 0);
    walk.go_back();
    if let Some(back) = back {
        close(back);
    }
    // With FTW_ACTIONRETVAL, only FTW_STOP is a result of the whole walk.
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
        let result = match self.flags & FTW_PHYS != 0 {
            true => stat::lstat(path.into(), (&mut found).into()),
            false => stat::stat(path.into(), (&mut found).into()),
        };
        let kind = match found.st_mode & libc::S_IFMT {
            _ if result != 0 => {
                if !matches!(memory::errno(), libc::EACCES | libc::ENOENT) {
                    return -1;
                }
                if stat::lstat(path.into(), (&mut found).into()) == 0 { FTW_SLN } else { FTW_NS }
            }
            libc::S_IFDIR => FTW_D,
            libc::S_IFLNK => FTW_SL,
            _ => FTW_F,
        };
        if kind == FTW_D { self.directory(path, &found, level) } else { self.visit(path, &found, kind, level) }
    }

    fn visit(&self, path: &CStr, found: &KernelStat, kind: c_int, level: c_int) -> c_int {
        let bytes = path.to_bytes();
        let base = bytes.iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1);
        if self.flags & FTW_CHDIR != 0 && base > 0 {
            self.go_back();
            let parent = CString::new(&bytes[..base]).unwrap_or_default();
            if chdir(parent.as_c_str().into()) != 0 {
                return -1;
            }
        }
        (self.visit)(path, found, kind, &mut Position { base: base as c_int, level })
    }

    fn directory(&mut self, path: &CStr, found: &KernelStat, level: c_int) -> c_int {
        if self.above.contains(&found.st_ino) {
            return 0;
        }
        let Ok(mut listing) = Listing::open(path) else { return self.visit(path, found, FTW_DNR, level) };
        let is_depth_first = self.flags & FTW_DEPTH != 0;
        let mut result = if is_depth_first { 0 } else { self.visit(path, found, FTW_D, level) };
        let has_actions = self.flags & FTW_ACTIONRETVAL != 0;
        if has_actions && result == FTW_SKIP_SUBTREE {
            return 0;
        }
        self.above.push(found.st_ino);
        while result == 0 {
            let Some(name) = listing.next().map(name_of) else { break };
            if name == b"." || name == b".." {
                continue;
            }
            let child = [path.to_bytes(), if path.to_bytes().ends_with(b"/") { b"" } else { b"/" }, &name].concat();
            result = self.entry(&CString::new(child).unwrap_or_default(), level + 1);
            if has_actions && result == FTW_SKIP_SIBLINGS {
                result = 0;
                break;
            }
        }
        self.above.pop();
        drop(listing);
        if result == 0 && is_depth_first { self.visit(path, found, FTW_DP, level) } else { result }
    }
}
