//! The hooks: functions with the C library's names and contracts, which the dynamic linker binds programs to. One file per
//! topic.
//!
//! A hook decides whether its path or descriptor belongs to the namespace. If it does, the hook answers from the view; otherwise
//! it passes its arguments on, unchanged, to the next library. Each function is declared once, by [`hook!`], which also defines
//! `NAME::next`: the call of the next library's function with the same signature. To add a function, add it to the file of its
//! topic:
//!
//! ```text
//! hook! {
//!     fn fsync(descriptor: c_int) -> c_int {
//!         if table::is_ours(descriptor) { 0 } else { fsync::next(descriptor) }
//!     }
//! }
//! ```
//!
//! Invariants that hold for every hook:
//!
//! - It never panics: work on the namespace runs inside [`crate::fault::answer`]. Two things can still unwind through a hook: a
//!   thread that is canceled in the next library's function, and an exception of a program's callback. So a destructor undoes
//!   whatever must be undone after such a call.
//! - It leaves `errno` as it was, unless it fails.
//! - It follows a pointer only as a [`crate::memory::FromC`], which stands for the caller's promise.
//! - To the program, the descriptors of this library look closed: `NAME::next` passes them on as [`hidden`] says.
//! - In a `vfork` child it changes nothing that the parent would see in the memory that both processes use.

mod attributes;
mod change;
mod creates;
mod descriptor;
mod directory;
mod exec;
mod fts;
mod ftw;
mod hidden;
mod kernel_reads;
mod loader;
mod map;
mod message;
mod names;
mod open;
mod poll;
mod read;
mod scan;
mod signal;
mod spawn;
mod stat;
mod stdio;
pub(crate) mod syscall;
mod transfer;
mod two_paths;
mod vfork;

#[cfg(not(test))]
pub(crate) use loader::prepare;

/// Defines hooks. `fn NAME | ALIAS... (ARGUMENT: TYPE, ...) -> TYPE { BODY }` defines
///
/// - the exported function `NAME`, with the given body,
/// - an exported function for each alias, which calls `NAME`,
/// - `NAME::next(ARGUMENT, ...)`, which calls the next library's function `NAME`. An argument whose name says that it is a
///   descriptor goes through [`hidden::as_seen`].
///
/// Where [`crate::next`] has declared the function for modules below this one, the hook lists its arguments by name only,
/// without types and without a result: both come from that declaration.
macro_rules! hook {
    (@function $name:ident $aliases:tt ($($argument:ident: $kind:ty),* $(,)?) [$result:ty] $body:block) => {
        hook! { @export $name $aliases ($($argument: $kind),*) [$result] $body }

        /// The next library's function of this name.
        #[allow(clippy::module_inception, reason = "a function may be the topic of its file")]
        pub(crate) mod $name {
            #[allow(unused_imports, reason = "some functions have no arguments")]
            use super::*;
            $crate::next::forward! { unchanged calls $name($($argument: $kind),*) -> $result }
            hook! { @next unchanged ($($argument: $kind),*) [$result] }
        }
    };
    (@function $name:ident $aliases:tt ($($argument:ident),*) [] $body:block) => {
        $crate::next::declared! { $name $aliases ($($argument),*) $body }
    };
    (@declared $name:ident [$($kind:ty),*] [$result:ty] $aliases:tt ($($argument:ident),*) $body:block) => {
        hook! { @export $name $aliases ($($argument: $kind),*) [$result] $body }

        /// The next library's function of this name.
        pub(crate) mod $name {
            #[allow(unused_imports, reason = "some functions have no arguments")]
            use super::*;
            use $crate::next::$name as unchanged;
            hook! { @next unchanged ($($argument: $kind),*) [$result] }
        }
    };
    (@next $unchanged:ident ($($argument:ident: $kind:ty),*) [$result:ty]) => {
        #[inline]
        #[allow(clippy::too_many_arguments, reason = "the C function has as many")]
        #[allow(dead_code, reason = "some hooks pass nothing on under their own name")]
        pub(crate) fn next($($argument: $kind),*) -> $result {
            $unchanged($($crate::calls::hidden::seen!($argument $argument)),*)
        }
    };
    (@export $name:ident [$($alias:ident)*] $arguments:tt [$result:ty] $body:block) => {
        hook! { @symbol $name $arguments [$result] $body }
        $(hook! { @alias $alias $name $arguments [$result] })*
    };
    (@alias $alias:ident $name:ident ($($argument:ident: $kind:ty),*) [$result:ty]) => {
        hook! { @symbol $alias ($($argument: $kind),*) [$result] { $name($($argument),*) } }
    };
    (@symbol $name:ident ($($argument:ident: $kind:ty),*) [$result:ty] $body:block) => {
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[allow(clippy::too_many_arguments, reason = "the C function has as many")]
        #[allow(dead_code, reason = "called from C")]
        pub(crate) extern "C-unwind" fn $name($($argument: $kind),*) -> $result $body
    };
    ($(fn $name:ident $(| $alias:ident)* ($($arguments:tt)*) $(-> $result:ty)? $body:block)*) => {
        $(hook! { @function $name [$($alias)*] ($($arguments)*) [$($result)?] $body })*
    };
}
use hook;
