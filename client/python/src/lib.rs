//! `dayfly._dayfly`, the native half of the Python package: attaches to a session, looks up names, and reads samples. The stub file
//! `python/dayfly/_dayfly.pyi` documents it for its users; everything else of the package is written in Python.
//!
//! # Parts, from the bottom up
//!
//! | module | what it holds |
//! |---|---|
//! | `memory` | Python objects whose bytes are filled while other threads run, and buffers of the caller |
//! | `array` | arrays of integers that NumPy sees without a copy |
//! | `failure` | errors as Python's exceptions |
//! | `wait` | waits without the GIL, which Ctrl-C ends |
//! | `path` | paths of Python as bytes, and back |
//! | `ids` | ids of samples, in any form that holds integers |
//! | `fork` | the sessions of this process, and what happens to them in a forked child |
//! | `stat` | attributes and directory entries |
//! | `order` | announced orders |
//! | `lent` | samples that are lent in place |
//! | `dlpack` | the exchange of memory with tensor libraries |
//! | `session`, `dataset`, `view` | the classes; they refer to each other, as their objects do |
//!
//! # Invariants
//!
//! - A call that may wait for the server or for a drive releases the GIL. No lock is held while a thread waits for the GIL.
//! - Objects of the module never change, except that a view can be released and an order can end. So threads may share them.
//! - A panic becomes a Python exception.

mod array;
mod dataset;
mod dlpack;
mod failure;
mod fork;
mod ids;
mod lent;
mod memory;
mod order;
mod path;
mod session;
mod stat;
mod view;
mod wait;

#[pyo3::pymodule]
mod _dayfly {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::array::Array;
    #[pymodule_export]
    use super::dataset::Dataset;
    #[pymodule_export]
    use super::dataset::reopen_dataset;
    #[pymodule_export]
    use super::failure::Error;
    #[pymodule_export]
    use super::order::Order;
    #[pymodule_export]
    use super::session::Session;
    #[pymodule_export]
    use super::session::attach;
    #[pymodule_export]
    use super::session::reattach;
    #[pymodule_export]
    use super::stat::{DirEntry, Stat};
    #[pymodule_export]
    use super::view::View;
    #[pymodule_export]
    use super::view::reopen_view;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::fork::register();
        super::wait::let_signals_interrupt();
        super::wait::show_long_waits();
        super::memory::keep_freed_memory();
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("NO_OWNER", super::dataset::NO_OWNER)
    }
}
