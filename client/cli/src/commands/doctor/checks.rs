//! What is looked at on a node.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Instant, SystemTime};

use dayfly_transport::{Choice, Options, Preference, probe};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use nix::sys::utsname::uname;

use super::{Finding, Report};
use crate::args::Doctor;
use crate::launch::{chosen_data_dirs, data_dir_kind};
use crate::preload;
use crate::size::show;

/// The oldest kernel with all calls that are needed: descriptors of processes, sealed memory, reads that do not wait.
const KERNEL_MIN: (u32, u32) = (5, 4);
/// Fewer descriptors than that are too few for many nodes and processes.
const DESCRIPTORS_MIN: u64 = 16 << 10;
/// A data dir with less room holds no data set.
const FREE_MIN: u64 = 1 << 30;
/// What a drive is tried with.
const TRIED_LEN: u64 = 256 << 20;
const TRIED_PART: usize = 1 << 20;
/// Below this a drive is not what a node's own NVMe is.
const DRIVE_RATE_MIN: f64 = 500e6;
/// Between processes of one machine RDMA is at least this fast, by real cards.
const RDMA_RATE_MIN: f64 = 1e9;

/// All checks of this node.
pub(super) fn all(arguments: &Doctor) -> Report {
    let mut findings = vec![kernel(), descriptors(), shared_memory()];
    findings.extend(chosen_data_dirs(&arguments.data_dir).iter().map(|path| drive(path)));
    findings.extend([preload_library(), rdma(arguments), locked_memory(), fuse(), time()]);
    let host = uname().map_or_else(|_| String::new(), |name| name.nodename().to_string_lossy().into_owned());
    Report { host, findings, clock: Some(now()) }
}

/// Seconds since 1970.
pub(super) fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// What the options say of the network.
pub(super) fn options(arguments: &Doctor) -> Options {
    let near = chosen_data_dirs(&arguments.data_dir).into_iter().next();
    let choice = Choice { device: arguments.rdma_device.clone(), near, ..Choice::default() };
    Options { preference: Preference::Rdma, choice }
}

fn kernel() -> Finding {
    let release = uname().map_or_else(|_| String::new(), |name| name.release().to_string_lossy().into_owned());
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= KERNEL_MIN {
        return Finding::ok("kernel", release).needed();
    }
    Finding::missing("kernel", format!("{release}; {}.{} is the oldest that will do", KERNEL_MIN.0, KERNEL_MIN.1), "update it")
        .needed()
}

fn limit(resource: Resource) -> (String, u64) {
    let hard = getrlimit(resource).map_or(0, |(_, hard)| hard);
    (if hard == RLIM_INFINITY { "unlimited".to_owned() } else { hard.to_string() }, hard)
}

fn descriptors() -> Finding {
    let (words, hard) = limit(Resource::RLIMIT_NOFILE);
    let detail = format!("{words} at most");
    if hard >= DESCRIPTORS_MIN {
        return Finding::ok("open files", detail);
    }
    Finding::slow(
        "open files",
        detail,
        "raise the hard limit: 'nofile' in /etc/security/limits.conf, or LimitNOFILE of the node's manager",
    )
}

fn locked_memory() -> Finding {
    let (words, hard) = limit(Resource::RLIMIT_MEMLOCK);
    if hard == RLIM_INFINITY || nix::unistd::geteuid().is_root() {
        return Finding::ok("locked memory", words);
    }
    let advice =
        "RDMA needs it unlimited: 'memlock' in /etc/security/limits.conf; for Slurm LimitMEMLOCK=infinity in slurmd's unit";
    Finding::slow("locked memory", format!("{words} bytes at most"), advice)
}

fn shared_memory() -> Finding {
    let made = || -> io::Result<()> {
        let file = File::from(memfd_create("dayfly-doctor", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?);
        file.set_len(64 << 20)?;
        let mut half = &file;
        half.seek(io::SeekFrom::Start(32 << 20))?;
        half.write_all(&[7; 4096])
    };
    match made() {
        Ok(()) => Finding::ok("shared memory", "sealed memory can be made").needed(),
        Err(error) => {
            Finding::missing("shared memory", error, "memfd_create must be allowed: look at the container's seccomp profile")
                .needed()
        }
    }
}

fn drive(path: &Path) -> Finding {
    let what = format!("data dir {}", path.display());
    let unusable = |error: &dyn std::fmt::Display| {
        Finding::missing(&what, error, "name a folder on a local drive by --data-dir; the site may have $SLURM_TMPDIR or /local")
            .needed()
    };
    let (kind, free) = match data_dir_kind(path) {
        Ok(found) => found,
        Err(error) => return unusable(&error),
    };
    let rates = match rates(path) {
        Ok(rates) => rates,
        Err(error) => return unusable(&error),
    };
    let rate = |bytes: f64| format!("{}/s", show(bytes as u64));
    let detail = format!("{kind}, {} free, writes {}, reads {}", show(free), rate(rates.0), rate(rates.1));
    if free < FREE_MIN {
        return Finding::missing(&what, detail, "make room, or name another folder by --data-dir").needed();
    }
    match kind.as_str() {
        "tmpfs" => Finding::slow(
            &what,
            detail,
            "this is memory: what is staged in takes it from your program; name a drive by --data-dir",
        ),
        kind if kind.starts_with("network") => {
            Finding::slow(&what, detail, "a session exists to avoid this: name a local drive by --data-dir")
        }
        _ if rates.1 < DRIVE_RATE_MIN => Finding::slow(&what, detail, "it reads slower than an NVMe drive; is there another?"),
        _ => Finding::ok(&what, detail),
    }
    .needed()
}

/// Bytes a second, written to a nameless file and read back past the page cache where that can be.
fn rates(path: &Path) -> io::Result<(f64, f64)> {
    let mut file = nameless(path)?;
    let part = vec![0x5a; TRIED_PART];
    let start = Instant::now();
    for _ in 0..TRIED_LEN / TRIED_PART as u64 {
        file.write_all(&part)?;
    }
    file.sync_data()?;
    let written = TRIED_LEN as f64 / start.elapsed().as_secs_f64();
    // A hint that a tmpfs does not take.
    let _ = nix::fcntl::posix_fadvise(&file, 0, 0, nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED);
    file.rewind()?;
    let (start, mut part) = (Instant::now(), part);
    while file.read(&mut part)? > 0 {}
    Ok((written, TRIED_LEN as f64 / start.elapsed().as_secs_f64()))
}

/// A file that is gone with us, whatever becomes of us.
fn nameless(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    options.clone().custom_flags(nix::libc::O_TMPFILE).open(path).or_else(|_| {
        // Not all file systems have files without a name from the start.
        let path = path.join(format!(".dayfly-doctor-{}", std::process::id()));
        let file = options.create_new(true).open(&path)?;
        fs::remove_file(&path).map(|()| file)
    })
}

fn preload_library() -> Finding {
    let advice = "install libdayfly_preload.so beside the program, or in ../lib/dayfly";
    let library = match preload::library() {
        Ok(library) => library,
        Err(failure) => return Finding::missing("LD_PRELOAD", failure, advice).needed(),
    };
    // The program knows whether the library is in it.
    let is_there = std::env::current_exe().and_then(|program| {
        let mut child = Command::new(program);
        child.arg("is-preloaded").env("LD_PRELOAD", &library).stderr(Stdio::null());
        child.status()
    });
    match is_there {
        Ok(status) if status.success() => Finding::ok("LD_PRELOAD", library.display()).needed(),
        Ok(_) => {
            Finding::missing("LD_PRELOAD", format!("{} is not loaded", library.display()), "is it built for this C library?")
                .needed()
        }
        Err(error) => Finding::missing("LD_PRELOAD", error, advice).needed(),
    }
}

fn rdma(arguments: &Doctor) -> Finding {
    let options = options(arguments);
    let advice = "sessions go by TCP as long as one node lacks RDMA";
    let probing = async {
        let mut key = [0; 32];
        getrandom::fill(&mut key).map_err(|error| error.to_string())?;
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let (_answering, address) = probe::answer(key, listen, &options).await.map_err(|error| error.to_string())?;
        probe::reach(key, address, &options).await.rdma
    };
    match super::hosts::block_on(probing).map_err(|failure| failure.to_string()).and_then(|found| found) {
        Ok(speed) => {
            let detail = format!(
                "a write to itself comes through: {:.0} us, {}/s",
                speed.round_trip_us,
                show(speed.bytes_per_second as u64)
            );
            match speed.bytes_per_second {
                rate if rate < RDMA_RATE_MIN => Finding::slow("RDMA", detail, "slower than a card is: is it Soft-RoCE?"),
                _ => Finding::ok("RDMA", detail),
            }
        }
        Err(reason) => Finding::missing("RDMA", reason, advice),
    }
}

fn fuse() -> Finding {
    let opened = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    let helper = ["fusermount3", "fusermount"].into_iter().find_map(in_path);
    let advice = "only programs that LD_PRELOAD does not reach need it: load the module fuse, install fuse3";
    match (opened, helper) {
        (Ok(_), Some(helper)) => Finding::ok("FUSE", format!("/dev/fuse, {}", helper.display())),
        (Ok(_), None) => Finding::missing("FUSE", "no fusermount3", advice),
        (Err(error), _) => Finding::missing("FUSE", format!("/dev/fuse: {error}"), advice),
    }
}

fn in_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|path| path.exists())
}

fn time() -> Finding {
    let source = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let source = fs::read_to_string(source).unwrap_or_default().trim().to_owned();
    match source.as_str() {
        "hpet" | "acpi_pm" | "jiffies" => Finding::slow(
            "time",
            format!("the clock is {source}"),
            "each look at it is a system call or worse: boot with clocksource=tsc, if it is stable",
        ),
        _ => Finding::ok("time", format!("the clock is {source}")),
    }
}
