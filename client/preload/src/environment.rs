//! Reads the environment directly, not through `getenv`: a program may have a `getenv` of its own, which knows nothing before the
//! program's `main`. Bash has one.

use std::ffi::{OsString, c_char};
use std::os::unix::ffi::OsStringExt;

use crate::memory::FromC;

/// An array of strings with a null pointer at its end, such as `argv`.
pub(crate) type Strings<'a> = FromC<'a, *const *const c_char>;

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// Returns this process's environment.
pub(crate) fn current() -> Strings<'static> {
    // SAFETY: libc's variable, read as any C program does; its array stays until the program changes the environment, which C
    // forbids while another function reads it.
    unsafe { FromC::new(environ) }
}

/// Returns a variable of this process's environment.
pub(crate) fn variable(name: &str) -> Option<OsString> {
    let value = |text: &[u8]| text.strip_prefix(name.as_bytes())?.strip_prefix(b"=").map(<[u8]>::to_vec);
    current().strings().find_map(|text| value(text.to_bytes())).map(OsString::from_vec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_those_of_the_standard_library() {
        for (name, expected) in std::env::vars_os() {
            assert_eq!(name.to_str().and_then(variable), Some(expected));
        }
        assert_eq!(variable("DAYFLY_TEST_NO_SUCH_VARIABLE"), None);
    }
}
