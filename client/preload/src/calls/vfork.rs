//! `vfork`: the C library's system call, wrapped in a count of the calls in progress.
//!
//! It is written in assembly because the child returns from it on its parent's stack and overwrites what lies there: no frame
//! of ours may be in the way.

use dayfly_client::cancellation;

use crate::attach::known_view;
use crate::vfork::UNDER_WAY;
use crate::{exec_handoff, memory};

#[cfg(not(target_arch = "x86_64"))]
compile_error!("vfork is not written for this processor yet");

/// `vfork(2)`.
///
/// # Safety
///
/// As for C's `vfork`: until the child calls `exec` or `_exit`, it changes nothing that the parent needs.
#[cfg(target_arch = "x86_64")]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn vfork() -> libc::pid_t {
    core::arch::naked_asm!(
        "push rax",
        "call {before}",
        "pop rax",
        // The child will overwrite the return address, so it stays in a register that the kernel does not touch.
        "pop rdi",
        "lock inc dword ptr [rip + {count}]",
        "mov eax, 58",
        "syscall",
        "push rdi",
        "test eax, eax",
        "jz 2f",
        "lock dec dword ptr [rip + {count}]",
        "mov edi, eax",
        "jmp {after}",
        "2:",
        "ret",
        count = sym UNDER_WAY,
        before = sym before,
        after = sym after,
    )
}

extern "C" fn before() {
    let _deferral = cancellation::defer();
    if known_view().is_some() {
        exec_handoff::open_vfork_channel();
    }
}

/// Runs in the parent, with the kernel's result: the child's process id, or minus an errno.
extern "C" fn after(result: i32) -> libc::pid_t {
    if result < 0 {
        return memory::fail(-result);
    }
    if known_view().is_some() {
        let _deferral = cancellation::defer();
        let before = memory::errno();
        exec_handoff::receive_from_vfork_child();
        memory::set_errno(before);
    }
    result
}
