//! Mapping files.
//!
//! A block of at least 64 KiB that this node owns is mapped in place, from the segment. A large part of another block is mapped
//! from a copy that the server keeps for all processes of the node; the first process that maps the block makes the copy. All other
//! bytes are copied into a kernel file of this process: up to 64 MiB in memory, beyond that on the node's data dir. A mapping may
//! consist of several of these parts; to the program it is one.
//!
//! A part that is mapped from a segment or from a shared copy must not grow, because what follows in that file is not what follows
//! in the program's: `in_place` remembers these parts.

mod in_place;

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};

use dayfly_client::cancellation::Whole;
use dayfly_client::reserved_fd::{InUse, ReservedFd};
use dayfly_client::{OpenFile, View};
use dayfly_meta::id::BlockId;
use dayfly_meta::limits::{BLOCK_SIZE_MAX, PAGE_BLOCK_SIZE_MIN, PAGE_SIZE, SHARED_COPY_LEN_MIN, SHARED_COPY_PARTS};
use dayfly_meta::wire::local::Original;
use libc::{MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED, MAP_PRIVATE, MAP_SHARED, PROT_NONE, PROT_WRITE, off_t, size_t};

use super::hook;
use crate::attach::view;
use crate::fault::{Fault, answer};
use crate::memory::{self, Errno, Failed, FromC};
use crate::table::Reference;
use crate::{kernel_copy, pages, table};

/// The protection of memory that can be read and written, so that [`pages`] need not forget anything about it.
const READ_WRITE: c_int = libc::PROT_READ | PROT_WRITE;

/// The flags that `MAP_SHARED_VALIDATE` accepts: the kernel's `LEGACY_MAP_MASK`.
const VALID_FLAGS: c_int = 0x7c07_f9f3;

/// The address of a mapping. Its failure value is `MAP_FAILED` instead of the null pointer.
struct Mapped(*mut c_void);

impl Failed for Mapped {
    const FAILED: Self = Self(MAP_FAILED);
}

hook! {
    fn mmap | mmap64 (
        address: FromC<*mut c_void>,
        len: size_t,
        protection: c_int,
        flags: c_int,
        descriptor: c_int,
        offset: off_t,
    ) -> *mut c_void {
        match of_ours(flags, descriptor) {
            None => {
                let mapped = mmap::next(address, len, protection, flags, descriptor, offset);
                note_mapped(mapped, len, protection, flags);
                mapped
            }
            Some(open) => answer(|| {
                let offset = u64::try_from(offset).map_err(|_| libc::EINVAL)?;
                if len == 0 {
                    return Err(Fault::Errno(libc::EINVAL));
                }
                check_flags(flags)?;
                let request = MapRequest { address, len, protection, flags, offset };
                let file = open.file().map_err(|errno| if errno == libc::EISDIR { libc::ENODEV } else { errno })?;
                let mapped = map(&*view()?, file, &request)?;
                pages::forget(mapped as usize, len);
                Ok(Mapped(mapped))
            }).0,
        }
    }

    fn mremap(
        address: FromC<*mut c_void>,
        old_len: size_t,
        new_len: size_t,
        flags: c_int,
        target: FromC<*mut c_void>,
    ) -> *mut c_void {
        if !may_resize(address.raw() as usize, old_len, new_len) {
            memory::set_errno(libc::ENOMEM);
            return MAP_FAILED;
        }
        let moved = mremap::next(address, old_len, new_len, flags, target);
        note_moved(address.raw() as usize, old_len, moved, new_len);
        moved
    }

    fn munmap(address: FromC<*mut c_void>, len: size_t) -> c_int {
        let result = munmap::next(address, len);
        if result == 0 {
            note_unmapped(address.raw() as usize, len);
        }
        result
    }

    fn mprotect(address: FromC<*mut c_void>, len: size_t, protection: c_int) -> c_int {
        let result = mprotect::next(address, len, protection);
        note_protected(address.raw() as usize, len, protection);
        result
    }

    fn pkey_mprotect(address: FromC<*mut c_void>, len: size_t, protection: c_int, key: c_int) -> c_int {
        let result = pkey_mprotect::next(address, len, protection, key);
        pages::forget(address.raw() as usize, len);
        result
    }

    fn shmdt(address: FromC<*const c_void>) -> c_int {
        let result = shmdt::next(address);
        pages::forget_all();
        result
    }
}

/// Returns the description that a call of `mmap` names, if it is ours.
fn of_ours(flags: c_int, descriptor: RawFd) -> Option<Reference> {
    if flags & MAP_ANONYMOUS != 0 { None } else { table::find(descriptor) }
}

/// Returns whether a call of `mmap` maps a file of ours.
pub(super) fn maps_ours(flags: c_int, descriptor: RawFd) -> bool {
    of_ours(flags, descriptor).is_some()
}

/// Learns of a mapping that the kernel has made, or has failed to make.
pub(super) fn note_mapped(mapped: *mut c_void, len: usize, protection: c_int, flags: c_int) {
    if mapped != MAP_FAILED && (protection & READ_WRITE != READ_WRITE || flags & MAP_FIXED != 0) {
        pages::forget(mapped as usize, len);
    }
}

/// Returns whether a mapping may get another length. A file that is mapped in place has other bytes after its end.
pub(super) fn may_resize(address: usize, old_len: usize, new_len: usize) -> bool {
    new_len <= old_len || !in_place::contains(address)
}

/// Learns of a mapping that the kernel has moved, or has failed to move.
pub(super) fn note_moved(address: usize, old_len: usize, moved: *mut c_void, new_len: usize) {
    if moved != MAP_FAILED {
        pages::forget(address, old_len);
        pages::forget(moved as usize, new_len);
    }
}

/// Learns that a range has been unmapped.
pub(super) fn note_unmapped(address: usize, len: usize) {
    in_place::forget(address, len);
    pages::forget(address, len);
}

/// Learns that a range has another protection. Even if the call fails, the first pages may have changed.
pub(super) fn note_protected(address: usize, len: usize, protection: c_int) {
    if protection & READ_WRITE != READ_WRITE {
        pages::forget(address, len);
    }
}

/// Refuses the flags that the kernel refuses before it looks at the file.
fn check_flags(flags: c_int) -> Result<(), Errno> {
    match flags & libc::MAP_TYPE {
        _ if flags & libc::MAP_HUGETLB != 0 => Err(libc::EINVAL),
        MAP_SHARED | MAP_PRIVATE => Ok(()),
        libc::MAP_SHARED_VALIDATE if flags & !VALID_FLAGS != 0 => Err(libc::EOPNOTSUPP),
        libc::MAP_SHARED_VALIDATE => Ok(()),
        _ => Err(libc::EINVAL),
    }
}

/// The arguments of `mmap`.
struct MapRequest<'a> {
    address: FromC<'a, *mut c_void>,
    len: usize,
    protection: c_int,
    flags: c_int,
    offset: u64,
}

/// A part of a mapping whose bytes lie in one block.
struct Part {
    /// Offset in the mapping, in bytes.
    start: u64,
    /// Length in bytes.
    len: u64,
    block: BlockId,
    /// Offset in the block, in bytes.
    within: u64,
}

fn map(view: &View, file: &OpenFile, request: &MapRequest<'_>) -> Result<*mut c_void, Fault> {
    let MapRequest { address, len, protection, flags, offset } = *request;
    if !offset.is_multiple_of(PAGE_SIZE) {
        return Err(Fault::Errno(libc::EINVAL));
    }
    let is_shared = flags & libc::MAP_TYPE != MAP_PRIVATE;
    if is_shared && protection & PROT_WRITE != 0 {
        return Err(Fault::Errno(libc::EACCES));
    }
    if flags & libc::MAP_GROWSDOWN != 0 {
        return Err(Fault::Errno(libc::EINVAL));
    }
    if flags & libc::MAP_SYNC != 0 {
        return Err(Fault::Errno(libc::EOPNOTSUPP));
    }
    // What was mapped there is gone, and another thread must not map anything there, so this cannot begin again.
    let _whole = (flags & MAP_FIXED != 0).then(Whole::begin);
    // First reserve room for the whole mapping. The part beyond the end of the file stays inaccessible.
    let placing = flags & (MAP_FIXED | libc::MAP_FIXED_NOREPLACE | libc::MAP_32BIT | libc::MAP_NORESERVE);
    let base = mmap::next(address, len, PROT_NONE, placing | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if base == MAP_FAILED {
        return Err(Fault::Errno(memory::errno()));
    }
    let filled = fill(view, file, request, base);
    if filled.is_err() {
        // SAFETY: mapped just above, and the program has not seen it.
        munmap(unsafe { FromC::new(base) }, len);
    }
    filled.map(|()| base)
}

/// Maps the parts of a file into the room at `base`.
fn fill(view: &View, file: &OpenFile, request: &MapRequest<'_>, base: *mut c_void) -> Result<(), Fault> {
    let mut copied: Vec<Part> = Vec::new();
    for part in parts(file, request)? {
        let found = file.dataset().segment_position(part.block).filter(|_| may_map_in_place(view, file, &part));
        let segment = found.and_then(|(segment, offset)| Some((intact(view, file, segment)?, offset)));
        match segment {
            Some((segment, offset)) if in_place::add(base as usize + part.start as usize, part.len as usize) => {
                put(request, base, part.start, part.len, segment.as_raw_fd(), offset + part.within)?;
            }
            _ => match shared_copy(view, file, request, &part)? {
                Some(copy) if in_place::add(base as usize + part.start as usize, part.len as usize) => {
                    put(request, base, part.start, part.len, copy.as_raw_fd(), part.within)?;
                }
                _ => copied.push(part),
            },
        }
    }
    if copied.is_empty() {
        return Ok(());
    }
    // Uses a file rather than anonymous memory, so that pages that the program discards (MADV_DONTNEED) come back with their
    // bytes.
    let total: u64 = copied.iter().map(|part| part.len.next_multiple_of(PAGE_SIZE)).sum();
    let copy = kernel_copy::empty_of(view, file, total)?;
    copy.set_len(total).map_err(|error| kernel_copy::errno_of(&error))?;
    let mut at = 0;
    for part in &copied {
        kernel_copy::copy_range(view, file, request.offset + part.start, part.len, &copy, at)?;
        at += part.len.next_multiple_of(PAGE_SIZE);
    }
    let copy = kernel_copy::for_mapping(copy);
    at = 0;
    for part in &copied {
        put(request, base, part.start, part.len, copy.as_raw_fd(), at)?;
        at += part.len.next_multiple_of(PAGE_SIZE);
    }
    Ok(())
}

/// Returns the copy of a part's block that all processes of the node share; `None` if the part is copied for this process alone.
fn shared_copy(view: &View, file: &OpenFile, request: &MapRequest<'_>, part: &Part) -> Result<Option<File>, Fault> {
    let (_, len) = file.dataset().catalog().block(part.block).ok_or(libc::EIO)?;
    if part.len < SHARED_COPY_LEN_MIN || part.len < len / SHARED_COPY_PARTS {
        return Ok(None);
    }
    let first = request.offset + part.start - part.within;
    let copy = view.session().shared_copy(file.dataset(), Original::Block(part.block), |copy| {
        kernel_copy::copy_range(view, file, first, len, copy, 0)
    });
    match copy {
        // Other programs have filled the drive.
        Err(Fault::Errno(libc::ENOSPC | libc::EDQUOT)) => Ok(None),
        copy => copy,
    }
}

/// Returns a segment's file, opened again if the program has closed its descriptor; `None` if that fails.
fn intact<'a>(view: &View, file: &OpenFile, segment: &'a ReservedFd) -> Option<InUse<'a>> {
    segment.get().or_else(|_| view.session().restore(file.dataset()).ok().and_then(|()| segment.get().ok()).ok_or(())).ok()
}

/// Divides the requested range of the file into parts, block by block.
fn parts(file: &OpenFile, request: &MapRequest<'_>) -> Result<Vec<Part>, Fault> {
    let (size, blocks) = file.dataset().catalog().sample(file.sample()).ok_or(libc::EIO)?;
    let len = (request.len as u64).next_multiple_of(PAGE_SIZE).min(size.saturating_sub(request.offset));
    let mut parts = Vec::new();
    let mut start = 0;
    while start < len {
        let at = request.offset + start;
        let within = at % BLOCK_SIZE_MAX;
        let count = (len - start).min(BLOCK_SIZE_MAX - within);
        parts.push(Part { start, len: count, block: BlockId(blocks.start + (at / BLOCK_SIZE_MAX) as u32), within });
        start += count;
    }
    Ok(parts)
}

/// Returns whether a part may be mapped in place: its block shares no page with another, the session does not verify reads, because the
/// bytes would have to be checked first, and the server that has stored the block has not ended, which frees it.
fn may_map_in_place(view: &View, file: &OpenFile, part: &Part) -> bool {
    let len = file.dataset().catalog().block(part.block).map_or(0, |(_, len)| len);
    len >= PAGE_BLOCK_SIZE_MIN && !view.session().verifies_reads() && !file.dataset().is_gone()
}

/// Maps a range of a kernel file at an offset within the room at `base`.
fn put(request: &MapRequest<'_>, base: *mut c_void, start: u64, len: u64, descriptor: RawFd, offset: u64) -> Result<(), Fault> {
    let kind = if request.flags & libc::MAP_TYPE == MAP_PRIVATE { MAP_PRIVATE } else { MAP_SHARED };
    let flags = kind | MAP_FIXED | request.flags & (libc::MAP_POPULATE | libc::MAP_LOCKED | libc::MAP_NORESERVE);
    // SAFETY: within the room that `map` has reserved, which nothing uses yet.
    let target = unsafe { FromC::new(base.wrapping_byte_add(start as usize)) };
    let room = len.next_multiple_of(PAGE_SIZE) as usize;
    let mapped = mmap::next(target, room, request.protection, flags, descriptor, offset as off_t);
    if mapped == MAP_FAILED { Err(Fault::Errno(memory::errno())) } else { Ok(()) }
}
