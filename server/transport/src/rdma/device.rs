//! An open RDMA card: the choice of card, port and address, and the registration of memory.

use std::ffi::CStr;
use std::fmt;
use std::fs;
use std::io;
use std::net::Ipv6Addr;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use super::error::RdmaError;
use super::verbs::{self, Verbs, done, made, verbs};
use crate::region::{Keys, Region, Registration};
use crate::selection::Port;

/// The folder in which the kernel lists its cards.
const CLASS: &str = "/sys/class/infiniband";

/// The user's choice among several cards, and the quality of service of the packets.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    /// The card, as `NAME` or `NAME:PORT`. If unset, the first card with an active port is used.
    pub device: Option<String>,
    /// A folder on a drive. Cards on the NUMA node of this drive are preferred.
    pub near: Option<PathBuf>,
    /// The service level (InfiniBand) or priority (RoCE) of the packets.
    pub service_level: u8,
    /// The traffic class of the packets; with RoCE, that of the IP header.
    pub traffic_class: u8,
}

/// The address of a port. It is displayed as an IP address (RoCE) or a LID (InfiniBand).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Address {
    /// The InfiniBand address within the subnet.
    pub(super) lid: u16,
    /// The RoCE address.
    pub(super) gid: [u8; 16],
    /// Index of the GID in the port's table.
    pub(super) gid_index: u8,
    pub(super) is_ethernet: bool,
    /// The library's code for the largest packet: 128 bytes shifted left by the code, so 5 is 4,096 bytes.
    pub(super) mtu: u8,
}

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gid = Ipv6Addr::from(self.gid);
        match gid.to_ipv4_mapped() {
            _ if !self.is_ethernet => write!(out, "LID {}", self.lid),
            Some(ipv4) => ipv4.fmt(out),
            None => gid.fmt(out),
        }
    }
}

/// The card's own bounds, as it reports them.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceLimits {
    pub(super) message_len: u32,
    pub(super) completions: u32,
    pub(super) send_depth: u32,
    pub(super) receives: u32,
    pub(super) reads: u8,
}

/// An open card with an active port.
pub(super) struct Device {
    pub(super) verbs: &'static Verbs,
    context: NonNull<verbs::Context>,
    pd: NonNull<verbs::Pd>,
    pub(super) name: String,
    pub(super) port: u8,
    pub(super) address: Address,
    pub(super) limits: DeviceLimits,
    pub(super) service_level: u8,
    pub(super) traffic_class: u8,
    registered_bytes: AtomicU64,
}

// SAFETY: the library's objects may be used from any thread, and the library locks what it must ("all verbs are thread-safe").
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Opens the card that `choice` names, or the nearest one whose port is active.
    pub(super) fn open(choice: &Choice) -> Result<Arc<Self>, RdmaError> {
        let verbs = verbs()?;
        let known = names();
        let mut candidates = known.clone();
        let mut wanted_port = None;
        if let Some(device) = &choice.device {
            let (name, port) = match device.split_once(':') {
                Some((name, port)) => {
                    let unknown = |_| RdmaError::NoSuchDevice { name: device.clone(), known: known.clone() };
                    (name, Some(port.parse().map_err(unknown)?))
                }
                None => (device.as_str(), None),
            };
            candidates.retain(|known| known == name);
            wanted_port = port;
            if candidates.is_empty() {
                return Err(RdmaError::NoSuchDevice { name: device.clone(), known });
            }
        }
        if let Some(node) = choice.near.as_deref().and_then(numa_node_of_folder) {
            candidates.sort_by_key(|name| numa_node(&Path::new(CLASS).join(name).join("device")) != Some(node));
        }
        let mut problem = RdmaError::NoDevice;
        for name in &candidates {
            match Self::open_named(verbs, name, wanted_port, choice) {
                Ok(device) => return Ok(Arc::new(device)),
                // The first candidate is the preferred one, so its problem is reported.
                Err(error) if matches!(problem, RdmaError::NoDevice) => problem = error,
                Err(_) => {}
            }
        }
        Err(problem)
    }

    fn open_named(verbs: &'static Verbs, name: &str, wanted_port: Option<u8>, choice: &Choice) -> Result<Self, RdmaError> {
        let context = open_context(verbs, name)?;
        let closing = |error| {
            // SAFETY: the context was opened above, and nothing was created from it.
            unsafe { (verbs.close_device)(context.as_ptr()) };
            error
        };
        let (port, address, limits) = query(verbs, context, name, wanted_port).map_err(closing)?;
        // SAFETY: the context is open.
        let pd = made(unsafe { (verbs.alloc_pd)(context.as_ptr()) }, "ibv_alloc_pd").map_err(closing)?;
        let (service_level, traffic_class) = (choice.service_level, choice.traffic_class);
        let (name, registered_bytes) = (name.to_owned(), AtomicU64::new(0));
        let device = Self { verbs, context, pd, name, port, address, limits, service_level, traffic_class, registered_bytes };
        // Events from the card must be read without waiting for the next one.
        fcntl(device.events_descriptor(), FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
            .map_err(io::Error::from)
            .map_err(|error| RdmaError::Call { call: "fcntl", error })?;
        Ok(device)
    }

    pub(super) fn context(&self) -> *mut verbs::Context {
        self.context.as_ptr()
    }

    pub(super) fn pd(&self) -> *mut verbs::Pd {
        self.pd.as_ptr()
    }

    /// Returns a descriptor that is readable when the card has events.
    pub(super) fn events_descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the context, which is open as long as `self`.
        unsafe { BorrowedFd::borrow_raw(self.context.as_ref().async_fd) }
    }

    /// Returns the events from the card since the last call: the kind, the port's number for events of a port, and a description.
    pub(super) fn events(&self) -> Vec<(u32, u32, String)> {
        let mut events = Vec::new();
        let mut event = verbs::AsyncEvent { element: ptr::null_mut(), event_type: 0 };
        // SAFETY: the context is open, its descriptor does not block, and `event` is written before it is read.
        while unsafe { (self.verbs.get_async_event)(self.context(), &mut event) } == 0 {
            // SAFETY: the library returns a constant string for any number.
            let description = unsafe { CStr::from_ptr((self.verbs.event_type_str)(event.event_type)) };
            // For events of a port, the first four bytes of the library's union are the port's number.
            events.push((event.event_type, event.element as usize as u32, description.to_string_lossy().into_owned()));
            // SAFETY: the event was received above and is acknowledged once.
            unsafe { (self.verbs.ack_async_event)(&mut event) };
        }
        events
    }

    /// Returns the library's description of the status of a completion.
    pub(super) fn status_text(&self, status: u32) -> String {
        // SAFETY: the library returns a constant string for any number.
        unsafe { CStr::from_ptr((self.verbs.wc_status_str)(status)) }.to_string_lossy().into_owned()
    }

    /// Describes the port in use, so that the nodes can choose a network.
    pub(super) fn describe(&self) -> Port {
        Port {
            device: format!("{}:{}", self.name, self.port),
            is_ethernet: self.address.is_ethernet,
            packet_len: 128 << self.address.mtu,
            address: self.address.to_string(),
        }
    }

    /// Returns the number of bytes of memory that the card may access.
    pub(super) fn registered_bytes(&self) -> u64 {
        self.registered_bytes.load(Ordering::Relaxed)
    }

    /// Creates a region that the card may read and write. Its pages are allocated now and locked in memory.
    pub(super) fn region(self: &Arc<Self>, len: u64) -> Result<Region, RdmaError> {
        let unregistered = Region::new(len).map_err(|error| RdmaError::Call { call: "memfd_create", error })?;
        let access = verbs::ACCESS_LOCAL_WRITE | verbs::ACCESS_REMOTE_WRITE | verbs::ACCESS_REMOTE_READ;
        let (address, len) = (unregistered.address() as *mut _, unregistered.len() as usize);
        // SAFETY: the range is the region's mapping, which outlives the registration: see `Region::registered`.
        let registered = unsafe { (self.verbs.reg_mr)(self.pd(), address, len, access) };
        let registered = made(registered, "ibv_reg_mr").map_err(|error| match error {
            RdmaError::Call { error, .. } if error.raw_os_error() == Some(nix::libc::ENOMEM) => {
                RdmaError::Memory { bytes: len as u64, limit: memory_limit(), error }
            }
            error => error,
        })?;
        // SAFETY: the library returned it above.
        let keys = unsafe { Keys { local: registered.as_ref().lkey, remote: registered.as_ref().rkey } };
        self.registered_bytes.fetch_add(len as u64, Ordering::Relaxed);
        let guard = RegisteredMemory { device: self.clone(), registered, len: len as u64 };
        Ok(unregistered.registered(Registration { keys, _guard: Box::new(guard) }))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: everything created from the domain and the context held `self` and is gone.
        unsafe {
            (self.verbs.dealloc_pd)(self.pd());
            (self.verbs.close_device)(self.context());
        }
    }
}

struct RegisteredMemory {
    device: Arc<Device>,
    registered: NonNull<verbs::Mr>,
    len: u64,
}

// SAFETY: as for `Device`.
unsafe impl Send for RegisteredMemory {}
// SAFETY: as for `Device`; shared references only read it.
unsafe impl Sync for RegisteredMemory {}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        self.device.registered_bytes.fetch_sub(self.len, Ordering::Relaxed);
        // SAFETY: the memory was registered once, and `self` is the only owner of the registration.
        let returned = unsafe { (self.device.verbs.dereg_mr)(self.registered.as_ptr()) };
        if returned != 0 {
            tracing::warn!(returned, "cannot deregister memory");
        }
    }
}

/// Returns the names of the cards that the kernel has, sorted.
pub(super) fn names() -> Vec<String> {
    let entries = fs::read_dir(CLASS).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Returns the soft limit on locked memory in bytes, if there is one.
pub(super) fn memory_limit() -> Option<u64> {
    getrlimit(Resource::RLIMIT_MEMLOCK).ok().map(|(soft, _)| soft).filter(|&soft| soft != RLIM_INFINITY)
}

fn open_context(verbs: &'static Verbs, name: &str) -> Result<NonNull<verbs::Context>, RdmaError> {
    let mut count = 0;
    // SAFETY: `count` is written; the list is freed below.
    let list = unsafe { (verbs.get_device_list)(&mut count) };
    let Some(list) = NonNull::new(list) else {
        return Err(no_device_file(name, io::Error::last_os_error()));
    };
    // SAFETY: the list has `count` devices.
    let devices = unsafe { std::slice::from_raw_parts(list.as_ptr(), usize::try_from(count).unwrap_or(0)) };
    // SAFETY: each pointer is a device of the list, and its name is a string that lives as long as the list.
    let is_it =
        |device: &&*mut verbs::Device| unsafe { CStr::from_ptr((verbs.get_device_name)(**device)) }.to_bytes() == name.as_bytes();
    let opened = devices.iter().find(is_it).map(|device| {
        // SAFETY: the device belongs to the list, which is freed only below.
        let context = unsafe { (verbs.open_device)(*device) };
        NonNull::new(context).ok_or_else(|| no_device_file(name, io::Error::last_os_error()))
    });
    // SAFETY: the list came from `get_device_list`. A device that was opened stays open.
    unsafe { (verbs.free_device_list)(list.as_ptr()) };
    // If the kernel has the card but the library does not list it, the library has no provider for it.
    opened.unwrap_or_else(|| Err(no_provider(name)))
}

fn no_device_file(name: &str, error: io::Error) -> RdmaError {
    RdmaError::NoDeviceFile { device: name.to_owned(), error }
}

/// Explains why the library does not list a card: it cannot find the card's device file, or it has no provider for the card.
fn no_provider(name: &str) -> RdmaError {
    let is_there = fs::read_dir("/dev/infiniband")
        .is_ok_and(|entries| entries.flatten().any(|entry| entry.file_name().as_encoded_bytes().starts_with(b"uverbs")));
    match is_there {
        true => RdmaError::NoProvider(name.to_owned()),
        false => no_device_file(name, io::ErrorKind::NotFound.into()),
    }
}

fn query(
    verbs: &Verbs,
    context: NonNull<verbs::Context>,
    name: &str,
    wanted_port: Option<u8>,
) -> Result<(u8, Address, DeviceLimits), RdmaError> {
    // SAFETY: all fields are numbers, for which zero is a valid value.
    let mut device: verbs::DeviceAttr = unsafe { std::mem::zeroed() };
    // SAFETY: the context is open and `device` is the structure that the library fills.
    done(unsafe { (verbs.query_device)(context.as_ptr(), &mut device) }, "ibv_query_device")?;
    let ports = wanted_port.map_or(1..=device.phys_port_cnt, |port| port..=port);
    let mut problem = RdmaError::PortDown { device: name.to_owned(), port: wanted_port.unwrap_or(1), state: "absent".to_owned() };
    for port in ports {
        // SAFETY: as above.
        let mut attributes: verbs::PortAttr = unsafe { std::mem::zeroed() };
        // SAFETY: as above. The call fails for the number of a port that does not exist.
        done(unsafe { (verbs.query_port)(context.as_ptr(), port, &mut attributes) }, "ibv_query_port")?;
        if attributes.state != verbs::PORT_ACTIVE {
            let state = port_file(name, port, "state").unwrap_or_else(|| attributes.state.to_string());
            problem = RdmaError::PortDown { device: name.to_owned(), port, state };
            continue;
        }
        let is_ethernet = attributes.link_layer == verbs::LINK_LAYER_ETHERNET;
        let table_len = usize::try_from(attributes.gid_tbl_len).unwrap_or(0);
        let Some((gid_index, gid)) = find_gid(name, port, is_ethernet, table_len) else {
            problem = RdmaError::NoGid { device: name.to_owned(), port };
            continue;
        };
        let mtu = attributes.active_mtu.clamp(1, 5) as u8;
        let address = Address { lid: attributes.lid, gid, gid_index, is_ethernet, mtu };
        let number = |value: i32| u32::try_from(value).unwrap_or(0);
        let limits = DeviceLimits {
            message_len: attributes.max_msg_sz,
            completions: number(device.max_cqe),
            send_depth: number(device.max_qp_wr),
            receives: number(device.max_srq_wr),
            reads: device.max_qp_rd_atom.min(device.max_qp_init_rd_atom).clamp(1, 16) as u8,
        };
        return Ok((port, address, limits));
    }
    Err(problem)
}

fn port_file(name: &str, port: u8, file: &str) -> Option<String> {
    let text = fs::read_to_string(format!("{CLASS}/{name}/ports/{port}/{file}")).ok()?;
    Some(text.trim().to_owned())
}

/// Returns the best address in the port's table, with its index. For RoCE this is a version 2 address, preferably IPv4, otherwise
/// any routable one. For InfiniBand it is the first address.
fn find_gid(name: &str, port: u8, is_ethernet: bool, table_len: usize) -> Option<(u8, [u8; 16])> {
    let entry = |index: u8| {
        let gid = parse_gid(&port_file(name, port, &format!("gids/{index}"))?)?;
        let kind = port_file(name, port, &format!("gid_attrs/types/{index}")).unwrap_or_default();
        Some((index, gid, kind))
    };
    let entries = (0..table_len.min(256)).filter_map(|index| entry(index as u8));
    let best = entries.filter(|(_, gid, _)| *gid != [0; 16]).min_by_key(|(_, gid, kind)| rank(gid, kind, is_ethernet))?;
    (!is_ethernet || best.2.contains("v2")).then_some((best.0, best.1))
}

/// Ranks an address; lower is better.
fn rank(gid: &[u8; 16], kind: &str, is_ethernet: bool) -> u8 {
    let is_ipv4 = gid[..10] == [0; 10] && gid[10..12] == [0xff; 2];
    let is_link_local = gid[..2] == [0xfe, 0x80];
    match (is_ethernet, kind.contains("v2")) {
        (false, _) => 0,
        (true, true) if is_ipv4 => 0,
        (true, true) if !is_link_local => 1,
        (true, true) => 2,
        (true, false) => 3,
    }
}

fn parse_gid(text: &str) -> Option<[u8; 16]> {
    let mut gid = [0; 16];
    let mut groups = text.trim().split(':');
    for pair in gid.chunks_exact_mut(2) {
        pair.copy_from_slice(&u16::from_str_radix(groups.next()?, 16).ok()?.to_be_bytes());
    }
    groups.next().is_none().then_some(gid)
}

fn numa_node(device: &Path) -> Option<i32> {
    fs::read_to_string(device.join("numa_node")).ok()?.trim().parse().ok().filter(|&node| node >= 0)
}

/// Returns the NUMA node of the drive that a folder is on, if the kernel knows it.
fn numa_node_of_folder(folder: &Path) -> Option<i32> {
    let number = nix::sys::stat::stat(folder).ok()?.st_dev;
    let (major, minor) = (nix::sys::stat::major(number), nix::sys::stat::minor(number));
    let block = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    // The parent folders are those of the partition's disk and of the disk's controller.
    block.ancestors().find_map(|folder| numa_node(folder).or_else(|| numa_node(&folder.join("device"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routable_ipv4_addresses_of_roce_version_2_are_preferred() {
        let gid = |text: &str| parse_gid(text).unwrap();
        let (local, ipv4, ipv6) = (
            gid("fe80:0000:0000:0000:900e:8eff:fe9a:1514"),
            gid("0000:0000:0000:0000:0000:ffff:0a4d:0001"),
            gid("2001:0db8:0000:0000:0000:0000:0000:0001"),
        );
        assert_eq!(ipv4[12..], [10, 77, 0, 1]);
        let mut entries = [(local, "IB/RoCE v1"), (ipv4, "IB/RoCE v1"), (local, "RoCE v2"), (ipv6, "RoCE v2"), (ipv4, "RoCE v2")];
        entries.sort_by_key(|(gid, kind)| rank(gid, kind, true));
        assert_eq!(entries.map(|(gid, _)| gid)[..3], [ipv4, ipv6, local]);
        assert_eq!(parse_gid("fe80::1"), None);
        assert_eq!(rank(&local, "IB/RoCE v1", false), 0);
    }
}
