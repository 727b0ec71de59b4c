//! Bindings to `libibverbs.so.1`, which is opened at run time, so a host without this library runs the same program. The library's
//! functions and structures are declared here as in version 1.1 of its ABI, so a build needs no headers. Names and fields are those
//! of the library.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::{offset_of, size_of};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::error::RdmaError;

/// An opaque device of the library.
#[repr(C)]
pub(super) struct Device {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(super) struct Pd {
    pub(super) context: *mut Context,
    pub(super) handle: u32,
}

/// The first fields of an open device. The library has no symbols for the functions of the data path: they are in the table `ops`.
#[repr(C)]
pub(super) struct Context {
    pub(super) device: *mut Device,
    pub(super) ops: ContextOps,
    pub(super) cmd_fd: c_int,
    pub(super) async_fd: c_int,
    pub(super) num_comp_vectors: c_int,
}

#[repr(C)]
pub(super) struct ContextOps {
    _before_poll: [*mut c_void; 11],
    pub(super) poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    pub(super) req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    _before_srq: [*mut c_void; 7],
    pub(super) post_srq_recv: Option<unsafe extern "C" fn(*mut Srq, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    _before_send: [*mut c_void; 4],
    pub(super) post_send: Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    _rest: [*mut c_void; 6],
}

#[repr(C)]
pub(super) struct DeviceAttr {
    _before: [u64; 10],
    pub(super) max_mr_size: u64,
    _ids: [u32; 5],
    pub(super) max_qp: c_int,
    pub(super) max_qp_wr: c_int,
    _flags: c_uint,
    pub(super) max_sge: c_int,
    _rd: c_int,
    _max_cq: c_int,
    pub(super) max_cqe: c_int,
    pub(super) max_mr: c_int,
    _max_pd: c_int,
    pub(super) max_qp_rd_atom: c_int,
    _ee: [c_int; 2],
    pub(super) max_qp_init_rd_atom: c_int,
    _until_srq: [c_int; 13],
    pub(super) max_srq: c_int,
    pub(super) max_srq_wr: c_int,
    _srq_sge: c_int,
    _pkeys: u16,
    _ack_delay: u8,
    pub(super) phys_port_cnt: u8,
    _end: c_int,
}

#[repr(C)]
pub(super) struct PortAttr {
    pub(super) state: c_uint,
    pub(super) max_mtu: c_uint,
    pub(super) active_mtu: c_uint,
    pub(super) gid_tbl_len: c_int,
    _port_cap_flags: u32,
    pub(super) max_msg_sz: u32,
    _counters: [u32; 2],
    _pkey_tbl_len: u16,
    pub(super) lid: u16,
    pub(super) sm_lid: u16,
    _lmc_to_phys_state: [u8; 8],
    pub(super) link_layer: u8,
    _rest: [u8; 5],
}

pub(super) const LINK_LAYER_ETHERNET: u8 = 2;
pub(super) const PORT_ACTIVE: c_uint = 4;

#[repr(C)]
pub(super) struct Mr {
    _context: *mut Context,
    _pd: *mut Pd,
    _addr: *mut c_void,
    _length: usize,
    _handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

#[repr(C)]
pub(super) struct CompChannel {
    _context: *mut Context,
    pub(super) fd: c_int,
    _refcnt: c_int,
}

#[repr(C)]
pub(super) struct Cq {
    pub(super) context: *mut Context,
    _channel: *mut CompChannel,
    _cq_context: *mut c_void,
    _handle: u32,
    pub(super) cqe: c_int,
}

#[repr(C)]
pub(super) struct Srq {
    pub(super) context: *mut Context,
}

#[repr(C)]
pub(super) struct Qp {
    pub(super) context: *mut Context,
    _qp_context: *mut c_void,
    _pd: *mut Pd,
    _cqs: [*mut Cq; 2],
    _srq: *mut Srq,
    _handle: u32,
    pub(super) qp_num: u32,
}

#[repr(C)]
pub(super) struct QpCap {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

#[repr(C)]
pub(super) struct QpInitAttr {
    pub(super) qp_context: *mut c_void,
    pub(super) send_cq: *mut Cq,
    pub(super) recv_cq: *mut Cq,
    pub(super) srq: *mut Srq,
    pub(super) cap: QpCap,
    pub(super) qp_type: c_uint,
    pub(super) sq_sig_all: c_int,
}

pub(super) const QPT_RC: c_uint = 2;

#[repr(C)]
pub(super) struct SrqInitAttr {
    pub(super) srq_context: *mut c_void,
    pub(super) max_wr: u32,
    pub(super) max_sge: u32,
    pub(super) srq_limit: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct GlobalRoute {
    pub(super) dgid: [u8; 16],
    pub(super) flow_label: u32,
    pub(super) sgid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct AhAttr {
    /// The library has a union here, which is aligned to 64 bits.
    pub(super) grh: GlobalRoute,
    pub(super) dlid: u16,
    pub(super) sl: u8,
    pub(super) src_path_bits: u8,
    pub(super) static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port_num: u8,
}

#[repr(C)]
pub(super) struct QpAttr {
    pub(super) qp_state: c_uint,
    pub(super) cur_qp_state: c_uint,
    pub(super) path_mtu: c_uint,
    pub(super) path_mig_state: c_uint,
    pub(super) qkey: u32,
    pub(super) rq_psn: u32,
    pub(super) sq_psn: u32,
    pub(super) dest_qp_num: u32,
    pub(super) qp_access_flags: c_uint,
    pub(super) cap: QpCap,
    pub(super) ah_attr: AhAttr,
    pub(super) alt_ah_attr: AhAttr,
    pub(super) pkey_index: u16,
    pub(super) alt_pkey_index: u16,
    pub(super) en_sqd_async_notify: u8,
    pub(super) sq_draining: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) port_num: u8,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) alt_port_num: u8,
    pub(super) alt_timeout: u8,
    pub(super) rate_limit: u32,
    _end: u32,
}

pub(super) const QPS_INIT: c_uint = 1;
pub(super) const QPS_RTR: c_uint = 2;
pub(super) const QPS_RTS: c_uint = 3;
pub(super) const QPS_ERR: c_uint = 6;

pub(super) const QP_STATE: c_int = 1;
pub(super) const QP_ACCESS_FLAGS: c_int = 1 << 3;
pub(super) const QP_PKEY_INDEX: c_int = 1 << 4;
pub(super) const QP_PORT: c_int = 1 << 5;
pub(super) const QP_AV: c_int = 1 << 7;
pub(super) const QP_PATH_MTU: c_int = 1 << 8;
pub(super) const QP_TIMEOUT: c_int = 1 << 9;
pub(super) const QP_RETRY_CNT: c_int = 1 << 10;
pub(super) const QP_RNR_RETRY: c_int = 1 << 11;
pub(super) const QP_RQ_PSN: c_int = 1 << 12;
pub(super) const QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
pub(super) const QP_MIN_RNR_TIMER: c_int = 1 << 15;
pub(super) const QP_SQ_PSN: c_int = 1 << 16;
pub(super) const QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
pub(super) const QP_DEST_QPN: c_int = 1 << 20;

pub(super) const ACCESS_LOCAL_WRITE: c_int = 1;
pub(super) const ACCESS_REMOTE_WRITE: c_int = 2;
pub(super) const ACCESS_REMOTE_READ: c_int = 4;

#[repr(C)]
pub(super) struct Sge {
    pub(super) addr: u64,
    pub(super) length: u32,
    pub(super) lkey: u32,
}

#[repr(C)]
pub(super) struct SendWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut SendWr,
    pub(super) sg_list: *mut Sge,
    pub(super) num_sge: c_int,
    pub(super) opcode: c_uint,
    pub(super) send_flags: c_uint,
    /// In network byte order.
    pub(super) imm_data: u32,
    /// The member of the library's union that RDMA reads and writes use.
    pub(super) remote_addr: u64,
    pub(super) rkey: u32,
    _union: [u64; 2],
    _qp_type: u64,
    _tail: [u64; 6],
}

impl SendWr {
    pub(super) fn zeroed() -> Self {
        Self {
            wr_id: 0,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 0,
            opcode: WR_RDMA_WRITE,
            send_flags: 0,
            imm_data: 0,
            remote_addr: 0,
            rkey: 0,
            _union: [0; 2],
            _qp_type: 0,
            _tail: [0; 6],
        }
    }
}

pub(super) const WR_RDMA_WRITE: c_uint = 0;
pub(super) const WR_RDMA_WRITE_WITH_IMM: c_uint = 1;
pub(super) const WR_SEND: c_uint = 2;
pub(super) const WR_RDMA_READ: c_uint = 4;
pub(super) const SEND_SIGNALED: c_uint = 2;

#[repr(C)]
pub(super) struct RecvWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut RecvWr,
    pub(super) sg_list: *mut Sge,
    pub(super) num_sge: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Wc {
    pub(super) wr_id: u64,
    pub(super) status: c_uint,
    /// Valid only if `status` is 0.
    pub(super) opcode: c_uint,
    pub(super) vendor_err: u32,
    pub(super) byte_len: u32,
    /// In network byte order.
    pub(super) imm_data: u32,
    pub(super) qp_num: u32,
    _src_qp: u32,
    pub(super) wc_flags: c_uint,
    _rest: u64,
}

impl Wc {
    pub(super) const ZERO: Self = Self {
        wr_id: 0,
        status: 0,
        opcode: 0,
        vendor_err: 0,
        byte_len: 0,
        imm_data: 0,
        qp_num: 0,
        _src_qp: 0,
        wc_flags: 0,
        _rest: 0,
    };
}

pub(super) const WC_WITH_IMM: c_uint = 2;

#[repr(C)]
pub(super) struct AsyncEvent {
    pub(super) element: *mut c_void,
    pub(super) event_type: c_uint,
}

// The layout of `libibverbs` 1.14 (rdma-core 44) on x86-64 and aarch64. The ABI has not changed since 1.1.
const _: () = {
    assert!(offset_of!(Context, ops) == 8 && offset_of!(Context, cmd_fd) == 264 && offset_of!(Context, async_fd) == 268);
    assert!(size_of::<ContextOps>() == 256 && offset_of!(ContextOps, poll_cq) == 88);
    assert!(offset_of!(ContextOps, req_notify_cq) == 96 && offset_of!(ContextOps, post_srq_recv) == 160);
    assert!(offset_of!(ContextOps, post_send) == 200);
    assert!(size_of::<DeviceAttr>() == 232 && offset_of!(DeviceAttr, max_mr_size) == 80);
    assert!(offset_of!(DeviceAttr, max_qp) == 108 && offset_of!(DeviceAttr, max_qp_wr) == 112);
    assert!(offset_of!(DeviceAttr, max_sge) == 120 && offset_of!(DeviceAttr, max_cqe) == 132);
    assert!(offset_of!(DeviceAttr, max_qp_rd_atom) == 144 && offset_of!(DeviceAttr, max_qp_init_rd_atom) == 156);
    assert!(offset_of!(DeviceAttr, max_srq) == 212 && offset_of!(DeviceAttr, max_srq_wr) == 216);
    assert!(offset_of!(DeviceAttr, phys_port_cnt) == 227);
    assert!(size_of::<PortAttr>() == 52 && offset_of!(PortAttr, max_msg_sz) == 20 && offset_of!(PortAttr, lid) == 34);
    assert!(offset_of!(PortAttr, sm_lid) == 36 && offset_of!(PortAttr, link_layer) == 46);
    assert!(size_of::<Mr>() == 48 && offset_of!(Mr, lkey) == 36 && offset_of!(Mr, rkey) == 40);
    assert!(offset_of!(CompChannel, fd) == 8 && offset_of!(Cq, cqe) == 28 && offset_of!(Qp, qp_num) == 52);
    assert!(size_of::<QpInitAttr>() == 64 && offset_of!(QpInitAttr, cap) == 32 && offset_of!(QpInitAttr, qp_type) == 52);
    assert!(size_of::<SrqInitAttr>() == 24 && size_of::<AhAttr>() == 32 && offset_of!(AhAttr, dlid) == 24);
    assert!(offset_of!(GlobalRoute, sgid_index) == 20 && offset_of!(GlobalRoute, traffic_class) == 22);
    assert!(size_of::<QpAttr>() == 144 && offset_of!(QpAttr, cap) == 36 && offset_of!(QpAttr, ah_attr) == 56);
    assert!(offset_of!(QpAttr, pkey_index) == 120 && offset_of!(QpAttr, max_rd_atomic) == 126);
    assert!(offset_of!(QpAttr, port_num) == 129 && offset_of!(QpAttr, rnr_retry) == 132 && offset_of!(QpAttr, rate_limit) == 136);
    assert!(size_of::<SendWr>() == 128 && offset_of!(SendWr, imm_data) == 36 && offset_of!(SendWr, remote_addr) == 40);
    assert!(size_of::<RecvWr>() == 32 && size_of::<Sge>() == 16);
    assert!(size_of::<Wc>() == 48 && offset_of!(Wc, qp_num) == 28 && offset_of!(Wc, wc_flags) == 36);
    assert!(size_of::<AsyncEvent>() == 16 && offset_of!(AsyncEvent, event_type) == 8);
};

/// Declares each function once, both as a field and as the symbol to look up.
macro_rules! functions {
    ($($field:ident = $symbol:literal: $type:ty;)*) => {
        /// The library's functions.
        pub(super) struct Verbs {
            $(pub(super) $field: $type,)*
        }

        impl Verbs {
            /// # Safety
            /// `library` must be `libibverbs.so.1` and must stay loaded.
            unsafe fn of(library: &Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the symbols have these types in version 1.1 of the ABI, and a lookup that names no version finds it.
                    $($field: unsafe { *library.get::<$type>(concat!($symbol, "\0").as_bytes())? },)*
                })
            }
        }
    };
}

functions! {
    get_device_list = "ibv_get_device_list": unsafe extern "C" fn(*mut c_int) -> *mut *mut Device;
    free_device_list = "ibv_free_device_list": unsafe extern "C" fn(*mut *mut Device);
    get_device_name = "ibv_get_device_name": unsafe extern "C" fn(*mut Device) -> *const c_char;
    open_device = "ibv_open_device": unsafe extern "C" fn(*mut Device) -> *mut Context;
    close_device = "ibv_close_device": unsafe extern "C" fn(*mut Context) -> c_int;
    query_device = "ibv_query_device": unsafe extern "C" fn(*mut Context, *mut DeviceAttr) -> c_int;
    query_port = "ibv_query_port": unsafe extern "C" fn(*mut Context, u8, *mut PortAttr) -> c_int;
    get_async_event = "ibv_get_async_event": unsafe extern "C" fn(*mut Context, *mut AsyncEvent) -> c_int;
    ack_async_event = "ibv_ack_async_event": unsafe extern "C" fn(*mut AsyncEvent);
    event_type_str = "ibv_event_type_str": unsafe extern "C" fn(c_uint) -> *const c_char;
    wc_status_str = "ibv_wc_status_str": unsafe extern "C" fn(c_uint) -> *const c_char;
    alloc_pd = "ibv_alloc_pd": unsafe extern "C" fn(*mut Context) -> *mut Pd;
    dealloc_pd = "ibv_dealloc_pd": unsafe extern "C" fn(*mut Pd) -> c_int;
    reg_mr = "ibv_reg_mr": unsafe extern "C" fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
    dereg_mr = "ibv_dereg_mr": unsafe extern "C" fn(*mut Mr) -> c_int;
    create_comp_channel = "ibv_create_comp_channel": unsafe extern "C" fn(*mut Context) -> *mut CompChannel;
    destroy_comp_channel = "ibv_destroy_comp_channel": unsafe extern "C" fn(*mut CompChannel) -> c_int;
    create_cq = "ibv_create_cq": unsafe extern "C" fn(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq;
    destroy_cq = "ibv_destroy_cq": unsafe extern "C" fn(*mut Cq) -> c_int;
    get_cq_event = "ibv_get_cq_event": unsafe extern "C" fn(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    ack_cq_events = "ibv_ack_cq_events": unsafe extern "C" fn(*mut Cq, c_uint);
    create_srq = "ibv_create_srq": unsafe extern "C" fn(*mut Pd, *mut SrqInitAttr) -> *mut Srq;
    destroy_srq = "ibv_destroy_srq": unsafe extern "C" fn(*mut Srq) -> c_int;
    create_qp = "ibv_create_qp": unsafe extern "C" fn(*mut Pd, *mut QpInitAttr) -> *mut Qp;
    modify_qp = "ibv_modify_qp": unsafe extern "C" fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
    destroy_qp = "ibv_destroy_qp": unsafe extern "C" fn(*mut Qp) -> c_int;
}

/// Returns the library, which the first call opens. It stays loaded until the process ends, because its objects may live anywhere
/// in the process.
pub(super) fn verbs() -> Result<&'static Verbs, RdmaError> {
    static VERBS: OnceLock<Result<Verbs, Arc<libloading::Error>>> = OnceLock::new();
    let loaded = VERBS.get_or_init(|| {
        // SAFETY: loading runs the library's initializers, which only set up its own state.
        let library = unsafe { Library::open(Some("libibverbs.so.1"), RTLD_NOW | RTLD_LOCAL) }.map_err(Arc::new)?;
        // SAFETY: this is that library, and it is never closed: it is forgotten below.
        let verbs = unsafe { Verbs::of(&library) }.map_err(Arc::new);
        std::mem::forget(library);
        verbs
    });
    match loaded {
        Ok(verbs) => Ok(verbs),
        Err(error) => Err(RdmaError::NoLibrary(error.clone())),
    }
}

/// Checks a pointer that the library returned. If it is null, the error is in `errno`.
pub(super) fn made<T>(pointer: *mut T, call: &'static str) -> Result<NonNull<T>, RdmaError> {
    NonNull::new(pointer).ok_or_else(|| RdmaError::Call { call, error: std::io::Error::last_os_error() })
}

/// Checks the return value of a function that returns 0 or the number of an error.
pub(super) fn done(returned: c_int, call: &'static str) -> Result<(), RdmaError> {
    match returned {
        0 => Ok(()),
        // Some functions return -1 and set `errno`.
        number if number < 0 => Err(RdmaError::Call { call, error: std::io::Error::last_os_error() }),
        number => Err(RdmaError::Call { call, error: std::io::Error::from_raw_os_error(number) }),
    }
}
