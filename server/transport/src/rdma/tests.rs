//! RDMA under faults. These run where there is a card: in a virtual machine with Soft-RoCE, by `tests/vm/rdma`.

use std::io::Write;

use super::device;

/// Whether there is a card to test with; says so where there is none, past the test harness.
pub(crate) fn has_card() -> bool {
    let is_there = !device::names().is_empty();
    if !is_there {
        assert!(std::env::var_os("DAYFLY_TEST_RDMA").is_none(), "a card was promised by DAYFLY_TEST_RDMA, and there is none");
        let _ = writeln!(std::io::stderr(), "RDMA was NOT tested: there is no card here. Run tests/vm/rdma, which has one in a virtual machine.");
    }
    is_there
}
