//! Checks one node.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use dayfly_launch::{FileSystemKind, chosen_data_dirs, file_system};
use dayfly_meta::limits::SERVER_DESCRIPTORS_MIN;
use dayfly_transport::probe;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use nix::sys::utsname::uname;

use super::finding::{Finding, Report};
use super::probe::{block_on, options};
use crate::args::DoctorArguments;
use crate::preload;
use crate::size::show;

/// The oldest kernel that has all the calls that Dayfly needs: process descriptors, sealed memory,
/// and non-blocking reads.
const KERNEL_MIN: (u32, u32) = (5, 4);
/// With fewer descriptors, a session with many nodes or processes would run out of them.
const DESCRIPTORS_MIN: u64 = 16 << 10;
/// A data dir with less free space is useless.
const FREE_MIN: u64 = 1 << 30;
/// Bytes that are written to a drive and read back to measure its speed.
const DRIVE_TEST_LEN: u64 = 256 << 20;
const DRIVE_TEST_CHUNK_LEN: usize = 1 << 20;
/// In bytes per second. A slower data dir is reported, because a local NVMe drive is faster.
const DRIVE_RATE_MIN: f64 = 500e6;
/// In bytes per second. A slower card is reported, because a real RDMA card is faster than this
/// even between processes on one machine.
const RDMA_RATE_MIN: f64 = 1e9;

/// Runs all checks of this node.
pub(super) fn check_node(arguments: &DoctorArguments) -> Report {
    let mut findings = vec![kernel(), descriptors(), shared_memory()];
    findings.extend(chosen_data_dirs(&arguments.data_dir).iter().map(|path| drive(path)));
    findings.extend([preload_library(), rdma(arguments), locked_memory(), fuse(), time()]);
    let host = uname().map_or_else(|_| String::new(), |name| name.nodename().to_string_lossy().into_owned());
    Report { host, findings, clock: Some(now()) }
}

/// Returns the seconds since 1970.
pub(super) fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

fn kernel() -> Finding {
    let release = uname().map_or_else(|_| String::new(), |name| name.release().to_string_lossy().into_owned());
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= KERNEL_MIN {
        return Finding::ok("kernel", release).needed();
    }
    let detail = format!("{release}; Dayfly needs {}.{} or newer", KERNEL_MIN.0, KERNEL_MIN.1);
    Finding::missing("kernel", detail, "update the kernel").needed()
}

/// Returns a hard limit as text and as a number.
fn limit(resource: Resource) -> (String, u64) {
    let hard = getrlimit(resource).map_or(0, |(_, hard)| hard);
    (if hard == RLIM_INFINITY { "unlimited".to_owned() } else { hard.to_string() }, hard)
}

fn descriptors() -> Finding {
    let (text, hard) = limit(Resource::RLIMIT_NOFILE);
    let detail = format!("at most {text}");
    if hard >= DESCRIPTORS_MIN {
        return Finding::ok("open files", detail);
    }
    let advice = "raise the hard limit: 'nofile' in /etc/security/limits.conf, or LimitNOFILE of the workload manager's daemon";
    if hard < SERVER_DESCRIPTORS_MIN {
        return Finding::missing("open files", detail, advice).needed();
    }
    Finding::slow("open files", detail, advice)
}

fn locked_memory() -> Finding {
    let (text, hard) = limit(Resource::RLIMIT_MEMLOCK);
    if hard == RLIM_INFINITY || nix::unistd::geteuid().is_root() {
        return Finding::ok("locked memory", text);
    }
    let advice =
        "for RDMA make it unlimited: 'memlock' in /etc/security/limits.conf; for Slurm, LimitMEMLOCK=infinity in slurmd's unit";
    Finding::slow("locked memory", format!("at most {text} bytes"), advice)
}

fn shared_memory() -> Finding {
    let make = || -> io::Result<()> {
        let file = File::from(memfd_create("dayfly-doctor", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?);
        file.set_len(64 << 20)?;
        let mut half = &file;
        half.seek(io::SeekFrom::Start(32 << 20))?;
        half.write_all(&[7; 4096])
    };
    match make() {
        Ok(()) => Finding::ok("shared memory", "sealed memory can be created").needed(),
        Err(error) => {
            let advice = "allow memfd_create; a container's seccomp profile may forbid it";
            Finding::missing("shared memory", error, advice).needed()
        }
    }
}

fn drive(path: &Path) -> Finding {
    let what = format!("data dir {}", path.display());
    let unusable = |error: io::Error| {
        let advice = "name a folder on a local drive with --data-dir; many sites provide $SLURM_TMPDIR or /local";
        Finding::missing(&what, error, advice).needed()
    };
    let (kind, free) = match file_system(path) {
        Ok(found) => found,
        Err(error) => return unusable(error),
    };
    let (write_rate, read_rate) = match rates(path) {
        Ok(rates) => rates,
        Err(error) => return unusable(error),
    };
    let name = match kind {
        FileSystemKind::Local => "local".to_owned(),
        FileSystemKind::Tmpfs => "tmpfs".to_owned(),
        FileSystemKind::Network(name) => format!("network ({name})"),
    };
    let (write, read) = (show(write_rate as u64), show(read_rate as u64));
    let detail = format!("{name}, {} free, writes {write}/s, reads {read}/s", show(free));
    if free < FREE_MIN {
        return Finding::missing(&what, detail, "free some space, or name another folder with --data-dir").needed();
    }
    match kind {
        FileSystemKind::Tmpfs => {
            let advice = "a tmpfs takes memory from your program; name a folder on a drive with --data-dir";
            Finding::slow(&what, detail, advice)
        }
        FileSystemKind::Network(_) => {
            Finding::slow(&what, detail, "a session exists to avoid network file systems; name a local drive with --data-dir")
        }
        FileSystemKind::Local if read_rate < DRIVE_RATE_MIN => Finding::slow(
            &what,
            detail,
            "it reads more slowly than an NVMe drive; if the node has a faster drive, name it with --data-dir",
        ),
        FileSystemKind::Local => Finding::ok(&what, detail),
    }
    .needed()
}

/// Measures the rates, in bytes per second, at which a drive writes an unnamed file and reads it
/// back. The reads bypass the page cache where possible.
fn rates(path: &Path) -> io::Result<(f64, f64)> {
    let mut file = nameless(path)?;
    let chunk = vec![0x5a; DRIVE_TEST_CHUNK_LEN];
    let start = Instant::now();
    for _ in 0..DRIVE_TEST_LEN / DRIVE_TEST_CHUNK_LEN as u64 {
        file.write_all(&chunk)?;
    }
    file.sync_data()?;
    let write_rate = DRIVE_TEST_LEN as f64 / start.elapsed().as_secs_f64();
    // This is only a hint: a tmpfs ignores it.
    let _ = nix::fcntl::posix_fadvise(&file, 0, 0, nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED);
    file.rewind()?;
    let (start, mut chunk) = (Instant::now(), chunk);
    while file.read(&mut chunk)? > 0 {}
    Ok((write_rate, DRIVE_TEST_LEN as f64 / start.elapsed().as_secs_f64()))
}

/// Creates a file that disappears with this process, however the process ends.
fn nameless(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    options.clone().custom_flags(nix::libc::O_TMPFILE).open(path).or_else(|_| {
        // Some file systems cannot create a file without a name.
        let path = path.join(format!(".dayfly-doctor-{}", std::process::id()));
        let file = options.create_new(true).open(&path)?;
        fs::remove_file(&path).map(|()| file)
    })
}

/// Checks that the preload library exists and that [`preload::library`] can load it.
fn preload_library() -> Finding {
    let advice = "install libdayfly_preload.so, built for this C library, next to the program or in ../lib/dayfly";
    match preload::library() {
        Ok(preload) => Finding::ok("LD_PRELOAD", preload.library.display()).needed(),
        Err(failure) => Finding::missing("LD_PRELOAD", failure, advice).needed(),
    }
}

fn rdma(arguments: &DoctorArguments) -> Finding {
    let options = options(arguments);
    let probing = async {
        let mut key = [0; 32];
        getrandom::fill(&mut key).map_err(|error| error.to_string())?;
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let (_answering, address) = probe::answer(key, listen, &options).await.map_err(|error| error.to_string())?;
        probe::reach(key, address, &options).await.rdma
    };
    match block_on(probing).map_err(|failure| failure.to_string()).and_then(|found| found) {
        Ok(speed) => {
            let rate = show(speed.bytes_per_second as u64);
            let detail = format!("a transfer from this node to itself works: {:.0} us, {rate}/s", speed.round_trip_us);
            match speed.bytes_per_second {
                rate if rate < RDMA_RATE_MIN => {
                    Finding::slow("RDMA", detail, "this is slower than a real card; it may be Soft-RoCE, for tests only")
                }
                _ => Finding::ok("RDMA", detail),
            }
        }
        // The user counts on the card that they name.
        Err(reason) if arguments.rdma_device.is_some() => {
            let devices = devices();
            let known = if devices.is_empty() {
                "no RDMA devices".to_owned()
            } else {
                format!("the RDMA devices {}", devices.join(", "))
            };
            let advice = format!("name another device with --rdma-device, or leave the option out; this node has {known}");
            Finding::missing("RDMA", reason, &advice).needed()
        }
        Err(reason) => Finding::missing("RDMA", reason, "nothing to do if the node has no RDMA card; sessions then use TCP"),
    }
}

/// Returns the names of the RDMA devices that the kernel has.
fn devices() -> Vec<String> {
    let listed = fs::read_dir("/sys/class/infiniband").into_iter().flatten().filter_map(Result::ok);
    let mut names: Vec<String> = listed.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn fuse() -> Finding {
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    let helper = ["fusermount3", "fusermount"].into_iter().find_map(in_path);
    let advice = "nothing to do: this version has no FUSE mount yet";
    match (device, helper) {
        (Ok(_), Some(helper)) => Finding::ok("FUSE", format!("/dev/fuse, {}", helper.display())),
        (Ok(_), None) => Finding::missing("FUSE", "there is no fusermount3", advice),
        (Err(error), _) => Finding::missing("FUSE", format!("cannot open /dev/fuse: {error}"), advice),
    }
}

fn in_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|path| path.exists())
}

fn time() -> Finding {
    let source = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let source = fs::read_to_string(source).unwrap_or_default().trim().to_owned();
    let detail = format!("the clock source is {source}");
    match source.as_str() {
        "hpet" | "acpi_pm" | "jiffies" => {
            let advice = "reading it takes at least as long as a system call; boot with clocksource=tsc if the TSC is stable";
            Finding::slow("time", detail, advice)
        }
        _ => Finding::ok("time", detail),
    }
}
