//! `dayfly stat`: prints everything about a path in the namespace.

use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use dayfly_client::{FileKind, View, ViewError};
use dayfly_launch::units::counted;
use dayfly_meta::catalog::{Catalog, Compression, Place};
use dayfly_meta::id::{BlockId, SampleId};
use dayfly_meta::path::{display, join};

use super::ls::{mode_text, time_text};
use crate::args::StatArguments;
use crate::failure::{Failure, complain, print_line};
use crate::namespace::{about, view};

pub(super) fn run(arguments: StatArguments) -> Result<ExitCode, Failure> {
    let view = view()?;
    let mut failed = false;
    for path in &arguments.paths {
        if let Err(error) = show(&view, path.as_bytes()) {
            complain(about(path.as_bytes(), &error));
            failed = true;
        }
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn show(view: &View, path: &[u8]) -> Result<(), ViewError> {
    let stat = view.lstat(path)?;
    let kind = match stat.kind {
        FileKind::File => "regular file",
        FileKind::Directory => "directory",
        FileKind::Symlink => "symbolic link",
    };
    print_line!("  File: {}", display(path));
    print_line!("  Size: {:<12} {kind}", stat.size);
    print_line!(" Inode: {:<12} Links: {}", stat.inode, stat.links);
    print_line!("Access: {:04o}/{}", stat.permissions, mode_text(&stat));
    print_line!("Modify: {} ({}.{:09})", time_text(&stat), stat.mtime_s, stat.mtime_ns);
    if stat.kind == FileKind::Symlink {
        print_line!("Target: {}", display(&view.read_link(path)?));
    }
    if stat.kind == FileKind::File {
        show_sample(view, path)?;
    }
    Ok(())
}

fn show_sample(view: &View, path: &[u8]) -> Result<(), ViewError> {
    let file = view.open(path)?;
    let (catalog, sample) = (file.dataset().catalog(), file.sample());
    print_line!("Sample: {} of '{}'", sample.0, display(&join(view.session().prefix(), file.dataset().target())));
    for block in catalog.sample(sample).map_or(0..0, |(_, blocks)| blocks).map(BlockId) {
        let (owner, len) = (catalog.owner(block), catalog.block(block).map_or(0, |(_, len)| len));
        let here = if file.dataset().is_here(block) { ", here" } else { "" };
        let how = if catalog.is_stored(block) { "on" } else { "not stored, read from its origin by" };
        let checksum = catalog.checksum(block).unwrap_or(0);
        print_line!(
            " Block: {} ({}, crc32c {checksum:08x}) {how} node {}{here}",
            block.0,
            counted(len, "byte"),
            owner.map_or_else(|| "?".to_owned(), |node| node.to_string())
        );
    }
    if let Some(origin) = origin_text(catalog, sample) {
        print_line!("Origin: {origin}");
    }
    Ok(())
}

/// Says where a sample's bytes lie on the parallel file system.
fn origin_text(catalog: &Catalog, sample: SampleId) -> Option<String> {
    let origin = catalog.origin(sample)?;
    let source = catalog.source(origin.source)?;
    let unpacked = if source.compression == Compression::None { "" } else { " of the unpacked archive" };
    let name = display(&source.path);
    Some(match origin.place {
        Place::Bytes { offset } => format!("{name}, at byte {offset}{unpacked}"),
        Place::SparseTar { offset, .. } => format!("{name}, sparse member at byte {offset}{unpacked}"),
        Place::ZipRecord { offset, .. } => format!("{name}, member at byte {offset}"),
        Place::Nested { offset, .. } => format!("{name}, in the archive within it at byte {offset}{unpacked}"),
        Place::Tree => display(&join(&source.path, &catalog.path_in_source(sample)?)),
    })
}
