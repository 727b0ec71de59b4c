//! `dayfly stat`: prints everything about a path in the namespace.

use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use dayfly_client::{FileKind, View, ViewError};
use dayfly_launch::units::counted;
use dayfly_meta::catalog::SourceKind;
use dayfly_meta::id::BlockId;
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
        let checksum = catalog.checksum(block).unwrap_or(0);
        print_line!(
            " Block: {} ({}, crc32c {checksum:08x}) on node {}{here}",
            block.0,
            counted(len, "byte"),
            owner.map_or_else(String::new, |node| node.to_string())
        );
    }
    if let Some(origin) = catalog.origin(sample) {
        let source = display(&origin.source.path);
        match origin.source.kind {
            SourceKind::Zip => print_line!("Origin: {source}, record at byte {} of the central directory", origin.offset),
            SourceKind::Tar => print_line!("Origin: {source}, at byte {} of the unpacked archive", origin.offset),
            SourceKind::Directory => print_line!("Origin: directory {source}"),
            SourceKind::File => print_line!("Origin: {source}"),
        }
    }
    Ok(())
}
