//! The file system that stands for a parallel one shows its source as it is, and counts each read.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn reads_are_right_and_counted_and_nothing_stays() {
    if !geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        eprintln!("NOT tested: mounting a FUSE file system needs root and /dev/fuse");
        return;
    }
    // With page cache, the kernel's first read ahead may be split in two.
    for (option, reads) in [(None, 5..=5), (Some("--page-cache"), 1..=2)] {
        let folder = tempfile::tempdir().unwrap();
        let (source, mount, counts) = (folder.path().join("source"), folder.path().join("mount"), folder.path().join("counts"));
        fs::create_dir_all(source.join("a")).unwrap();
        fs::create_dir(&mount).unwrap();
        let bytes: Vec<u8> = (0..1_u32 << 18).flat_map(u32::to_le_bytes).collect();
        fs::write(source.join("a/b"), &bytes).unwrap();
        let device = fs::metadata(&mount).unwrap().dev();
        let mut pfs = Command::new(env!("CARGO_BIN_EXE_dayfly-bench"))
            .arg("pfs")
            .args([&source, &mount])
            .args(option)
            .arg("--counts")
            .arg(&counts)
            .spawn()
            .unwrap();
        let pid = Pid::from_raw(pfs.id().cast_signed());
        wait_until("mounted", || fs::metadata(&mount).unwrap().dev() != device);
        // The file system is mounted a moment before it has set how far the kernel reads ahead.
        kill(pid, Signal::SIGUSR1).unwrap();
        wait_until("serves", || counts.exists());
        let (shown, real) = (fs::metadata(mount.join("a/b")).unwrap(), fs::metadata(source.join("a/b")).unwrap());
        let facts = |of: &fs::Metadata| (of.ino(), of.len(), of.mtime(), of.mtime_nsec(), of.ctime(), of.ctime_nsec(), of.mode());
        assert_eq!(facts(&shown), facts(&real));
        let file = File::open(mount.join("a/b")).unwrap();
        let mut read = vec![0; bytes.len()];
        for (number, part) in read.chunks_mut(1 << 18).enumerate() {
            file.read_exact_at(part, (number as u64) << 18).unwrap();
        }
        assert!(read == bytes, "the bytes differ");
        assert_eq!(file.read_at(&mut [0; 1], bytes.len() as u64).unwrap(), 0);
        drop(file);
        kill(pid, Signal::SIGTERM).unwrap();
        assert!(pfs.wait().unwrap().success());
        assert_eq!(fs::metadata(&mount).unwrap().dev(), device, "still mounted");
        let text = fs::read_to_string(&counts).unwrap();
        let count = |name: &str| -> u64 {
            let (_, rest) = text.split_once(&format!("\"{name}\": ")).unwrap();
            rest.split([',', '}']).next().unwrap().parse().unwrap()
        };
        assert_eq!((count("opens"), count("bytes")), (1, bytes.len() as u64), "{option:?}: {text}");
        assert!(reads.contains(&count("reads")), "{option:?}: {text}");
    }
}
