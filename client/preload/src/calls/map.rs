//! Mapping files. Blocks of at least 64 KiB that the node holds are mapped where they lie in the segment; all else is copied, up
//! to 64 MiB into memory and beyond that onto the data dir.

mod in_place;

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, RawFd};

use dayfly_client::{OpenFile, View};
use dayfly_meta::id::BlockId;
use dayfly_meta::limits::{BLOCK_SIZE_MAX, PAGE_BLOCK_SIZE_MIN, PAGE_SIZE};
use libc::{MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED, MAP_PRIVATE, MAP_SHARED, PROT_NONE, PROT_WRITE, off_t, size_t};

use super::hook;
use crate::memory::{self, Failed};
use crate::process::{Fault, answer, view};
use crate::{carry, next, table};

/// A mapping's address; it fails in a way of its own.
struct Mapped(*mut c_void);

impl Failed for Mapped {
    const FAILED: Self = Self(MAP_FAILED);
}

hook! {
    fn mmap | mmap64 (address: *mut c_void, len: size_t, protection: c_int, flags: c_int, descriptor: c_int, offset: off_t) -> *mut c_void {
        let open = if flags & MAP_ANONYMOUS != 0 { None } else { table::find(descriptor) };
        match open {
            None => next::mmap(address, len, protection, flags, descriptor, offset),
            Some(open) => answer(|| {
                let request = Request { address, len, protection, flags, offset: u64::try_from(offset).map_err(|_| libc::EINVAL)? };
                let file = open.file().map_err(|_| libc::ENODEV)?;
                map(&*view()?, file, &request).map(Mapped)
            }).0,
        }
    }

    fn mremap(address: *mut c_void, old_len: size_t, new_len: size_t, flags: c_int, target: *mut c_void) -> *mut c_void {
        if new_len > old_len && in_place::has(address as usize) {
            // Behind a block in its segment lies another.
            memory::set_errno(libc::ENOMEM);
            return MAP_FAILED;
        }
        next::mremap(address, old_len, new_len, flags, target)
    }

    fn munmap(address: *mut c_void, len: size_t) -> c_int {
        let result = next::munmap(address, len);
        if result == 0 {
            in_place::forget(address as usize, len);
        }
        result
    }
}

struct Request {
    address: *mut c_void,
    len: usize,
    protection: c_int,
    flags: c_int,
    offset: u64,
}

/// Bytes of the file that lie in one block, from `start` of the mapping on.
struct Part {
    start: u64,
    len: u64,
    block: BlockId,
    within: u64,
}

fn map(view: &View, file: &OpenFile, request: &Request) -> Result<*mut c_void, Fault> {
    let Request { address, len, protection, flags, offset } = *request;
    if len == 0 || !offset.is_multiple_of(PAGE_SIZE) {
        return Err(Fault::Errno(libc::EINVAL));
    }
    let is_shared = flags & libc::MAP_TYPE != MAP_PRIVATE;
    if is_shared && protection & PROT_WRITE != 0 {
        return Err(Fault::Errno(libc::EACCES));
    }
    // Room for all of it first. What lies beyond the end of the file stays out of reach.
    let placing = flags & (MAP_FIXED | libc::MAP_FIXED_NOREPLACE | libc::MAP_32BIT | libc::MAP_NORESERVE);
    let base = next::mmap(address, len, PROT_NONE, placing | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if base == MAP_FAILED {
        return Err(Fault::Errno(memory::errno()));
    }
    let filled = fill(view, file, request, base);
    if filled.is_err() {
        // The program has not seen it.
        munmap(base, len);
    }
    filled.map(|()| base)
}

fn fill(view: &View, file: &OpenFile, request: &Request, base: *mut c_void) -> Result<(), Fault> {
    let mut copied: Vec<Part> = Vec::new();
    for part in parts(file, request)? {
        let place = file.dataset().segment_position(part.block).filter(|_| may_lie_in_place(view, file, &part));
        match place {
            Some((segment, place)) if in_place::note(base as usize + part.start as usize, part.len as usize) => {
                put(request, base, part.start, part.len, segment.as_raw_fd(), place + part.within)?;
            }
            _ => copied.push(part),
        }
    }
    if copied.is_empty() {
        return Ok(());
    }
    // A file, though nobody else has it: pages that the program gives up (`MADV_DONTNEED`) come back from it.
    let total: u64 = copied.iter().map(|part| part.len.next_multiple_of(PAGE_SIZE)).sum();
    let copy = carry::empty_of(view, file, total)?;
    copy.set_len(total).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
    let mut at = 0;
    for part in &copied {
        carry::copy_range(view, file, request.offset + part.start, part.len, &copy, at)?;
        put(request, base, part.start, part.len, copy.as_raw_fd(), at)?;
        at += part.len.next_multiple_of(PAGE_SIZE);
    }
    Ok(())
}

/// The parts of the file that are asked for, block by block.
fn parts(file: &OpenFile, request: &Request) -> Result<Vec<Part>, Fault> {
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

/// Only blocks that own their pages; and where reads are verified, the bytes have to be seen first.
fn may_lie_in_place(view: &View, file: &OpenFile, part: &Part) -> bool {
    let len = file.dataset().catalog().block(part.block).map_or(0, |(_, len)| len);
    len >= PAGE_BLOCK_SIZE_MIN && !view.session().verifies_reads()
}

/// Maps a range of a file of the kernel's at its place.
fn put(request: &Request, base: *mut c_void, start: u64, len: u64, descriptor: RawFd, offset: u64) -> Result<(), Fault> {
    let kind = if request.flags & libc::MAP_TYPE == MAP_PRIVATE { MAP_PRIVATE } else { MAP_SHARED };
    let flags = kind | MAP_FIXED | request.flags & (libc::MAP_POPULATE | libc::MAP_LOCKED | libc::MAP_NORESERVE);
    let target = base.wrapping_byte_add(start as usize);
    let room = len.next_multiple_of(PAGE_SIZE) as usize;
    let mapped = next::mmap(target, room, request.protection, flags, descriptor, offset as off_t);
    if mapped == MAP_FAILED { Err(Fault::Errno(memory::errno())) } else { Ok(()) }
}
