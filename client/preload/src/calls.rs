//! The functions that stand in front of the C library's, by what they are about.

mod attributes;
mod change;
mod descriptor;
mod directory;
mod exec;
mod fts;
mod ftw;
mod map;
mod names;
mod open;
mod poll;
mod read;
mod scan;
mod signal;
mod spawn;
mod stat;
mod stdio;
mod transfer;

pub(crate) use stat::kernel_form;

/// Defines functions of C's names, each also under its aliases. Arguments are as the program passes them.
macro_rules! hook {
    ($($(#[$attribute:meta])* fn $name:ident $(| $alias:ident)* ($($argument:ident: $kind:ty),* $(,)?) -> $result:ty $body:block)*) => {$(
        $(#[$attribute])*
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[allow(clippy::too_many_arguments, reason = "as C has it")]
        pub(crate) extern "C" fn $name($($argument: $kind),*) -> $result $body

        hook!(@aliases [$($alias)*] $name ($($argument: $kind),*) -> $result);
    )*};
    (@aliases [] $name:ident $arguments:tt -> $result:ty) => {};
    (@aliases [$alias:ident $($rest:ident)*] $name:ident ($($argument:ident: $kind:ty),*) -> $result:ty) => {
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[allow(clippy::too_many_arguments, reason = "as C has it")]
        #[allow(dead_code, reason = "called from C")]
        pub(crate) extern "C" fn $alias($($argument: $kind),*) -> $result {
            $name($($argument),*)
        }

        hook!(@aliases [$($rest)*] $name ($($argument: $kind),*) -> $result);
    };
}
use hook;
